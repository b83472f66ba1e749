"""Log-probabilities of given tokens: the one function by which responses are rescored and by which agents are trained.

Notation: B responses, S the longest prompt plus response, T the longest response, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hacpo.engines.head import CHUNK_LOGITS, chunked_logprobs, output_head


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded sequences.

    Attributes:
        input_ids: int64 [B, S], prompt then response, padded at the end.
        attention_mask: int64 [B, S], 1 where there is a token.
        positions: int64 [B, T], index in S of the logits that predict response token t (0 where there is none).
        targets: int64 [B, T], response tokens.
        mask: bool [B, T], True where there is a response token.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor


def collate(sequences: Sequence[tuple[Sequence[int], Sequence[int]]], pad: int, device: torch.device) -> TokenBatch:
    """Pad (prompt, response) pairs into one batch."""
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
    return TokenBatch(*(tensor.to(device) for tensor in (input_ids, attention_mask, positions, targets, mask)))


def token_logprobs(model: Any, batch: TokenBatch, temperature: float) -> torch.Tensor:
    """log pi(token | prefix) at the sampling temperature, float32 [B, T], 0 where there is no token; differentiable.

    Logits that would not fit into one chunk of `hacpo.engines.head` are never held together. Few enough ones come from
    the model's own forward pass, as do those of a model whose head has an unknown form.
    """
    targets = batch.targets[batch.mask]
    if not len(targets):
        return torch.zeros_like(batch.targets, dtype=torch.float32)  # nothing but empty responses
    vocabulary = model.config.get_text_config().vocab_size
    # Prompts of different lengths put the scored positions apart, and the model's own forward pass takes all between.
    held = len(batch.targets) * len(_scored_span(batch)) * vocabulary
    head = output_head(model) if held > CHUNK_LOGITS else None
    if head is None:
        scored = _own_logits(model, batch).float() / temperature
        chosen = torch.log_softmax(scored, dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    else:
        hidden = model.get_decoder()(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
        ).last_hidden_state
        chosen = chunked_logprobs(_at_positions(hidden, batch.positions, batch.mask), targets, head, temperature)
    return torch.zeros_like(batch.targets, dtype=torch.float32).masked_scatter(batch.mask, chosen)


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
