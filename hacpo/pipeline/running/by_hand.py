"""`hacpo prune` and `hacpo restore`: checkpoints removed, or trained again, when nobody runs the pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from hacpo.artifacts.durability import flushing
from hacpo.artifacts.tables import SETTINGS
from hacpo.errors import SettingsError
from hacpo.pipeline.catalogue import StageSpec
from hacpo.pipeline.execution.opening import check_resolved
from hacpo.pipeline.execution.session import ConsoleProgress
from hacpo.pipeline.execution.workers import Workers
from hacpo.pipeline.locking.locks import driver_lock
from hacpo.pipeline.policies import check_policy
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.bookkeeping import Books
from hacpo.pipeline.records.caching import CheckpointCache
from hacpo.pipeline.records.dvc_files import cached_steps
from hacpo.pipeline.records.order import agent_of, may_be_pruned, spec_of, stage_groups
from hacpo.pipeline.records.stamp_check import check_stamped
from hacpo.pipeline.retention.pruning import AgentPlan, plan_pruning, prune, remove_leftovers
from hacpo.pipeline.running.restoring import train_again
from hacpo.pipeline.views.progress import described_change

_WAIT_SECONDS = 0.5
_READ_BY_NO_STAGE = ("retention.", "disk.")


@dataclass(frozen=True)
class Retained:
    """What a prune by hand did.

    Attributes:
        plans: what went (or, of a dry run, would go) and stayed.
        done: the last step that is done and recorded; -1: none.
        cached: the steps whose checkpoints are in DVC's cache.
        told: remarks for the user.
    """

    plans: list[AgentPlan]
    done: int
    cached: list[int]
    told: list[str]


def prune_by_hand(pipeline: Pipeline, *, dry_run: bool) -> Retained:
    """Remove the checkpoints that the retention settings of params.yaml let go, and have DVC's cache follow them.

    Raises:
        BusyError: a run, a stage or DVC works on the pipeline.
        SettingsError: params.yaml has changed, so what is still needed is not known before the next run.
        MissingInputError: the run has no DVC files.
    """
    with flushing(pipeline.settings.disk.fsync), driver_lock(pipeline.layout, _WAIT_SECONDS, "hacpo prune"):
        _check_unchanged(pipeline)
        books = _books(pipeline)
        with books.claimed(pipeline.layout.root, _WAIT_SECONDS), books.open(_WAIT_SECONDS):
            done = _steps_done(pipeline, books)
            plans = plan_pruning(pipeline, done)
            cache = CheckpointCache(pipeline, books)
            if dry_run:
                return Retained(plans, done, sorted(cached_steps(pipeline)), [])
            cached = cache.follow(plans, done)
            prune(pipeline, plans)
            remove_leftovers(pipeline.layout)
    return Retained(plans, done, cached, [*cache.told, *cache.remarks])


def _check_unchanged(pipeline: Pipeline) -> None:
    """Refuse where params.yaml says something else than the run's files were made with, but for what no stage reads."""
    try:
        changes = sorted(pipeline.changed_settings().items())
        changed = [described_change(key, *values) for key, values in changes if not key.startswith(_READ_BY_NO_STAGE)]
    except ValueError:
        changed = [f"{pipeline.layout.settings} is not readable"]
    if changed:
        raise SettingsError(
            "has changed since the run, so which checkpoints are still needed is not known",
            where=pipeline.folder / "params.yaml",
            found=changed[0],
            remedy="`hacpo run` or `dvc repro` first, or change it back",
        )


def restore_by_hand(pipeline: Pipeline, agent: str, step: int) -> bool:
    """Train a pruned checkpoint again; False if it is there.

    Raises:
        BusyError: a run, a stage or DVC works on the pipeline.
        SettingsError: params.yaml has changed, or something before that step is not done.
        ArtifactError: the repeated updates give other bits than the run's.
    """
    if pipeline.layout.checkpoint(step, agent).is_dir():
        check_policy(pipeline, step, agent)
        return False
    with contextlib.ExitStack() as work:
        work.enter_context(flushing(pipeline.settings.disk.fsync))
        work.enter_context(driver_lock(pipeline.layout, _WAIT_SECONDS, "hacpo restore"))
        check_resolved(pipeline)
        books = _books(pipeline)
        progress = ConsoleProgress()
        work.enter_context(books.claimed(pipeline.layout.root, _WAIT_SECONDS))
        with books.open(_WAIT_SECONDS):
            for spec, whose, at in _not_current(pipeline, books, until=step):
                if spec.at != "evaluation":
                    raise SettingsError(
                        f"{f'{spec.command} {whose}'.strip()} of step {at} is not done, or out of date",
                        where=pipeline.folder,
                        remedy=f"first `{pipeline.command('run')}`",
                    )
        with progress.showing("restore"), Workers(0, progress) as workers:
            train_again(pipeline, books, workers, {agent: step}, print)
        CheckpointCache(pipeline, books).release_partial(step)
    return True


def _books(pipeline: Pipeline) -> Books:
    check_stamped(pipeline)
    return Books(pipeline.root)


def _steps_done(pipeline: Pipeline, books: Books) -> int:
    """The last step up to which everything is recorded and current; -1 if not even the start is."""
    first = next(_not_current(pipeline, books), None)
    return pipeline.settings.steps if first is None else first[-1] - 1


def _not_current(pipeline: Pipeline, books: Books, until: int | None = None) -> Iterator[tuple[StageSpec, str, int]]:
    """(stage, agent, step) of every stage that would run; not what has no step (settings, report)."""
    for step, group in stage_groups(pipeline, books, until):
        for stage in group:
            spec = spec_of(stage)
            current = books.compare(stage, may_be_pruned=may_be_pruned(pipeline, step, stage))
            if not current and spec is not None and spec.at != "after" and not spec.makes(SETTINGS):
                yield spec, agent_of(stage), step
