"""How sure a mean over runs and problems is: a hierarchical bootstrap, and a correction for many comparisons.

Every run answers the same problems, so runs and problems are crossed, and each of both is drawn anew with replacement,
problems once for all runs (the pigeonhole bootstrap: Owen (2007), "The pigeonhole bootstrap", arXiv 0712.1111). Below
them the responses to each problem are drawn anew, which adds a sum of binomials with mean 0: it is drawn as the normal
of its variance. Such draws spread too far: what runs and problems do not explain, most of what there is where responses
are few, is counted about three times, and the responses' share once more. So their distances from the mean are scaled
to the variance that is right on average (`mean_variance`).

With few runs percentile intervals are too short. They are expanded (Hesterberg (2015), "What Teachers Should Know About
the Bootstrap", section 5.3, arXiv 1411.5279): for k runs the tail of a percentile interval is taken at
Phi(-sqrt(k / (k - 1)) t), t being Student's quantile with k - 1 degrees of freedom. Where that is farther out than the
draws reach, the normal of the draws' spread takes their place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

DRAWS = 10_000
_CHUNK = 1000
_MOST_KEPT = 4_000_000
"""Numbers of a resampling that is kept for the next table of its shape: 32 MB."""
_FEWEST = 10
"""Draws beyond a quantile from which on it is believed."""
_ROUNDING = 1e-12
"""What sums of shares in another order may differ by."""
_NORMAL = NormalDist()

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Uncertain:
    """A mean with its interval.

    Attributes:
        mean: over runs and problems.
        low, high: its interval; None with fewer than two runs, where none is claimed.
        p: two-sided, of a mean of 0: the largest 1 - confidence whose interval holds 0; None with fewer than two runs.
        runs, problems: over how many it is taken.
    """

    mean: float
    low: float | None
    high: float | None
    p: float | None
    runs: int
    problems: int


def hierarchical(
    values: Array, variances: Array, *, seed: int, confidence: float = 0.95, draws: int = DRAWS
) -> Uncertain:
    """The mean of a table of runs by problems, or of paired differences between runs.

    Args:
        values: (runs, problems): of each problem in each run.
        variances: (runs, problems): of each value, from the drawing of responses alone.
        seed: of the bootstrap: the same arguments give the same interval.
        confidence: of the interval.
        draws: of the bootstrap.

    Raises:
        ValueError: the tables are empty or differ in shape.
    """
    if values.ndim != 2 or values.shape != variances.shape or 0 in values.shape:
        raise ValueError(f"expected two tables of runs by problems, found {values.shape} and {variances.shape}")
    runs, problems = values.shape
    mean = float(values.mean())
    if runs < 2:
        return Uncertain(mean, None, None, None, runs, problems)
    drawn = np.sort(_drawn(values, variances, seed, draws))
    if (spread := float(drawn.std())) > _ROUNDING:
        # A bootstrap of k runs has (k - 1) / k of the variance, which the expansion of its interval makes good.
        drawn = mean + (drawn - mean) * math.sqrt((runs - 1) / runs * mean_variance(values, variances)) / spread
    tail = expanded((1 + confidence) / 2, runs)
    low, high = _quantile(drawn, mean, -tail), _quantile(drawn, mean, tail)
    return Uncertain(mean, low, high, _p_value(drawn, mean, runs), runs, problems)


def mean_variance(values: Array, variances: Array) -> float:
    """Variance of the mean of a table of runs by problems, both of which could have been others.

    With components of runs, of problems and of what neither explains, s_r^2 / R + s_p^2 / P + s_c^2 / RP: that of the
    runs' means, plus that of the problems' means, minus that of what is left, each over its number (two-way analysis
    of variance), is right on average. It is taken for no less than either of the first two, or than the variance that
    the drawing of responses gives.

    Args:
        values, variances: as for `hierarchical`; at least two runs.
    """
    runs, problems = values.shape
    mean, of_runs, of_problems = values.mean(), values.mean(axis=1, keepdims=True), values.mean(axis=0, keepdims=True)
    by_runs = float(((of_runs - mean) ** 2).sum()) / (runs * (runs - 1))
    by_problems = float(((of_problems - mean) ** 2).sum()) / (problems * max(1, problems - 1))
    left = float(((values - of_runs - of_problems + mean) ** 2).sum())
    rest = left / ((runs - 1) * max(1, problems - 1)) / values.size
    return float(max(by_runs + by_problems - rest, by_runs, by_problems, variances.sum() / values.size**2))


def _drawn(values: Array, variances: Array, seed: int, draws: int) -> Array:
    """Means of tables whose runs, problems and responses are drawn anew."""
    (runs, problems), means = values.shape, []
    for of_runs, of_problems, normal in _resampled(seed, runs, problems, draws):
        mean = ((of_runs @ values) * of_problems).sum(axis=1) / values.size
        spread = np.sqrt(((of_runs @ variances) * of_problems).sum(axis=1)) / values.size
        means.append(mean + spread * normal)
    return np.concatenate(means)


def _resampled(seed: int, runs: int, problems: int, draws: int) -> Iterable[tuple[Array, Array, Array]]:
    """How often each draw has each run, and each problem, and a normal of its own; in parts of `_CHUNK` draws.

    They depend on no value: a comparison with many differences draws them once, where they are small enough to keep.
    """
    if draws * (runs + problems) <= _MOST_KEPT:
        return _kept_resampled(seed, runs, problems, draws)
    return _newly_resampled(seed, runs, problems, draws)


@lru_cache(maxsize=4)
def _kept_resampled(seed: int, runs: int, problems: int, draws: int) -> list[tuple[Array, Array, Array]]:
    return list(_newly_resampled(seed, runs, problems, draws))


def _newly_resampled(seed: int, runs: int, problems: int, draws: int) -> Iterator[tuple[Array, Array, Array]]:
    random = np.random.default_rng(seed)
    for begin in range(0, draws, _CHUNK):
        size = min(_CHUNK, draws - begin)
        of_runs = random.multinomial(runs, np.full(runs, 1 / runs), size).astype(float)
        of_problems = random.multinomial(problems, np.full(problems, 1 / problems), size).astype(float)
        yield of_runs, of_problems, random.standard_normal(size)


def expanded(upper: float, runs: int) -> float:
    """The normal quantile at which an expanded percentile interval ends: sqrt(k / (k - 1)) t.

    Args:
        upper: what lies below its end, such as .975.
        runs: k, at least 2.
    """
    return math.sqrt(runs / (runs - 1)) * student_quantile(upper, runs - 1)


def _quantile(drawn: Array, mean: float, at: float) -> float:
    """Of sorted draws, at a quantile of the standard normal."""
    share = _NORMAL.cdf(at)
    if min(share, 1 - share) * len(drawn) < _FEWEST:
        return mean + at * float(drawn.std())
    return float(np.quantile(drawn, share))


def _p_value(drawn: Array, mean: float, runs: int) -> float:
    """What `expanded` says of the quantile at which 0 lies among the draws, two-sided."""
    spread = float(drawn.std())
    if spread < _ROUNDING:
        return 0.0 if abs(mean) > _ROUNDING else 1.0
    beyond = int(min((drawn <= 0).sum(), (drawn >= 0).sum()))
    at = _NORMAL.inv_cdf(beyond / len(drawn)) if beyond >= _FEWEST else -abs(mean) / spread
    return min(1.0, 2 * student_cdf(min(at, 0.0) * math.sqrt((runs - 1) / runs), runs - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm (1979)): of m in ascending order the i-th, from 0, times m - i, and
    none smaller than one before it."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * p_values[index]))
        corrected[index] = largest
    return corrected


# --- Student's distribution ------------------------------------------------------------------------------------------


def student_cdf(t: float, freedom: int) -> float:
    """P(T <= t) of Student's distribution with a whole number of degrees of freedom (Abramowitz and Stegun, 26.7.3 and
    26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    term = cosine if freedom % 2 else 1.0
    total = term if freedom > 1 else 0.0
    for step in range(3 if freedom % 2 else 2, freedom, 2):
        term *= (step - 1) / step * cosine**2
        total += term
    inside = 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total
    return (1 + inside) / 2


def student_quantile(share: float, freedom: int) -> float:
    """The t below which a share, at least one half, of Student's distribution lies; by bisection."""
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < share:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < share else (low, middle)
    return (low + high) / 2
