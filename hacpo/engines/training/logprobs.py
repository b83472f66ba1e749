"""Log-probabilities of given tokens, from the same logits in the same parts for rescoring and for training:
`token_logprobs` for both, and for the rescoring of truncated samples `support_scores`.

Notation: B responses, S the longest prompt plus response, T the longest response, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hacpo.algorithm.batching import CHUNK_LOGITS
from hacpo.algorithm.support import Support
from hacpo.engines.training.head import Head, chunked_logits, chunked_logprobs, chunks, output_head
from hacpo.engines.truncation import KeptTokens, truncated


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded sequences.

    Attributes:
        input_ids: int64 [B, S], prompt then response, padded at the end.
        attention_mask: int64 [B, S], 1 where there is a token.
        positions: int64 [B, T], index in S of the logits that predict response token t (0 where there is none).
        targets: int64 [B, T], response tokens.
        mask: bool [B, T], True where there is a response token.
        support: what each of these tokens was drawn from, row by row; None: all from the whole vocabulary.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    support: KeptTokens | None = None


def collate(
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    pad: int,
    device: torch.device,
    supports: Sequence[Support | None] | None = None,
) -> TokenBatch:
    """Pad (prompt, response) pairs into one batch.

    Args:
        supports: of each response, as many positions as it has tokens, or more.
    """
    length = max(len(prompt) + len(response) for prompt, response in sequences)
    longest = max(len(response) for _, response in sequences)
    rows = len(sequences)
    input_ids = torch.full((rows, length), pad, dtype=torch.int64)
    attention_mask = torch.zeros((rows, length), dtype=torch.int64)
    positions = torch.zeros((rows, longest), dtype=torch.int64)
    targets = torch.zeros((rows, longest), dtype=torch.int64)
    mask = torch.zeros((rows, longest), dtype=torch.bool)
    for row, (prompt, response) in enumerate(sequences):
        start, count = len(prompt), len(response)
        input_ids[row, : start + count] = torch.tensor([*prompt, *response])
        attention_mask[row, : start + count] = 1
        positions[row, :count] = torch.arange(start - 1, start - 1 + count)
        targets[row, :count] = torch.tensor(list(response))
        mask[row, :count] = True
    kept = None
    if supports is not None:
        kept = KeptTokens.of(supports, [len(response) for _, response in sequences], device)
    return TokenBatch(
        input_ids.to(device), attention_mask.to(device), positions.to(device), targets.to(device), mask.to(device), kept
    )


def token_logprobs(model: Any, batch: TokenBatch, temperature: float) -> torch.Tensor:
    """log pi(token | prefix) at the sampling temperature, float32 [B, T], 0 where there is no token; differentiable.

    Renormalised over the batch's support where it has one: the logit minus the log-sum-exp over the kept tokens.

    Logits that would not fit into one chunk of `hacpo.engines.training.head` are never held together. Few enough ones
    come from the model's own forward pass, as do those of a model whose head has an unknown form.
    """
    targets = batch.targets[batch.mask]
    if not len(targets):
        return torch.zeros_like(batch.targets, dtype=torch.float32)  # nothing but empty responses
    head = _head(model, batch)
    if head is not None:
        chosen = chunked_logprobs(_hidden(model, batch), targets, head, temperature, batch.support)
    else:
        scored = _own_logits(model, batch).float() / temperature
        if batch.support is None:
            chosen = torch.log_softmax(scored, dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        else:
            kept = batch.support.of_tokens(slice(0, len(targets)), scored.shape[-1])
            chosen = scored.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - kept.normaliser(scored)
    return torch.zeros_like(batch.targets, dtype=torch.float32).masked_scatter(batch.mask, chosen)


@dataclass(frozen=True)
class SupportScores:
    """The N scored tokens of a batch under truncated sampling, row by row.

    Attributes:
        logprobs: float32 [N], renormalised over the support, as `token_logprobs` gives them.
        support_logprobs: float32 [N], log of the mass that the support holds; the two sum up to the whole vocabulary's.
        support: what was kept.
    """

    logprobs: torch.Tensor
    support_logprobs: torch.Tensor
    support: KeptTokens


@torch.no_grad()
def support_scores(
    model: Any, batch: TokenBatch, temperature: float, *, top_p: float, top_k: int | None
) -> SupportScores:
    """Score a batch's tokens within its support, or, where it has none, within what these logits would have kept.

    A token that these logits would not have kept (another engine drew it) is added to what they keep.
    """
    targets = batch.targets[batch.mask]
    logprobs, masses = torch.zeros(2, len(targets), device=targets.device).unbind()
    supports = []
    for chunk, logits_nv in _logits(model, batch) if len(targets) else ():
        scored_nv = logits_nv.div_(temperature)
        support = batch.support or _kept(scored_nv, targets[chunk], top_p, top_k)
        here = chunk if batch.support is not None else slice(0, len(scored_nv))
        normaliser_n = support.of_tokens(here, scored_nv.shape[-1]).normaliser(scored_nv)
        logprobs[chunk] = scored_nv.gather(-1, targets[chunk, None]).squeeze(-1) - normaliser_n
        masses[chunk] = (normaliser_n - scored_nv.logsumexp(dim=-1)).clamp_(max=0.0)  # above 0 by rounding only
        supports.append(support)
    return SupportScores(logprobs, masses, batch.support or KeptTokens.joined(supports, targets.device))


def _kept(scored_nv: torch.Tensor, targets_n: torch.Tensor, top_p: float, top_k: int | None) -> KeptTokens:
    """What truncated sampling keeps of some logits; a few at a time, for sorting takes several times their memory."""
    parts = []
    for chunk in chunks(len(scored_nv), 8 * scored_nv.shape[-1]):
        kept_nv = truncated(torch.log_softmax(scored_nv[chunk], dim=-1), top_p=top_p, top_k=top_k).isfinite()
        parts.append(KeptTokens.of_mask(kept_nv.scatter_(-1, targets_n[chunk, None], True)))
    return KeptTokens.joined(parts, scored_nv.device)


def _logits(model: Any, batch: TokenBatch) -> Iterator[tuple[slice, torch.Tensor]]:
    """The scored tokens' logits, float32, in the parts in which `token_logprobs` takes them."""
    head = _head(model, batch)
    if head is not None:
        yield from chunked_logits(_hidden(model, batch), head)
    else:
        logits_nv = _own_logits(model, batch).float()
        yield slice(0, len(logits_nv)), logits_nv


