"""Log-probabilities from hidden states without ever holding all logits.

With a vocabulary of 151,936 the logits of one response of 4,096 tokens take 2.3 GiB, and their gradient as much again.
Here tokens go through the head in chunks; only one number per token is kept (the log of the normaliser), and the
backward pass computes each chunk's logits once more. Memory grows with tokens x width, not with tokens x vocabulary.

Notation: N scored tokens, H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hacpo.engines.truncation import KeptTokens

CHUNK_LOGITS = 1 << 26
"""Logits held at once, 256 MiB in float32: as large as makes the product efficient, small beside any real model."""

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
        logits_nv = torch.nn.functional.linear(hidden_nh, self.weight_vh, self.bias_v).float() * self.scale
        return logits_nv if self.softcap is None else self.softcap * torch.tanh(logits_nv / self.softcap)


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
        normaliser_n = hidden_nh.new_empty(len(targets_n), dtype=torch.float32)
        chosen_n = torch.empty_like(normaliser_n)
        for chunk in chunks(len(targets_n), len(weight_vh)):
            logits_nv = head.logits(hidden_nh[chunk]).div_(temperature)
            kept = None if support is None else support.of_tokens(chunk, len(weight_vh))
            normaliser_n[chunk] = logits_nv.logsumexp(dim=-1) if kept is None else kept.normaliser(logits_nv)
            chosen_n[chunk] = logits_nv.gather(-1, targets_n[chunk, None]).squeeze(-1)
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
        grad_hidden = torch.empty_like(hidden_nh) if wants_hidden else None
        # Sums over chunks are kept in float32: bfloat16 would drop what later chunks add.
        grad_weight = torch.zeros_like(weight_vh, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias_v, dtype=torch.float32) if wants_bias else None
        for chunk in chunks(len(targets_n), len(weight_vh)):
            logits_nv = head.logits(hidden_nh[chunk])
            slope_nv = None if softcap is None else 1.0 - (logits_nv / softcap).square_()
            # d logprob / d logits = (one-hot(target) - softmax) / temperature, the softmax over what is kept
            grad_nv = logits_nv.div_(temperature).sub_(normaliser_n[chunk, None]).exp_()
            if support is not None:
                support.of_tokens(chunk, len(weight_vh)).restrict_(grad_nv)
            grad_nv.mul_(-grad_n[chunk, None])
            grad_nv.scatter_add_(-1, targets_n[chunk, None], grad_n[chunk, None])
            grad_nv.mul_(scale / temperature)
            if slope_nv is not None:
                grad_nv.mul_(slope_nv)
            if grad_bias is not None:
                grad_bias += grad_nv.sum(dim=0)
            grad_nv = grad_nv.to(weight_vh.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = grad_nv @ weight_vh
            if grad_weight is not None:
                _add_product(grad_weight, grad_nv.T, hidden_nh[chunk])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight_vh.dtype),
            None if grad_bias is None else grad_bias.to(weight_vh.dtype),
            *(None,) * 5,
        )


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
    return (slice(start, start + size) for start in range(0, tokens, size))
