"""How far an estimated capability, and omega with it, may be off: standard errors taken from problem to problem.

A step's P of agent k is the mean over n problems of r, the mean of the agent's scores on one problem. Samples of one
problem are not independent, so a problem is one observation, however many samples it has; and all agents answer the
same problems, so their errors go together:

    cov_t^(k,j) = sum over problems of (r^(k) - P^(k)) (r^(j) - P^(j)) / (n (n - 1))

Phat is the mean of K such steps, each with problems of its own: C = sum over the window of cov_s / K^2, and the
standard error of Phat^(k) is sqrt(C^(k,k)). By the delta method on log omega^(k,j) = log Phat^(k) - log Phat^(j),

    Var log omega = C^(k,k) / Phat^(k)^2 + C^(j,j) / Phat^(j)^2 - 2 C^(k,j) / (Phat^(k) Phat^(j)),

and the interval is omega exp(+-1.96 sqrt(Var)). Not in the paper, which takes the estimate as it is.

Legend: `_n` agents, `_nn` agents by agents, `_p` problems, `_g` samples of a problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TWO_SIDED_95 = 1.959963984540054
"""Standard errors to each side that hold 95 % of a normal distribution."""


def accuracy_covariance(score_npg: NDArray[np.float64]) -> list[list[float]]:
    """cov_t of every two agents' accuracies of one step; sums are exactly rounded, so no order has an influence.

    Args:
        score_npg: what each response counts for in P (`capability.scores`), [N, P, G].

    Returns:
        N lists of N numbers; empty lists for a single problem, which says nothing about others.
    """
    agents, problems, group_size = score_npg.shape
    if problems < 2:
        return [[] for _ in range(agents)]
    mean_np = [[math.fsum(group) / group_size for group in scores] for scores in score_npg.tolist()]
    accuracy_n = [math.fsum(means) / problems for means in mean_np]
    away_np = [[mean - whole for mean in means] for means, whole in zip(mean_np, accuracy_n, strict=True)]
    divisor = problems * (problems - 1)
    return [[math.fsum(a * b for a, b in zip(k, j, strict=True)) / divisor for j in away_np] for k in away_np]


def smoothed_covariance(window: Sequence[Sequence[float]]) -> list[float]:
    """C of one agent's capability with that of every agent: the covariance of means over the window's steps.

    Args:
        window: the agent's row of `accuracy_covariance` of each step that the capability averages over.

    Returns:
        N numbers; none if a step's are not known.
    """
    if not all(len(step) for step in window):
        return []
    return [math.fsum(with_one) / len(window) ** 2 for with_one in zip(*window, strict=True)]


def ratio_interval(
    capability_n: Sequence[float],
    covariance_nn: Sequence[Sequence[float]],
    k: int,
    j: int,
    *,
    ratio_min: float,
    ratio_max: float,
) -> tuple[float, float]:
    """95 % interval of omega^(k,j), its ends held in omega's own bounds.

    An agent whose answers all had one reward has no variance, and neither has one whose capability is the floor for
    that reason: the interval then knows less than it seems to.

    Args:
        capability_n: Phat of each agent, above 0.
        covariance_nn: `smoothed_covariance` of each agent, known.
        k, j: of which agent, relative to which.
    """
    variance = (
        covariance_nn[k][k] / capability_n[k] ** 2
        + covariance_nn[j][j] / capability_n[j] ** 2
        - 2 * covariance_nn[k][j] / (capability_n[k] * capability_n[j])
    )
    center = math.log(capability_n[k]) - math.log(capability_n[j])
    reach = TWO_SIDED_95 * math.sqrt(max(variance, 0.0))
    # Held in the bounds twice: before exp, which overflows, and after, which rounds.
    ends = (min(max(end, math.log(ratio_min)), math.log(ratio_max)) for end in (center - reach, center + reach))
    low, high = (min(max(math.exp(end), ratio_min), ratio_max) for end in ends)
    return low, high
