"""Checkpoints that are pruned, by the driver and by hand, and everything that meets a run without them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from conftest import PARAMS, Cli, contents, environment, make_finished
from hacpo.artifacts.layout import Layout
from hacpo.artifacts.weights import policy_hash
from hacpo.errors import ArtifactError
from hacpo.evaluation.values import best_step
from hacpo.pipeline.locking.locks import driver_lock, stage_lock
from hacpo.pipeline.retention.pruning import set_aside
from hacpo.pipeline.retention.rule import kept_steps
from hacpo.settings.root import RetentionSettings
from tests.tampering import Sandbox

STEPS = 5
EVALUATED = [0, 2, 4, 5]
KEEP_ALL = PARAMS.replace("steps: 2", f"steps: {STEPS}")
KEEP_LAST = KEEP_ALL + "retention: {keep_last: 1}\n"
RUN = Path("artifacts/small")
DVC = [sys.executable, "-m", "dvc"]
HACPO = [sys.executable, "-m", "hacpo.cli"]


def steps_there(agent: str = "ada") -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in (RUN / "checkpoints").glob(f"step=*/agent={agent}"))


def set_param(old: str, new: str) -> None:
    path = Path("pipelines/small/params.yaml")
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def retain(rules: str) -> None:
    path = Path("pipelines/small/params.yaml")
    text = path.read_text().split("retention:")[0]
    path.write_text(f"{text}retention: {rules}\n")


def dvc(*arguments: str) -> str:
    result = subprocess.run([*DVC, *arguments], capture_output=True, text=True, env=environment(), check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def tables(root: Path) -> dict[str, bytes]:
    """Everything but checkpoints and the settings, which name the retention rule."""
    other = ("checkpoints/", "pruned.json", "settings.json")
    return {name: data for name, data in contents(root).items() if not name.startswith(other)}


def checkpoint(root: Path, step: int, agent: str = "ada") -> dict[str, bytes]:
    folder = root / RUN / "checkpoints" / f"step={step:04d}" / f"agent={agent}"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def times() -> dict[str, int]:
    files = (path for path in RUN.rglob("*") if path.is_file() and ".locks" not in path.parts)
    return {str(path.relative_to(RUN)): path.stat().st_mtime_ns for path in files}


def recorded(step: int, stage: str, output: str) -> str:
    """The hash of an output in a step's lock."""
    lock = YAML(typ="safe").load(Path(f"pipelines/small/steps/{step:04d}/dvc.lock"))
    return next(out["md5"] for out in lock["stages"][stage]["outs"] if out["path"] == f"{RUN}/{output}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """A finished run of five steps with all its checkpoints."""
    return make_finished(tmp_path_factory.mktemp("whole"), models, KEEP_ALL)


@pytest.fixture(scope="module")
def lean(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """The same run, pruned as it went to the start and the newest."""
    return make_finished(tmp_path_factory.mktemp("lean"), models, KEEP_LAST)


@pytest.fixture
def whole_copy(sandbox_of: Callable[[Path], Sandbox], whole: Path) -> Path:
    return sandbox_of(whole).root


@pytest.fixture
def lean_copy(sandbox_of: Callable[[Path], Sandbox], lean: Path) -> Path:
    return sandbox_of(lean).root


# --- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "done", "kept"),
    [
        ({}, 3, [0, 1, 2, 3]),
        ({"keep_last": 2}, 10, [0, 9, 10]),
        ({"keep_last": 20}, 3, [0, 1, 2, 3]),
        ({"keep_every": 4}, 10, [0, 4, 8, 10]),
        # Results at 0, 3, 6, 9: .5 at 3 and 6 is the best, 3 the earlier; .9 at 12 is not done yet.
        ({"keep_best": "heldout"}, 10, [0, 3, 10]),
        ({"keep_last": 2, "keep_every": 5, "keep_best": "heldout"}, 11, [0, 3, 5, 10, 11]),
        ({"keep_best": "heldout"}, 2, [0, 2]),
        ({"keep_last": 1}, 0, [0]),
    ],
)
def test_kept_steps(rules: dict[str, object], done: int, kept: list[int]) -> None:
    results = {0: 0.1, 3: 0.5, 6: 0.5, 9: 0.4, 12: 0.9}
    assert sorted(kept_steps(RetentionSettings.model_validate(rules), done, results)) == kept


def test_the_best_is_the_earliest_of_equals() -> None:
    thirds = sum([1 / 3] * 3) / 10, 0.1  # the same mean, added up in two ways
    assert best_step({1: 0.05, 4: thirds[1], 2: thirds[0] - 1e-12, 3: float("nan")}) == 2
    assert best_step({}) is None


def test_every_kept_step_says_why() -> None:
    retention = RetentionSettings(keep_last=2, keep_every=2)
    assert kept_steps(retention, 5) == {
        0: "start, keep_every 2",
        2: "keep_every 2",
        4: "keep_last 2, keep_every 2",
        5: "newest, keep_last 2",
    }


def test_rules_that_cannot_be(project: Path, cli: Cli) -> None:
    for rules, said in (
        ("{keep_best: heldin}", "retention.keep_best: 'heldin' is none of heldout"),
        ("{keep_last: 0}", "retention.keep_last: input should be greater than or equal to 1"),
    ):
        retain(rules)
        refused = cli("plan", "pipelines/small")
        assert refused.code == 2
        assert said in refused.error


# --- pruned as the run goes ------------------------------------------------------------------------------------------


def test_a_pruned_run_has_the_same_tables_and_result(whole: Path, lean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lean)
    assert (steps_there("ada"), steps_there("bo")) == ([0, STEPS], [0, STEPS])
    assert sorted(path.name for path in (RUN / "checkpoints").iterdir()) == ["step=0000", f"step={STEPS:04d}"]
    assert tables(lean) == tables(whole)
    assert checkpoint(lean, STEPS) == checkpoint(whole, STEPS)
    record = json.loads((RUN / "pruned.json").read_text())
    assert {agent: sorted(entries) for agent, entries in record.items()} == {
        name: ["1", "2", "3", "4"] for name in record
    }
    for step in (1, 2, 3, 4):
        files = checkpoint(whole, step)
        assert record["ada"][str(step)] == {
            "policy": policy_hash(Layout(whole / RUN).checkpoint(step, "ada")),
            "bytes": sum(map(len, files.values())),
            "rule": "keep_last 1",
        }


def test_a_pruned_run_is_up_to_date_for_both_ways(lean_copy: Path, cli: Cli) -> None:
    before = times()
    again = cli("run", "pipelines/small")
    assert again.code == 0
    assert "everything is done already" in again.err
    assert "Data and pipelines are up to date" in dvc("repro", "--allow-missing", "pipelines/small/dvc.yaml")
    said = [line.strip() for line in dvc("status").splitlines()]
    entries = [line for line in said if line and not line.endswith(":")]
    assert entries  # that is what is missing, and nothing else has changed
    assert all(line.startswith("deleted:") and "/checkpoints/step=000" in line for line in entries)
    assert times() == before
    status = cli("status", "pipelines/small").out
    assert "5 of 5 steps done" in status
    assert "next: nothing, all outputs are there" in status
    assert "checkpoints of ada: steps 0, 5; pruned: steps 1-4 (2.0 MiB)" in status


def test_pruning_is_no_finding_of_an_audit_and_hides_none(lean_copy: Path, cli: Cli) -> None:
    audited = cli("audit", "pipelines/small", "--deep")
    assert audited.code == 0, audited.out
    assert "checkpoints between the first and the last step (they were pruned), 8 times" in audited.out
    noted = "policy of ada's rollouts against the weights (the checkpoint was pruned, its hash was noted), 4 times"
    assert noted in audited.out
    assert "repeating update (the checkpoint is not there), 8 times" in audited.out
    for shard in (RUN / "rollouts/step=0003/agent=ada").iterdir():  # all alike, so only the record tells
        table = pq.read_table(shard)
        forged = pa.array(["0" * 64] * len(table), pa.string())
        column = table.schema.get_field_index("policy")
        pq.write_table(table.set_column(column, table.schema.field(column), forged), shard, write_page_checksum=True)
    found = json.loads(cli("audit", "pipelines/small", "--json", "--texts", "none").out)["findings"]
    assert [one["note"] for one in found if one["check"] == "policy"] == [
        "noted when the checkpoint of step 2 was pruned"
    ]


def test_other_rules_train_nothing_again(whole_copy: Path, cli: Cli) -> None:
    before, all_tables = times(), tables(whole_copy)
    retain("{keep_every: 2}")
    ran = cli("run", "pipelines/small", "--jobs", 1)
    assert ran.code == 0
    assert "retention: " in ran.err
    assert steps_there() == [0, 2, 4, 5]
    after = times()
    rewritten = {name for name, when in after.items() if before.get(name) != when}
    assert {name.split("/")[0] for name in rewritten} <= {"settings.json", "report", "metrics", "pruned.json"}
    assert {name.split("/")[1] for name in rewritten if name.startswith("metrics")} <= {"report"}
    assert tables(whole_copy) == all_tables
    retain("{keep_every: 3}")  # what is gone is gone, and nothing is trained for it
    assert cli("run", "pipelines/small", "--jobs", 1).code == 0
    assert steps_there() == [0, 5]


def test_more_steps_go_on_from_the_newest(lean_copy: Path, cli: Cli) -> None:
    before = times()
    set_param(f"steps: {STEPS}", f"steps: {STEPS + 1}")
    ran = cli("run", "pipelines/small", "--jobs", 1)
    assert ran.code == 0, ran.err
    assert "again" not in ran.err
    assert steps_there() == [0, STEPS + 1]
    again = {name for name, when in times().items() if before.get(name) != when}
    assert {name.split("/")[0] for name in again if f"step={STEPS + 1:04d}" not in name} <= {
        *("settings.json", "data", "schedule.parquet", "prompts", "report", "metrics", "pruned.json")
    }


def test_fewer_steps_make_the_result_anew(lean_copy: Path, whole: Path, cli: Cli) -> None:
    """The last step's checkpoint is what a run is for."""
    set_param(f"steps: {STEPS}", "steps: 2")
    ran = cli("run", "pipelines/small", "--jobs", 1)
    assert ran.code == 0, ran.err
    assert "bo: the checkpoint of step 1 was pruned and is needed; training 1 step again from step 0" in ran.err
    assert steps_there() == [0, 2, STEPS]
    assert checkpoint(lean_copy, 2) == checkpoint(whole, 2)
    set_param("steps: 2", f"steps: {STEPS}")
    assert "again" not in cli("run", "pipelines/small", "--jobs", 1).err
    assert steps_there() == [0, STEPS]


# --- what was pruned is needed again ---------------------------------------------------------------------------------


def test_another_benchmark_trains_pruned_steps_again(
    whole_copy: Path, lean_copy: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every evaluation is made anew, so pruned checkpoints are needed: each is trained from the one before."""
    for root in (whole_copy, lean_copy):
        monkeypatch.chdir(root)
        set_param(
            "samples: 2, temperature: 1.0}", "samples: 2, temperature: 1.0}\n    more: {data: arithmetic/heldout}"
        )
        ran = cli("run", "pipelines/small", "--jobs", 1)
        assert ran.code == 0, ran.err
    told = [line for line in ran.err.splitlines() if line.startswith("bo: ")]
    assert told == [
        f"bo: the checkpoint of step {step} was pruned and is needed; training 2 steps again from step {step - 2}"
        for step in (2, 4)
    ]
    assert tables(lean_copy) == tables(whole_copy)
    assert steps_there() == [0, STEPS]
    assert not list(Path("artifacts").glob(".*.restoring"))


def test_a_lost_table_trains_pruned_steps_again_and_changes_nothing_else(lean_copy: Path, cli: Cli) -> None:
    expected, before = contents(lean_copy), times()
    shutil.rmtree(RUN / "rollouts/step=0005/agent=ada")
    md5 = recorded(5, "generate@ada", "rollouts/step=0005/agent=ada")
    (Path(".dvc/cache/files/md5") / md5[:2] / md5[2:]).unlink()  # nor does DVC have it
    ran = cli("run", "pipelines/small", "--jobs", 1)
    assert ran.code == 0, ran.err
    assert "ada: the checkpoint of step 4 was pruned and is needed; training 4 steps again from step 0" in ran.err
    assert contents(lean_copy) == expected
    again = {name for name, when in times().items() if before.get(name) != when}
    assert {name for name in again if "step=" in name} == {
        "rollouts/step=0005/agent=ada/part-00000.parquet",
        "rollouts/step=0005/agent=ada/part-00001.parquet",
        "metrics/generate/step=0005/ada.json",
    }


@pytest.mark.parametrize(
    ("step", "stage", "output"),
    [
        (3, "generate@ada", "rollouts/step=0003/agent=ada"),  # its stage reads a pruned checkpoint
        (3, "update@ada", "metrics/update/step=0003/ada.json"),  # its stage made one, and is never in the run cache
    ],
)
def test_a_lost_object_of_a_pruned_step_is_copied_again(
    lean_copy: Path, cli: Cli, step: int, stage: str, output: str
) -> None:
    expected, before = contents(lean_copy), times()
    md5 = recorded(step, stage, output)
    lost = Path(".dvc/cache/files/md5") / md5[:2] / md5[2:]
    lost.unlink()
    ran = cli("run", "pipelines/small", "--jobs", 1)
    assert ran.code == 0, ran.err
    assert lost.is_file()
    assert contents(lean_copy) == expected
    again = {name for name, when in times().items() if before.get(name) != when}
    assert not {name for name in again if "step=" in name and not name.startswith("metrics/")}  # DVC copies these anew
    assert "everything is done already" in " ".join((ran.out + ran.err).split())
    assert "up to date" in dvc("repro", "--allow-missing", "pipelines/small/dvc.yaml")


def test_restore_brings_back_the_same_bits(lean_copy: Path, whole: Path, cli: Cli) -> None:
    refused = cli("export", "pipelines/small", "out/model", "--agent", "ada", "--step", 3)
    assert refused.code == 3
    assert "the checkpoint was pruned (retention: keep_last 1) (found ada's checkpoints of steps 0, 5)" in refused.error
    assert "Run `hacpo restore pipelines/small --step 3 --agent ada` to train it again" in refused.error
    others = {name: data for name, data in times().items() if "checkpoints" not in name}
    restored = cli("restore", "pipelines/small", "--step", 3, "--agent", "ada")
    assert restored.code == 0, restored.err
    assert "training 3 steps again from step 0" in restored.out
    assert checkpoint(lean_copy, 3) == checkpoint(whole, 3)
    assert (steps_there("ada"), steps_there("bo")) == ([0, 3, 5], [0, 5])
    assert {name: data for name, data in times().items() if "checkpoints" not in name} == others
    assert "is there" in cli("restore", "pipelines/small", "--step", 3, "--agent", "ada").out
    assert cli("prune", "pipelines/small").code == 0
    assert steps_there() == [0, 5]


def test_other_bits_are_not_put_back(lean_copy: Path, cli: Cli) -> None:
    """As on a machine that computes other bits: what the locks recorded is not what comes out."""
    md5 = recorded(1, "update@ada", "checkpoints/step=0001/agent=ada")
    for path in Path("pipelines/small").rglob("dvc.lock"):
        path.write_text(path.read_text().replace(md5, f"{'0' * 32}.dir"))
    before = times()
    refused = cli("restore", "pipelines/small", "--step", 2, "--agent", "ada")
    assert refused.code == 4
    assert "ada's update of step 1, repeated, gave other bits than the run's" in refused.error
    assert "remove pipelines/small/steps/0001/dvc.lock and run again" in refused.error
    assert times() == before
    # What it says to do trains on from the bits of this machine (here the same after all).
    Path("pipelines/small/steps/0001/dvc.lock").unlink()
    assert cli("run", "pipelines/small", "--jobs", 1, "--yes").code == 0
    assert recorded(1, "update@ada", "checkpoints/step=0001/agent=ada") == md5


def test_restore_of_what_is_not_done(lean_copy: Path, cli: Cli) -> None:
    for step, agent, said in ((STEPS + 1, "ada", "--step is out of range"), (1, "eve", "no agent 'eve'")):
        refused = cli("restore", "pipelines/small", "--step", step, "--agent", agent)
        assert (refused.code, said in refused.error) == (2, True)
    set_param("alpha: 1.0", "alpha: 2.0")
    refused = cli("restore", "pipelines/small", "--step", 2, "--agent", "ada")
    assert "has changed since the settings were resolved" in refused.error
    assert cli("resolve", "pipelines/small").code == 0
    refused = cli("restore", "pipelines/small", "--step", 2, "--agent", "ada")
    assert "update ada of step 1 is not done, or out of date. First `hacpo run pipelines/small`" in refused.error


# --- pruned by hand --------------------------------------------------------------------------------------------------


def test_prune_by_hand_does_what_a_run_does(whole_copy: Path, lean: Path, cli: Cli) -> None:
    assert "every checkpoint is kept" in cli("prune", "pipelines/small").out
    retain("{keep_last: 1}")
    before = times()
    planned = cli("prune", "pipelines/small", "--dry-run")
    assert planned.code == 0
    assert "step 5 is done and recorded" in planned.out
    assert "ada: steps 1-4 would go, 2.0 MiB; kept: 0 (start), 5 (newest, keep_last 1)" in planned.out
    assert "8 checkpoints, 4.1 MiB would be free" in planned.out
    assert times() == before
    pruned = cli("prune", "pipelines/small")
    assert "8 checkpoints, 4.1 MiB are free" in pruned.out
    assert (steps_there("ada"), steps_there("bo")) == ([0, 5], [0, 5])
    assert (RUN / "pruned.json").read_bytes() == (lean / RUN / "pruned.json").read_bytes()
    assert "0 checkpoints" in cli("prune", "pipelines/small").out


def test_the_best_is_kept_and_exported(whole_copy: Path, cli: Cli) -> None:
    best = {}
    for agent in ("ada", "bo"):
        made_there = [RUN / f"evaluations/step={step:04d}/agent={agent}/*.parquet" for step in EVALUATED]
        means = [pl.read_parquet(table)["reward"].mean() for table in made_there]
        best[agent] = EVALUATED[means.index(max(means))]
    retain("{keep_best: heldout}")
    assert cli("prune", "pipelines/small").code == 0
    for agent in ("ada", "bo"):
        assert steps_there(agent) == sorted({0, best[agent], STEPS})
        exported = cli("export", "pipelines/small", f"out/{agent}", "--agent", agent, "--step", "best")
        assert exported.code == 0, exported.err
        assert f"{agent} at step {best[agent]} " in exported.out


@pytest.mark.parametrize("linked", ["checkpoints", "checkpoints/step=0001"])
def test_no_checkpoint_is_removed_through_a_link(whole_copy: Path, cli: Cli, tmp_path: Path, linked: str) -> None:
    """Whoever hands a run over may have linked it to checkpoints of another run."""
    mine, link = tmp_path / "mine", whole_copy / "artifacts" / "small" / linked
    shutil.move(link, mine)
    link.symlink_to(mine)
    before = sorted(mine.rglob("*"))
    with Path("pipelines/small/params.yaml").open("a") as params:
        params.write("retention:\n  keep_last: 1\n  cache: none\n")
    result = cli("prune", "pipelines/small")
    assert "is a link, and no file of a run is written or read through one" in result.error
    with pytest.raises(ArtifactError, match="is a link, and no checkpoint is removed through one"):
        set_aside(Layout(RUN).checkpoint(1, "ada"))  # the link was made while a run was at work
    assert not (whole_copy / "artifacts" / "small" / "pruned.json").exists()
    assert sorted(mine.rglob("*")) == before


def test_prune_waits_for_nobody(whole_copy: Path, cli: Cli) -> None:
    retain("{keep_last: 1}")
    layout, before = Layout(RUN), times()
    with driver_lock(layout):
        assert "another run works on this pipeline (hacpo run" in cli("prune", "pipelines/small").error
    with stage_lock(layout, "update-0004-ada"):
        refused = cli("prune", "pipelines/small")
    assert (refused.code, "a stage works on this pipeline" in refused.error) == (7, True)
    assert times() == before


def test_prune_leaves_what_is_still_needed(whole_copy: Path, cli: Cli) -> None:
    retain("{keep_last: 1}")
    before = times()
    set_param("alpha: 1.0", "alpha: 2.0")
    refused = cli("prune", "pipelines/small")
    assert refused.code == 2
    assert (
        "which checkpoints are still needed is not known (found algorithm.importance.alpha 1.0 -> 2.0)" in refused.error
    )
    set_param("alpha: 2.0", "alpha: 1.0")
    shutil.rmtree(RUN / "evaluations/step=0002/agent=bo")
    pruned = cli("prune", "pipelines/small")
    assert "step 1 is done and recorded" in pruned.out
    assert steps_there() == [0, 1, 2, 3, 4, 5]
    Path("pipelines/small/steps/0003/dvc.yaml").unlink()
    assert "run `hacpo plan pipelines/small`" in cli("prune", "pipelines/small").error.replace("Run", "run")
    assert {name for name in before if name not in times()} <= {name for name in before if "evaluations" in name}


def test_what_a_killed_prune_leaves_is_whole_or_removed(whole_copy: Path, lean: Path, cli: Cli) -> None:
    retain("{keep_last: 1}")
    # Killed after the record was written, and while the second of eight was deleted.
    shutil.copy(lean / RUN / "pruned.json", RUN / "pruned.json")
    for agent in ("ada", "bo"):
        (RUN / f"checkpoints/step=0001/agent={agent}").rename(
            RUN / f"checkpoints/step=0001/.agent={agent}.tmp-1-pruned"
        )
    (RUN / "checkpoints/step=0001/.agent=bo.tmp-1-pruned/config.json").unlink()
    assert "pruned: steps 1 (" in cli("status", "pipelines/small").out  # 2 to 4 are there, whatever the record says
    ran = cli("run", "pipelines/small", "--jobs", 1)
    assert ran.code == 0
    assert "again" not in ran.err
    assert steps_there() == [0, 5]
    assert not list(RUN.rglob(".*.tmp-*"))
    assert (RUN / "pruned.json").read_bytes() == (lean / RUN / "pruned.json").read_bytes()
    assert cli("audit", "pipelines/small").code == 0


@pytest.mark.slow
def test_killed_at_any_moment_a_pruned_run_ends_with_the_same_bytes(project: Path, lean: Path, cli: Cli) -> None:
    Path("pipelines/small/params.yaml").write_text(KEEP_LAST)
    landed = 0
    for sign in ("pruned.json", "checkpoints/step=0003/agent=ada"):
        process = subprocess.Popen(
            [*HACPO, "run", "pipelines/small", "--jobs", "1"],
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        while process.poll() is None:
            if (RUN / sign).exists():
                process.send_signal(signal.SIGKILL)
                landed += 1
                break
            time.sleep(0.001)
        process.wait()
    assert landed == 2, "the kills missed"
    assert cli("run", "pipelines/small", "--jobs", 1).code == 0
    assert contents(project) == contents(lean)
    assert not list(RUN.rglob(".*.tmp-*"))
