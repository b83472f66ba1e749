"""The trace's numbers from its log-probabilities, without a model: what audits and what-if questions recompute.

Written apart from `hacpo.algorithm.loss`, in numpy instead of torch, so that one checks the other (tests compare them).

    s = exp(bounded((learner_sum - source_sum) / |y|))      arXiv 2603.02604, eq. 11
    own    min(s A, c A)                                     GSPO; c = s clipped to [lower, upper]
    cross  c min(c, 1)^alpha A                               eq. 12-14; `clip.cross: own`: min(s A, c A) min(c, 1)^alpha
           `clip.cross: likelihood`: the learner's mean log-probability min(c, 1)^alpha
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hacpo.settings.algorithm import ClipSettings, ImportanceSettings

LOG_RATIO_BOUND = 10.0
"""As `hacpo.algorithm.importance.LOG_RATIO_BOUND` (a test compares them)."""

UNCLIPPED = (0.0, 1e5)
"""As `hacpo.algorithm.importance.UNCLIPPED`, compared too."""

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class TraceColumns:
    """Columns of the trace, [B] each."""

    ratio: Floats
    """s; NaN where it is not `known`."""
    lower: Floats
    upper: Floats
    clipped: Flags
    """The clip leaves no gradient; false where it is not `known`."""
    is_weight: Floats
    """min(c, 1)^alpha; 1 for own."""
    objective: Floats
    """The response's term before averaging and before the sampler's weight; NaN where it is not `known`."""
    known: Flags
    """Whether ratio, clipped and objective follow from means: not for own responses under `importance.level: token`,
    whose ratios are of single tokens."""


def trace_columns(
    *,
    learner_logprob: ArrayLike,
    source_logprob: ArrayLike,
    learner_tokens: ArrayLike,
    source_tokens: ArrayLike,
    text_bytes: ArrayLike,
    is_self: ArrayLike,
    effective_advantage: ArrayLike,
    update: ArrayLike,
    importance: ImportanceSettings,
    clip: ClipSettings,
) -> TraceColumns:
    """Ratio, clip interval, clipped flag, weight and objective of responses, all arguments [B].

    Args:
        learner_logprob, source_logprob: means per scored token, as the trace has them, in nats.
        learner_tokens: scored tokens in the learner's vocabulary (the pool's count).
        source_tokens: tokens behind `source_logprob`: the pool's count, but the learner's for cross responses under
            `importance.reference: self`.
        text_bytes: UTF-8 bytes of the text.
        is_self: the learner's own response.
        effective_advantage: A of own, omega A of cross responses.
        update: m, the optimizer updates done before within the step.

    Numbers that are not finite give ratios that are not: whoever calls checks them first.
    """
    learner_b, source_b = _floats(learner_tokens), _floats(source_tokens)
    own_b = np.asarray(is_self, dtype=np.bool_)
    advantage_b = _floats(effective_advantage)
    log_ratio_b = _log_ratio(
        _floats(learner_logprob) * learner_b,
        _floats(source_logprob) * source_b,
        learner_b,
        source_b,
        _floats(text_bytes),
        own_b,
        importance.ratio_norm,
    )
    ratio_b = np.exp(np.clip(log_ratio_b, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    lower_b, upper_b = clip_intervals(own_b, update, clip)
    clipped_ratio_b = np.clip(ratio_b, lower_b, upper_b)
    is_weight_b = np.where(own_b, 1.0, np.minimum(clipped_ratio_b, 1.0) ** importance.alpha)
    pessimistic_b = own_b | (clip.cross == "own")
    term_b = clipped_ratio_b * advantage_b
    objective_b = np.where(pessimistic_b, np.minimum(ratio_b * advantage_b, term_b), term_b) * is_weight_b
    above_b, below_b = ratio_b > upper_b, ratio_b < lower_b
    helped_b = ((advantage_b > 0) & above_b) | ((advantage_b < 0) & below_b)
    clipped_b = np.where(pessimistic_b, helped_b, above_b | below_b)
    if clip.cross == "likelihood":
        objective_b = np.where(own_b, objective_b, _floats(learner_logprob) * is_weight_b)
        clipped_b = clipped_b & own_b
    known_b = ~own_b | (importance.level == "sequence")
    return TraceColumns(
        ratio=np.where(known_b, ratio_b, np.nan),
        lower=lower_b,
        upper=upper_b,
        clipped=clipped_b & known_b,
        is_weight=is_weight_b,
        objective=np.where(known_b, objective_b, np.nan),
        known=known_b,
    )


def is_unclipped(upper: float) -> bool:
    """Whether an upper clip bound clips nothing: no ratio is above e^LOG_RATIO_BOUND."""
    return upper >= math.exp(LOG_RATIO_BOUND)


def clip_intervals(is_self: ArrayLike, update: ArrayLike, clip: ClipSettings) -> tuple[Floats, Floats]:
    """Lower and upper bound of each response's ratio, [B] (eq. 13, 14; own: GSPO)."""
    own_b, update_b = np.asarray(is_self, dtype=np.bool_), _floats(update)
    own_low, own_high = 1.0 - clip.own_low, 1.0 + clip.own_high
    if clip.cross == "stepwise":
        low_b, high = np.minimum(1.0, 1.0 - clip.cross_delta + update_b * clip.cross_step), 1.0
    else:
        low, high = (own_low, own_high) if clip.cross == "own" else UNCLIPPED
        low_b = np.full(own_b.shape, low)
    return np.where(own_b, own_low, low_b), np.where(own_b, own_high, high)


def _log_ratio(
    learner_sum_b: Floats,
    source_sum_b: Floats,
    learner_tokens_b: Floats,
    source_tokens_b: Floats,
    text_bytes_b: Floats,
    own_b: Flags,
    ratio_norm: str,
) -> Floats:
    """Each sum over its length, the difference of the two; own responses: over the learner's tokens, whatever the norm.
    A length of 0 counts as 1."""
    cross_b = {"learner_tokens": learner_tokens_b, "own_tokens": learner_tokens_b, "bytes": text_bytes_b}[ratio_norm]
    learner_length_b = np.maximum(np.where(own_b, learner_tokens_b, cross_b), 1.0)
    if ratio_norm != "own_tokens":
        return np.asarray((learner_sum_b - source_sum_b) / learner_length_b)
    source_length_b = np.maximum(np.where(own_b, learner_tokens_b, source_tokens_b), 1.0)
    return np.asarray(learner_sum_b / learner_length_b - source_sum_b / source_length_b)


def _floats(values: ArrayLike) -> Floats:
    return np.asarray(values, dtype=np.float64)
