"""Which responses each update of a step sees; no model is needed to know it, so an audit can tell."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hacpo.batching import batches
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


@dataclass(frozen=True)
class UpdateSlots:
    """Per problem, in the pool's order, the update that sees its responses; -1 if none does.

    Attributes:
        own: of the learner's own responses.
        cross: of the other agents'.
    """

    own: list[int]
    cross: list[int]


def update_slots(problems: int, *, own: int, cross: int, updates: int, order: str, seed: int | None) -> UpdateSlots:
    """Which update of a step sees which problem (`plan_updates` says by what rule).

    Args:
        problems: number of problems.
        own, cross: numbers of own and of other agents' responses, unusable ones included.
        updates, order, seed: as for `plan_updates`.
    """
    shuffled = list(range(problems))
    if seed is not None:
        random.Random(seed).shuffle(shuffled)

    def cut(first: int, share: int) -> list[int]:
        slots = [-1] * problems
        for index in range(share):
            for problem in shuffled[index * problems // share : (index + 1) * problems // share]:
                slots[problem] = first + index
        return slots

    if order == "mixed":
        slots = cut(0, updates)
        return UpdateSlots(slots, slots)
    own_share = updates if not cross else max(1, round(updates * own / (own + cross)))
    return UpdateSlots(cut(0, own_share), cut(own_share, updates - own_share))


def plan_updates(rows: Sequence[Row], *, updates: int, order: str, seed: int | None) -> UpdatePlan:
    """Split a step's pool into its updates.

    Prompts are shuffled, or taken in the pool's order. `mixed`: they are cut into `updates` equal parts, each with all
    responses to its prompts. `self_first`: the first updates see only own responses, the later ones only cross
    responses, in proportion to their number.

    Args:
        rows: every row of the pool, in table order, unusable ones too.
        updates: number of updates.
        seed: of the shuffle; None does not shuffle.
    """
    problems = list(dict.fromkeys(row["problem_id"] for row in rows))
    own_count = sum(bool(row["is_self"]) for row in rows)
    slots = update_slots(
        len(problems), own=own_count, cross=len(rows) - own_count, updates=updates, order=order, seed=seed
    )
    slot_of = {problem: (slots.cross[number], slots.own[number]) for number, problem in enumerate(problems)}
    parts: list[list[Row]] = [[] for _ in range(updates)]
    for row in rows:
        slot = slot_of[row["problem_id"]][row["is_self"]]
        if slot >= 0:
            parts[slot].append(row)
    counts = [{source: sum(row["source"] == source for row in part) for source in _sources(part)} for part in parts]
    usable = [[row for row in part if row["status"] == "kept"] for part in parts]
    # Rows of similar length share a forward pass: less padding, and still the same order every time.
    by_length = [sorted(part, key=lambda row: len(row["prompt_token_ids"]) + len(row["token_ids"])) for part in usable]
    return UpdatePlan(by_length, counts)


def micro_batches(rows: Sequence[Row], *, most_rows: int, most_tokens: int | None) -> list[Sequence[Row]]:
    """The rows of an update, in parts for one forward pass each; arguments as for `batching.batches`."""
    lengths = [len(row["prompt_token_ids"]) + len(row["token_ids"]) for row in rows]
    return [rows[part.start : part.stop] for part in batches(lengths, most_rows=most_rows, most_tokens=most_tokens)]


def _sources(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["source"] for row in rows))


def shuffle_seed(seed: int, step: int, agent: str) -> int:
    """Seed of the step's shuffle of prompts."""
    return derive_seed(seed, "update", step, agent)
