"""Means over problems with their standard errors.

Responses to one problem resemble each other (an easy problem is easy every time), so they are no independent
observations; problems are. Every error here is taken over the problems' means ("clustered by problem"). With one
response per problem this is the usual standard error of a share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A mean over problems.

    Attributes:
        mean: the mean over problems of each problem's mean reward.
        error: its standard error; None with a single problem, where nothing can be said.
        problems: how many problems it is taken over.
    """

    mean: float
    error: float | None
    problems: int

    @property
    def interval(self) -> tuple[float, float]:
        """Mean minus and plus one standard error (the mean twice where the error is unknown)."""
        error = self.error or 0.0
        return self.mean - error, self.mean + error


def over_problems(values: Sequence[float]) -> Estimate:
    """The mean of one value per problem, with s / sqrt(problems) as its standard error (s with ddof = 1).

    Raises:
        ValueError: no value.
    """
    count = len(values)
    if not count:
        raise ValueError("an estimate needs at least one problem")
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, math.sqrt(variance / count), count)


def paired_change(before: Mapping[str, float], after: Mapping[str, float]) -> Estimate | None:
    """after - before over the problems that both have, the error taken over the differences; None without such a
    problem.

    The same problems are asked both times, so the difference is known better than two separate errors would say.
    """
    both = sorted(before.keys() & after.keys())
    return over_problems([after[key] - before[key] for key in both]) if both else None
