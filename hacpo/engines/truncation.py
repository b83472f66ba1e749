"""Truncated sampling (`top_k`, `top_p`) on logits: what is kept, and log-probabilities renormalised over it.

Notation: N scored tokens, V vocabulary, K the most ids that one of the N positions kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hacpo.algorithm.support import Support

# --- what is kept ----------------------------------------------------------------------------------------------------


def truncated(logprobs: Tensor, *, top_p: float, top_k: int | None) -> Tensor:
    """Log-probabilities of the distribution that is sampled: -inf outside the kept tokens, renormalised over them.

    Args:
        logprobs: normalised, at the sampling temperature; [..., V].
        top_p: smallest set of likeliest tokens of this mass, of what `top_k` leaves; 1: all.
        top_k: the so many likeliest, and those as likely as the last of them; None: all.
    """
    if top_k is not None:
        logprobs = torch.log_softmax(likeliest(logprobs, top_k), dim=-1)
    if top_p < 1:
        logprobs = torch.log_softmax(nucleus(logprobs, top_p), dim=-1)
    return logprobs


def likeliest(logprobs: Tensor, top_k: int) -> Tensor:
    """Log-probabilities [..., V], all but the `top_k` likeliest at -inf; those as likely as the last of them stay."""
    least = logprobs.topk(min(top_k, logprobs.shape[-1]), dim=-1).values[..., -1:]
    return logprobs.masked_fill(logprobs < least, float("-inf"))


def nucleus(logprobs: Tensor, top_p: float) -> Tensor:
    """Log-probabilities [..., V], all but the smallest set of likeliest tokens of mass `top_p` at -inf."""
    ordered, index = logprobs.sort(dim=-1, descending=True, stable=True)
    before = ordered.exp().cumsum(dim=-1) - ordered.exp()
    return torch.full_like(logprobs, float("-inf")).scatter(
        -1, index, ordered.masked_fill(before >= top_p, float("-inf"))
    )


class SupportRecorder:
    """What a sampler kept, token by token, for each of B responses."""

    def __init__(self, responses: int) -> None:
        self._ids: list[np.ndarray] = []
        self._starts: list[np.ndarray] = []
        """Where the ids of each row begin, and the last ones end, [b + 1]."""
        self._places: list[np.ndarray] = []
        """Row of each response at that token, [B]; -1: it was not in the batch."""
        self._none = np.full(responses, -1)

    def add(self, kept_bv: Tensor, responses: np.ndarray) -> None:
        """One more token of some responses, in the batch's order; bool [b, V]."""
        self._ids.append(kept_bv.nonzero()[:, 1].to(torch.int32).cpu().numpy())
        self._starts.append(np.concatenate([[0], kept_bv.sum(dim=-1).cpu().numpy().cumsum()]))
        places = self._none.copy()
        places[responses] = np.arange(len(responses))
        self._places.append(places)

    def of(self, response: int, tokens: int) -> Support:
        """The support of a response's first so many tokens."""
        parts = []
        for ids, starts, places in zip(self._ids[:tokens], self._starts[:tokens], self._places[:tokens], strict=True):
            row = places[response]
            parts.append(ids[starts[row] : starts[row + 1]])
        return Support(
            np.concatenate([np.empty(0, np.int32), *parts]), np.array([len(part) for part in parts], dtype=np.int64)
        )