def _head(model: Any, batch: TokenBatch) -> Head | None:
    """What turns hidden states into logits in parts; None where the model's own forward pass gives them at once."""
    vocabulary = model.config.get_text_config().vocab_size
    # Prompts of different lengths put the scored positions apart, and the model's own forward pass takes all between.
    held = len(batch.targets) * len(_scored_span(batch)) * vocabulary
    return output_head(model) if held > CHUNK_LOGITS else None


def _hidden(model: Any, batch: TokenBatch) -> torch.Tensor:
    """Last hidden states at the scored positions, [N, H]."""
    hidden = model.get_decoder()(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
    ).last_hidden_state
    return _at_positions(hidden, batch.positions, batch.mask)


def _own_logits(model: Any, batch: TokenBatch) -> torch.Tensor:
    """Logits at the scored positions, [N, V], by the model's own head (some scale or cap them)."""
    span = _scored_span(batch)
    logits = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        use_cache=False,
        logits_to_keep=torch.arange(span.start, span.stop, device=batch.input_ids.device),
    ).logits
    return _at_positions(logits, (batch.positions - span.start).clamp(min=0), batch.mask)


def _scored_span(batch: TokenBatch) -> range:
    """From the first position in S that predicts a scored token of any response to the last."""
    return range(int(batch.positions[batch.mask].min()), int(batch.positions.max()) + 1)


def _at_positions(values: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(values.shape[0], device=values.device).unsqueeze(1)
    return values[rows, positions][mask]
