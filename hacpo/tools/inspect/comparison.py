"""What differs between a step as it was and as other settings would have made it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hacpo.algorithm.advantage_table import CapabilityRow, better_responses
from hacpo.algorithm.rollouts import problem_of
from hacpo.tools.inspect.recompute import Flags, Floats, Numbers, Updates, places_of

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)

Pair = tuple[float | None, float | None]
"""Before and after; None where there is nothing to measure."""

_RELATIVE, _ABSOLUTE = 1e-9, 1e-12
"""Numbers as near as this are the same: log-probabilities are stored as means, whose rounding a ratio shows."""

_SIGNS = {-1: "-", 0: "0", 1: "+"}


@dataclass(frozen=True)
class Spread:
    """Quantiles (`QUANTILES`) of one quantity, before and after."""

    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """One learner's responses of one kind.

    Attributes:
        kind: `own` or `cross`.
        responses: how many on both sides.
        dropped: how many the asked settings do not use.
        differing: column -> rows in which it differs; only columns that differ.
        flips: `+ to -` -> responses whose effective advantage does so; only those that occur.
        spreads: quantity -> quantiles.
        shares: `live`, `guarded`, `punished_correct` (of the best responses of live groups, with rewards of 0 and 1
            the correct ones: with a negative effective advantage), `clipped` (of rows of the trace whose flag is known
            on both sides).
        unknown: rows of the trace whose clipping cannot be known.
    """

    kind: str
    responses: int
    dropped: int
    differing: dict[str, int]
    flips: dict[str, int]
    spreads: dict[str, Spread]
    shares: dict[str, Pair]
    unknown: int


@dataclass(frozen=True)
class Values:
    """One response in one update; None where there is no trace or the number cannot be known."""

    baseline: float
    advantage: float
    omega: float
    effective_advantage: float
    ratio: float | None = None
    clipped: bool | None = None
    is_weight: float | None = None
    objective: float | None = None
    gradient_weight: float | None = None


@dataclass(frozen=True)
class Change:
    """One response whose numbers differ."""

    rollout_id: str
    source: str
    is_self: bool
    reward: float
    update: int | None
    before: Values
    after: Values


def compare(before: Numbers, after: Numbers) -> list[Comparison]:
    """Own and, if there are any, cross responses."""
    places = places_of(before.rollout_id, after.rollout_id)
    result = []
    for kind, wanted_r in (("own", before.is_self), ("cross", ~before.is_self)):
        if wanted_r.any():
            result.append(_one_kind(kind, before, after, wanted_r, places))
    return result


def changes(before: Numbers, after: Numbers, most: int) -> list[Change]:
    """The `most` responses that differ most: by effective advantage, those alike in it by gradient weight, then by
    objective. Responses that the asked settings do not use are not among them."""
    places = places_of(before.rollout_id, after.rollout_id)
    pairs = _paired_updates(before, after, places)
    effective = _gap(before.effective_advantage, after.effective_advantage[places])
    if pairs is None:
        traced: list[tuple[int, int | None]] = []
        gradient = objective = np.zeros(0)
    else:
        before, after = (replace(side, updates=rows) for side, rows in zip((before, after), pairs, strict=True))
        traced = [(int(number), index) for index, number in enumerate(pairs[0].response_u)]
        gradient = _gap(before.gradient_weight_u, after.gradient_weight_u)
        objective = _gap(pairs[0].objective_u, pairs[1].objective_u)
    # Responses that no update saw (not usable, or the update is still to come) have an advantage all the same.
    unseen = sorted(set(np.flatnonzero(places >= 0).tolist()) - {number for number, _ in traced})
    rows = traced + [(number, None) for number in unseen]
    measures = [
        effective[[number for number, _ in rows]],
        *(np.append(gap, np.zeros(len(unseen))) for gap in (gradient, objective)),
    ]
    # The largest first, by the first measure that tells two responses apart; equal ones in the table's order.
    order = np.lexsort((np.arange(len(rows)), *(-measure for measure in reversed(measures))))
    differing = [int(place) for place in order if any(measure[place] for measure in measures)]
    return [_change(before, after, places, *rows[place]) for place in differing[:most]]


def _change(before: Numbers, after: Numbers, places: NDArray[np.int64], number: int, index: int | None) -> Change:
    return Change(
        rollout_id=before.rollout_id[number],
        source=before.source[number],
        is_self=bool(before.is_self[number]),
        reward=float(before.reward[number]),
        update=None if index is None or before.updates is None else int(before.updates.update_u[index]),
        before=_values(before, number, index),
        after=_values(after, int(places[number]), index),
    )


def _gap(before: Floats, after: Floats) -> Floats:
    """|after - before|, 0 where the same or not known."""
    with np.errstate(invalid="ignore"):
        gap = np.abs(after - before)
    return np.where(np.isclose(before, after, _RELATIVE, _ABSOLUTE) | np.isnan(gap), 0.0, gap)


def _paired_updates(before: Numbers, after: Numbers, places: NDArray[np.int64]) -> tuple[Updates, Updates] | None:
    """The traces' rows that both sides have, in the same order (`after` is made from `before`, row by row)."""
    if before.updates is None or after.updates is None:
        return None
    return before.updates.taken(places[before.updates.response_u] >= 0), after.updates


