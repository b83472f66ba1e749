"""From log-probabilities and advantages to per-response terms and one number to minimise.

Source: HACPO, arXiv 2603.02604, eq. 11-14 and 47-52; own responses: GSPO, arXiv 2507.18071, eq. 5-7. Eq. 47 can be read
in two ways: as printed, min(s, c) A for own responses, or as GSPO's min(s A, c A), which differs where A < 0. Both of
the authors' code bases compute the second, and so does this one.

Notation (B responses of a micro-batch, T padded tokens in the learner's vocabulary; `_b` is [B], `_bt` is [B, T]):
    s       ratio of the learner's policy to the one that sampled, one per response: exp of the difference of their mean
            log-probabilities per token, the exponent held in +-10 (`hacpo.algorithm.importance`)
    A       effective advantage (`hacpo.algorithm.group_advantage`): A of own responses, omega A of cross responses
    c       s clipped to [lower, upper] of this update
    sg[.]   stop-gradient
    own     min(s A, c A)       GSPO; GRPO: the same per token, then the mean over tokens
    cross   c sg[min(c, 1)]^alpha A     no outer min: outside the interval there is no gradient, whatever the sign of A;
            eq. 12 weighs where s < 1 only, which matters where the upper bound is above 1 (`clip.cross: none`, `own`).
            Under `clip.cross: own`: min(s A, c A) sg[min(c, 1)]^alpha; under `likelihood` the mean of the learner's
            log-probabilities over the response's tokens, whose gradient is that of a supervised loss (SGT), in place of
            c A
    v       weight from the sampler's to the training stack's distribution (`sampler_correction`); 1 if off
    loss    - sum_i w_i v_i objective_i + kl_coef sum_i w_i KL_i      (KL over all responses, or over own ones)

The loss is a plain sum over rows. All averaging is in the row weights w (`row_weights`), which come from counts over
the whole update (`hacpo.algorithm.updates`; `hacpo.engines.training.trainer` passes them on, with m): the gradient is
the same however an update is cut into micro-batches or spread over processes. Add the losses (a wrapper
that averages gradients over processes needs the loss times the number of processes).

Per-response numbers are float64, whatever the model computes in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from hacpo.algorithm.importance import LOG_RATIO_BOUND, bounded_ratio, log_ratio, response_bounds, sum_logprobs
from hacpo.algorithm.training_pool import TrainingRow
from hacpo.errors import DataError
from hacpo.settings.algorithm import AlgorithmSettings, ClipSettings, ImportanceSettings, LossSettings

CAPPED_KL_BOUND = 20.0
"""What d of a capped k3 is held in, in nats: only so that exp(d) is finite, far beyond where a cap acts."""


@dataclass(frozen=True)
class ResponseBatch:
    """What the loss needs to know of each response; kept responses only, each with at least one scored token.

    Raises:
        DataError: shapes or dtypes do not fit, or a response has no scored token.
    """

    learner_logprobs_bt: Tensor
    """The learner's current log-probability of each response token, at the sampling temperature; differentiable."""
    mask_bt: Tensor
    """bool: true on scored response tokens (those of the pool), false on padding; padding may hold anything."""
    source_logprob_b: Tensor
    """float64: sum of the log-probabilities of the old policy the ratio divides by: the source's (eq. 11), or under
    `reference: self` the learner's own before this step's updates."""
    source_tokens_b: Tensor
    """int: tokens behind `source_logprob_b`; under `reference: self` the learner's count."""
    text_bytes_b: Tensor
    """int: UTF-8 bytes of the text."""
    is_self_b: Tensor
    """bool: sampled by the learner itself."""
    effective_advantage_b: Tensor
    """float64."""
    row_weight_b: Tensor
    """float64: from `row_weights`, cross rows times `cross_weight`; 0 for a row that only fills a batch."""
    sampler_weight_b: Tensor
    """float64: `hacpo.algorithm.sampler_correction`; 1 for cross responses, and for all when it is off."""
    old_logprobs_bt: Tensor | None = None
    """The learner's log-probabilities before this step's updates; token-level ratios of own responses need them."""
    initial_logprobs_bt: Tensor | None = None
    """Log-probabilities under the initial policy; the KL penalty needs them, of the responses that carry it."""

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[TrainingRow],
        learner_logprobs_bt: Tensor,
        mask_bt: Tensor,
        *,
        counts: Mapping[str, int],
        algorithm: AlgorithmSettings,
        initial_logprobs_bt: Tensor | None = None,
    ) -> Self:
        """The responses of a micro-batch, with their log-probabilities.

        Args:
            counts: source -> responses scheduled for the update (`row_weights`).
        """
        old_bt = None
        if algorithm.importance.level == "token":
            old_bt = torch.zeros_like(learner_logprobs_bt)
            for number, row in enumerate(rows):
                if row.old_logprobs is not None:
                    old_bt[number, : len(row.token_ids)] = torch.tensor(row.old_logprobs, dtype=old_bt.dtype)
        sources = list(counts)

        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(row, name) for row in rows], dtype=dtype, device=mask_bt.device)

        is_self_b = column("is_self", torch.bool)
        row_weight_b = row_weights(
            torch.tensor([sources.index(row.source) for row in rows], device=mask_bt.device),
            torch.tensor(list(counts.values()), device=mask_bt.device),
            algorithm.loss.aggregation,
        )
        return cls(
            learner_logprobs_bt=learner_logprobs_bt,
            mask_bt=mask_bt,
            source_logprob_b=column("source_logprob", torch.float64),
            source_tokens_b=column("source_tokens", torch.int64),
            text_bytes_b=column("text_bytes", torch.int64),
            is_self_b=is_self_b,
            effective_advantage_b=column("effective_advantage", torch.float64),
            row_weight_b=torch.where(is_self_b, row_weight_b, row_weight_b * algorithm.loss.cross_weight),
            sampler_weight_b=column("sampler_weight", torch.float64),
            old_logprobs_bt=old_bt,
            initial_logprobs_bt=initial_logprobs_bt,
        )

    def __post_init__(self) -> None:
        shape = self.learner_logprobs_bt.shape
        if len(shape) != 2:
            raise DataError("log-probabilities must be [responses, tokens]", found=f"shape {tuple(shape)}")
        for name, value in vars(self).items():
            wanted = shape if name.endswith("_bt") else shape[:1]
            if value is not None and value.shape != wanted:
                raise DataError(f"{name} has the wrong shape", expected=tuple(wanted), found=tuple(value.shape))
        for name, dtype in _DTYPES.items():
            if getattr(self, name).dtype != dtype:
                raise DataError(f"{name} has the wrong dtype", expected=dtype, found=getattr(self, name).dtype)
        if not self.mask_bt.any(dim=-1).all():
            raise DataError("a response without scored tokens cannot be learned from", where="mask_bt")


