"""The pipeline as its users meet it: two ways to run it, resuming, replaying, debugging a single stage."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import PARAMS, ROOT, Cli, contents, environment, make_project

DVC = [sys.executable, "-m", "dvc"]
HACPO = [sys.executable, "-m", "hacpo.cli"]


def dvc(*arguments: str) -> str:
    result = subprocess.run([*DVC, *arguments], capture_output=True, text=True, env=environment(), check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def times(root: Path) -> dict[str, int]:
    """When each file of the run was last written."""
    base = root / "artifacts" / "small"
    return {
        str(path.relative_to(base)): path.stat().st_mtime_ns
        for path in base.rglob("*")
        if path.is_file() and ".locks" not in path.parts
    }


def rewritten(before: dict[str, int], after: dict[str, int]) -> set[str]:
    return {name for name, when in after.items() if before.get(name) != when}


def set_param(old: str, new: str) -> None:
    path = Path("pipelines/small/params.yaml")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_finished_run_is_up_to_date_for_both_ways(finished_copy: Path, cli: Cli) -> None:
    assert "up to date" in dvc("status", "pipelines/small/dvc.yaml", "pipelines/small/steps/0002/dvc.yaml")
    before = times(finished_copy)
    again = cli("run", "pipelines/small")
    assert again.code == 0
    assert "everything is done already" in again.err
    assert "heldout" in again.out
    assert "Data and pipelines are up to date" in dvc("repro", "pipelines/small/dvc.yaml")
    assert not rewritten(before, times(finished_copy))


def test_step_files_differ_only_in_step(finished: Path) -> None:
    steps = finished / "pipelines" / "small" / "steps"
    assert sorted(path.name for path in steps.iterdir()) == ["0000", "0001", "0002"]
    text = (steps / "0002" / "dvc.yaml").read_text()
    assert "{step: '0002', prev: '0001'}" in text
    body = text.split("stages:")[1]
    assert "0002" not in body


@pytest.mark.slow
def test_dvc_finishes_what_the_driver_began_with_the_same_bytes(project: Path, finished: Path, cli: Cli) -> None:
    assert cli("run", "pipelines/small", "--until", "1", "--jobs", "1").code == 0
    dvc("repro", "pipelines/small/dvc.yaml")
    assert contents(project) == contents(finished)
    assert "up to date" in dvc("status")


@pytest.mark.slow
def test_the_driver_finishes_what_dvc_began_with_the_same_bytes(project: Path, finished: Path, cli: Cli) -> None:
    assert cli("plan", "pipelines/small").code == 0
    dvc("repro", "pipelines/small/steps/0001/dvc.yaml")
    before = times(project)
    assert cli("run", "pipelines/small", "--jobs", "1").code == 0
    assert not rewritten(before, times(project)) & before.keys()
    assert contents(project) == contents(finished)
    for lock in sorted((finished / "pipelines").rglob("dvc.lock")):
        mine = (project / lock.relative_to(finished)).read_text()
        assert _without_metrics(mine) == _without_metrics(lock.read_text())


def _without_metrics(lock: str) -> object:
    """A lock without what holds timings: metrics files and the report that shows them."""
    from ruamel.yaml import YAML

    content = YAML(typ="safe", pure=True).load(lock)
    for stage in content["stages"].values():
        for kind in ("deps", "outs"):
            stage[kind] = [
                item
                for item in stage.get(kind, [])
                if "/metrics" not in item["path"] and "/report/" not in item["path"]
            ]
    return content


@pytest.mark.slow
def test_side_by_side_workers_give_the_same_bytes(project: Path, finished: Path) -> None:
    run = subprocess.run(
        [*HACPO, "run", "pipelines/small", "--jobs", "2"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert contents(project) == contents(finished)


WAYS = {
    "run": [*HACPO, "run", "pipelines/small", "--jobs", "2"],
    "repro": [*DVC, "repro", "pipelines/small/dvc.yaml"],
}


def killed_at(way: str, sign: str, delay: float) -> bool:
    """Start a way, kill it with SIGKILL `delay` seconds after a file matching `sign` appears; False if it ended before.

    Only the process itself is killed: what it started is left to itself, as when the machine runs out of memory.
    """
    process = subprocess.Popen(
        WAYS[way], env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while process.poll() is None:
        if any(Path("artifacts/small").glob(sign)):
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.002)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("last", ["run", "repro"])
def test_killed_at_any_moment_either_way_resumes_with_the_same_bytes(
    project: Path, finished: Path, last: str, cli: Cli
) -> None:
    """Kills land in every stage, while outputs are written, moved and recorded; each time the other way takes over."""
    assert cli("plan", "pipelines/small").code == 0
    dice = random.Random(last)
    signs = [
        "checkpoints/step=0000/.*.tmp-*",
        "rollouts/step=0001/agent=ada",
        "pool/step=0001/learner=*",
        "checkpoints/step=0001/.*.tmp-*",
        "updates/step=0001/agent=bo",
        "rollouts/step=0002/*",
        "advantages/step=0002/.*",
        "checkpoints/step=0002/.*.tmp-*",
    ]
    landed = 0
    for number, sign in enumerate(signs):
        # The way that must not leave a lock cut off more often; DVC writes its own in place.
        way = "repro" if number % 4 == (1 if last == "run" else 3) else "run"
        landed += killed_at(way, sign, dice.choice([0.0, 0.0, 0.02, 0.1, 0.3]))
    assert landed >= len(signs) - 2, "the kills missed"
    if last == "repro":
        cli("repair", "pipelines/small")  # what the README says to do should DVC find its own files cut off
    result = subprocess.run(WAYS[last], env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert contents(project) == contents(finished)
    assert "up to date" in dvc("status")
    assert not list((project / "artifacts").rglob(".*.tmp-*"))


def test_a_cut_off_lock_is_repaired(finished_copy: Path, cli: Cli) -> None:
    lock = finished_copy / "pipelines" / "small" / "steps" / "0001" / "dvc.lock"
    whole = lock.read_text()
    expected = contents(finished_copy)
    for cut in ("", whole[: whole.index("outs:") + 2]):
        lock.write_text(cut)
        result = cli("run", "pipelines/small", "--jobs", "1")
        assert result.code == 0
        said = f"mended what a kill left: removed {lock.relative_to(finished_copy)}, which it had cut off"
        assert said in result.err
        assert contents(finished_copy) == expected


def test_another_alpha_repeats_nothing_before_the_update(finished_copy: Path, cli: Cli) -> None:
    before, old = times(finished_copy), contents(finished_copy)
    set_param("alpha: 1.0", "alpha: 2.0")
    assert cli("run", "pipelines/small", "--jobs", "1", "--yes").code == 0
    changed = rewritten(before, times(finished_copy))
    assert not {name for name in changed if name.split("/")[0] in ("data", "prompts", "schedule.parquet")}
    step_one = {name for name in changed if "step=0001" in name or "step=0000" in name}
    assert {name.split("/")[0] for name in step_one if not name.startswith("metrics")} == {"updates", "checkpoints"}
    assert {name.split("/")[1] for name in step_one if name.startswith("metrics")} == {"update"}
    new = contents(finished_copy)
    assert (
        new["checkpoints/step=0001/agent=ada/model.safetensors"]
        != old["checkpoints/step=0001/agent=ada/model.safetensors"]
    )
    set_param("alpha: 2.0", "alpha: 1.0")
    assert cli("run", "pipelines/small", "--jobs", "1", "--yes").code == 0
    assert contents(finished_copy) == old


def test_more_steps_repeat_nothing_that_is_done(finished_copy: Path, cli: Cli) -> None:
    before = times(finished_copy)
    set_param("steps: 2", "steps: 3")
    assert cli("run", "pipelines/small", "--jobs", "1").code == 0
    changed = rewritten(before, times(finished_copy))
    assert {name for name in changed if "step=0003" in name}
    again = {name for name in changed if "step=0001" in name or "step=0002" in name}
    assert not {name for name in again if not name.startswith("prompts/")}


@pytest.mark.parametrize("way", ["run", "repro"])
def test_deleted_advantages_come_back_with_the_same_bytes_and_nothing_else_runs(
    finished_copy: Path, cli: Cli, way: str
) -> None:
    expected, before = contents(finished_copy), times(finished_copy)
    subprocess.run(["rm", "-rf", "artifacts/small/advantages/step=0001"], check=True)
    if way == "run":
        assert cli("run", "pipelines/small", "--jobs", "1").code == 0
    else:
        dvc("repro", "pipelines/small/dvc.yaml")
    assert contents(finished_copy) == expected
    assert {name.rsplit("/", 2)[0] for name in rewritten(before, times(finished_copy))} <= {
        "advantages/step=0001",
        "capability",
        "metrics/advantage",
    }


def test_the_stage_alone_makes_the_same_advantages(finished_copy: Path, cli: Cli) -> None:
    expected = contents(finished_copy)
    subprocess.run(["rm", "-rf", "artifacts/small/advantages/step=0001"], check=True)
    assert cli("advantage", "pipelines/small", "--step", 1).code == 0
    assert contents(finished_copy) == expected


def test_out_writes_elsewhere_and_touches_nothing(finished_copy: Path, cli: Cli, tmp_path: Path) -> None:
    before = times(finished_copy)
    out = tmp_path / "out"
    run = ("pipelines/small", "--out", out)
    assert cli("generate", *run, "--step", 1, "--agent", "ada", "--limit", 2).code == 0
    rollouts = pl.read_parquet(out / "rollouts" / "step=0001" / "agent=ada" / "*.parquet")
    assert len(rollouts) == 2 * 4
    original = pl.read_parquet("artifacts/small/rollouts/step=0001/agent=ada/*.parquet")
    assert rollouts["token_ids"].to_list() == original["token_ids"].to_list()[:8]  # seeds do not depend on the batch

    assert cli("verify", *run, "--step", 1, "--agent", "bo", "--limit", 3).code == 0
    assert cli("pool", *run, "--step", 1, "--learner", "bo", "--limit", 3).code == 0
    assert cli("advantage", *run, "--step", 2, "--learner", "bo", "--set", "algorithm.advantage.baseline=own").code == 0
    assert not (out / "advantages" / "step=0002" / "learner=ada").exists()
    changed = pl.read_parquet(out / "advantages" / "step=0002" / "learner=bo" / "*.parquet")
    kept = pl.read_parquet("artifacts/small/advantages/step=0002/learner=bo/*.parquet")
    assert changed["rollout_id"].to_list() == kept["rollout_id"].to_list()
    assert changed["baseline"].to_list() != kept["baseline"].to_list()
    assert cli("update", *run, "--step", 1, "--agent", "bo", "--set", "algorithm.importance.alpha=0").code == 0
    weights = pl.read_parquet(out / "updates" / "step=0001" / "agent=bo" / "trace.parquet")["is_weight"]
    assert set(weights) == {1.0}
    assert cli("evaluate", *run, "--step", 0, "--agent", "ada", "--limit", 2).code == 0
    assert cli("report", *run).code == 0
    assert not rewritten(before, times(finished_copy))


def test_debugging_options_need_out(finished_copy: Path, cli: Cli) -> None:
    for extra in (["--limit", 2], ["--set", "seed=3"]):
        result = cli("generate", "pipelines/small", "--step", 1, "--agent", "ada", *extra)
        assert result.code == 2
        assert "need --out" in result.error


def test_status_says_what_comes_next(project: Path, cli: Cli) -> None:
    assert (
        "next: hacpo run pipelines/small (alone, what comes first: hacpo resolve pipelines/small)"
        in cli("status", "pipelines/small").out
    )
    assert cli("run", "pipelines/small", "--until", 1, "--jobs", 1).code == 0
    said = cli("status", "pipelines/small").out
    assert "1 of 2 steps done" in said
    assert "what comes first: hacpo generate pipelines/small --step 2 --agent ada)" in said
    rollouts = [line for line in said.splitlines() if line.strip().startswith("ada")]
    assert rollouts[0].split()[1] == "32"
    assert "disk:" in said


def test_two_runs_at_once_are_refused(finished_copy: Path, cli: Cli) -> None:
    from hacpo.artifacts.layout import Layout
    from hacpo.errors import BusyError
    from hacpo.pipeline.locking.locks import driver_lock, stage_lock

    layout = Layout(finished_copy / "artifacts" / "small")
    before = times(finished_copy)
    with driver_lock(layout):
        for command in (("run", "pipelines/small"), ("advantage", "pipelines/small", "--step", 1)):
            result = cli(*command)
            assert result.code == 7
            assert f"another run works on this pipeline (hacpo run, process {os.getpid()})" in result.error
    with stage_lock(layout, "advantage-0001"), pytest.raises(BusyError, match="a stage works on this pipeline"):  # noqa: SIM117
        with driver_lock(layout, wait_seconds=0.2):
            pass
    assert not rewritten(before, times(finished_copy)) - {"settings.json"}


def test_a_second_process_is_refused_while_a_run_works(project: Path, cli: Cli) -> None:
    from hacpo.pipeline.locking.leases import is_held

    process = subprocess.Popen(
        WAYS["run"], env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        while process.poll() is None and not is_held(project / "artifacts" / "small" / ".locks", "driver"):
            time.sleep(0.01)
        refused = cli("run", "pipelines/small")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert refused.code == 7
    assert f"another run works on this pipeline (hacpo run, process {process.pid})" in refused.error


def test_params_edited_in_a_run_are_noticed(finished_copy: Path, cli: Cli) -> None:
    set_param("alpha: 1.0", "alpha: 3.0")
    before = times(finished_copy)
    refused = cli("update", "pipelines/small", "--step", 1, "--agent", "ada")
    assert refused.code == 2
    assert "params.yaml: has changed since the settings were resolved" in refused.error
    assert not rewritten(before, times(finished_copy))


def test_checkpoints_are_not_copied_into_the_cache(finished: Path) -> None:
    weights = (finished / "artifacts/small/checkpoints/step=0001/agent=ada/model.safetensors").read_bytes()
    cached = [path for path in (finished / ".dvc" / "cache").rglob("*") if path.is_file()]
    assert cached
    assert not [path for path in cached if path.read_bytes() == weights]


def test_another_held_out_set_repeats_no_training(finished_copy: Path, cli: Cli) -> None:
    before = times(finished_copy)
    set_param("split: heldout, problems: 16", "split: heldout, problems: 12")
    assert cli("run", "pipelines/small", "--jobs", "1").code == 0
    changed = {name.split("/")[0] for name in rewritten(before, times(finished_copy))}
    assert changed <= {"settings.json", "data", "schedule.parquet", "prompts", "evaluations", "metrics", "report"}


def test_out_inside_the_run_is_refused(finished_copy: Path, cli: Cli) -> None:
    before = times(finished_copy)
    for out in ("artifacts/small", "artifacts/small/deeper", "artifacts", "."):
        result = cli("advantage", "pipelines/small", "--step", 1, "--out", out)
        assert result.code == 2
        assert "--out must lie outside the run's own artifacts" in result.error
    assert not rewritten(before, times(finished_copy))


def test_hacpo_settings_in_files_are_what_the_stage_read(finished: Path) -> None:
    from hacpo.artifacts.parquet import read_metadata

    base = finished / "artifacts" / "small"
    settings = json.loads((base / "settings.json").read_text())
    for path, keys in (
        ("rollouts/step=0001/agent=ada", {"seed", "agents", "sampling", "algorithm", "engine", "storage"}),
        ("updates/step=0002/agent=bo/trace.parquet", None),
        ("advantages/step=0002/learner=bo", None),
    ):
        metadata = read_metadata(base / path)
        assert metadata["run"] == "small"
        found = metadata["settings"]
        assert keys is None or set(found) == keys
        _assert_subset(found, {**settings, "agent_names": ["ada", "bo"]})


def _assert_subset(part: dict[str, object], whole: dict[str, object]) -> None:
    for key, value in part.items():
        if isinstance(value, dict):
            inner = whole[key]
            assert isinstance(inner, dict)
            _assert_subset(value, inner)
        else:
            assert whole[key] == value, key


def test_light_commands_load_no_heavy_library(finished_copy: Path) -> None:
    code = (
        "import sys; from hacpo.cli import app; from hacpo.pipeline.execution.command_line import run_app;"
        "codes = [run_app(app, a.split()) for a in sys.argv[1:]];"
        "heavy = {'torch', 'transformers', 'vllm', 'dvc', 'sympy', 'math_verify'} & set(sys.modules);"
        "print(codes, sorted(heavy))"
    )
    commands = [
        "--help",
        "verify pipelines/small --step 1 --agent ada",
        "pool pipelines/small --step 1 --learner ada",
        "advantage pipelines/small --step 1",
        "status pipelines/small",
        "resolve pipelines/small",
    ]
    result = subprocess.run(
        [sys.executable, "-c", code, *commands], capture_output=True, text=True, env=environment(), check=False
    )
    assert result.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0, 0] []", result.stdout + result.stderr


def test_a_run_with_nothing_to_do_opens_no_table(finished_copy: Path, cli: Cli) -> None:
    assert cli("run", "pipelines/small").code == 0  # sees that the copy is as its records say
    code = (
        "import sys; from hacpo.cli import app; from hacpo.pipeline.execution.command_line import run_app;"
        "code = run_app(app, ['run', 'pipelines/small']);"
        "print(code, sorted({'torch', 'transformers', 'numpy', 'pyarrow', 'polars'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False
    )
    assert "everything is done already" in result.stderr, result.stdout + result.stderr
    assert "heldout (sampled at temperature 1)" in result.stdout
    assert result.stdout.splitlines()[-1] == "0 []", result.stdout + result.stderr


def test_a_pool_is_the_same_however_few_rows_are_in_memory_and_in_whatever_order_they_come(
    finished_copy: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("pool", "pipelines/small", "--step", 1, "--learner", "ada")
    made = Path("artifacts/small/pool/step=0001/learner=ada")

    def shards() -> list[bytes]:
        return [file.read_bytes() for file in sorted(made.iterdir())]

    before = shards()
    assert len(before) > 1
    monkeypatch.setattr("hacpo.stages.pool._ROWS_AT_ONCE", 1)  # a problem at a time
    assert cli(*command).code == 0
    assert shards() == before
    assert cli(*command, "--limit", 1, "--out", "one").code == 0
    some = pl.read_parquet("one/**/*.parquet")
    assert some["problem_id"].n_unique() == 1
    assert some.equals(pl.read_parquet(f"{made}/*.parquet")[: len(some)])
    # The responses of one agent from the last to the first, their verdicts as they are.
    files = sorted(Path("artifacts/small/rollouts/step=0001/agent=bo").iterdir())
    tables = [pq.read_table(file) for file in files]
    whole = pa.concat_tables(tables)
    turned, start = whole.take(pa.array(range(len(whole))[::-1])), 0
    for file, table in zip(files, tables, strict=True):
        pq.write_table(turned.slice(start, len(table)).replace_schema_metadata(table.schema.metadata), file)
        start += len(table)
    assert cli(*command).code == 0
    assert shards() == before


def test_pool_without_sharing_loads_no_tokenizer(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    root = make_project(tmp_path / "gspo", models, PARAMS.replace("recipe: hacpo", "recipe: gspo"))
    monkeypatch.chdir(root)
    assert cli("run", "pipelines/small", "--jobs", "1").code == 0
    pool = pl.read_parquet("artifacts/small/pool/step=0001/learner=ada/*.parquet")
    assert set(pool["source"]) == {"ada"}
    trace = pl.read_parquet("artifacts/small/updates/step=0001/agent=ada/trace.parquet")
    assert trace["update"].n_unique() == 2
    code = (
        "import sys; from hacpo.cli import app; from hacpo.pipeline.execution.command_line import run_app;"
        "print(run_app(app, 'pool pipelines/small --step 1 --learner ada'.split()), 'transformers' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False
    )
    assert result.stdout.splitlines()[-1] == "0 False", result.stdout + result.stderr


def test_every_stage_is_a_module_too() -> None:
    for name in ("hacpo.stages.generate", "hacpo.stages.report", "hacpo.commands.run", "stages.update"):
        result = subprocess.run(
            [sys.executable, "-m", name, "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env=environment(),
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert "{pipeline}" in result.stdout


def test_a_cut_off_rwlock_is_repaired(finished_copy: Path, cli: Cli) -> None:
    """DVC rewrites it in place; empty, it makes every DVC command of the project fail."""
    rwlock = finished_copy / ".dvc" / "tmp" / "rwlock"
    rwlock.parent.mkdir(exist_ok=True)
    rwlock.write_text("")
    assert cli("run", "pipelines/small").code == 0
    assert not rwlock.exists() or isinstance(json.loads(rwlock.read_text()), dict)


def test_stopping_early_says_so(finished_copy: Path, cli: Cli) -> None:
    stopped = cli("run", "pipelines/small", "--until", 1)
    assert "stopped after step 1 of 2, as asked; `hacpo run pipelines/small` goes on" in stopped.out
    assert (
        "--until is beyond the last step (expected 0 to 2, found 3)"
        in cli("run", "pipelines/small", "--until", 3).error
    )


def test_status_tells_of_settings_that_changed(finished_copy: Path, cli: Cli) -> None:
    assert "has changed" not in cli("status", "pipelines/small").out
    set_param("alpha: 1.0", "alpha: 2.0")
    assert (
        "params.yaml has changed since: algorithm.importance.alpha 1.0 -> 2.0" in cli("status", "pipelines/small").out
    )


def test_a_run_that_is_being_made_longer_is_no_finding(finished_copy: Path, cli: Cli) -> None:
    set_param("steps: 2", "steps: 3")
    assert cli("run", "pipelines/small", "--until", 2).code == 0  # cut off before its third step
    audited = cli("audit", "pipelines/small")
    assert audited.code == 0, audited.out


def test_spaces_around_a_setting_do_not_matter(finished_copy: Path, cli: Cli, tmp_path: Path) -> None:
    command = ["advantage", "pipelines/small", "--step", 1, "--set"]
    assert cli(*command, "algorithm.advantage.baseline=own", "--out", tmp_path / "a").code == 0
    assert cli(*command, " algorithm.advantage.baseline = own", "--out", tmp_path / "b").code == 0
    written = "advantages/step=0001/learner=ada/part-00000.parquet"
    assert (tmp_path / "a" / written).read_bytes() == (tmp_path / "b" / written).read_bytes()
