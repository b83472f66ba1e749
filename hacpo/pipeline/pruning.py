"""Removing the checkpoints that the retention rule lets go, and the record of those that went.

A checkpoint is renamed aside and then deleted: a kill leaves it whole, or a hidden leftover that the next run or prune
removes. `artifacts/<run>/pruned.json` notes what went, by which rule, and the hash of its weights (`policy`), which an
audit still compares with the rollouts that were drawn from them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hacpo import durability, schema
from hacpo.errors import ArtifactError, HacpoError
from hacpo.layout import Layout
from hacpo.retention import kept_steps, rule_text
from hacpo.storage import refused
from hacpo.text_files import load_json
from hacpo.weights import policy_hash

if TYPE_CHECKING:
    from hacpo.pipeline.project import Pipeline

_STEP = re.compile(r"step=(\d{4})")
_REMEDY = "remove the file; it only says what was pruned"


@dataclass(frozen=True)
class Pruned:
    """One checkpoint that was removed: the hash of its weights, its size, and the rule that did not keep it."""

    policy: str
    bytes: int
    rule: str


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


# --- the record
# --------------------------------------------------------------------------------------------------------


def read_record(layout: Layout) -> dict[str, dict[int, Pruned]]:
    """Agent -> step -> what was pruned. Of a checkpoint that has been made again since, the files count, not this.

    Raises:
        ArtifactError: the record is damaged.
    """
    try:
        raw = load_json(layout.pruned)
        return {
            agent: {
                int(step): Pruned(str(entry["policy"]), int(entry["bytes"]), str(entry["rule"]))
                for step, entry in entries.items()
                if not layout.checkpoint(int(step), agent).is_dir()
            }
            for agent, entries in raw.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ArtifactError("is no record of pruned checkpoints", where=layout.pruned, remedy=_REMEDY) from None


def was_pruned(layout: Layout, step: int, agent: str) -> Pruned | None:
    """The record of a pruned checkpoint; None if there is none, or none that can be read."""
    with contextlib.suppress(HacpoError):
        return read_record(layout).get(agent, {}).get(step)
    return None


def _write_record(layout: Layout, record: Mapping[str, Mapping[int, Pruned]]) -> None:
    schema.write_json(
        layout.pruned,
        {
            agent: {str(step): vars(entry) for step, entry in sorted(entries.items())}
            for agent, entries in record.items()
            if entries
        },
    )


# --- planning and removing
# ---------------------------------------------------------------------------------------------


def checkpoints_there(layout: Layout, agent: str) -> list[int]:
    """Steps whose checkpoint of an agent is on disk, in order."""
    folders = (layout.root / "checkpoints").glob(f"step=*/agent={agent}")
    matches = [_STEP.fullmatch(folder.parent.name) for folder in folders if folder.is_dir()]
    return sorted(int(match[1]) for match in matches if match)


def plan_pruning(pipeline: Pipeline, steps_done: int) -> list[AgentPlan]:
    """What the retention rule says of the checkpoints that are there, up to `steps_done`; later ones all stay.

    Args:
        steps_done: the last step of which everything is recorded; -1: not even the start.
    """
    from hacpo.pipeline.plan import evaluated
    from hacpo.pipeline.status import accuracies

    settings, layout = pipeline.settings, pipeline.layout
    retention = settings.retention
    there = {agent: checkpoints_there(layout, agent) for agent in settings.agents}
    kept: dict[str, dict[int, str]] = {}
    for agent in settings.agents:
        results = dict(accuracies(pipeline, retention.keep_best, agent)) if retention.keep_best else {}
        # `hacpo export --step best` looks at every evaluation there is, also those that are no longer asked for.
        due = {step: value for step, value in results.items() if evaluated(settings, step)}
        mine = kept_steps(retention, steps_done, results) | kept_steps(retention, steps_done, due)
        mine |= {step: "not all is done that needs it" for step in there[agent] if step > steps_done}
        # Where pruned steps are trained again one after another, the next begins here.
        newest = max((step for step in there[agent] if step <= steps_done), default=0)
        kept[agent] = {newest: "newest that is there"} | mine
    if retention.cache == "kept":  # DVC's file says of a step as a whole whether it is in the cache
        others = {step: f"{why}, of {agent}" for agent, steps in kept.items() for step, why in steps.items()}
        kept = {agent: others | steps for agent, steps in kept.items()}
    return [
        AgentPlan(
            agent,
            {step: _size(layout.checkpoint(step, agent)) for step in there[agent] if step not in kept[agent]},
            {step: kept[agent][step] for step in there[agent] if step in kept[agent]},
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
    if going:
        rule = rule_text(pipeline.settings.retention)
        record = read_record(layout)
        for agent, step, size in going:
            policy = policy_hash(layout.checkpoint(step, agent))
            record.setdefault(agent, {})[step] = Pruned(policy, size, rule)
        _write_record(layout, record)
    for agent, step, _ in going:
        set_aside(layout.checkpoint(step, agent))
    remove_leftovers(layout)
    return sum(size for _, _, size in going)


def set_aside(checkpoint: Path) -> None:
    """Rename a checkpoint to what `remove_leftovers` deletes.

    Raises:
        StorageError: the disk refuses.
    """
    try:
        durability.set_aside(checkpoint, checkpoint.with_name(f".{checkpoint.name}.tmp-{os.getpid()}-pruned"))
    except OSError as error:
        raise refused(checkpoint, error) from None


def remove_leftovers(layout: Layout) -> None:
    """Delete what was renamed aside, folders of steps that are empty now, and what a killed restore was making."""
    schema.remove(layout.restoring)
    for aside in list((layout.root / "checkpoints").glob("step=*/.agent=*.tmp-*-pruned")):
        schema.remove(aside)
        with contextlib.suppress(OSError):  # another agent's checkpoint is there still
            aside.parent.rmdir()


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# --- words
# ------------------------------------------------------------------------------------------------------


def ranges(steps: Sequence[int]) -> str:
    """`1-3, 5` for 1, 2, 3, 5."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def mebibytes(size: int) -> str:
    """`12.3 MiB`, or GiB from there on."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