# --- renormalising ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeptTokens:
    """The supports of a batch's N scored tokens. A token without one keeps the whole vocabulary.

    Attributes:
        token_ids: int32 [M + 1], all kept ids one after another, and one more that belongs to none.
        ends: int64 [N + 1], where those of each token begin and end.
    """

    token_ids: Tensor
    ends: Tensor

    @classmethod
    def of(cls, supports: Sequence[Support | None], tokens: Sequence[int], device: torch.device) -> KeptTokens | None:
        """Of responses with so many scored tokens each; None if none has a support."""
        if all(support is None for support in supports):
            return None
        heads = [
            None if support is None else support.head(count) for support, count in zip(supports, tokens, strict=True)
        ]
        ids = [*(head.token_ids for head in heads if head is not None), np.zeros(1, np.int32)]  # never nothing to index
        counts = [
            np.zeros(count, np.int64) if head is None else head.counts
            for head, count in zip(heads, tokens, strict=True)
        ]
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(counts))])
        return cls(torch.from_numpy(np.concatenate(ids)).to(device), torch.from_numpy(ends).to(device))

    @classmethod
    def of_mask(cls, kept_nv: Tensor) -> KeptTokens:
        """Of a bool [N, V]."""
        ids = kept_nv.nonzero()[:, 1].to(torch.int32)
        counts = kept_nv.sum(dim=-1)
        return cls(torch.cat([ids, ids.new_zeros(1)]), torch.cat([counts.new_zeros(1), counts.cumsum(dim=0)]))

    @classmethod
    def joined(cls, parts: Sequence[KeptTokens], device: torch.device) -> KeptTokens:
        """Tokens after tokens."""
        counts = [part.ends.diff() for part in parts]
        ends = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), *counts]).cumsum(dim=0)
        ids = [part.token_ids[:-1] for part in parts]
        return cls(torch.cat([*ids, torch.zeros(1, dtype=torch.int32, device=device)]), ends)

    def supports(self, tokens: Sequence[int]) -> list[Support]:
        """Of responses with so many scored tokens each."""
        ids, ends = self.token_ids.cpu().numpy(), self.ends.cpu().numpy()
        found, start = [], 0
        for count in tokens:
            part = ends[start : start + count + 1]
            found.append(Support(ids[part[0] : part[-1]], np.diff(part)))
            start += count
        return found

    def of_tokens(self, chunk: slice, vocabulary: int) -> PaddedSupport:
        """Of some of the tokens, padded; ids beyond the vocabulary are left out (a source's may be padded further)."""
        ends = self.ends[chunk.start : min(chunk.stop, len(self.ends) - 1) + 1]
        counts = ends.diff()
        place = torch.arange(max(int(counts.max()), 1), device=ends.device)
        kept = place < counts[:, None]
        index = (ends[:-1, None] + place).clamp_(max=len(self.token_ids) - 1)
        ids = self.token_ids[index].long().masked_fill_(~kept, 0)
        kept &= ids < vocabulary
        return PaddedSupport(ids.masked_fill_(~kept, 0), kept, counts == 0)


@dataclass(frozen=True)
class PaddedSupport:
    """Kept ids of n tokens side by side.

    Attributes:
        ids: int64 [n, K], ascending; 0 where there is none.
        kept: bool [n, K], whether there is one.
        whole: bool [n], the token keeps the whole vocabulary, and has no ids here.
    """

    ids: Tensor
    kept: Tensor
    whole: Tensor

    def normaliser(self, logits_nv: Tensor) -> Tensor:
        """log of the sum of exp(logits) over what each token keeps, [n]; differentiable."""
        # A token that keeps everything has a stand-in here: the gradient of an empty sum's logarithm is no number.
        kept = self.kept | self.whole[:, None]
        restricted_n = logits_nv.gather(-1, self.ids).masked_fill(~kept, float("-inf")).logsumexp(dim=-1)
        if not self.whole.any():
            return restricted_n
        return torch.where(self.whole, logits_nv.logsumexp(dim=-1), restricted_n)

    def restrict_(self, values_nv: Tensor) -> Tensor:
        """Sets everything outside the support to 0, in place."""
        inside = values_nv.gather(-1, self.ids).masked_fill_(~self.kept, 0.0)
        values_nv.masked_fill_(~self.whole[:, None], 0.0)
        return values_nv.scatter_add_(-1, self.ids, inside)  # padding adds 0 to the first id
