"""How able each agent is just now, and how able relative to another (arXiv 2603.02604, eq. 8 and 9).

Per step t and agent k: accuracy P_t is the mean reward of the agent's own responses; capability Phat_t is the mean of P
over the last K steps, t included, floored (eq. 9); the capability ratio omega^(k,j) = Phat^(k) / Phat^(j) is bounded
(eq. 8). The window is an artifact of its step: these functions take it and return the next one, and keep nothing.
`advantage_table.capability_rows` calls them for a step; `group_advantage` uses omega.

Legend: `_n` agents; `_nn` agents by agents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hacpo.errors import DataError
from hacpo.settings.algorithm import CapabilitySettings


def accuracy(rewards: ArrayLike, metric: str) -> float:
    """P_t of one agent (eq. 9): `reward_mean`, or `positive_rate`, the share of rewards above zero.

    Args:
        rewards: rewards of all of the agent's own responses of the step, any shape.
        metric: `CapabilitySettings.metric`.

    Returns:
        The mean. The sum is exactly rounded, so the order of the rewards has no influence.

    Raises:
        DataError: there is no reward, or one is not finite.
    """
    values = scores(rewards, metric)
    return math.fsum(values.ravel().tolist()) / values.size


def scores(rewards: ArrayLike, metric: str) -> NDArray[np.float64]:
    """What each reward counts for in P_t: itself, or 1 above zero and else 0; in the shape of `rewards`.

    Raises:
        DataError: there is no reward, or one is not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.size == 0 or not np.isfinite(values).all():
        raise DataError("an agent's rewards must be finite and at least one", found=_glance(values))
    return {"reward_mean": values, "positive_rate": (values > 0).astype(np.float64)}[metric]


def extend_window(previous: Sequence[float], accuracy_now: float, size: int) -> tuple[float, ...]:
    """The last `size` accuracies, oldest first: `previous` (the window of step t - 1; empty at step 1) and this step's.

    Raises:
        DataError: `size` is below 1, or an accuracy is not finite.
    """
    window = (*(float(value) for value in previous), float(accuracy_now))
    if size < 1 or not all(map(math.isfinite, window)):
        raise DataError("a capability window needs a size of at least 1 and finite accuracies", found=(size, window))
    return window[-size:]


def smoothed(window: Sequence[float], floor: float) -> float:
    """Phat_t of one agent (eq. 9): mean of its window, at least `floor`.

    Raises:
        DataError: the window is empty or not finite.
    """
    if not len(window) or not all(map(math.isfinite, window)):
        raise DataError("a capability window must be finite and not empty", found=tuple(window))
    return max(math.fsum(window) / len(window), floor)


def capability_ratio(*, of: float, relative_to: float, ratio_min: float, ratio_max: float) -> float:
    """omega^(k,j) (eq. 8) of agent k (`of`) relative to agent j (`relative_to`): Phat^(k) / Phat^(j), bounded.

    The bounds keep an agent near zero accuracy from blowing the ratio up.

    Raises:
        DataError: a capability is not finite and positive.
    """
    for capability in (of, relative_to):
        if not (math.isfinite(capability) and capability > 0):
            raise DataError("a capability must be finite and positive", found=capability)
    return min(max(of / relative_to, ratio_min), ratio_max)


def omega_matrix(capability_n: ArrayLike, settings: CapabilitySettings) -> NDArray[np.float64]:
    """omega of every agent relative to every other.

    Args:
        capability_n: Phat of each agent, [N].
        settings: gives the bounds `ratio_min` and `ratio_max`.

    Returns:
        omega_nn, [N, N]: entry [k, j] is omega^(k,j); the diagonal is exactly 1.0.

    Raises:
        DataError: not a vector, or a capability is not finite and positive.
    """
    capabilities = np.asarray(capability_n, dtype=np.float64)
    if capabilities.ndim != 1:
        raise DataError(
            "capabilities must be one number per agent", expected="rank 1", found=f"rank {capabilities.ndim}"
        )
    values = capabilities.tolist()
    omega_nn = np.ones((len(values), len(values)), dtype=np.float64)
    for k, of in enumerate(values):
        for j, relative_to in enumerate(values):
            omega = capability_ratio(
                of=of, relative_to=relative_to, ratio_min=settings.ratio_min, ratio_max=settings.ratio_max
            )
            omega_nn[k, j] = omega if k != j else 1.0
    return omega_nn


def _glance(values: NDArray[np.float64]) -> str:
    """A short account of an array for an error message."""
    bad = values[~np.isfinite(values)]
    return f"{values.size} rewards, {bad.size} not finite"
