"""How far the engine that sampled is from the training stack that rescored the same tokens, and what corrects for it.

Both hold the same weights, yet another kernel, precision or a nucleus gives another probability: own responses come
from q (the sampler's) while the ratio of the loss divides by p (the training stack's). A weight of p / q per response
makes the expectation over q one over p; the cap bounds its variance (truncated importance sampling, Ionides 2008).

    log w = sum over tokens of (log p - log q)      w = min(cap, exp(log w)), data: no gradient

The sequence-level form of TRL (GRPOConfig `vllm_importance_sampling_mode="sequence_truncate"`) and verl
(rollout correction, `rollout_is: sequence`, `rollout_is_threshold: 2.0`). As there, w multiplies the policy term and
not the KL penalty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from hacpo.errors import DataError


def sequence_log_weight(logprobs: ArrayLike, sampler_logprobs: ArrayLike) -> float:
    """log w of one response: its log-probability under the training stack minus that under the sampler, in nats.

    Args:
        logprobs, sampler_logprobs: of the same tokens, one number per token.

    Raises:
        DataError: not as many of one as of the other.
    """
    return math.fsum(_difference(logprobs, sampler_logprobs))  # exactly rounded: an audit gets the same in any order


def truncated_weight(log_weight: float, cap: float) -> float:
    """min(cap, exp(log_weight)), without overflow."""
    return cap if log_weight >= math.log(cap) else math.exp(log_weight)


def effective_sample_size(log_weights: Sequence[float]) -> float:
    """(sum w)^2 / (n sum w^2) of n responses, a share in (0, 1]: 1 if all weights are equal, 1 / n if one has it all.

    Args:
        log_weights: log w of each response, finite, at least one; a constant added to all changes nothing.

    Source: Kish's effective sample size, divided by n.

    Raises:
        DataError: there is none, or one is not finite.
    """
    values = np.asarray(log_weights, dtype=np.float64)
    if values.size == 0 or not np.isfinite(values).all():
        raise DataError("log-weights must be finite and at least one", found=f"{values.size} numbers")
    weights = np.exp(values - values.max())
    return float(weights.sum() ** 2 / (values.size * (weights**2).sum()))


def sampler_metrics(logprobs: Sequence[ArrayLike], sampler_logprobs: Sequence[ArrayLike]) -> dict[str, float]:
    """How well sampler and training stack agree on a step's responses.

    Args:
        logprobs, sampler_logprobs: per response, of all its sampled tokens.

    Returns:
        `sampler_difference_mean`, `_p99` (linear between the two nearest tokens) and `_max` of |log p - log q| over
        tokens, in nats; `sampler_ess`, the effective sample size of the responses' uncapped weights, as a share.

    Raises:
        DataError: a response has not as many of one as of the other.
    """
    differences = [_difference(p, q) for p, q in zip(logprobs, sampler_logprobs, strict=True)]
    sizes = np.abs(np.concatenate(differences))
    if not sizes.size:  # every response is empty: nothing to differ in
        sizes = np.zeros(1)
    return {
        "sampler_difference_mean": float(sizes.mean()),
        "sampler_difference_p99": float(np.quantile(sizes, 0.99)),
        "sampler_difference_max": float(sizes.max()),
        "sampler_ess": effective_sample_size([math.fsum(values) for values in differences]),
    }


def _difference(logprobs: ArrayLike, sampler_logprobs: ArrayLike) -> list[float]:
    """log p - log q of each token."""
    p, q = np.asarray(logprobs, dtype=np.float64), np.asarray(sampler_logprobs, dtype=np.float64)
    if p.shape != q.shape:
        raise DataError(
            "a response's two lists of log-probabilities differ in length", expected=f"{p.size} of each", found=q.size
        )
    return list((p - q).tolist())
