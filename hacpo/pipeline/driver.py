"""`hacpo run`: walk a run's DVC stages in warm processes, recording each as `dvc repro` would.

The commands are the ones in the dvc.yaml files; nothing is decided here but their order, and which agents work side by
side.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hacpo.pipeline.bookkeeping import Books, repair_locks
from hacpo.pipeline.locks import driver_lock
from hacpo.pipeline.plan import stamp
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.view import RunView
from hacpo.pipeline.workers import Workers


def side_by_side(pipeline: Pipeline) -> int:
    """How many agents work at once by default: as many as cores allow where threads are fixed, one on a GPU."""
    engine = pipeline.settings.engine
    on_gpu = engine.device == "cuda" or (engine.device == "auto" and shutil.which("nvidia-smi") is not None)
    if engine.threads is None or on_gpu:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(len(pipeline.settings.agents), cores // engine.threads))


def run_pipeline(pipeline: Pipeline, entry: str, *, jobs: int | None = None, until: int | None = None) -> int:
    """Run every stage that is not done; returns how many ran.

    Args:
        pipeline: the run.
        entry: `module:function` that executes one stage's command line.
        jobs: agents that work side by side; None decides.
        until: stop after this step.

    Raises:
        BusyError: another run works on this pipeline.
        HacpoError: a stage failed; what was finished before is recorded.
    """
    jobs = side_by_side(pipeline) if jobs is None else jobs
    slots = {agent: number for number, agent in enumerate(pipeline.settings.agents)}
    with driver_lock(pipeline.layout):
        books = Books(pipeline.root)
        with books.open():
            repaired = repair_locks(pipeline)
            stamped = stamp(pipeline)
        ran = 0
        with (
            RunView(pipeline, repaired=repaired, stamped=stamped) as view,
            Workers(entry, 0 if jobs == 1 else jobs, view) as workers,
        ):
            for step, group in _groups(pipeline, books, until):
                view.look_at(step, _title(group[0]))
                todo = [stage for stage in group if books.changed(stage)]
                view.restored = books.restored
                view.plan(step, [_title(stage) for stage in todo])
                for stage in todo:
                    books.begin(stage)
                done, failure = workers.run(
                    [(slots.get(_agent(stage), 0), shlex.split(stage.cmd)[1:]) for stage in todo]
                )
                for index in sorted(done):
                    books.finish(todo[index])
                ran += len(done)
                if failure is not None:
                    raise failure
                view.settled(step, [_title(stage) for stage in group])
    return ran


def _groups(pipeline: Pipeline, books: Books, until: int | None) -> Iterator[tuple[int, list[Any]]]:
    """(step, stages that may run side by side), in the order of the pipeline."""
    own = books.stages(pipeline.folder / "dvc.yaml")
    last = pipeline.settings.steps if until is None else min(until, pipeline.settings.steps)
    for stage in own:
        if stage.name in ("resolve", "prepare"):
            yield 0, [stage]
    for step in range(last + 1):
        stages = books.stages(pipeline.folder / "steps" / f"{step:04d}" / "dvc.yaml")
        for _, group in itertools.groupby(stages, key=_title):
            yield step, list(group)
    if last == pipeline.settings.steps:
        for stage in own:
            if stage.name == "report":
                yield last, [stage]
        for stage in books.stages(pipeline.root / "dvc.yaml") if (pipeline.root / "dvc.yaml").is_file() else []:
            # A stage of the project's own that hangs on this run's report, such as the quickstart's.
            report = str(pipeline.layout.report.resolve())
            if stage.cmd.startswith("hacpo ") and any(str(Path(dep.fs_path)).startswith(report) for dep in stage.deps):
                yield last, [stage]


def _title(stage: Any) -> str:
    """The command's name: stages of one name may run side by side."""
    return shlex.split(stage.cmd)[1]


def _agent(stage: Any) -> str:
    """Whose part of the step it is."""
    words = shlex.split(stage.cmd)
    return next((words[at + 1] for at, word in enumerate(words) if word in ("--agent", "--learner")), "")
