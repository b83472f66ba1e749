"""Removing the checkpoints that the retention rule lets go, and the record of those that went.

A checkpoint is renamed aside and then deleted: a kill leaves it whole, or a hidden leftover that the next run or prune
removes. `artifacts/<run>/pruned.json` notes what went, by which rule, and the hash of its weights (`policy`), which an
audit still compares with the rollouts that were drawn from them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hacpo.artifacts import durability, storage
from hacpo.artifacts.layout import Layout
from hacpo.artifacts.storage import disk_bytes, refused
from hacpo.artifacts.tables import CHECKPOINT, EVERY_STEP, owner_dir
from hacpo.artifacts.weights import policy_hash
from hacpo.errors import ArtifactError
from hacpo.pipeline.retention.pruned import Pruned, checkpoints_there, read_record, write_record
from hacpo.pipeline.retention.rule import kept_steps, rule_text

if TYPE_CHECKING:
    from hacpo.pipeline.project import Pipeline


@dataclass(frozen=True)
class AgentPlan:
    """One agent's checkpoints.

    Attributes:
        go: step -> bytes of every checkpoint that the rule lets go.
        stay: step -> why, of those that are there and stay.
    """

    agent: str
    go: dict[int, int]
    stay: dict[int, str]


def plan_pruning(pipeline: Pipeline, steps_done: int) -> list[AgentPlan]:
    """What the retention rule says of the checkpoints that are there, up to `steps_done`; later ones all stay.

    Args:
        steps_done: the last step of which everything is recorded; -1: not even the start.
    """
    from hacpo.evaluation.values import accuracies

    settings, layout = pipeline.settings, pipeline.layout
    retention = settings.retention
    checkpoints = {agent: checkpoints_there(layout, agent) for agent in settings.agents}
    kept: dict[str, dict[int, str]] = {}
    for agent in settings.agents:
        results = (
            dict(accuracies(layout, pipeline.run, settings, retention.keep_best, agent)) if retention.keep_best else {}
        )
        # `hacpo export --step best` looks at every evaluation there is, also those that are no longer asked for.
        due = {step: value for step, value in results.items() if settings.evaluated(step)}
        mine = kept_steps(retention, steps_done, results) | kept_steps(retention, steps_done, due)
        mine |= {step: "not all is done that needs it" for step in checkpoints[agent] if step > steps_done}
        # Where pruned steps are trained again one after another, the next begins here.
        newest = max((step for step in checkpoints[agent] if step <= steps_done), default=0)
        kept[agent] = {newest: "newest that is there"} | mine
    if retention.cache == "kept":  # DVC's file says of a step as a whole whether it is in the cache
        others = {step: f"{why}, of {agent}" for agent, steps in kept.items() for step, why in steps.items()}
        kept = {agent: others | steps for agent, steps in kept.items()}
    return [
        AgentPlan(
            agent,
            {
                step: disk_bytes(layout.checkpoint(step, agent))
                for step in checkpoints[agent]
                if step not in kept[agent]
            },
            {step: kept[agent][step] for step in checkpoints[agent] if step in kept[agent]},
        )
        for agent in settings.agents
    ]


def prune(pipeline: Pipeline, plans: Sequence[AgentPlan]) -> int:
    """Remove what the plans let go, and leftovers of a prune that was killed; returns the bytes of the checkpoints.

    The caller holds the run (`driver_lock`).

    Raises:
        StorageError: the disk refuses.
        ArtifactError: the record of earlier ones is damaged.
    """
    layout = pipeline.layout
    going = [(plan.agent, step, size) for plan in plans for step, size in plan.go.items()]
    for agent, step, _ in going:
        _refuse_links(layout.checkpoint(step, agent))
    if going:
        rule = rule_text(pipeline.settings.retention)
        record = read_record(layout)
        for agent, step, size in going:
            policy = policy_hash(layout.checkpoint(step, agent))
            record.setdefault(agent, {})[step] = Pruned(policy, size, rule)
        write_record(layout, record)
    for agent, step, _ in going:
        set_aside(layout.checkpoint(step, agent))
    remove_leftovers(layout)
    return sum(size for _, _, size in going)


def set_aside(checkpoint: Path) -> None:
    """Rename a checkpoint to what `remove_leftovers` deletes.

    Raises:
        StorageError: the disk refuses.
        ArtifactError: it is reached through a link, and may be another run's.
    """
    _refuse_links(checkpoint)
    try:
        durability.set_aside(checkpoint, checkpoint.with_name(f".{checkpoint.name}.tmp-{os.getpid()}-pruned"))
    except OSError as error:
        raise refused(checkpoint, error) from None


def remove_leftovers(layout: Layout) -> None:
    """Delete what was renamed aside, folders of steps that are empty now, and what a killed restore was making."""
    storage.remove(layout.restoring)
    every_agent = owner_dir(CHECKPOINT.per, "*")
    for aside in list(layout.root.glob(f"{CHECKPOINT.within(EVERY_STEP)}/.{every_agent}.tmp-*-pruned")):
        if _links_above(aside):
            continue
        storage.remove(aside)
        with contextlib.suppress(OSError):  # another agent's checkpoint is there still
            aside.parent.rmdir()


def _refuse_links(checkpoint: Path) -> None:
    for path in _links_above(checkpoint):
        raise ArtifactError("is a link, and no checkpoint is removed through one", where=path, remedy="remove the link")


def _links_above(checkpoint: Path) -> list[Path]:
    """Links among `checkpoints` and the step's folder: hacpo makes none, whoever handed a run over may have."""
    return [path for path in (checkpoint.parent.parent, checkpoint.parent) if path.is_symlink()]
