"""What every response of a step is worth to one learner (arXiv 2603.02604, eq. 6, 7, 10 and 50).

For each prompt: a baseline mu per agent, one sigma over all agents' rewards, A = (R - mu) / (sigma + eps), and for
responses of other agents the capability discrepancy coefficient omega on top. With one agent this is the group-relative
advantage of GRPO and GSPO.

Baselines, most of them weighted sums of the agents' group sums (m_j = S^(j) / G is a group's mean):

    mu^(k) = sum over j of W[k, j] S^(j) / D,  S^(j) = sum over i of R(y_i^(j))
    capability  W = omega                        D = nG       eq. 7
    oracle      the same, omega from capabilities known better than by the window's estimate
    joint       W = 1                            D = nG       ablation
    own         W = identity                     D = G        ours
    group       W = identity                     D = G        the source's, for its responses; sigma is its group's too:
                                                              each group on its own, as in GRPO
    shrunk      (G m_k + kappa * mean over j of min(1, omega^(k,j) m_j)) / (G + kappa)   ours

Legend: `_p` prompts, `_n` agents, `_g` samples of a group; k is the learner, j a source.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hacpo.algorithm.capability import omega_matrix
from hacpo.errors import DataError
from hacpo.settings.algorithm import AdvantageSettings, CapabilitySettings

UNIFORM_TOLERANCE = 1e-6
"""Rewards of a prompt count as equal when max - min <= this times max |reward|. About eight float32 roundings: rewards
are float32, and the same grade reached by two orders of additions differs by a few of them. Ours, not the paper's."""

GUARD_TOLERANCE = 1e-12
"""How far above 1 a baseline must be to be guarded: rounding of a sum that is 1 on paper is not a baseline above 1."""


@dataclass(frozen=True)
class StepAdvantages:
    """Columns of the `advantages` table of one learner; every field is [P, N, G] (agent axis: the source).

    `ravel()` of a field gives the column in row order (problem, agent, sample).
    """

    baseline: NDArray[np.float64]
    """mu that the row was measured against, after the guard."""
    sigma: NDArray[np.float64]
    """sigma_joint: standard deviation (ddof = 1) of the prompt's nG rewards; under `group` of the source's G."""
    advantage: NDArray[np.float64]
    """A, before omega."""
    omega: NDArray[np.float64]
    """Factor applied: omega^(source, learner); 1.0 for own rows, and everywhere without discrepancy."""
    effective_advantage: NDArray[np.float64]
    """omega * A."""
    uniform: NDArray[np.bool_]
    """All of the prompt's nG rewards (under `group` the source's G) are equal: A is exactly 0.0."""
    guarded: NDArray[np.bool_]
    """The baseline was above 1 for 0/1 rewards and the own group mean of its agent took its place."""


def step_advantages(
    rewards_png: ArrayLike,
    *,
    learner: int,
    capability_n: ArrayLike,
    settings: AdvantageSettings,
    capability_settings: CapabilitySettings,
) -> StepAdvantages:
    """Advantages of all responses of a step, as `learner` sees them.

    Recipes without sharing pass the learner's own rewards only (N = 1). Sums run in the order of the samples and
    agents, whatever the memory layout or the number of prompts: a prompt's numbers do not depend on its batch.

    Args:
        rewards_png: rewards, [P, N, G]; P may be 0.
        learner: index of the learning agent on the N axis.
        capability_n: Phat of each agent, [N].
        settings: baseline, epsilon, discrepancy and guard.
        capability_settings: gives the bounds of omega.

    Returns:
        The columns, all finite.

    Raises:
        DataError: wrong ranks or lengths, rewards that float32 cannot hold, fewer than two responses per prompt, or a
            capability that is not finite and positive.

    Source: eq. 6, 7 (baseline, sigma), eq. 10 and 50 (discrepancy; `cross_baseline` source and learner).
    """
    rewards_png = np.asarray(rewards_png, dtype=np.float64)
    capability_n = np.asarray(capability_n, dtype=np.float64)
    _check(rewards_png, learner, capability_n)
    agents, group_size = rewards_png.shape[1:]

    omega_nn = omega_matrix(capability_n, capability_settings)
    group_sum_pn = _ordered_sum(rewards_png)
    mu_pn = _baselines(group_sum_pn, omega_nn, group_size, settings)
    if settings.baseline_guard:
        binary_p = ((rewards_png == 0.0) | (rewards_png == 1.0)).all(axis=(1, 2))
        guarded_pn = binary_p[:, None] & (mu_pn > 1.0 + GUARD_TOLERANCE)
        mu_pn = np.where(guarded_pn, group_sum_pn / group_size, mu_pn)
    else:
        guarded_pn = np.zeros(mu_pn.shape, dtype=np.bool_)

    by_group = settings.baseline == "group"
    by_source = by_group or (settings.baseline in ("capability", "oracle") and settings.cross_baseline == "source")
    owner_n = np.arange(agents) if by_source else np.full(agents, learner)
    baseline_pn1 = mu_pn[:, owner_n, None]
    omega_n = omega_nn[:, learner] if settings.discrepancy else np.ones(agents)
    compared = [rewards_png[:, [agent]] for agent in range(agents)] if by_group else [rewards_png]
    uniform_pn1, sigma_pn1 = (np.stack(part, axis=1)[:, :, None] for part in zip(*map(_spread, compared), strict=True))
    scale_pn1 = np.where(uniform_pn1, 1.0, sigma_pn1 + settings.epsilon)
    advantage_png = np.where(uniform_pn1, 0.0, (rewards_png - baseline_pn1) / scale_pn1)
    omega_1n1 = omega_n[None, :, None]

    shape = rewards_png.shape
    return StepAdvantages(
        baseline=np.broadcast_to(baseline_pn1, shape).copy(),
        sigma=np.broadcast_to(sigma_pn1, shape).copy(),
        advantage=advantage_png,
        omega=np.broadcast_to(omega_1n1, shape).copy(),
        effective_advantage=omega_1n1 * advantage_png,
        uniform=np.broadcast_to(uniform_pn1, shape).copy(),
        guarded=np.broadcast_to(guarded_pn[:, owner_n, None], shape).copy(),
    )


