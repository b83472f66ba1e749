"""Accuracy at equal cost: which share each evaluation has in a number that is read off a curve.

A curve is straight between its evaluations. All numbers here are sums of the evaluations' values with weights that only
their places decide, so they can be taken problem by problem.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise


def at_budget(places: Sequence[float], budget: float) -> list[float]:
    """Weights of the value at a budget, between the two evaluations around it.

    Args:
        places: what had been spent at each evaluation, ascending.
        budget: within them.

    Raises:
        ValueError: it is not.
    """
    _check(places, budget)
    weights = [0.0] * len(places)
    for index, (left, right) in enumerate(pairwise(places)):
        if left <= budget <= right and right > left:
            share = (budget - left) / (right - left)
            weights[index], weights[index + 1] = 1 - share, share
            return weights
    weights[list(places).index(budget)] = 1.0
    return weights


def area(places: Sequence[float], budget: float, shared: Collection[float] = ()) -> list[float]:
    """Weights of the area under the curve from the first evaluation to a budget, divided by its width: the mean
    accuracy on the way; the first evaluation's value where it has no width. Errors as for `at_budget`.

    Args:
        places, budget: as for `at_budget`.
        shared: places that another curve has too. Where there are any after the first, evaluations elsewhere before the
            budget have no weight: of two equal curves that bend, the one with fewer evaluations would have less area.
    """
    _check(places, budget)
    common = [place for place in places if place in shared]
    if places[0] in shared and any(places[0] < place <= budget for place in common):
        kept = [index for index, place in enumerate(places) if place in shared or place >= budget]
        weights = [0.0] * len(places)
        for index, weight in zip(kept, area([places[index] for index in kept], budget), strict=True):
            weights[index] = weight
        return weights
    width = budget - places[0]
    if width == 0:
        return at_budget(places, budget)
    weights = [0.0] * len(places)
    for index, (left, right) in enumerate(pairwise(places)):
        end = min(right, budget)
        if end <= left:
            continue
        # A trapezoid from `left` to `end`, where the curve has come the share `at` of the way to the next value.
        at, part = (end - left) / (right - left), (end - left) / width
        weights[index] += part * (2 - at) / 2
        weights[index + 1] += part * at / 2
    return weights


def _check(places: Sequence[float], budget: float) -> None:
    if not places or any(right < left for left, right in pairwise(places)):
        raise ValueError(f"expected ascending places, found {list(places)}")
    if not places[0] <= budget <= places[-1]:
        raise ValueError(f"the budget {budget} is outside the curve, {places[0]} to {places[-1]}")
