"""What the run's small JSON files say, for what is only shown or guessed from them: one that is not there, or holds
something else, says nothing. The audit and the report refuse those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hacpo.artifacts.layout import Layout
from hacpo.artifacts.text_files import load_json


def noted(path: Path) -> dict[str, Any]:
    """The mapping that a JSON file holds; empty where there is none that can be read."""
    try:
        content: Any = load_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def numbers(layout: Layout, stage: str, step: int, agent: str = "") -> dict[str, float]:
    """The numbers in a stage's metrics, as a whole where no agent is named."""
    metrics = noted(layout.metrics(stage, step, agent))
    return {key: value for key, value in metrics.items() if isinstance(value, int | float)}
