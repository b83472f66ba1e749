"""What the run's small JSON files say, its metrics above all: one way to read them.

What is only shown or guessed from such a file passes over one that is not there, or holds something else; the audit and
the report refuse it (`strict`).
"""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any, TypeGuard

from hacpo.artifacts.layout import Layout
from hacpo.artifacts.text_files import LARGEST, load_json
from hacpo.pipeline.catalogue import StageSpec

POLICY = "policy"
"""Key, among a stage's numbers, of the hash of the weights in the checkpoint that it made."""

POLICY_CONFIG = "policy_config"
"""Of the hash of what libraries read beside them."""

TEXTS = (POLICY, POLICY_CONFIG)
"""Keys of what is no number."""


class NotedError(ValueError):
    """A file does not hold what it should.

    Attributes:
        expected, found: what it should hold, and what it does.
    """

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"expected {expected}, found {found}")
        self.expected, self.found = expected, found


def noted(path: Path, *, strict: bool = False) -> dict[str, Any]:
    """The mapping that a JSON file holds.

    Args:
        strict: raise what is wrong; else a file that cannot be read says nothing.

    Raises:
        OSError: it is not there, or cannot be read.
        NotedError: it is no JSON, or no mapping.
    """
    try:
        content: Any = load_json(path)
    except (OSError, ValueError) as error:
        if not strict:
            return {}
        if isinstance(error, OSError):
            raise
        raise NotedError("JSON", str(error)) from None
    if not isinstance(content, dict):
        if not strict:
            return {}
        raise NotedError("a mapping of numbers", type(content).__name__)
    return content


def stage_metrics(
    layout: Layout, stage: StageSpec, step: int, agent: str = "", *, strict: bool = False
) -> dict[str, Any]:
    """What a stage's metrics file says: its numbers, and of a checkpoint's maker its `TEXTS`; arguments and errors
    as for `noted`.

    Args:
        agent: whose; of a stage that serves all agents at once, nobody's.
    """
    return noted(layout.metrics(stage.name, step, agent), strict=strict)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of a JSON file is a number that can be computed with: JSON as Python reads it also holds NaN,
    infinities, and whole numbers of thousands of digits."""
    return type(value) in (int, float) and abs(value) <= LARGEST  # type: ignore[arg-type]


def numbers(layout: Layout, stage: StageSpec, step: int, agent: str = "") -> dict[str, float]:
    """The numbers in a stage's metrics, none where they cannot be read; what is no such number is not known."""
    return {key: value for key, value in stage_metrics(layout, stage, step, agent).items() if is_number(value)}


def all_numbers(layout: Layout, stage: StageSpec, step: int, agent: str = "") -> dict[str, float]:
    """The numbers in a stage's metrics.

    Raises:
        OSError: they are not there, or cannot be read.
        NotedError: there is something else among them.
    """
    metrics = stage_metrics(layout, stage, step, agent, strict=True)
    numeric = {key: value for key, value in metrics.items() if is_number(value)}
    odd = next((key for key in metrics if key not in numeric and key not in TEXTS), None)
    if odd is not None:
        raise NotedError(f"{odd}: a number", reprlib.repr(metrics[odd]))
    return numeric