_DTYPES = {
    "mask_bt": torch.bool,
    "is_self_b": torch.bool,
    "source_logprob_b": torch.float64,
    "effective_advantage_b": torch.float64,
    "row_weight_b": torch.float64,
    "sampler_weight_b": torch.float64,
}


@dataclass(frozen=True)
class ResponseTerms:
    """What each response did in an update: the columns of the trace, all [B]; only `objective_b` carries a gradient."""

    learner_logprob_b: Tensor
    """Mean over the learner's scored tokens."""
    source_logprob_b: Tensor
    """Mean over the tokens behind it."""
    ratio_b: Tensor
    """s; token level: mean of the token ratios."""
    lower_b: Tensor
    upper_b: Tensor
    clipped_b: Tensor
    """bool: the clip leaves no gradient. Own: A > 0 and s > upper, or A < 0 and s < lower; token level: so for every
    token. Cross: s outside [lower, upper] (under `cross: own` as own)."""
    is_weight_b: Tensor
    """sg[min(c, 1)]^alpha; 1 for own."""
    objective_b: Tensor
    """This response's term before averaging and before the sampler's weight."""


def update_loss(batch: ResponseBatch, update_index: int, algorithm: AlgorithmSettings) -> tuple[Tensor, ResponseTerms]:
    """The micro-batch's share of the loss of one update, a float64 scalar to add up, and the terms it is made of.

    Args:
        update_index: m, optimizer updates already done within the step.
        algorithm: its `importance`, `clip` and `loss`.

    Raises:
        DataError: the settings need log-probabilities that the batch lacks.
    """
    loss = algorithm.loss
    terms = response_terms(batch, update_index=update_index, importance=algorithm.importance, clip=algorithm.clip)
    total = -(batch.row_weight_b * batch.sampler_weight_b * terms.objective_b).sum()
    penalised_b = carries_kl(batch.is_self_b, loss)
    if penalised_b.any():
        kl_b = torch.where(penalised_b, kl_to_initial(batch, loss.kl_cap), 0.0)
        total = total + loss.kl_coef * (batch.row_weight_b * kl_b).sum()
    return total, terms


