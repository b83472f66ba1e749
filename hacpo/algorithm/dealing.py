"""The authors' orders of a step's responses: a batch dealt to data-parallel ranks, each of which cuts its own part.

An update sees the responses that the ranks have at its place. So what a batch puts first is first in the first rank
only, and the share of own responses per update depends on the number of ranks. Two agents and four updates, own
responses first: 1, 1, 0, 0 with one rank; 1/2 in each with 2, 4 or 8 ranks, half of which hold only own responses and
half only cross ones.

Source: the authors' code (docs/reference_code.md); `balanced`: balanced largest differencing method, Michiels et al.,
"Performance ratios for the Karmarkar-Karp differencing method", 2003, as verl splits a batch by sequence length.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hacpo.errors import DataError

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_Part = tuple[int, int, tuple[tuple[int, int], ...]]
"""Sum of lengths, how many, (index, length) of each. Compared in this order, so ties are broken the same way always."""


def self_first(place_b: Ints, source_b: Ints, learner: int) -> Ints:
    """Row numbers in the order of the authors' branch `verl-v1`: own responses, then each other agent's, [B].

    Args:
        place_b: place of each row's prompt in the batch.
        source_b: number of the agent that sampled each row.
        learner: the learner's number.
    """
    block_b = np.where(source_b == learner, -1, source_b)
    order_b: Ints = np.lexsort((np.arange(len(place_b)), place_b, block_b))  # numpy 2.3 types it as Any
    return order_b


def balanced(place_b: Ints, source_b: Ints, length_b: Ints, learner: int, ranks: int) -> Ints:
    """Row numbers in the order of the authors' `main` with `balance_batch`, [B].

    Agent after agent, the rows are split into `ranks` parts of equal number and nearly equal sums of lengths, within
    each of which they keep their order. Every learner takes the same parts, rotated by its number times the responses
    of one agent: of two agents the second exchanges the halves.

    Args:
        place_b, source_b, learner: as for `self_first`.
        length_b: tokens of each row, prompt included.
        ranks: number of parts.

    Raises:
        DataError: the number of rows is no multiple of `ranks`.
    """
    listed = np.lexsort((np.arange(len(place_b)), place_b, source_b))
    parts = equal_parts(length_b[listed].tolist(), ranks)
    dealt = listed[np.concatenate([np.sort(part) for part in parts])]
    return np.roll(dealt, -learner * (len(dealt) // len(np.unique(source_b))))


def slots_of_ranks(order_b: Ints, *, ranks: int, updates: int) -> Ints:
    """The update that sees each row: `order_b` is dealt to the ranks in equal runs, and each run cut into the updates.

    Raises:
        DataError: the rows cannot be dealt evenly.
    """
    rows = len(order_b)
    if rows % (ranks * updates):
        raise _uneven(ranks, updates, rows)
    slots = np.empty(rows, dtype=np.int64)
    slots[order_b] = np.tile(np.repeat(np.arange(updates), rows // (ranks * updates)), ranks)
    return slots


def equal_parts(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of `lengths` in so many parts of equal number, their sums nearly equal; the largest sum first.

    Repeatedly, the two solutions with the largest spread of sums become one, the largest part of the one joined with
    the smallest of the other; they start as runs of `parts` neighbours in the order of length.

    Raises:
        DataError: their number is no multiple of `parts`.
    """
    if not lengths or len(lengths) % parts:
        raise _uneven(parts, 1, len(lengths))
    by_length = sorted((length, index) for index, length in enumerate(lengths))
    solutions: list[tuple[int, list[_Part]]] = []
    for start in range(0, len(by_length), parts):
        chosen = by_length[start : start + parts]
        insort(solutions, _solution([(length, 1, ((index, length),)) for length, index in chosen]))
    while len(solutions) > 1:
        (_, largest), (_, other) = solutions.pop(), solutions.pop()
        joined = [(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in zip(largest, reversed(other), strict=True)]
        insort(solutions, _solution(joined))
    return [[index for index, _ in members] for _, _, members in solutions[0][1]]


def _solution(parts: list[_Part]) -> tuple[int, list[_Part]]:
    """Spread of sums, and the parts, the largest first."""
    ordered = sorted(parts, reverse=True)
    return ordered[0][0] - ordered[-1][0], ordered


def _uneven(ranks: int, updates: int, rows: int) -> DataError:
    return DataError(
        "the responses of a step cannot be dealt evenly",
        where="algorithm.loss.ranks",
        expected=f"a multiple of {ranks} ranks times {updates} updates",
        found=f"{rows} responses",
    )
