"""`hacpo sweep`: many runs from one file, on a real project with real models."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import polars as pl
import psutil
import pytest

from conftest import Cli, contents, environment
from soak import shim
from soak.frame import SkippedError
from tests.small_project import PARAMS, changed

SWEEP = "pipelines/study/sweep.yaml"
DESCRIBED = """
bases: {small: ../small}
variants:
  hacpo: {}
  gspo: {algorithm: {recipe: gspo}}
seeds: [1, 2]
"""
TINY = """
steps: 1
agents:
  ada:
    model: null
    tiny: {architecture: qwen3, layers: 1, hidden: 32, heads: 2, vocabulary: characters, warmup: {steps: 20}}
  bo: null
algorithm: {recipe: gspo}
batch: {prompts: 4}
"""
"""One agent, which is warmed up in the run."""


def described(text: str) -> None:
    Path(SWEEP).parent.mkdir(parents=True, exist_ok=True)
    Path(SWEEP).write_text(text)


@pytest.fixture
def study(project: Path) -> Path:
    """A project whose base is one short run, and a sweep of two variants and two seeds."""
    Path("pipelines/small/params.yaml").write_text(changed(PARAMS, "{steps: 1, batch: {prompts: 4}}"))
    described(DESCRIBED)
    return project


def test_every_cell_is_a_run_like_any_other(study: Path, cli: Cli) -> None:
    ran = cli("sweep", "pipelines/study")
    assert ran.code == 0, ran.err
    assert "pipelines/study: 4 of 4 runs done" in ran.err
    one = Path("pipelines/study/small/gspo/seed-2")
    assert (one / "params.yaml").read_text() == (
        "# Made by `hacpo sweep pipelines/study` from sweep.yaml: change that, not this.\n"
        'extends: "../../../../small/params.yaml"\n'
        "seed: 2\n"
        'retention: {"keep_last": 1, "keep_every": null, "keep_best": null, "cache": "none"}\n'
        'report: {"problems_per_step": 0}\n'
        'algorithm: {"recipe": "gspo"}\n'
    )
    audited = cli("audit", one)
    assert audited.code == 0, audited.out
    again = cli("run", one, "--jobs", 1)
    assert "everything is done already" in again.err

    collected = cli("sweep", "pipelines/study", "--collect", "out.parquet")
    assert collected.code == 0, collected.err
    assert "out.parquet: 4 of 4 runs, 16 rows" in collected.out  # 4 runs x 2 agents x steps 0 and 1 x 1 benchmark
    assert cli("sweep", "pipelines/study", "--collect", "out.parquet").code == 0  # what it has made it replaces
    os.mkfifo("pipe")
    for other, found in (
        ("pipelines", "found a folder"),
        ("pipe", "found a pipe"),
        (SWEEP, "remove it yourself"),
    ):
        refused = cli("sweep", "pipelines/study", "--collect", other)
        assert refused.code == 2
        assert f"{other}: is there" in refused.error
        assert found in refused.error
    frame = pl.read_parquet("out.parquet")
    last = frame.filter(pl.col("run") == "study/small/gspo/seed-2", pl.col("agent") == "bo", pl.col("step") == 1)
    (row,) = last.iter_rows(named=True)
    assert (row["base"], row["variant"], row["seed"], row["start_seed"]) == ("small", "gspo", 2, 2)
    # 4 prompts x 4 responses; minibatches of 4 prompts: one update; 16 problems x 2 samples.
    assert (row["rollouts"], row["updates"]) == (16, 1)
    answers = pl.read_parquet("artifacts/study/small/gspo/seed-2/evaluations/step=0001/agent=bo")
    rollouts = pl.read_parquet("artifacts/study/small/gspo/seed-2/rollouts/step=0001/agent=bo")
    assert row["sampled_tokens"] == rollouts["token_ids"].list.len().sum()
    assert row["accuracy"] == pytest.approx(answers["reward"].mean(), abs=1e-7)
    assert (len(row["problem_ids"]), row["samples"]) == (16, [2] * 16)
    by_problem = dict(answers.group_by("problem_id").agg((pl.col("verdict") == "correct").sum()).iter_rows())
    assert dict(zip(row["problem_ids"], row["correct"], strict=True)) == by_problem
    assert row["seconds"] > 0

    compared = cli("compare", "pipelines/study", "--html", "page.html")
    assert compared.code == 0, compared.err
    assert "small, heldout: gspo against hacpo\n2 pairs of runs of the same seeds; budget: 16 rollouts" in compared.out
    assert 'id="verdicts"' in Path("page.html").read_text()
    named = cli("compare", *(f"{one}=pipelines/study/small/{one}/seed-1" for one in ("gspo", "hacpo")))
    assert "heldout: hacpo against gspo" in named.out
    assert "one pair of runs: nothing shown" in named.out

    # What changes no number of a run keeps it from nothing.
    text = (one / "params.yaml").read_text()
    (one / "params.yaml").write_text(f"{text}storage: {{rows_per_shard: 7}}\n")
    assert "gspo against hacpo" in cli("compare", "hacpo=pipelines/study/small/hacpo/seed-2", f"gspo={one}").out
    (one / "params.yaml").write_text(text)

    # What a run has spent is known from every metrics file, or not at all.
    noted = Path("artifacts/study/small/hacpo/seed-1/metrics/pool/step=0001/bo.json")
    content = noted.read_text()
    for text, said in (
        (None, "is missing, so what the run has spent is not known"),
        ("{", "cannot be read: expected JSON"),
        ("{}", "does not say what the run has spent (expected seconds: 0 to 1,099,511,627,776, found None)"),
        ('{"seconds": Infinity}', "found inf"),
        ('{"seconds": -1}', "found -1"),
        ('{"seconds": 1e400}', "found inf"),
    ):
        noted.unlink() if text is None else noted.write_text(text)
        refused = cli("compare", "a=pipelines/study/small/hacpo/seed-1", f"b={one}")
        assert refused.code in (3, 4)
        assert f"{noted}: " in refused.error
        assert said in refused.error
        assert "`hacpo run pipelines/study/small/hacpo/seed-1`" in refused.error
    noted.write_text(content)

    before = contents(study, "study/small/gspo/seed-2")
    settled = cli("sweep", "pipelines/study")
    assert settled.code == 0
    assert settled.err == "pipelines/study: 4 of 4 runs done\n"
    assert contents(study, "study/small/gspo/seed-2") == before


def test_results_of_other_machines_are_taken_and_a_run_goes_only_when_its_own_can_be_read(
    study: Path, cli: Cli
) -> None:
    described(DESCRIBED.replace("[1, 2]", "[1]"))
    assert cli("sweep", "pipelines/study", "--only", "*/gspo/*").code == 0
    assert cli("sweep", "pipelines/study", "--collect", "out.parquet").code == 0
    results = Path("artifacts/study/.results/small/gspo/seed-1.parquet")
    whole = results.read_bytes()
    results.unlink()
    taken = cli("sweep", "pipelines/study", "--take", "out.parquet")
    assert "out.parquet: 0 runs taken" in taken.out
    assert "small/gspo/seed-1: not taken, its run is here; it is collected when it ends" in taken.out

    results.write_bytes(whole[:4] + bytes(596) + whole[600:])  # the footer says as before that all is well
    described(DESCRIBED.replace("[1, 2]", "[1]") + "keep: results\n")
    left = cli("sweep", "pipelines/study", "--only", "*/gspo/*")
    assert left.code == 1
    assert "done, but not removed: small/gspo/seed-1" in left.err
    assert "seed-1.parquet: cannot be read" in left.err
    assert Path("artifacts/study/small/gspo/seed-1/rollouts").is_dir()
    results.unlink()
    assert cli("sweep", "pipelines/study", "--only", "*/gspo/*").code == 0
    assert not Path("artifacts/study/small/gspo/seed-1").exists()

    results.unlink()
    described(DESCRIBED.replace("[1, 2]", "[1]").replace("gspo}}", "gspo}, steps: 2}"))
    taken = cli("sweep", "pipelines/study", "--take", "out.parquet")
    assert "out.parquet: 0 runs taken" in taken.out
    assert (
        "small/gspo/seed-1: not taken, it was made with other settings than sweep.yaml has: steps 1 -> 2" in taken.out
    )
    described(DESCRIBED.replace("[1, 2]", "[1]"))
    taken = cli("sweep", "pipelines/study", "--take", "out.parquet")
    assert "out.parquet: 1 runs taken\npipelines/study: 1 of 2 runs done" in taken.out
    assert cli("sweep", "pipelines/study", "--collect", "again.parquet").code == 0
    assert pl.read_parquet("again.parquet").equals(pl.read_parquet("out.parquet"))


def test_a_warm_start_is_made_once_for_all_that_share_it(study: Path, cli: Cli) -> None:
    Path("pipelines/tiny.yaml").write_text("extends: small/params.yaml" + TINY)
    described("bases: {tiny: ../tiny.yaml}\nvariants: {a: null}\nseeds: [1, 2]\nstart_seeds: [7, 8]\n")
    ran = cli("sweep", "pipelines/study", "--jobs", 2)
    assert ran.code == 0, ran.err
    weights = sorted(Path("artifacts/study").rglob("checkpoints/step=0000/agent=ada/model.safetensors"))
    assert len(weights) == 4  # 2 seeds x 2 starts
    assert len({path.stat().st_ino for path in weights}) == 2
    for start in (7, 8):
        assert len({path.read_bytes() for path in weights if f"start-{start}-" in str(path)}) == 1
    assert len({path.read_bytes() for path in weights}) == 2
    logs = [path.read_text() for path in Path("artifacts/study/.logs").rglob("*.log")]
    assert sum("warmup ada: made from scratch" in log for log in logs) == 2
    assert cli("audit", "pipelines/study/tiny/a/start-8-seed-2").code == 0
    trained = [Path(f"artifacts/study/tiny/a/start-7-seed-{seed}/rollouts") for seed in (1, 2)]
    texts = [pl.read_parquet(folder / "**/*.parquet")["text"].to_list() for folder in trained]
    assert texts[0] != texts[1]  # the runs' own seeds differ all the same


def test_a_killed_sweep_goes_on_and_leaves_nobody_behind(study: Path, cli: Cli) -> None:
    described(DESCRIBED.replace("[1, 2]", "[1]"))
    command = [sys.executable, "-m", "hacpo.cli", "sweep", "pipelines/study", "--jobs"]
    results = Path("artifacts/study/.results")
    for jobs, moment in (("2", "small/hacpo/seed-1/rollouts"), ("1", ".results/small/hacpo/seed-1.parquet")):
        process = subprocess.Popen(
            [*command, jobs], env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 600
        while not Path("artifacts/study", moment).exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.poll() is None, "it was through before it was killed"
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
    done = results / "small/hacpo/seed-1.parquet"
    written = done.stat().st_mtime_ns
    ran = cli("sweep", "pipelines/study")
    assert ran.code == 0, ran.err
    assert "2 runs, 1 done, 1 to do" in ran.err
    assert "2 of 2 runs done" in ran.err
    assert done.stat().st_mtime_ns == written  # what was done stays
    assert cli("audit", "pipelines/study/small/hacpo/seed-1").code == 0


def test_of_runs_whose_results_are_kept_nothing_else_is(study: Path, cli: Cli) -> None:
    described(DESCRIBED.replace("[1, 2]", "[1]") + "keep: results\naudit: true\n")
    assert cli("run", "pipelines/small", "--jobs", 1).code == 0
    before, cached = contents(study), {path for path in Path(".dvc/cache").rglob("*") if path.is_file()}
    ran = cli("sweep", "pipelines/study")
    assert ran.code == 0, ran.err
    assert "2 of 2 runs done" in ran.err
    left = sorted(str(path) for path in Path("artifacts/study").rglob("*") if path.is_file())
    names = [f"small/{variant}/seed-1" for variant in ("gspo", "hacpo")]
    assert [path for path in left if not path.endswith("lock")] == [
        *(f"artifacts/study/.logs/{name}.log" for name in names),
        *(f"artifacts/study/.results/{name}.parquet" for name in names),
    ]
    assert all(os.listdir(f"pipelines/study/{name}") == ["params.yaml"] for name in names)
    assert {path for path in Path(".dvc/cache").rglob("*") if path.is_file()} == cached
    # Other runs' DVC knows which folders of the cache there are, and fails where one has gone.
    assert any(not any(folder.iterdir()) for folder in Path(".dvc/cache/files/md5").iterdir())
    assert contents(study) == before
    assert cli("audit", "pipelines/small").code == 0
    assert "gspo/seed-1: no finding" in Path(f"artifacts/study/.logs/{names[0]}.log").read_text()
    assert "2 of 2 runs done" in cli("sweep", "pipelines/study").err
    assert cli("sweep", "pipelines/study", "--collect", "out.parquet").code == 0


def test_a_run_that_cannot_be_removed_is_no_other_cells_failure(study: Path, cli: Cli) -> None:
    text = DESCRIBED.replace("[1, 2]", "[1]")
    described(text)
    assert cli("sweep", "pipelines/study", "--only", "small/gspo/*").code == 0
    victim = study / "victim"
    victim.mkdir()
    (victim / "work.txt").write_text("mine")
    link = Path("artifacts/study/small/gspo/seed-1/report/elsewhere")
    link.symlink_to(victim)
    before = contents(study, "study/small/gspo/seed-1")
    described(text + "keep: results\n")
    ran = cli("sweep", "pipelines/study")
    assert ran.code == 1
    assert "failed" not in ran.err
    assert ran.err.count("is a link") == 1
    assert f"done, but not removed: small/gspo/seed-1: {link}: is a link" in ran.err
    assert "2 of 2: small/hacpo/seed-1" in ran.err
    assert ran.err.endswith("pipelines/study: 2 of 2 runs done, 1 not removed\n")
    assert os.listdir("pipelines/study/small/hacpo/seed-1") == ["params.yaml"]
    assert contents(study, "study/small/gspo/seed-1") == before
    assert cli("sweep", "pipelines/study").code == 1  # as long as it is there
    link.unlink()
    again = cli("sweep", "pipelines/study")
    assert (again.code, again.err) == (0, "pipelines/study: 2 of 2 runs done\n")
    assert os.listdir("pipelines/study/small/gspo/seed-1") == ["params.yaml"]
    assert (victim / "work.txt").read_text() == "mine"


def test_what_the_disk_does_not_remove_is_said_and_tried_again(study: Path, cli: Cli, tmp_path: Path) -> None:
    """A folder, which is removed as far as it can be; at the end it can."""
    try:
        library = shim.library()
    except SkippedError as reason:
        pytest.skip(str(reason))
    described(DESCRIBED.replace("[1, 2]", "[1]"))
    sweep = ("sweep", "pipelines/study", "--only", "small/gspo/*")
    assert cli(*sweep).code == 0
    described(DESCRIBED.replace("[1, 2]", "[1]") + "keep: results\n")
    spent = tmp_path / "spent"
    fault = shim.Fault(shim.Site("rmdir", "artifacts/study/small/gspo/seed-#/report"), errno.EIO)
    ran = subprocess.run(
        [sys.executable, "-m", "hacpo.cli", *sweep],
        capture_output=True,
        text=True,
        env={**environment(), **shim.environment(study, fault=fault, spent=spent), "LD_PRELOAD": str(library)},
        check=False,
    )
    assert spent.exists(), "the call was never made"
    assert ran.returncode == 0, ran.stderr
    first, last = ran.stderr.splitlines()
    folder = "artifacts/study/small/gspo/seed-1"
    assert first.startswith(
        f"done, but not removed: small/gspo/seed-1: {folder}/report: cannot be removed: it is still"
    )
    assert last == "pipelines/study: 1 of 1 runs done"
    assert not Path(folder).exists()


FOLDERS = (
    "artifacts/study/small",
    "artifacts/study/small/gspo/seed-1",
    "artifacts/study/.logs",
    "pipelines/study/small",
)
FILES = (
    "artifacts/study/.results/small/gspo/seed-1.parquet",
    "artifacts/study/.logs/small/gspo/seed-1.log",
    "artifacts/study/.sweep.lock",
)


@pytest.mark.parametrize(
    ("link", "kind"),
    [*((folder, "folder") for folder in FOLDERS), *((file, kind) for file in FILES for kind in ("file", "pipe"))],
)
def test_a_sweep_that_was_handed_over_leads_nowhere_else(study: Path, cli: Cli, link: str, kind: str) -> None:
    described(DESCRIBED.replace("[1, 2]", "[1]") + "keep: results\n")
    victim = study / "victim"
    victim.mkdir()
    (victim / "work.txt").write_text("mine")
    Path(link).parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(link)
    else:
        Path(link).symlink_to(victim / "work.txt" if kind == "file" else victim)
    for options in ([], ["--dry-run"]):
        refused = cli("sweep", "pipelines/study", *options)
        assert refused.code in (2, 4)
        assert any(part in refused.error for part in ("is a link", "is no regular file", "is no pipeline folder"))
    assert [path.name for path in victim.iterdir()] == ["work.txt"]
    assert (victim / "work.txt").read_text() == "mine"


def test_what_a_run_has_read_is_not_its_own_to_remove(study: Path, cli: Cli) -> None:
    """Models that `dvc add` has put in the cache, which is all there is of them in a clone."""
    from dvc.repo import Repo

    models = Path("models").resolve()  # a link to everybody's
    Path("models").unlink()
    shutil.copytree(models, "models")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DVC's own
        Repo(str(study)).add(["models/ada"])
    added = {path for path in Path(".dvc/cache/files").rglob("*") if path.is_file()}
    assert added
    text = DESCRIBED.replace("[1, 2]", "[1]") + "keep: results\n"
    described(text)
    assert cli("sweep", "pipelines/study", "--only", "small/gspo/*").code == 0
    assert os.listdir("pipelines/study/small/gspo/seed-1") == ["params.yaml"]
    assert {path for path in Path(".dvc/cache/files").rglob("*") if path.is_file()} >= added


def test_what_a_commit_names_of_a_run_stays_in_the_cache_and_what_a_user_has_put_there(study: Path, cli: Cli) -> None:
    cell = "pipelines/study/small/gspo/seed-1"
    described(DESCRIBED.replace("[1, 2]", "[1]"))
    assert cli("sweep", "pipelines/study", "--only", "small/gspo/*").code == 0
    lock = Path(cell, "steps/0001/dvc.lock")
    named = {f"{md5[:2]}/{md5[2:]}" for md5 in re.findall(r"md5: (\w{32})$", lock.read_text(), re.MULTILINE)}
    who = ("-c", "user.name=me", "-c", "user.email=me@here")
    for words in (
        ("init", "--quiet"),
        ("add", "--force", str(lock)),
        (*who, "commit", "--quiet", "--message", "so far"),
    ):
        subprocess.run(["git", *words], check=True)
    cached = {path for name in named if (path := Path(".dvc/cache/files/md5", name)).is_file()}
    assert cached  # the metrics; tables are in folders
    others = {path for path in Path(".dvc/cache/files/md5").glob("??/*") if path.is_file()}
    artifacts = Path("artifacts/study/small/gspo/seed-1")
    mine = [
        *(Path(cell, name) for name in ("notes.md", "xsteps", "_dvc.lock", ".dvc.lock.tmp-of-me", "dvc.lock.tmp-12")),
        *(artifacts / name / "mine.txt" for name in ("notes", "_report", "1report", "_rollouts", "report.tmp-12-old")),
        artifacts / ".report.tmp-draft",
    ]
    left_behind = [
        Path(cell, ".dvc.lock.tmp-12"),
        *(artifacts / name for name in (".pruned.json.tmp-12", ".report.tmp-12-old/x", "..locks.tmp-12-removed/x")),
    ]
    for path in (*mine, *left_behind):
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    described(DESCRIBED.replace("[1, 2]", "[1]") + "keep: results\n")
    assert cli("sweep", "pipelines/study", "--only", "small/gspo/*").code == 0
    files = {path for folder in (Path(cell), artifacts) for path in folder.rglob("*") if path.is_file()}
    assert files == {*mine, Path(cell, "params.yaml")}
    assert all(path.read_text() == "mine" for path in mine)
    left = {path for path in Path(".dvc/cache/files/md5").glob("??/*") if path.is_file()}
    assert cached <= left < others


def test_what_has_changed_is_made_again_only_when_asked(study: Path, cli: Cli) -> None:
    described(DESCRIBED.replace("[1, 2]", "[1]"))
    assert cli("sweep", "pipelines/study", "--only", "*/gspo/*").code == 0
    states = cli("sweep", "pipelines/study", "--dry-run").out
    assert "small/gspo/seed-1: done" in states
    assert "small/hacpo/seed-1: to do" in states
    # Of what no stage trains by, nothing is made again.
    described(
        DESCRIBED.replace("[1, 2]", "[1]") + "settings: {retention: {keep_every: 1}, storage: {rows_per_shard: 7}}\n"
    )
    assert "small/gspo/seed-1: done" in cli("sweep", "pipelines/study", "--dry-run").out
    described(DESCRIBED.replace("[1, 2]", "[1]").replace("gspo}", "gspo, clip: {own_low: 0.02}}"))
    refused = cli("sweep", "pipelines/study", "--only", "*/gspo/*")
    assert "small/gspo/seed-1 was made with other settings: algorithm.clip.own_low 0.03 -> 0.02" in refused.error
    assert refused.code == 2
    assert "clip" not in Path("pipelines/study/small/gspo/seed-1/params.yaml").read_text()
    again = cli("sweep", "pipelines/study", "--only", "*/gspo/*", "--yes")
    assert again.code == 0, again.err
    assert '"own_low": 0.02' in pl.read_parquet("artifacts/study/.results/small/gspo/seed-1.parquet")["settings"][0]


def test_a_run_that_fails_is_said_and_the_others_go_on(study: Path, cli: Cli) -> None:
    described(DESCRIBED.replace("gspo: {algorithm: {recipe: gspo}}", "gone: {agents: {bo: {model: models/none}}}"))
    ran = cli("sweep", "pipelines/study", "--only", "*/seed-1")
    assert ran.code == 1
    assert "failed: small/gone/seed-1: models/none: the model folder is missing" in ran.err
    assert "pipelines/study: 1 of 2 runs done, 1 failed" in ran.err
    collected = cli("sweep", "pipelines/study", "--collect", "out.parquet")
    assert "out.parquet: 1 of 4 runs" in collected.out
    assert "not done: small/gone/seed-1, small/hacpo/seed-2, small/gone/seed-2" in collected.out


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[1]", "input should be a valid dictionary"),
        (DESCRIBED + "sedes: [1]", "unknown key 'sedes'. Did you mean 'seeds'?"),
        (DESCRIBED.replace("../small", "../smal"), "bases.small: there is no such file"),
        (DESCRIBED.replace("hacpo: {}", "a/b: {}"), "variants: 'a/b' cannot be a name"),
        (DESCRIBED.replace("[1, 2]", "[1, 1]"), "seeds: expected whole numbers from 0, each once"),
        (
            DESCRIBED.replace("recipe: gspo", "recipe: gsop"),
            "small/gspo/seed-1: algorithm.recipe: unknown recipe 'gsop'",
        ),
        (DESCRIBED.replace("hacpo: {}", "hacpo: {seed: 3}"), "variants.hacpo: seed is not a variant's to set"),
        (DESCRIBED + "grid: {optimizer.learning_rte: [1.0e-4]}", "unknown key 'optimizer.learning_rte'"),
        (
            DESCRIBED + f"grid: {{optimizer.learning_rate: {[*range(10_000)]}}}",
            "describes too many runs (expected at most",
        ),
        (DESCRIBED + "grid: {seed: [5, 6]}", "grid: seed is not a variant's to set"),
        (DESCRIBED + "grid: {optimizer.learning_rate: []}", "grid: optimizer.learning_rate has no value"),
        (DESCRIBED + "grid: {sampling.stop: [[a], [a]]}", "grid: two combinations have one name"),
        ("bases: [", "not valid YAML"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(study: Path, cli: Cli, text: str, line: str) -> None:
    described(text)
    refused = cli("sweep", "pipelines/study")
    assert line in refused.error
    assert refused.code == 2
    assert os.listdir("pipelines/study") == ["sweep.yaml"]
    assert not Path("artifacts").exists()


def test_refusals_that_need_no_run(study: Path, cli: Cli) -> None:
    assert "pipelines/small: there is no sweep.yaml" in cli("sweep", "pipelines/small").error
    assert "--only fits no cell" in cli("sweep", "pipelines/study", "--only", "x").error
    assert "no cell is done yet" in cli("sweep", "pipelines/study", "--collect", "out.parquet").error
    assert "--take writes" in cli("sweep", "pipelines/study", "--take", "out.parquet", "--dry-run").error
    assert "out.parquet: " in cli("sweep", "pipelines/study", "--take", "out.parquet").error
    mine = Path("pipelines/study/small/hacpo/seed-1/params.yaml")
    mine.parent.mkdir(parents=True)
    mine.write_text("extends: ../../../../small/params.yaml\n")
    refused = cli("sweep", "pipelines/study")
    assert "small/hacpo/seed-1/params.yaml: is not one that a sweep has made" in refused.error
    assert mine.read_text() == "extends: ../../../../small/params.yaml\n"


def test_a_grid_makes_a_cell_of_every_combination(study: Path, cli: Cli) -> None:
    described(DESCRIBED + "grid: {optimizer.learning_rate: [3.0e-5, 1.0e-3], algorithm.clip.own_low: [0.01]}\n")
    shown = cli("sweep", "pipelines/study", "--dry-run")
    assert shown.code == 0, shown.err
    assert "pipelines/study: 8 runs, 0 done" in shown.out
    assert "small/gspo-learning_rate-3e_05-own_low-0_01/seed-1: to do" in shown.out


def test_the_start_has_a_seed_of_its_own(study: Path, cli: Cli) -> None:
    base = changed(PARAMS, TINY)
    weights = {}
    for run, seeds in {"a": "{seed: 1}", "b": "{seed: 2, start_seed: 1}", "c": "{seed: 2}"}.items():
        Path("pipelines", run).mkdir()
        Path("pipelines", run, "params.yaml").write_text(changed(base, seeds))
        assert cli("run", f"pipelines/{run}", "--until", 0, "--jobs", 1).code == 0
        weights[run] = Path("artifacts", run, "checkpoints/step=0000/agent=ada/model.safetensors").read_bytes()
    assert weights["a"] == weights["b"] != weights["c"]


def test_a_setting_that_a_later_version_adds_makes_nothing_again(project: Path) -> None:
    from hacpo.pipeline.views.made_otherwise import UNTRAINED
    from hacpo.pipeline.views.run_results import difference
    from hacpo.settings import params

    settings = params.load(Path("pipelines/small/params.yaml"))
    recorded = params.dump(settings)
    del recorded["pool"], recorded["agents"]["ada"]["adapter"]
    assert difference(recorded, settings) is None
    recorded["optimizer"]["learning_rate"] = 1e-5
    recorded["retention"]["keep_last"] = 7
    recorded["storage"]["rows_per_shard"] = 7
    assert difference(recorded, settings) == "optimizer.learning_rate 1e-05 -> 0.0003"
    recorded["optimizer"] = params.dump(settings)["optimizer"]
    assert difference(recorded, settings) is None
    # A run that is not through makes such steps again.
    assert difference(recorded, settings, UNTRAINED) == "storage.rows_per_shard 7 -> 20"
    assert difference({**recorded, "gone": {"x": 1}}, settings) is not None
