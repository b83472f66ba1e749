"""The catalogue is the truth about stages: what DVC is told that a stage reads is all that it opens."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from conftest import PARAMS, Cli, make_project
from hacpo.artifacts import layout, tables
from hacpo.artifacts.layout import Layout
from hacpo.artifacts.parquet import read_metadata
from hacpo.cli import app
from hacpo.pipeline import catalogue
from hacpo.pipeline.catalogue import PIPELINE, POOL_STAGE, PREPARE, STAGES, StageSpec, maker_of
from hacpo.pipeline.declared import UndeclaredError
from hacpo.pipeline.execution.command_line import run_app
from hacpo.pipeline.execution.opening import open_stage
from hacpo.pipeline.execution.stage import Stage
from hacpo.pipeline.noted import NotedError, numbers, stage_metrics
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records import dvc_files
from hacpo.pipeline.records.bookkeeping import Books
from hacpo.pipeline.records.order import stage_groups
from tests.tampering import Sandbox

RUN = "artifacts/small"
PARAMS_FILE = "pipelines/small/params.yaml"
_IN_OPEN, _IN_ISDIR, _IN_NONBLOCK = 0x20, 0x40000000, 0o4000

POLICIES = ("metrics/warmup/", "metrics/update/")
"""A reader of a checkpoint compares its hash with the one that is noted there, and refuses others."""
SAID = {"advantage": ("metrics/verify/",)}
"""What a stage reads for a line that it says, when it is done."""

WITH_FILES = (
    PARAMS.replace("bo: {model: models/bo}", "bo: {model: models/bo, adapter: {rank: 2}}")
    .replace(
        "  recipe: hacpo",
        "  recipe: hacpo\n  advantage: {baseline: oracle}\n  capability: {oracle_table: data/oracle.parquet}",
    )
    .replace("{task: arithmetic, split: train, problems: 64}", "{path: data/mine.parquet}")
    + "verification: {reward: 'rewards:good'}\n"
)
"""An adapter, and every file of the project that a stage may read: problems, a reward function, an oracle's table."""
WITH_SIDE_SAMPLE = PARAMS.replace(
    "  recipe: hacpo", "  recipe: hacpo\n  advantage: {baseline: oracle}\n  capability: {oracle_samples: 2}"
)
RUNS = {"plain": PARAMS, "with files": WITH_FILES, "with a side sample": WITH_SIDE_SAMPLE}
TRACED = [
    *(("plain", spec) for spec in PIPELINE if not spec.side),
    *(("with files", spec) for spec in PIPELINE if not spec.side),
    *(("with a side sample", spec) for spec in PIPELINE if spec.side or spec.name == "advantage"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Callable[[str], Path]:
    """The root of a project whose run is complete, by its name in `RUNS`; its models are in the project."""
    made: dict[str, Path] = {}

    def finished(name: str) -> Path:
        if name not in made:
            root = make_project(tmp_path_factory.mktemp("run"), models, RUNS[name])
            (root / "models").unlink()
            shutil.copytree(models, root / "models")
            (root / "rewards.py").write_text(
                "def good(problem, response, finish_reason):\n    return float(problem['answer'] in response)\n"
            )
            problems = [{"problem_id": f"p{n}", "problem": f"{n}+{n}=", "answer": str(2 * n)} for n in range(10, 50)]
            oracle = [{"step": s, "agent": a, "capability": 0.5} for s in (1, 2) for a in ("ada", "bo")]
            (root / "data").mkdir()
            pq.write_table(pa.Table.from_pylist(problems), root / "data/mine.parquet")
            pq.write_table(pa.Table.from_pylist(oracle), root / "data/oracle.parquet")
            before = Path.cwd()
            os.chdir(root)
            try:
                assert run_app(app, ["run", "pipelines/small", "--jobs", "1"]) == 0
            finally:
                os.chdir(before)
            made[name] = root
        return made[name]

    return finished


@pytest.fixture
def copy_of(runs: Callable[[str], Path], sandbox_of: Callable[[Path], Sandbox]) -> Callable[[str], Sandbox]:
    """Copies such a project, and goes there."""
    return lambda name: sandbox_of(runs(name))


@contextmanager
def opened_files(root: Path) -> Iterator[set[str]]:
    """Paths below a folder that anybody opens meanwhile, by whatever library: the kernel tells (inotify)."""
    libc = ctypes.CDLL(None, use_errno=True)
    queue = libc.inotify_init1(_IN_NONBLOCK)
    folders = {
        libc.inotify_add_watch(queue, os.fsencode(folder), _IN_OPEN): folder
        for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]
    }
    seen: set[str] = set()
    try:
        yield seen
        while True:
            try:
                content = os.read(queue, 1 << 20)
            except BlockingIOError:
                break
            at = 0
            while at < len(content):
                watch, mask, _, length = struct.unpack_from("iIII", content, at)
                name = content[at + 16 : at + 16 + length].rstrip(b"\0").decode()
                at += 16 + length
                if name and not mask & _IN_ISDIR:
                    seen.add((folders[watch] / name).relative_to(root).as_posix())
    finally:
        os.close(queue)


def declared(spec: StageSpec, agent: str, step: int) -> set[str]:
    """Dependencies, outputs and the file of settings of a stage in its dvc.yaml, below the project's root."""
    folder = Path("pipelines/small")
    file = folder / "dvc.yaml" if spec.at in ("before", "after") else folder / f"steps/{step:04d}/dvc.yaml"
    stages = YAML(typ="safe").load(file.read_text())["stages"]
    entry = stages.get(f"{spec.name}-{agent}") or stages[spec.name]
    paths = [*entry.get("deps", []), *entry["outs"], *(key for params in entry.get("params", []) for key in params)]
    names = [path if isinstance(path, str) else next(iter(path)) for path in paths]
    return {
        name.replace("${step}", f"{step:04d}").replace("${prev}", f"{step - 1:04d}").replace("${item.agent}", agent)
        for name in names
    }


@pytest.mark.parametrize(
    ("use", "mine", "parts"),
    [
        (catalogue.this(tables.SCHEDULE), "ada", [(None, "")]),
        (catalogue.this(tables.CAPABILITY), "ada", [(3, "")]),
        (catalogue.before(tables.CHECKPOINT), "ada", [(2, "ada")]),
        (catalogue.before(tables.CHECKPOINT), "", []),
        (catalogue.of_all(tables.ROLLOUTS), "ada", [(3, "ada"), (3, "bo")]),
        (catalogue.of_all(tables.PROMPTS, "all"), "", [(None, "")]),
        (catalogue.of_all(tables.CHECKPOINT, "start"), "", [(0, "ada"), (0, "bo")]),
    ],
)
def test_which_parts_of_an_artifact_a_stage_uses(
    use: catalogue.Use, mine: str, parts: list[tuple[int | None, str]]
) -> None:
    assert use.parts(["ada", "bo"], mine, (3, 2, 0)) == parts
    artifact = use.artifact
    for step in range(5):
        for whose in ("ada", "bo"):
            used = any(of_step in (None, step) and owner in ("", whose) for of_step, owner in parts)
            assert use.covers(artifact, step, whose, at=3, mine=mine) is used


def strange(seen: set[str], spec: StageSpec, agent: str, step: int) -> set[str]:
    """What of the files opened is neither declared nor known to decide nothing."""
    # Both say whether params.yaml has changed since its settings were resolved.
    allowed = declared(spec, agent, step) | {f"{RUN}/settings.json", PARAMS_FILE}
    beside = tuple(f"{RUN}/{name}" for name in (*layout.BESIDE, *POLICIES, *SAID.get(spec.name, ())))
    return {
        path
        for path in seen
        if not path.startswith(beside)
        and not any(path == place or path.startswith(f"{place}/") for place in allowed)
        and ".tmp-" not in path  # what is being written
        and "__pycache__" not in path
    }


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel which files are opened (inotify)")
@pytest.mark.parametrize(("run", "spec"), TRACED, ids=lambda value: getattr(value, "name", value))
def test_a_stage_opens_nothing_but_what_dvc_is_told(
    copy_of: Callable[[str], None], cli: Cli, run: str, spec: StageSpec
) -> None:
    copy_of(run)
    step = 2 if spec.at in ("step", "evaluation") else 0
    words = [spec.command, "pipelines/small", *(["--step", step] if step else [])]
    words += [f"--{spec.per}", "bo"] if spec.per != "run" else []
    words += ["--side"] if spec.side else []
    with opened_files(Path()) as seen:
        result = cli(*words)
    assert result.code == 0, result.err
    assert strange(seen, spec, "bo", step) == set()
    # A start is linked with its model folder, and opened under its own name alone.
    outside = spec.outside(Pipeline.open(Path("pipelines/small")), "bo") if spec.at != "start" else ()
    for place in [*outside, *([RUN] if spec.reads else [])]:  # the trace sees what it is to see
        assert any(path == place or path.startswith(f"{place}/") for path in seen), place


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel which files are opened (inotify)")
def test_the_report_looks_at_no_later_checkpoint_for_one_that_is_gone(copy_of: Callable[[str], None], cli: Cli) -> None:
    copy_of("plain")
    shutil.rmtree(f"{RUN}/checkpoints/step=0000")
    with opened_files(Path()) as seen:
        assert cli("report", "pipelines/small").code == 0
    assert strange(seen, STAGES["report"], "", 0) == set()


def test_reading_what_is_not_declared_is_refused(finished_copy: Path) -> None:
    """A forgotten dependency fails at once, and not as a stale result some day."""
    forgetful = replace(POOL_STAGE, reads=tuple(use for use in POOL_STAGE.reads if use.artifact != tables.VERDICTS))
    with (
        pytest.raises(UndeclaredError, match=r"pool reads verdicts/step=0001/agent=ada, which its entry does not say"),
        open_stage(forgetful, None, Path("pipelines/small"), step=1, agent="bo", out=finished_copy / "out") as stage,
    ):
        stage.read(tables.VERDICTS, "ada")


@pytest.mark.parametrize(
    ("table", "agent", "step"),
    [
        (tables.ROLLOUTS, "bo", 1),  # of an earlier step
        (tables.POOL, "ada", 2),  # another learner's
        (tables.TRACE, "bo", 2),  # what it writes itself
    ],
)
def test_other_steps_and_agents_are_not_declared_either(
    finished_copy: Path, table: tables.Table, agent: str, step: int
) -> None:
    with (
        pytest.raises(UndeclaredError),
        open_stage(
            STAGES["update"], None, Path("pipelines/small"), step=2, agent="bo", out=finished_copy / "out"
        ) as stage,
    ):
        stage.read(table, agent, step=step)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda stage: stage.place(tables.ROLLOUTS, ""), "verify reads rollouts/step=0002, which"),
        (lambda stage: stage.inputs.path(tables.ROLLOUTS), "verify reads rollouts, which"),
        (lambda stage: stage.read(tables.PROBLEMS, "arithmetic/heldout"), "verify reads data/arithmetic/heldout.parq"),
        (lambda stage: stage.inputs.data, "verify reads data, which"),
        (lambda stage: stage.inputs.metrics("verify", 2, "bo"), "verify reads metrics/verify/step=0002/bo.json, which"),
        (lambda stage: stage.write(tables.ROLLOUTS, []), "verify writes rollouts/step=0002/agent=bo, which"),
        (lambda stage: stage.write(tables.VERDICTS, [], whose="ada"), "verify writes verdicts/step=0002/agent=ada, wh"),
        (lambda stage: stage.write(tables.VERDICTS, [], step=1), "verify writes verdicts/step=0001/agent=bo, which"),
        (lambda stage: stage.outputs.metrics("update", 2, "bo"), "verify writes metrics/update/step=0002/bo.json, wh"),
        (lambda stage: stage.replacing(tables.POOL).__enter__(), "verify writes pool/step=0002/learner=bo, which"),
    ],
)
def test_nothing_undeclared_is_read_or_written(
    copy_of: Callable[[str], None], tmp_path: Path, attempt: Callable[[Stage], object], message: str
) -> None:
    copy_of("with files")
    with (
        pytest.raises(UndeclaredError, match=re.escape(message)),
        open_stage(STAGES["verify"], None, Path("pipelines/small"), step=2, agent="bo", out=tmp_path / "out") as stage,
    ):
        stage.read(tables.PROBLEMS, "arithmetic/train")
        attempt(stage)
    assert not (tmp_path / "out").exists()


