"""Log-probabilities of given tokens: the one function by which responses are rescored and by which agents are trained.

Notation: B responses, S the longest prompt plus response, T the longest response, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


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

    The model's own head computes the logits (some scale or cap them), from the first scored position to the last.
    """
    first = int(batch.positions[batch.mask].min())
    last = int(batch.positions.max())
    logits = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        use_cache=False,
        logits_to_keep=torch.arange(first, last + 1, device=batch.input_ids.device),
    ).logits
    rows = torch.arange(logits.shape[0], device=logits.device).unsqueeze(1)
    scored = logits[rows, (batch.positions - first).clamp(min=0)][batch.mask].float() / temperature
    chosen = torch.log_softmax(scored, dim=-1).gather(-1, batch.targets[batch.mask].unsqueeze(-1)).squeeze(-1)
    return torch.zeros_like(batch.targets, dtype=torch.float32).masked_scatter(batch.mask, chosen)
