"""Log-probabilities from hidden states without ever holding all logits.

With a vocabulary of 151,936 the logits of one response of 4,096 tokens take 2.3 GiB, and their gradient as much again.
Here tokens go through the head in blocks of some tokens and some of the vocabulary; only one number per token is kept
(the log of the normaliser), and the backward pass computes each block's logits once more. Memory grows with tokens x
width, not with tokens x vocabulary.

Notation: N scored tokens, H width, V vocabulary; n and v of them in a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hacpo.algorithm.batching import CHUNK_LOGITS
from hacpo.engines.truncation import KeptTokens

_CPU_BLOCK_LOGITS = 1 << 21
"""On a CPU: 8 MiB, which stay in its cache while they are computed, exponentiated and multiplied again. A GPU has the
bandwidth, and wants few large products."""

_BLOCK_TOKENS = 1024
"""Most tokens of a block that has a part of the vocabulary; all weights are read for each."""

_PROBE_TOLERANCE = 1e-3
"""Relative to the largest logit; a head with another formula is off by far more, rounding in float32 by far less."""


@dataclass(frozen=True)
class Head:
    """How a model turns its last hidden state into logits: softcap(scale * (hidden @ weight.T + bias)).

    Attributes:
        weight_vh: [V, H], in the model's dtype.
        bias_v: [V]; None: the head has none.
        scale: what the logits are multiplied by.
        softcap: logits become softcap * tanh(logits / softcap); None: they stay.
    """

    weight_vh: Tensor
    bias_v: Tensor | None
    scale: float
    softcap: float | None

    def logits(self, hidden_nh: Tensor) -> Tensor:
        """Logits of hidden states [N, H]: [N, V], float32 whatever the weights are."""
        logits_nv = torch.nn.functional.linear(hidden_nh, self.weight_vh, self.bias_v).float()
        if self.scale != 1:
            logits_nv = logits_nv * self.scale
        return logits_nv if self.softcap is None else self.softcap * torch.tanh(logits_nv / self.softcap)

    def of(self, ids: slice) -> Head:
        """The head of a part of the vocabulary."""
        bias_v = None if self.bias_v is None else self.bias_v[ids]
        return Head(self.weight_vh[ids], bias_v, self.scale, self.softcap)


def output_head(model: Any) -> Head | None:
    """The model's head, checked against the model's own logits once; None where it has another form.

    The formula covers plain heads, those that scale (Cohere, Granite) and those that cap (Gemma 2).
    """
    embeddings = model.get_output_embeddings()
    if embeddings is None or not isinstance(getattr(embeddings, "weight", None), Tensor):
        return None
    config = model.config.get_text_config()
    head = Head(
        embeddings.weight,
        getattr(embeddings, "bias", None),
        float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0),
        getattr(config, "final_logit_softcapping", None),
    )
    known = getattr(model, "_hacpo_plain_head", None)
    if known is None:
        known = _reproduces(model, head)
        model._hacpo_plain_head = known
    return head if known else None


@torch.no_grad()
def _reproduces(model: Any, head: Head) -> bool:
    token_ids = torch.arange(min(8, head.weight_vh.shape[0]), device=head.weight_vh.device)[None]
    try:
        own = model(input_ids=token_ids, use_cache=False).logits.float()
        rebuilt = head.logits(model.get_decoder()(input_ids=token_ids, use_cache=False).last_hidden_state)
    except (AttributeError, TypeError, RuntimeError):
        return False  # no decoder of the usual form
    return own.shape == rebuilt.shape and bool((own - rebuilt).abs().max() <= _PROBE_TOLERANCE * own.abs().max())


def chunked_logprobs(
    hidden_nh: Tensor, targets_n: Tensor, head: Head, temperature: float, support: KeptTokens | None = None
) -> Tensor:
    """log softmax(logits / temperature) at each token's target, float32 [N]; differentiable in hidden states and head.

    Args:
        hidden_nh: last hidden state at each position that predicts a scored token.
        targets_n: the token predicted there, int64.
        head: the model's.
        temperature: sampling temperature.
        support: the softmax is over these ids only; None: over the vocabulary.
    """
    result: Tensor = _ChunkedLogprobs.apply(
        hidden_nh, head.weight_vh, head.bias_v, targets_n, head.scale, head.softcap, temperature, support
    )  # type: ignore[no-untyped-call]
    return result


def chunked_logits(hidden_nh: Tensor, head: Head) -> Iterator[tuple[slice, Tensor]]:
    """Logits of some tokens after others, [n, V] each; for callers that want no gradient."""
    for chunk in chunks(len(hidden_nh), len(head.weight_vh)):
        yield chunk, head.logits(hidden_nh[chunk])


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_nh: Tensor,
        weight_vh: Tensor,
        bias_v: Tensor | None,
        targets_n: Tensor,
        scale: float,
        softcap: float | None,
        temperature: float,
        support: KeptTokens | None,
    ) -> Tensor:
        head = Head(weight_vh, bias_v, scale, softcap)
        top_n = torch.full((len(targets_n),), torch.finfo(torch.float32).min, device=hidden_nh.device)
        total_n, chosen_n = torch.zeros_like(top_n), torch.zeros_like(top_n)
        normaliser_n = torch.zeros_like(top_n)
        for chunk, ids in _blocks(hidden_nh, len(weight_vh), whole=support is not None):
            logits_nv = _over(head.of(ids).logits(hidden_nh[chunk]), temperature)
            rows, columns = _targets_in(targets_n[chunk], ids)
            chosen_n[chunk.start + rows] = logits_nv[rows, columns]
            if support is not None:
                normaliser_n[chunk] = support.of_tokens(chunk, len(weight_vh)).normaliser(logits_nv)
                continue
            before_n, top_n[chunk] = top_n[chunk].clone(), torch.maximum(top_n[chunk], logits_nv.amax(dim=-1))
            total_n[chunk] *= (before_n - top_n[chunk]).exp_()
            total_n[chunk] += logits_nv.sub_(top_n[chunk, None]).exp_().sum(dim=-1)
        if support is None:
            normaliser_n = top_n + total_n.log()
        ctx.save_for_backward(hidden_nh, weight_vh, bias_v, targets_n, normaliser_n)
        ctx.constants = (scale, softcap, temperature, support)
        return chosen_n - normaliser_n

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_n: Tensor) -> tuple[Tensor | None, ...]:
        hidden_nh, weight_vh, bias_v, targets_n, normaliser_n = ctx.saved_tensors
        scale, softcap, temperature, support = ctx.constants
        head = Head(weight_vh, bias_v, scale, softcap)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # Sums over blocks are kept in float32: bfloat16 would drop what later ones add.
        grad_hidden, grad_weight, grad_bias = (
            torch.zeros_like(given, dtype=torch.float32) if wanted else None
            for given, wanted in ((hidden_nh, wants_hidden), (weight_vh, wants_weight), (bias_v, wants_bias))
        )
        grad_n = grad_n * (scale / temperature)
        for chunk, ids in _blocks(hidden_nh, len(weight_vh), whole=support is not None):
            logits_nv = head.of(ids).logits(hidden_nh[chunk])
            slope_nv = None if softcap is None else 1.0 - (logits_nv / softcap).square_()
            # d logprob / d logits = (one-hot(target) - softmax) / temperature, the softmax over what is kept
            grad_nv = _over(logits_nv, temperature).sub_(normaliser_n[chunk, None]).exp_()
            if support is not None:
                support.of_tokens(chunk, len(weight_vh)).restrict_(grad_nv)
            grad_nv.mul_(-grad_n[chunk, None])
            rows, columns = _targets_in(targets_n[chunk], ids)
            grad_nv[rows, columns] += grad_n[chunk.start + rows]
            if slope_nv is not None:
                grad_nv.mul_(slope_nv)
            if grad_bias is not None:
                grad_bias[ids] += grad_nv.sum(dim=0)
            grad_nv = grad_nv.to(weight_vh.dtype)
            if grad_hidden is not None:
                _add_product(grad_hidden[chunk], grad_nv, weight_vh[ids])
            if grad_weight is not None:
                _add_product(grad_weight[ids], grad_nv.T, hidden_nh[chunk])
        return (
            None if grad_hidden is None else grad_hidden.to(hidden_nh.dtype),
            None if grad_weight is None else grad_weight.to(weight_vh.dtype),
            None if grad_bias is None else grad_bias.to(weight_vh.dtype),
            *(None,) * 5,
        )


def _over(logits_nv: Tensor, temperature: float) -> Tensor:
    return logits_nv if temperature == 1 else logits_nv.div_(temperature)


def _targets_in(targets_n: Tensor, ids: slice) -> tuple[Tensor, Tensor]:
    """Which tokens of a block have their target in its part of the vocabulary, and where there."""
    rows = ((targets_n >= ids.start) & (targets_n < ids.stop)).nonzero().squeeze(-1)
    return rows, targets_n[rows] - ids.start


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, with float32 sums whatever the factors are."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda:
        total += torch.mm(left, right, out_dtype=torch.float32)
    else:
        total.addmm_(left.float(), right.float())


def chunks(tokens: int, vocabulary: int) -> Iterator[slice]:
    """Tokens whose logits are held at once."""
    size = max(1, CHUNK_LOGITS // vocabulary)
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def _blocks(hidden_nh: Tensor, vocabulary: int, *, whole: bool) -> Iterator[tuple[slice, slice]]:
    """Tokens and part of the vocabulary whose logits are held at once.

    Args:
        whole: a block needs all logits of its tokens.
    """
    if whole or hidden_nh.device.type != "cpu":
        yield from ((chunk, slice(0, vocabulary)) for chunk in chunks(len(hidden_nh), vocabulary))
        return
    for start in range(0, len(hidden_nh), _BLOCK_TOKENS):
        chunk = slice(start, min(start + _BLOCK_TOKENS, len(hidden_nh)))
        size = max(1, min(CHUNK_LOGITS, _CPU_BLOCK_LOGITS) // (chunk.stop - chunk.start))
        yield from ((chunk, slice(first, min(first + size, vocabulary))) for first in range(0, vocabulary, size))
