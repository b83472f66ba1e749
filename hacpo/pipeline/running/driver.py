"""`hacpo run`: walk a run's DVC stages in warm processes, recording each as `dvc repro` would.

The commands are the ones in the dvc.yaml files; nothing is decided here but their order, and which agents work side by
side.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from typing import Any

from hacpo.artifacts.durability import flushing
from hacpo.artifacts.model_folder import model_files
from hacpo.errors import ModelError, SettingsError
from hacpo.phrases import mebibytes
from hacpo.pipeline.execution.workers import Workers
from hacpo.pipeline.locking.locks import driver_lock
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.bookkeeping import Books
from hacpo.pipeline.records.caching import CheckpointCache
from hacpo.pipeline.records.dvc_files import stamp
from hacpo.pipeline.records.order import agent_of, command_of, makes_checkpoint, may_be_pruned, stage_groups
from hacpo.pipeline.records.repairing import repair
from hacpo.pipeline.retention.pruning import plan_pruning, prune
from hacpo.pipeline.running.remaking import Remaking
from hacpo.pipeline.running.restoring import needed_checkpoints, train_again
from hacpo.pipeline.views.live_view import RunView
from hacpo.settings.model_source import hub_repository, missing_folder


def side_by_side(pipeline: Pipeline) -> int:
    """How many agents work at once by default: as many as cores allow where threads are fixed, one on a GPU."""
    engine = pipeline.settings.engine
    on_gpu = engine.device == "cuda" or (engine.device == "auto" and shutil.which("nvidia-smi") is not None)
    if engine.threads is None or on_gpu:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(len(pipeline.settings.agents), cores // engine.threads))


def run_pipeline(
    pipeline: Pipeline,
    *,
    jobs: int | None = None,
    until: int | None = None,
    remake: bool = False,
    apart: bool = False,
) -> int:
    """Run every stage that is not done; returns how many ran.

    Args:
        pipeline: the run.
        jobs: agents that work side by side; None decides.
        until: stop after this step.
        remake: train finished steps again where what they depend on has changed.
        apart: leave this process alone: one agent at a time works in a process of its own too.

    Raises:
        SettingsError: `jobs` or `until` is out of range; nothing was done.
        RemakeError: finished steps would be trained again, without `remake`.
        BusyError: another run works on this pipeline.
        ModelError: an agent's model folder is none.
        HacpoError: a stage failed; what was finished before is recorded.
    """
    _check_range(pipeline, "jobs", jobs, 1)
    _check_range(pipeline, "until", until, 0, pipeline.settings.steps)
    _check_models(pipeline)
    jobs = side_by_side(pipeline) if jobs is None else jobs
    slots = {agent: number for number, agent in enumerate(pipeline.settings.agents)}
    books = Books(pipeline.root)
    with books.open():
        repairs = repair(pipeline, books)
    with (
        flushing(pipeline.settings.disk.fsync),
        books.claimed(pipeline.layout.root),
        driver_lock(pipeline.layout),
    ):
        remaking = Remaking(pipeline, books, remake)
        remaking.check_settings()
        with books.open():
            stamped = stamp(pipeline)
        cache = CheckpointCache(pipeline, books)
        ran, at, freed, trained = 0, 0, 0, False
        with (
            RunView(pipeline, stamped=stamped) as view,
            Workers(0 if jobs == 1 and not apart else jobs, view) as workers,
        ):
            if str(repairs):
                view.note(str(repairs))
            for step, group in stage_groups(pipeline, books, until):
                if step > at and ran:  # the step before is done, and everything is recorded
                    freed += _retain(pipeline, cache, at, view, newest=trained)
                trained = trained and step == at
                at = step
                view.look_at(step, command_of(group[0]))
                todo = [
                    stage
                    for stage in group
                    if books.changed(
                        stage,
                        may_be_pruned=may_be_pruned(pipeline, step, stage),
                        before=functools.partial(remaking.check_stage, step),
                    )
                ]
                while remaking.told:
                    view.note(remaking.told.pop())
                view.restored = books.restored
                view.plan(step, [command_of(stage) for stage in todo])
                train_again(pipeline, books, workers, needed_checkpoints(pipeline, books, todo), view.note)
                for stage in todo:
                    cache.release(step, stage)
                    books.begin(stage)
                done, failure = workers.run(
                    [(slots.get(agent_of(stage), 0), shlex.split(stage.cmd)[1:]) for stage in todo],
                    on_done=_recorder(books, todo),
                )
                ran += len(done)
                trained = trained or any(map(makes_checkpoint, todo))
                if failure is not None:
                    raise failure
                view.settled(step, [command_of(stage) for stage in group])
            freed += _retain(pipeline, cache, at, view, newest=trained or at == pipeline.settings.steps)
            if at == pipeline.settings.steps:
                remaking.done()
        if freed:
            view.note(f"retention: {mebibytes(freed)} of checkpoints pruned")
    return ran


def _retain(pipeline: Pipeline, cache: CheckpointCache, at: int, view: RunView, *, newest: bool) -> int:
    """Do with the checkpoints up to a step what the retention settings say; returns the bytes that were pruned.

    Args:
        newest: whether nothing after that step is made yet.
    """
    plans = plan_pruning(pipeline, at)
    with cache.books.open():
        cache.follow(plans, at, newest=newest)
    while cache.told:
        view.note(cache.told.pop())
    return prune(pipeline, plans)


def _check_range(pipeline: Pipeline, name: str, value: object, least: int, most: int | None = None) -> None:
    if value is None or (type(value) is int and least <= value and (most is None or value <= most)):
        return
    expected = f"a whole number from {least}{'' if most is None else f' to {most}'}"
    raise SettingsError(f"{name} is out of range", where=pipeline.folder, expected=expected, found=repr(value))


def _check_models(pipeline: Pipeline) -> None:
    """Refuse model folders that no start can be made from, before another stage has run.

    Raises:
        ModelError: one is missing, or holds a file that is none of a model's.
    """
    for name, agent in pipeline.settings.agents.items():
        if agent.model is None or hub_repository(agent.model, pipeline.root) is not None:
            continue
        folder = pipeline.root / agent.model
        if not folder.is_dir():
            raise ModelError(
                missing_folder(agent.model, pipeline.root), where=folder, remedy=f"correct agents.{name}.model"
            )
        model_files(folder)


def _recorder(books: Books, stages: Sequence[Any]) -> Callable[[int], None]:
    """Records each stage as soon as it has run: a kill costs only what is under way."""
    return lambda index: books.finish(stages[index])