def test_every_artifact_has_one_maker() -> None:
    made = [use.artifact for spec in PIPELINE for use in spec.writes]
    assert {*made, tables.METRICS} == {*tables.ARTIFACTS}
    for artifact in dict.fromkeys(made):
        makers = [spec.name for spec in PIPELINE if spec.makes(artifact)]
        assert makers == (["warmup", "update"] if artifact == tables.CHECKPOINT else [maker_of(artifact).name])
    assert maker_of(tables.CHECKPOINT, 0).name == "warmup"
    assert maker_of(tables.CHECKPOINT, 3).name == "update"
    assert maker_of(tables.PROBLEMS).name == "prepare"
    with pytest.raises(LookupError, match="no stage alone makes metrics"):
        maker_of(tables.METRICS)


@pytest.mark.usefixtures("finished_copy")
def test_what_a_file_says_of_settings_follows_from_its_entry() -> None:
    """Prompts leave out how many steps there are, and problems how they are dealt, though `prepare` reads both."""
    layout, settings, recorded = Layout(Path(RUN)), Pipeline.open(Path("pipelines/small")).settings, {}
    for table, path in (
        (tables.PROBLEMS, layout.problems("arithmetic/train")),
        (tables.SCHEDULE, layout.schedule),
        (tables.PROMPTS, layout.prompts(1) / "part-00000.parquet"),
    ):
        recorded[table.name] = read_metadata(path)["settings"].keys()
        # The audit asks the same function what a file must say.
        assert recorded[table.name] == PREPARE.recorded(table, settings, None).keys()
    assert recorded == {
        "problems": {"data"},
        "schedule": {"seed", "steps", "data", "batch"},
        "prompts": {"seed", "batch"},
    }


