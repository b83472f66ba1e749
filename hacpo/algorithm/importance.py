"""How far a response is from the learner's policy: sequence ratio, its exponent's bounds and its clip interval.

    s = (pi_learner(y) / pi_source,old(y))^(1/|y|)         arXiv 2603.02604, eq. 11
    cross clip interval [min(1, 1 - delta + m step), 1]     eq. 13, 14; m = updates already done in this step

Log-probabilities are at the sampling temperature, the learner's over its own tokens of the text, the source's over the
source's, in natural log units (nats); whether the EOS that ends a response is among the tokens is decided by the pool
(`importance.score_eos`).

Legend: `_b` responses of a (micro-)batch, `_t` tokens of a response in the learner's vocabulary, padded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hacpo.settings.algorithm import ClipSettings

LOG_RATIO_BOUND = 10.0
"""A log-ratio is held in [-10, 10] before exp; beyond, the ratio is constant and has no gradient. Not from the paper:
e^10 is far outside every clip interval, and exp of more could overflow."""

UNCLIPPED = (0.0, 1e5)
"""The interval that means no clip: it holds every possible ratio (at most e^10, about 22026). Finite, so that it can be
written to Parquet and JSON like any other."""


def sum_logprobs(token_logprobs_bt: Tensor, mask_bt: Tensor) -> Tensor:
    """Sum of log-probabilities over the scored tokens, float64 [B].

    Args:
        token_logprobs_bt: any float dtype; padding may hold anything, NaN included.
        mask_bt: bool, true where a token is scored.
    """
    return torch.where(mask_bt, token_logprobs_bt.double(), 0.0).sum(dim=-1)


def log_ratio(
    *,
    learner_logprob_b: Tensor,
    source_logprob_b: Tensor,
    learner_tokens_b: Tensor,
    source_tokens_b: Tensor,
    text_bytes_b: Tensor,
    is_self_b: Tensor,
    ratio_norm: str,
) -> Tensor:
    """log s of each response, not yet bounded (eq. 11); differentiable in `learner_logprob_b`.

    The length |y| is ambiguous between two tokenizers; `ratio_norm` decides for cross responses: `learner_tokens` and
    `bytes` divide both sums by one length, `own_tokens` each side by its own. Own responses always use the learner's
    tokens (GSPO), under every norm. A length of 0 (empty text: 0 bytes) counts as 1.

    Args:
        learner_logprob_b: sum of the learner's log-probabilities, float64 [B].
        source_logprob_b: sum of the old policy's that the ratio divides by, float64 [B]: the source's, or under
            `reference: self` the learner's own before the step (then `source_tokens_b` are the learner's).
        learner_tokens_b: scored tokens in the learner's vocabulary, [B].
        source_tokens_b: scored tokens behind `source_logprob_b`, [B].
        text_bytes_b: UTF-8 bytes of the text, [B].
        is_self_b: the learner's own response, bool [B].
        ratio_norm: `ImportanceSettings.ratio_norm`.

    Returns:
        float64 [B].
    """
    learner_length_b, source_length_b = {
        "learner_tokens": (learner_tokens_b, learner_tokens_b),
        "own_tokens": (learner_tokens_b, source_tokens_b),
        "bytes": (text_bytes_b, text_bytes_b),
    }[ratio_norm]
    learner_length_b = torch.where(is_self_b, learner_tokens_b, learner_length_b).clamp(min=1).double()
    source_length_b = torch.where(is_self_b, learner_tokens_b, source_length_b).clamp(min=1).double()
    # mean - mean, arranged so that equal lengths subtract the sums first and equal sums give exactly 0.
    return (learner_logprob_b - source_logprob_b * (learner_length_b / source_length_b)) / learner_length_b


def bounded_ratio(log_ratios: Tensor) -> Tensor:
    """exp of a log-ratio held in +-`LOG_RATIO_BOUND`; any shape."""
    return log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def clip_bounds(update_index: int, settings: ClipSettings, *, is_self: bool) -> tuple[float, float]:
    """Clip interval (lower, upper) of the ratio, in force at one update.

    Args:
        update_index: m, optimizer updates this agent has already done within the step (eq. 14).
        settings: own interval (GSPO), and which interval cross responses get.
        is_self: own or cross responses.

    Returns:
        Own: (1 - own_low, 1 + own_high). Cross `stepwise`: (min(1, 1 - cross_delta + m cross_step), 1.0), eq. 13, 14;
        `own`: as own; `none` and `likelihood`: `UNCLIPPED`.
    """
    own = (1.0 - settings.own_low, 1.0 + settings.own_high)
    stepwise = (min(1.0, 1.0 - settings.cross_delta + update_index * settings.cross_step), 1.0)
    return own if is_self else {"stepwise": stepwise, "own": own}.get(settings.cross, UNCLIPPED)


def response_bounds(is_self_b: Tensor, update_index: int, settings: ClipSettings) -> tuple[Tensor, Tensor]:
    """`clip_bounds` of each response: lower and upper, float64 [B]."""
    own_low, own_high = clip_bounds(update_index, settings, is_self=True)
    cross_low, cross_high = clip_bounds(update_index, settings, is_self=False)
    ones_b = torch.ones_like(is_self_b, dtype=torch.float64)
    return (
        torch.where(is_self_b, own_low * ones_b, cross_low * ones_b),
        torch.where(is_self_b, own_high * ones_b, cross_high * ones_b),
    )
