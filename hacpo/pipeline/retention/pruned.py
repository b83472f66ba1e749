"""The record of pruned checkpoints, and which checkpoints are there.

`artifacts/<run>/pruned.json` notes what went, by which rule, and the hash of its weights (`policy`), which an audit
still compares with the rollouts that were drawn from them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hacpo.artifacts import storage
from hacpo.artifacts.layout import Layout
from hacpo.artifacts.tables import CHECKPOINT, EVERY_STEP, step_of
from hacpo.artifacts.text_files import load_json
from hacpo.errors import ArtifactError, HacpoError
from hacpo.settings.base import NAME

_HASH = re.compile(r"[0-9a-f]{64}")
_STEP = re.compile(r"[1-9][0-9]{0,8}")
"""Of a checkpoint that may go; as many digits as a folder's name has room for."""
_MOST_BYTES = 1 << 60

_REMEDY = "remove the file; it only says what was pruned"


@dataclass(frozen=True)
class Pruned:
    """One checkpoint that was removed: the hash of its weights, its size, and the rule that did not keep it."""

    policy: str
    bytes: int
    rule: str


def read_record(layout: Layout) -> dict[str, dict[int, Pruned]]:
    """Agent -> step -> what was pruned. Of a checkpoint that has been made again since, the files count, not this.

    Raises:
        ArtifactError: the record is damaged.
    """
    try:
        raw = load_json(layout.pruned)
        record = {
            _matching(NAME, agent): {int(_matching(_STEP, step)): _pruned(entry) for step, entry in entries.items()}
            for agent, entries in raw.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise ArtifactError("is no record of pruned checkpoints", where=layout.pruned, remedy=_REMEDY) from None
    return {
        agent: {step: entry for step, entry in entries.items() if not layout.checkpoint(step, agent).is_dir()}
        for agent, entries in record.items()
    }


def _matching(pattern: re.Pattern[str], text: str) -> str:
    if not pattern.fullmatch(text):
        raise ValueError("not as it was written")
    return text


def _pruned(entry: Mapping[str, Any]) -> Pruned:
    policy, size, rule = _matching(_HASH, entry["policy"]), entry["bytes"], entry["rule"]
    if type(size) is not int or not 0 <= size <= _MOST_BYTES or not (isinstance(rule, str) and rule.isprintable()):
        raise ValueError("not as it was written")
    return Pruned(policy, size, rule)


def was_pruned(layout: Layout, step: int, agent: str) -> Pruned | None:
    """The record of a pruned checkpoint; None if there is none, or none that can be read."""
    with contextlib.suppress(HacpoError):
        return read_record(layout).get(agent, {}).get(step)
    return None


def write_record(layout: Layout, record: Mapping[str, Mapping[int, Pruned]]) -> None:
    """Write the record, atomically.

    Raises:
        StorageError: the disk refuses.
    """
    storage.write_json(
        layout.pruned,
        {
            agent: {str(step): vars(entry) for step, entry in sorted(entries.items())}
            for agent, entries in record.items()
            if entries
        },
    )


def checkpoints_there(layout: Layout, agent: str) -> list[int]:
    """Steps whose checkpoint of an agent is on disk, in order."""
    folders = layout.root.glob(CHECKPOINT.path(EVERY_STEP, agent))
    steps = [step_of(folder.parent.name) for folder in folders if folder.is_dir()]
    return sorted(step for step in steps if step is not None)
