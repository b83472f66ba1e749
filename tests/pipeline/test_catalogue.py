"""The catalogue is the truth about stages: what DVC is told that a stage reads is all that it opens."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from conftest import Cli
from hacpo.artifacts import tables
from hacpo.pipeline.catalogue import PIPELINE, POOL_STAGE, STAGES, maker_of
from hacpo.pipeline.stage import UndeclaredError, open_stage

RUN = Path("artifacts/small")
_IN_OPEN, _IN_ISDIR, _IN_NONBLOCK = 0x20, 0x40000000, 0o4000

BESIDE = (".locks/", ".saved/", ".merged/", "pruned.json")
"""Notes of the run about itself, on which no result depends."""
POLICIES = ("metrics/warmup/", "metrics/update/")
"""A reader of a checkpoint compares its hash with the one that is noted there, and refuses others."""
SAID = {"advantage": ("metrics/verify/",)}
"""What a stage reads for a line that it says, when it is done."""


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


def declared(file: Path, stage: str, agent: str, step: int) -> set[str]:
    """Dependencies, outputs and the file of settings of a stage in a dvc.yaml, below the run's root."""
    stages = YAML(typ="safe").load(file.read_text())["stages"]
    entry = stages.get(f"{stage}-{agent}") or stages[stage]
    paths = [*entry.get("deps", []), *entry["outs"], *(key for params in entry.get("params", []) for key in params)]
    names = [path if isinstance(path, str) else next(iter(path)) for path in paths]
    filled = (
        name.replace("${step}", f"{step:04d}").replace("${prev}", f"{step - 1:04d}").replace("${item.agent}", agent)
        for name in names
    )
    return {name.removeprefix(f"{RUN.as_posix()}/") for name in filled}


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel which files are opened (inotify)")
@pytest.mark.parametrize("stage", [name for name, spec in STAGES.items() if not spec.side])
def test_a_stage_opens_nothing_but_what_dvc_is_told(finished_copy: Path, cli: Cli, stage: str) -> None:
    spec, steps = STAGES[stage], Path("pipelines/small/steps")
    words, step, file = [stage, "pipelines/small"], 2, steps / "0002/dvc.yaml"
    if spec.at in ("step", "evaluation"):
        words += ["--step", "2"]
    elif spec.at == "start":
        step, file = 0, steps / "0000/dvc.yaml"
    else:
        step, file = 0, Path("pipelines/small/dvc.yaml")
    words += [f"--{spec.per}", "bo"] if spec.per != "run" else []
    with opened_files(RUN) as seen:
        result = cli(*words)
    assert result.code == 0, result.err
    allowed = declared(file, stage, "bo", step) | {"settings.json"}  # which says whether params.yaml has changed since
    strange = {
        path
        for path in seen
        if not path.startswith((*BESIDE, *POLICIES, *SAID.get(stage, ())))
        and not any(path == place or path.startswith(f"{place}/") for place in allowed)
        and ".tmp-" not in path  # what is being written
    }
    assert strange == set()
    if spec.reads:
        assert any(path not in ("settings.json",) for path in seen)


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


def test_every_table_has_one_maker() -> None:
    for table in tables.TABLES.values():
        assert maker_of(table) in PIPELINE
    assert maker_of(tables.CHECKPOINT, 0).name == "warmup"
    assert maker_of(tables.CHECKPOINT, 3).name == "update"
    assert maker_of(tables.PROBLEMS).name == "prepare"
