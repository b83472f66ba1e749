"""Tokens drawn from logits, each at a uniform number of its response's own random stream, and kept as responses.

Notation: B responses, b of them in the batch, T most tokens of a response, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hacpo.engines.interface import SampledResponse, SamplingParameters, SamplingRequest
from hacpo.engines.truncation import SupportRecorder, truncated
from hacpo.tokens.stopping import StopStrings

_BLOCK = 512
"""Ids whose probabilities are added up together, in float32; sums over blocks are float64."""


def draw(scores_bv: Tensor, uniforms_b: Tensor) -> tuple[Tensor, Tensor]:
    """The token at which each cumulative distribution passes a uniform number, and its log-probability.

    Blocks of ids are looked at first and then the ids of one block, so that no float64 [b, V] is ever made.

    Args:
        scores_bv: logits at the temperature, float32; -inf is never drawn.
        uniforms_b: float64, in [0, 1).

    Returns:
        int64 [b], float32 [b].
    """
    top_b1 = scores_bv.amax(dim=-1, keepdim=True)
    weights_bv = (scores_bv - top_b1).exp_()
    short = -weights_bv.shape[-1] % _BLOCK
    blocks_bnk = torch.nn.functional.pad(weights_bv, (0, short)).view(len(weights_bv), -1, _BLOCK)
    cumulative_bn = blocks_bnk.sum(dim=-1).double().cumsum(dim=-1)
    total_b1 = cumulative_bn[:, -1:]
    aim_b1 = _below(uniforms_b[:, None] * total_b1, total_b1)
    # Clamped for logits that are no numbers; whoever reads the log-probability sees them.
    block_b1 = torch.searchsorted(cumulative_bn, aim_b1, right=True).clamp_(max=cumulative_bn.shape[-1] - 1)
    before_b1 = torch.nn.functional.pad(cumulative_bn, (1, 0)).gather(-1, block_b1)
    rows = torch.arange(len(weights_bv), device=weights_bv.device)
    within_bk = blocks_bnk[rows, block_b1.squeeze(-1)].double().cumsum(dim=-1)
    place_b1 = torch.searchsorted(within_bk, _below(aim_b1 - before_b1, within_bk[:, -1:]), right=True)
    chosen_b1 = (block_b1 * _BLOCK + place_b1).clamp_(max=scores_bv.shape[-1] - 1)
    logprobs_b1 = scores_bv.gather(-1, chosen_b1) - top_b1 - total_b1.log().float()
    return chosen_b1.squeeze(-1), logprobs_b1.squeeze(-1)


def _below(values: Tensor, bounds: Tensor) -> Tensor:
    """At most the number before the bound, so that what is searched for is there whatever was rounded."""
    return torch.minimum(values, torch.nextafter(bounds, torch.zeros_like(bounds)))


def likeliest(scores_bv: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token and its log-probability: int64 [b], float32 [b]."""
    best_b1 = scores_bv.argmax(dim=-1, keepdim=True)
    logprobs_b1 = scores_bv.gather(-1, best_b1) - scores_bv.logsumexp(dim=-1, keepdim=True)
    return best_b1.squeeze(-1), logprobs_b1.squeeze(-1)


class Responses:
    """B responses as they grow; calling it is `decoding.Choose`.

    Args:
        requests: one for each response.
        eos: tokens that end a response.
        decode: text of a response's tokens; needed for stop strings only.
    """

    def __init__(
        self,
        requests: Sequence[SamplingRequest],
        parameters: SamplingParameters,
        eos: Sequence[int],
        decode: Callable[[list[int]], str] | None,
    ) -> None:
        self._parameters = parameters
        self._eos = np.asarray(eos)
        streams = [np.random.Generator(np.random.Philox(request.seed)) for request in requests]
        self._uniforms = np.stack([stream.random(parameters.max_new_tokens) for stream in streams])  # [B, T]
        self._tokens = np.zeros(self._uniforms.shape, np.int64)
        self._logprobs = np.zeros(self._uniforms.shape, np.float32)
        self._counts = np.zeros(len(requests), np.int64)
        self._stopped = np.zeros(len(requests), np.bool_)
        self._support = SupportRecorder(len(requests)) if parameters.record and parameters.truncates else None
        self._growing: dict[int, StopStrings] = {}
        if parameters.stop:
            assert decode is not None, "stop strings need a tokenizer"
            self._growing = {row: StopStrings(parameters.stop, decode) for row in range(len(requests))}

    def __call__(self, logits_bv: Tensor, rows: list[int]) -> tuple[Tensor, npt.NDArray[np.bool_]]:
        """Draw the next token of each row that has not ended; see `decoding.Choose`."""
        here = np.asarray(rows)
        step = int(self._counts[here].max())
        chosen_b, logprobs_b = self._choose(logits_bv, here, step)
        tokens, going = chosen_b.cpu().numpy(), ~self._stopped[here]
        grown = here[going]
        self._tokens[grown, step] = tokens[going]
        self._logprobs[grown, step] = logprobs_b.cpu().numpy()[going]
        self._counts[grown] += 1
        self._stopped[grown] = np.isin(tokens[going], self._eos)
        for row in grown if self._growing else ():
            if not self._stopped[row]:
                self._stopped[row] = self._growing[row].completed_by(int(self._tokens[row, step]))
        return chosen_b, self._stopped[here]

    def _choose(self, logits_bv: Tensor, here: npt.NDArray[np.intp], step: int) -> tuple[Tensor, Tensor]:
        parameters = self._parameters
        if parameters.temperature == 0:
            return likeliest(logits_bv)
        scores_bv = logits_bv if parameters.temperature == 1 else logits_bv / parameters.temperature
        if parameters.truncates:
            logprobs_bv = torch.log_softmax(scores_bv, dim=-1)
            scores_bv = truncated(logprobs_bv, top_p=parameters.top_p, top_k=parameters.top_k)
            if self._support is not None:
                self._support.add(scores_bv.isfinite(), here)
        return draw(scores_bv, torch.from_numpy(self._uniforms[here, step]).to(scores_bv.device))

    def finished(self) -> list[SampledResponse]:
        """All of them, in the order of their requests."""
        return [
            SampledResponse(
                self._tokens[row, :count].tolist(),
                self._logprobs[row, :count].copy(),
                "stop" if self._stopped[row] else "length",
                None if self._support is None else self._support.of(row, count),
            )
            for row, count in enumerate(self._counts.tolist())
        ]