def _values(numbers: Numbers, number: int, index: int | None) -> Values:
    worth = Values(
        baseline=float(numbers.baseline[number]),
        advantage=float(numbers.advantage[number]),
        omega=float(numbers.omega[number]),
        effective_advantage=float(numbers.effective_advantage[number]),
    )
    updates = numbers.updates
    if updates is None or index is None:
        return worth
    known = bool(updates.known_u[index])
    return replace(
        worth,
        ratio=float(updates.ratio_u[index]),
        clipped=bool(updates.clipped_u[index]) if known else None,
        is_weight=float(updates.is_weight_u[index]),
        objective=float(updates.objective_u[index]) if known else None,
        gradient_weight=None if updates.token_level_u[index] else float(numbers.gradient_weight_u[index]),
    )


def _one_kind(kind: str, before: Numbers, after: Numbers, wanted_r: Flags, places: NDArray[np.int64]) -> Comparison:
    both = np.flatnonzero(wanted_r & (places >= 0))
    kept = places[both]
    differing = {
        name: _differences(getattr(before, name)[both], getattr(after, name)[kept])
        for name in ("baseline", "sigma", "advantage", "omega", "effective_advantage", "uniform", "guarded")
    }
    was, now = before.effective_advantage[both], after.effective_advantage[kept]
    spreads = {"effective_advantage": _spread(was, now)} if len(both) else {}
    shares = {
        "live": (_mean(~before.uniform[wanted_r]), _mean(~after.uniform[kept])),
        "guarded": (_mean(before.guarded[wanted_r]), _mean(after.guarded[kept])),
        "punished_correct": (_punished(before, np.flatnonzero(wanted_r)), _punished(after, kept)),
    }
    unknown = 0
    pairs = _paired_updates(before, after, places)
    if pairs is not None:
        old, new = (updates.taken(wanted_r[pairs[0].response_u]) for updates in pairs)
        if len(old.ratio_u):
            for name in ("ratio", "is_weight", "row_weight"):
                spreads[name] = _spread(getattr(old, f"{name}_u"), getattr(new, f"{name}_u"))
            for name in ("ratio", "lower", "upper", "clipped", "is_weight", "objective", "row_weight"):
                values = (getattr(updates, f"{name}_u")[new.known_u] for updates in (old, new))
                differing[name] = _differences(*values)
        shares["clipped"] = (_mean(old.clipped_u[new.known_u]), _mean(new.clipped_u[new.known_u]))
        unknown = int((~new.known_u).sum())
    return Comparison(
        kind=kind,
        responses=len(both),
        dropped=int(wanted_r.sum()) - len(both),
        differing={name: count for name, count in differing.items() if count},
        flips=_flips(was, now),
        spreads=spreads,
        shares=shares,
        unknown=unknown,
    )


def _differences(before: NDArray[np.generic], after: NDArray[np.generic]) -> int:
    return int((~np.isclose(before.astype(np.float64), after.astype(np.float64), _RELATIVE, _ABSOLUTE)).sum())


def _spread(before: Floats, after: Floats) -> Spread:
    return Spread(*(tuple(float(value) for value in np.quantile(values, QUANTILES)) for values in (before, after)))


def _mean(flags: Flags) -> float | None:
    return float(flags.mean()) if len(flags) else None


def _punished(numbers: Numbers, rows: NDArray[np.int64]) -> float | None:
    problem = np.array([problem_of(identity) for identity in numbers.rollout_id])
    best = rows[(~numbers.uniform & better_responses(problem, numbers.reward))[rows]]
    return _mean(_sign(numbers.effective_advantage[best]) < 0)


def _sign(values: Floats) -> NDArray[np.int64]:
    """-1, 0 or 1; what is only the rounding of a zero counts as zero."""
    return np.where(np.abs(values) <= _ABSOLUTE, 0, np.sign(values)).astype(np.int64)


def _flips(before: Floats, after: Floats) -> dict[str, int]:
    signs, others = _sign(before), _sign(after)
    counts = {
        f"{_SIGNS[was]} to {_SIGNS[now]}": int(((signs == was) & (others == now)).sum())
        for was in _SIGNS
        for now in _SIGNS
        if was != now
    }
    return {name: count for name, count in counts.items() if count}


def capability_differences(
    before: Mapping[str, CapabilityRow], after: Mapping[str, CapabilityRow]
) -> dict[str, tuple[CapabilityRow, CapabilityRow]]:
    """Agents whose row of the capability table differs: agent -> (before, after)."""
    return {agent: (row, after[agent]) for agent, row in before.items() if row != after[agent]}