def _baselines(
    group_sum_pn: NDArray[np.float64], omega_nn: NDArray[np.float64], group_size: int, settings: AdvantageSettings
) -> NDArray[np.float64]:
    """mu of every agent for every prompt, [P, N], before the guard (table in the module's docstring)."""
    agents = omega_nn.shape[0]
    responses = float(agents * group_size)
    if settings.baseline == "shrunk":
        bounded_pnn = np.minimum(1.0, omega_nn[None, :, :] * group_sum_pn[:, None, :] / group_size)
        joint_pn = _ordered_sum(bounded_pnn) / agents
        return np.asarray((group_sum_pn + settings.kappa * joint_pn) / (group_size + settings.kappa))
    weights_nn, divisor = {
        "capability": (omega_nn, responses),
        "oracle": (omega_nn, responses),
        "joint": (np.ones_like(omega_nn), responses),
        "own": (np.eye(agents), float(group_size)),
        "group": (np.eye(agents), float(group_size)),
    }[settings.baseline]
    return _ordered_sum(group_sum_pn[:, None, :] * weights_nn[None, :, :]) / divisor


def _spread(rewards_png: NDArray[np.float64]) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Per prompt, whether all rewards are equal, and their standard deviation (ddof = 1).

    Rewards are mapped to [0, 1] first: equal rewards then deviate by exactly 0, and no square over- or underflows.
    """
    prompts, agents, group_size = rewards_png.shape
    flat_pr = rewards_png.reshape(prompts, agents * group_size)
    low_p, range_p = flat_pr.min(axis=1), np.ptp(flat_pr, axis=1)
    uniform_p = range_p <= UNIFORM_TOLERANCE * np.abs(flat_pr).max(axis=1)
    unit_pr = (flat_pr - low_p[:, None]) / np.where(range_p > 0, range_p, 1.0)[:, None]
    mean_p = _ordered_sum(unit_pr) / flat_pr.shape[1]
    variance_p = _ordered_sum((unit_pr - mean_p[:, None]) ** 2) / (flat_pr.shape[1] - 1)
    return uniform_p, range_p * np.sqrt(variance_p)


def _ordered_sum(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum over the last axis from first to last; numpy's own order changes with memory layout."""
    total = np.zeros(values.shape[:-1], dtype=np.float64)
    for index in range(values.shape[-1]):
        total += values[..., index]
    return total


def _check(rewards_png: NDArray[np.float64], learner: int, capability_n: NDArray[np.float64]) -> None:
    if rewards_png.ndim != 3:
        raise DataError(
            "rewards must be [prompts, agents, samples]", expected="rank 3", found=f"shape {rewards_png.shape}"
        )
    _, agents, group_size = rewards_png.shape
    if agents * group_size < 2:
        raise DataError(
            "responses to one prompt are compared: at least 2 are needed", found=f"shape {rewards_png.shape}"
        )
    # Rewards are stored as float32; the test below is false for NaN, so it refuses that too.
    if not (np.abs(rewards_png) <= np.finfo(np.float32).max).all():
        raise DataError("rewards must be finite float32 numbers", remedy="check the verifier that gave them")
    if capability_n.shape != (agents,):
        raise DataError("capabilities must be one per agent", expected=(agents,), found=capability_n.shape)
    if not 0 <= learner < agents:
        raise DataError("the learner must be one of the agents", expected=f"0..{agents - 1}", found=learner)