def carries_kl(is_self_b: Tensor, settings: LossSettings) -> Tensor:
    """Which responses carry the KL penalty to the initial policy, bool [B]; none if its coefficient is 0."""
    return (is_self_b | (settings.kl_responses == "all")) & (settings.kl_coef > 0)


def response_terms(
    batch: ResponseBatch, *, update_index: int, importance: ImportanceSettings, clip: ClipSettings
) -> ResponseTerms:
    """Ratio, clip interval, weight and objective of each response (eq. 11-14; own: GSPO, or GRPO with `level: token`).

    Args:
        batch: the responses.
        update_index: m, optimizer updates already done within the step.
        importance: alpha, length norm, level. `level: token` concerns own responses; cross responses keep one ratio.
        clip: intervals; `cross: own` also gives cross responses the outer min.

    Raises:
        DataError: `level: token` without `old_logprobs_bt`.
    """
    tokens_b = batch.mask_bt.sum(dim=-1)
    learner_logprob_b = sum_logprobs(batch.learner_logprobs_bt, batch.mask_bt)
    ratio_b = bounded_ratio(
        log_ratio(
            learner_logprob_b=learner_logprob_b,
            source_logprob_b=batch.source_logprob_b,
            learner_tokens_b=tokens_b,
            source_tokens_b=batch.source_tokens_b,
            text_bytes_b=batch.text_bytes_b,
            is_self_b=batch.is_self_b,
            ratio_norm=importance.ratio_norm,
        )
    )
    lower_b, upper_b = response_bounds(batch.is_self_b, update_index, clip)
    outer_min_b = batch.is_self_b | (clip.cross == "own")
    advantage_b = batch.effective_advantage_b
    term_b, clipped_b = clipped_term(ratio_b, advantage_b, lower_b, upper_b, outer_min_b)
    if importance.level == "token":
        token_ratio_b, token_term_b, token_clipped_b = _token_level(batch, lower_b, upper_b)
        ratio_b = torch.where(batch.is_self_b, token_ratio_b, ratio_b)
        term_b = torch.where(batch.is_self_b, token_term_b, term_b)
        clipped_b = torch.where(batch.is_self_b, token_clipped_b, clipped_b)
    if clip.cross == "likelihood":
        term_b = torch.where(batch.is_self_b, term_b, learner_logprob_b / tokens_b)
        clipped_b = clipped_b & batch.is_self_b
    importance_b = ratio_b.detach().clamp(lower_b, upper_b).clamp(max=1.0).pow(importance.alpha)
    is_weight_b = torch.where(batch.is_self_b, torch.ones_like(importance_b), importance_b)
    return ResponseTerms(
        learner_logprob_b=(learner_logprob_b / tokens_b).detach(),
        source_logprob_b=batch.source_logprob_b / batch.source_tokens_b.clamp(min=1),
        ratio_b=ratio_b.detach(),
        lower_b=lower_b,
        upper_b=upper_b,
        clipped_b=clipped_b,
        is_weight_b=is_weight_b,
        objective_b=term_b * is_weight_b,
    )


def clipped_term(
    ratio: Tensor, advantage: Tensor, lower: Tensor, upper: Tensor, outer_min: Tensor
) -> tuple[Tensor, Tensor]:
    """min(s A, c A) where `outer_min`, else c A, with c = clip(s, lower, upper); and where the clip stops the gradient.

    All arguments have, or broadcast to, the shape of `ratio`. On a bound itself the gradient passes.
    """
    clipped_ratio = ratio.clamp(lower, upper)
    term = torch.where(
        outer_min, torch.minimum(ratio * advantage, clipped_ratio * advantage), clipped_ratio * advantage
    )
    above, below = ratio > upper, ratio < lower
    pessimistic = ((advantage > 0) & above) | ((advantage < 0) & below)
    return term, torch.where(outer_min, pessimistic, above | below)