@pytest.mark.parametrize(
    ("content", "expected", "found"),
    [
        ("[1, 2]", "a mapping of numbers", "list"),
        ("{", "JSON", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[" * 100_000, "JSON", "nested too deeply"),
    ],
)
def test_metrics_are_read_in_one_way_strictly_or_not(tmp_path: Path, content: str, expected: str, found: str) -> None:
    layout = Layout(tmp_path)
    path = layout.metrics(STAGES["update"].name, 1, "bo")
    path.parent.mkdir(parents=True)
    assert stage_metrics(layout, STAGES["update"], 1, "bo") == {}
    with pytest.raises(FileNotFoundError):
        stage_metrics(layout, STAGES["update"], 1, "bo", strict=True)
    path.write_text(content)
    assert stage_metrics(layout, STAGES["update"], 1, "bo") == {}
    with pytest.raises(NotedError) as odd:
        stage_metrics(layout, STAGES["update"], 1, "bo", strict=True)
    assert (odd.value.expected, odd.value.found) == (expected, found)
    path.write_text('{"loss": 0.5, "policy": "ab", "updates": 2}')
    assert stage_metrics(layout, STAGES["update"], 1, "bo", strict=True) == {"loss": 0.5, "policy": "ab", "updates": 2}
    assert numbers(layout, STAGES["update"], 1, "bo") == {"loss": 0.5, "updates": 2}


ADDED: tuple[tuple[str, Literal["before", "after"]], ...] = (("fetch", "before"), ("publish", "after"))


def test_a_stage_runs_when_its_entry_says(project: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one before all steps, and one after: nobody but the catalogue knows of them."""
    fetch, publish = (replace(STAGES["prepare"], name=name, at=at, writes=()) for name, at in ADDED)
    monkeypatch.setattr(catalogue, "PIPELINE", (*PIPELINE, fetch, publish))
    monkeypatch.setattr(dvc_files, "PIPELINE", (*PIPELINE, fetch, publish))
    assert cli("plan", "pipelines/small").code == 0
    pipeline = Pipeline.open(Path("pipelines/small"))
    groups = list(stage_groups(pipeline, Books(pipeline.root)))
    assert [group[0].name for _, group in groups[:3]] == ["resolve", "prepare", "fetch"]
    assert [(step, group[0].name) for step, group in groups[-2:]] == [(2, "report"), (2, "publish")]
