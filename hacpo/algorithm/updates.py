"""Which responses each update of a step sees; no model is needed to know it, so an audit can tell."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hacpo.algorithm.batching import batches
from hacpo.algorithm.dealing import Ints, balanced, self_first, slots_of_ranks
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


def update_slots(
    problem_b: Ints,
    source_b: Ints,
    length_b: Ints,
    *,
    learner: int,
    updates: int,
    order: str,
    ranks: int = 1,
    seed: int | None,
) -> Ints:
    """The update that sees each row of a pool (`plan_updates` says by what rule), -1 if none does, [B].

    Args:
        problem_b: number of each row's problem, from 0 in the pool's order; unusable rows count too.
        source_b: number of the agent that sampled it, from 0 in the order of agents.
        length_b: tokens of prompt and response; `balanced` alone needs them.
        learner: the learner's number.
        updates, order, ranks, seed: as for `plan_updates`.

    Raises:
        DataError: the rows cannot be dealt evenly to the ranks.
    """
    shuffled = list(range(int(problem_b.max()) + 1)) if len(problem_b) else []
    if seed is not None:
        random.Random(seed).shuffle(shuffled)
    place_b = np.argsort(np.array(shuffled, dtype=np.int64))[problem_b]
    if order == "balanced":
        dealt = balanced(place_b, source_b, length_b, learner, ranks)
        return slots_of_ranks(dealt, ranks=ranks, updates=updates)
    if order == "self_first" and ranks > 1:
        return slots_of_ranks(self_first(place_b, source_b, learner), ranks=ranks, updates=updates)

    def cut(first: int, share: int) -> Ints:
        ends = [index * len(shuffled) // share for index in range(1, share + 1)]
        return first + np.searchsorted(ends, place_b, side="right") if share else np.full(len(place_b), -1)

    if order == "mixed":
        return cut(0, updates)
    own_b = source_b == learner
    own, total = int(own_b.sum()), len(own_b)
    own_share = updates if own == total else max(1, round(updates * own / total))
    return np.where(own_b, cut(0, own_share), cut(own_share, updates - own_share))


def plan_updates(rows: Sequence[Row], *, updates: int, order: str, ranks: int = 1, seed: int | None) -> UpdatePlan:
    """Split a step's pool into its updates.

    Prompts are shuffled, or taken in the pool's order. `mixed`: they are cut into `updates` equal parts, each with all
    responses to its prompts. `self_first`: the first updates see only own responses, the later ones only cross
    responses, in proportion to their number; with several ranks, each of them deals with its own part of that order.
    `balanced`: agent after agent, dealt to the ranks by length (`hacpo.algorithm.dealing` has both orders).

    Args:
        rows: every row of the pool, in table order (by problem, agent and sample), unusable ones too.
        updates: number of updates.
        order: `LossSettings.minibatch_order`.
        ranks: ranks that `self_first` and `balanced` deal the responses to.
        seed: of the shuffle; None does not shuffle.

    Raises:
        DataError: the rows cannot be dealt evenly to the ranks.
    """
    own = next((number for number, row in enumerate(rows) if row["is_self"]), None)
    source_b = _numbered([row["source"] for row in rows])
    slots = update_slots(
        _numbered([row["problem_id"] for row in rows]),
        source_b,
        _ints(len(row["prompt_token_ids"]) + row["source_tokens"] for row in rows if order == "balanced"),
        learner=-1 if own is None else int(source_b[own]),
        updates=updates,
        order=order,
        ranks=ranks,
        seed=seed,
    )
    parts: list[list[Row]] = [[] for _ in range(updates)]
    for row, slot in zip(rows, slots.tolist(), strict=True):
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


def _numbered(names: Sequence[str]) -> Ints:
    """Each name as a number, in the order in which they first occur."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return _ints(numbers[name] for name in names)


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)


def _sources(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["source"] for row in rows))


def shuffle_seed(seed: int, step: int, agent: str) -> int:
    """Seed of the step's shuffle of prompts."""
    return derive_seed(seed, "update", step, agent)