def kl_to_initial(batch: ResponseBatch, cap: float | None = None) -> Tensor:
    """KL penalty of each response to the initial policy, float64 [B]: the mean over tokens of exp(d) - d - 1 (k3) with
    d = log pi_0 - log pi, held in +-`LOG_RATIO_BOUND` so that it is finite. Unbiased only on the learner's own samples.

    Args:
        batch: the responses.
        cap: largest value of a token, in nats; a token above it has no gradient (10: d above 2.6 or below -11). d is
            then held in +-20 instead. None: no cap.

    Source: GRPO, arXiv 2402.03300, eq. 4 (k3 is Schulman's name for it); cap and its bound: verl's `low_var_kl`.

    Raises:
        DataError: the batch has no `initial_logprobs_bt`.
    """
    if batch.initial_logprobs_bt is None:
        raise DataError("the KL penalty needs the initial policy's log-probabilities", where="initial_logprobs_bt")
    d_bt = _masked_difference(batch.initial_logprobs_bt, batch.learner_logprobs_bt, batch.mask_bt)
    bound = LOG_RATIO_BOUND if cap is None else CAPPED_KL_BOUND
    d_bt = d_bt.clamp(-bound, bound)
    kl_bt = (torch.expm1(d_bt) - d_bt).clamp(max=math.inf if cap is None else cap)
    return kl_bt.sum(dim=-1) / batch.mask_bt.sum(dim=-1)


def row_weights(source_index_b: Tensor, counts_n: Tensor, aggregation: str) -> Tensor:
    """What each response's objective counts for in its update, float64 [B] (eq. 47).

    Args:
        source_index_b: agent that sampled each response, int [B].
        counts_n: responses of each agent scheduled for this update over all micro-batches and processes, int [N], the
            unusable ones included: those contribute nothing but stay in the denominator.
        aggregation: `sum`, the mean over own responses plus for every other agent the mean over its responses (each row
            1 / its source's count); `mean`, one mean over all (each row 1 / total count).

    Raises:
        DataError: a response comes from an agent with no scheduled responses.
    """
    counts_b = counts_n[source_index_b]
    if (counts_b < 1).any():
        raise DataError("a response's source has no scheduled responses in this update", where="counts_n")
    denominator_b = {"sum": counts_b, "mean": counts_n.sum().expand_as(counts_b)}[aggregation]
    return 1.0 / denominator_b.double()


def _token_level(batch: ResponseBatch, lower_b: Tensor, upper_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """GRPO's ratio (mean), term and clipped flag (all tokens) per response, [B]; meaningful on own responses only."""
    if batch.old_logprobs_bt is None:
        raise DataError("a token-level ratio needs the learner's old log-probabilities", where="old_logprobs_bt")
    tokens_b = batch.mask_bt.sum(dim=-1)
    own_bt = batch.mask_bt & batch.is_self_b[:, None]
    ratio_bt = bounded_ratio(_masked_difference(batch.learner_logprobs_bt, batch.old_logprobs_bt, own_bt))
    advantage_bt = batch.effective_advantage_b[:, None].expand_as(ratio_bt)
    term_bt, clipped_bt = clipped_term(
        ratio_bt, advantage_bt, lower_b[:, None], upper_b[:, None], torch.ones_like(own_bt)
    )
    return (
        torch.where(batch.mask_bt, ratio_bt, 0.0).sum(dim=-1) / tokens_b,
        torch.where(batch.mask_bt, term_bt, 0.0).sum(dim=-1) / tokens_b,
        (clipped_bt | ~batch.mask_bt).all(dim=-1),
    )


def _masked_difference(a_bt: Tensor, b_bt: Tensor, mask_bt: Tensor) -> Tensor:
    """a - b in float64, 0 outside the mask, whatever stands there."""
    return torch.where(mask_bt, a_bt.double() - b_bt.double(), 0.0)
