"""`hacpo run`: walk a run's DVC stages in warm processes, recording each as `dvc repro` would.

The commands are the ones in the dvc.yaml files; nothing is decided here but how many agents work side by side. What
runs when is `runner`'s.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

from hacpo.artifacts.durability import flushing
from hacpo.artifacts.model_folder import gguf_of, model_files
from hacpo.errors import ModelError, SettingsError
from hacpo.pipeline.execution.workers import Crew, Workers
from hacpo.pipeline.locking.locks import driver_lock, refuse_beside_run
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.bookkeeping import Books
from hacpo.pipeline.records.dvc_files import stamp
from hacpo.pipeline.records.repairing import repair
from hacpo.pipeline.running.remaking import Remaking
from hacpo.pipeline.running.runner import Runner
from hacpo.pipeline.views.live_view import RunView
from hacpo.settings.executor import Kind
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
    executor: Kind | None = None,
) -> int:
    """Run every stage that is not done; returns how many ran.

    Args:
        pipeline: the run.
        jobs: agents that work side by side; None decides.
        until: stop after this step.
        remake: train finished steps again where what they depend on has changed.
        apart: leave this process alone: one agent at a time works in a process of its own too.
        executor: who carries out stages; None: as the settings say.

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
    refuse_beside_run(pipeline.layout)
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
        with (
            RunView(pipeline, stamped=stamped) as view,
            _crew(pipeline, view, 0 if jobs == 1 and not apart else jobs, executor) as workers,
        ):
            if str(repairs):
                view.note(str(repairs))
            return Runner(pipeline, books, workers, remaking, view).through(until)


@contextlib.contextmanager
def _crew(pipeline: Pipeline, view: RunView, jobs: int, kind: Kind | None) -> Iterator[Crew]:
    """Who carries out the stages: processes of this machine, or a cluster."""
    settings = pipeline.settings.executor
    settings = settings.model_copy(update={"kind": kind or settings.kind})
    if settings.kind == "local":
        with Workers(jobs, view) as workers:
            yield workers
        return
    from hacpo.pipeline.executors.far_workers import FarWorkers, open_executor

    opened = open_executor(settings, pipeline.layout.locks / settings.kind)
    with FarWorkers(opened, settings, pipeline, view) as far:
        yield far


def _check_range(pipeline: Pipeline, name: str, value: object, least: int, most: int | None = None) -> None:
    if value is None or (type(value) is int and least <= value and (most is None or value <= most)):
        return
    expected = f"a whole number from {least}{'' if most is None else f' to {most}'}"
    raise SettingsError(f"{name} is out of range", where=pipeline.folder, expected=expected, found=repr(value))


def _check_models(pipeline: Pipeline) -> None:
    """Refuse model folders that no start can be made from, before another stage has run.

    Raises:
        ModelError: one is missing, or holds a file that is none of a model's, or cannot be read here.
    """
    from hacpo.engines.models.gguf_start import require_gguf

    for name, agent in pipeline.settings.agents.items():
        if agent.model is None or hub_repository(agent.model, pipeline.root) is not None:
            continue
        folder = pipeline.root / agent.model
        if gguf_of(folder) is not None:
            require_gguf(f"agents.{name}.model")
            continue
        if not folder.is_dir():
            raise ModelError(
                missing_folder(agent.model, pipeline.root), where=folder, remedy=f"correct agents.{name}.model"
            )
        model_files(folder)
