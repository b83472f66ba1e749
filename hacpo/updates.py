"""Which responses each update of a step sees; no model is needed to know it, so an audit can tell."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hacpo.seeds import derive_seed

Row = dict[str, Any]


@dataclass(frozen=True)
class UpdatePlan:
    """Which responses each update sees.

    Attributes:
        rows: per update, the usable responses in the order in which they are computed.
        counts: per update, source -> responses scheduled, the unusable ones included (the denominators of the means).
    """

    rows: list[list[Row]]
    counts: list[dict[str, int]]


def plan_updates(rows: Sequence[Row], *, updates: int, order: str, seed: int) -> UpdatePlan:
    """Split a step's pool into its updates.

    Prompts are shuffled. `mixed`: they are cut into `updates` equal parts, each with all responses to its prompts.
    `self_first`: the first updates see only own responses, the later ones only cross responses, in proportion to their
    number.

    Args:
        rows: every row of the pool, in table order, unusable ones too.
        updates: number of updates.
        seed: of the shuffle.
    """
    problems = list(dict.fromkeys(row["problem_id"] for row in rows))
    random.Random(seed).shuffle(problems)
    parts: list[list[Row]] = []
    if order == "mixed":
        groups: list[Sequence[Row]] = [rows]
        shares = [updates]
    else:
        own = [row for row in rows if row["is_self"]]
        cross = [row for row in rows if not row["is_self"]]
        first = updates if not cross else max(1, round(updates * len(own) / len(rows)))
        groups, shares = [own, cross], [first, updates - first]
    for group, share in zip(groups, shares, strict=True):
        for index in range(share):
            chosen = set(problems[index * len(problems) // share : (index + 1) * len(problems) // share])
            parts.append([row for row in group if row["problem_id"] in chosen])
    counts = [{source: sum(row["source"] == source for row in part) for source in _sources(part)} for part in parts]
    usable = [[row for row in part if row["status"] == "kept"] for part in parts]
    # Rows of similar length share a forward pass: less padding, and still the same order every time.
    by_length = [sorted(part, key=lambda row: len(row["prompt_token_ids"]) + len(row["token_ids"])) for part in usable]
    return UpdatePlan(by_length, counts)


def _sources(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["source"] for row in rows))


def shuffle_seed(seed: int, step: int, agent: str) -> int:
    """Seed of the step's shuffle of prompts."""
    return derive_seed(seed, "update", step, agent)
