"""The stages of a run in the order of the pipeline."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacpo.artifacts.tables import CHECKPOINT
from hacpo.pipeline import catalogue
from hacpo.pipeline.catalogue import StageSpec
from hacpo.pipeline.project import Pipeline

if TYPE_CHECKING:
    from hacpo.pipeline.records.bookkeeping import Books

_CHECKPOINT = re.compile(rf"/{CHECKPOINT.pattern}$")


def stage_groups(
    pipeline: Pipeline, books: Books, until: int | None = None, *, first: int = 0
) -> Iterator[tuple[int, list[Any]]]:
    """(step, stages that may run side by side), in the order of the pipeline.

    Args:
        first: the step to begin with; what comes before all steps belongs to the start.
    """
    own = books.stages(pipeline.folder / "dvc.yaml")
    last = pipeline.settings.steps if until is None else min(until, pipeline.settings.steps)
    for stage in own:
        if of_run(stage) == "before" and first == 0:
            yield 0, [stage]
    for step in range(first, last + 1):
        stages = books.stages(step_file(pipeline, step))
        for _, group in itertools.groupby(stages, key=command_of):
            yield step, list(group)
    if last == pipeline.settings.steps:
        for stage in own:
            if of_run(stage) == "after":
                yield last, [stage]
        for stage in books.stages(pipeline.root / "dvc.yaml") if (pipeline.root / "dvc.yaml").is_file() else []:
            # The quickstart has one, so that `dvc repro` alone runs it. Any other of the project's own is DVC's to run:
            # it may do anything.
            if stage.cmd == f"{pipeline.command('status')} --outcome" and not stage.outs:
                yield last, [stage]


def step_file(pipeline: Pipeline, step: int) -> Path:
    """A step's dvc.yaml."""
    return pipeline.folder / "steps" / f"{step:04d}" / "dvc.yaml"


def step_files(pipeline: Pipeline) -> list[Path]:
    """The dvc.yaml files of steps that are there, the start's first."""
    return sorted((pipeline.folder / "steps").glob("[0-9][0-9][0-9][0-9]/dvc.yaml"))


def command_of(stage: Any) -> str:
    """The command's name: stages of one name may run side by side."""
    return shlex.split(stage.cmd)[1]


def spec_of(stage: Any) -> StageSpec | None:
    """Its entry in the catalogue; None of one of the project's own."""
    words = shlex.split(stage.cmd)
    return next(
        (spec for spec in catalogue.PIPELINE if words[1] == spec.command and ("--side" in words) == spec.side), None
    )


def of_run(stage: Any) -> str:
    """Whether a stage comes once in a run, `before` all steps or `after` them; empty if it is a step's."""
    spec = spec_of(stage)
    if spec is None:
        return "after"  # the project's own, which hangs on the report
    return spec.at if spec.at in ("before", "after") else ""


def makes_checkpoint(stage: Any) -> bool:
    """Whether it makes an agent's checkpoint."""
    spec = spec_of(stage)
    return spec is not None and spec.makes(CHECKPOINT)


def agent_of(stage: Any) -> str:
    """Whose part of the step it is; empty if it is all agents'."""
    words = shlex.split(stage.cmd)
    return next((words[at + 1] for at, word in enumerate(words) if word in ("--agent", "--learner")), "")


def may_be_pruned(pipeline: Pipeline, step: int, stage: Any) -> bool:
    """Whether the stage's checkpoint may be missing without anything being undone."""
    return makes_checkpoint(stage) and is_between(pipeline, step)


def is_between(pipeline: Pipeline, step: int) -> bool:
    """Whether a step's checkpoints are neither the start nor the result: retention prunes these alone."""
    return 0 < step < pipeline.settings.steps


def is_checkpoint(path: str) -> bool:
    """Whether a path is the folder of an agent's checkpoint."""
    return _CHECKPOINT.search(path) is not None
