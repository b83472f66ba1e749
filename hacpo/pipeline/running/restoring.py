"""Training pruned checkpoints again: the updates since the nearest one that is there, from the tables of the run.

Nothing of the run is written but the checkpoints. Each is made beside the run and moved into place only if its hash is
what DVC recorded of the pruned one, so all that was made from it stands.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hacpo.artifacts import storage
from hacpo.artifacts.layout import Layout
from hacpo.artifacts.tables import CHECKPOINT
from hacpo.errors import ArtifactError, MissingInputError
from hacpo.pipeline.execution.workers import Crew
from hacpo.pipeline.policies import check_policy
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.bookkeeping import Books
from hacpo.pipeline.records.elsewhere import checkpoint_command
from hacpo.pipeline.records.order import agent_of, makes_checkpoint, step_file
from hacpo.pipeline.retention.pruned import checkpoints_there
from hacpo.pipeline.retention.pruning import remove_leftovers, set_aside


def needed_checkpoints(pipeline: Pipeline, books: Books, stages: Iterable[Any]) -> dict[str, int]:
    """Agent -> step of the pruned checkpoints that stages of one step are about to read."""
    needed: dict[str, int] = {}
    for stage in stages:
        for path in books.pruned_inputs(stage):
            step, agent = CHECKPOINT.place_of(path.as_posix()) or (0, "")
            if agent and path.resolve() == pipeline.layout.checkpoint(step, agent).resolve():
                needed[agent] = max(step, needed.get(agent, 0))
    return needed


def train_again(
    pipeline: Pipeline, books: Books, workers: Crew, needed: Mapping[str, int], tell: Callable[[str], None]
) -> None:
    """Make pruned checkpoints again. What made them is recorded and current; the caller holds the run (`driver_lock`).

    Args:
        needed: agent -> step.
        tell: is told, before it begins, what is trained again.

    Raises:
        MissingInputError: an agent's start is not there.
        ArtifactError: an update, repeated, gives other bits than recorded.
        HacpoError: an update failed.
    """
    layout = pipeline.layout
    beside = Layout(layout.restoring)
    first = {agent: _nearest(pipeline, agent, step) for agent, step in needed.items()}
    for agent, step in needed.items():
        count = step - first[agent]
        tell(
            f"{agent}: the checkpoint of step {step} was pruned and is needed; training {count} "
            f"step{'s' if count > 1 else ''} again from step {first[agent]}"
        )
    slots = {agent: number for number, agent in enumerate(pipeline.settings.agents)}
    try:
        for step in range(min(first.values(), default=0) + 1, max(needed.values(), default=0) + 1):
            storage.remove(beside.root)
            updates = {
                agent_of(stage): stage
                for stage in books.stages(step_file(pipeline, step))
                if makes_checkpoint(stage) and first.get(agent_of(stage), step) < step <= needed[agent_of(stage)]
            }
            out = ["--out", str(beside.root)]
            _, failure = workers.run(
                [(slots[agent], [*shlex.split(stage.cmd)[1:], *out]) for agent, stage in updates.items()]
            )
            if failure is not None:
                raise failure
            for agent, stage in updates.items():
                _put_back(pipeline, books, stage, beside.checkpoint(step, agent), step, agent)
                if step - 1 > first[agent]:  # made on the way, and nobody asked for it
                    set_aside(layout.checkpoint(step - 1, agent))
            remove_leftovers(layout)
    finally:
        storage.remove(beside.root)


def _nearest(pipeline: Pipeline, agent: str, step: int) -> int:
    """The last step before `step` whose checkpoint is there."""
    before = [at for at in checkpoints_there(pipeline.layout, agent) if at < step]
    if not before:
        start = pipeline.layout.checkpoint(0, agent)
        remedy = f"run `{checkpoint_command(pipeline, 0, agent)}`"
        raise MissingInputError("the checkpoint is missing", where=start, remedy=remedy)
    return before[-1]


def _put_back(pipeline: Pipeline, books: Books, stage: Any, made: Path, step: int, agent: str) -> None:
    target = pipeline.layout.checkpoint(step, agent)
    if not books.same_as_recorded(stage, target, made):
        lock = step_file(pipeline, step).with_name("dvc.lock")
        raise ArtifactError(
            f"{agent}'s update of step {step}, repeated, gave other bits than the run's, as another machine, other "
            "libraries or a GPU may. Nothing was changed",
            where=target,
            remedy=f"to train on from other bits, remove {lock} and run again with --yes: step {step} and all "
            "later ones are then made anew",
        )
    with storage.atomic(target) as scratch:
        shutil.move(made, scratch)
    check_policy(pipeline, step, agent)
