"""Checkpoints that a run has made and that are not here: in a clone, or in a copy made to look at tables alone."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hacpo.artifacts.tables import CHECKPOINT
from hacpo.errors import ArtifactError, HacpoError
from hacpo.phrases import ranges
from hacpo.pipeline.catalogue import maker_of
from hacpo.pipeline.records.dvc_files import cached_steps
from hacpo.pipeline.records.order import step_file
from hacpo.pipeline.retention.pruned import read_record, was_pruned

if TYPE_CHECKING:
    from hacpo.pipeline.project import Pipeline


def not_here(pipeline: Pipeline) -> list[int]:
    """Steps whose checkpoints were made, of which no agent's is here, and which were not pruned here.

    Empty where the start and the result are here: the steps between may have been pruned where the run was made.

    Raises:
        ArtifactError: the record of pruned checkpoints is damaged.
    """
    layout, agents = pipeline.layout, list(pipeline.settings.agents)
    pruned = read_record(layout)
    last = pipeline.settings.steps

    def missing(step: int) -> bool:
        if any(layout.checkpoint(step, agent).is_dir() or step in pruned.get(agent, {}) for agent in agents):
            return False
        if step == 0:
            return any(layout.rollouts(1, agent).is_dir() or layout.evaluation(0, agent).is_dir() for agent in agents)
        return any(layout.trace(step, agent).is_file() for agent in agents)

    return [step for step in range(last + 1) if missing(step)] if missing(0) or missing(last) else []


def checkpoint_command(pipeline: Pipeline, step: int, agent: str) -> str:
    """The command that makes, or brings, an agent's checkpoint of a step: a pruned one is made as it was."""
    if was_pruned(pipeline.layout, step, agent) is not None:
        return pipeline.command("restore", step, agent=agent)
    if not pipeline.layout.checkpoint(step, agent).is_dir() and step in cached_steps(pipeline):
        return f"dvc {_way(pipeline, [step])} {step_file(pipeline, step)}"
    with contextlib.suppress(ArtifactError):
        if step in not_here(pipeline):
            return pipeline.command("run")
    return pipeline.command_for(maker_of(CHECKPOINT, step), step, agent)


def described(pipeline: Pipeline, steps: Sequence[int]) -> str:
    """What to say of them, in one line."""
    shared = sorted(cached_steps(pipeline) & set(steps))
    ways = []
    if shared:
        way = _way(pipeline, shared)
        ways = [f"`dvc {way}` brings {_named(shared)}{' if pushed' if way == 'pull' else ''}"]
    if len(shared) < len(steps):
        ways.append(f"`{pipeline.command('run')}` trains {'the others' if shared else 'them'} again")
    return f"checkpoints are not here: {_named(steps)}; {', '.join(ways)}"


def _way(pipeline: Pipeline, steps: Sequence[int]) -> str:
    """What DVC needs to be told to bring checkpoints: a remote, which a project may lack, only where its own cache does
    not have them."""
    from hacpo.pipeline.records.bookkeeping import Books
    from hacpo.pipeline.records.caching import CheckpointCache

    with contextlib.suppress(HacpoError):
        cache = CheckpointCache(pipeline, Books(pipeline.root))
        if all(cache.has(step) for step in steps):
            return "checkout"
    return "pull"


def _named(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {ranges(steps)}"
