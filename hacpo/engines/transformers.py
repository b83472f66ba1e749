"""Sampling and scoring with transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hacpo.algorithm.batching import batches, most_tokens
from hacpo.algorithm.support import Support
from hacpo.callbacks import OnProgress
from hacpo.engines.decoding import decode
from hacpo.engines.drawing import Responses
from hacpo.engines.interface import SampledResponse, SamplingParameters, SamplingRequest, ScoredResponse
from hacpo.engines.training.logprobs import collate, support_scores, token_logprobs


class TransformersEngine:
    """A loaded model as sampler and scorer.

    Args:
        model: a causal language model in evaluation mode.
        eos_token_ids: tokens that end a response.
        pad_token_id: filler; never scored.
        batch_size: most responses handled together.
        batch_tokens: most tokens scored together, padding included; None: as many as suit the device.
        decode: text of token ids that continue a prompt; needed for stop strings only.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        batch_size: int,
        batch_tokens: int | None = None,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        self._decode = decode
        self._model = model
        self._eos = list(eos_token_ids)
        self._pad = pad_token_id
        self._batch_size = batch_size
        self._batch_tokens = batch_tokens

    @torch.inference_mode()
    def sample(
        self,
        requests: Sequence[SamplingRequest],
        parameters: SamplingParameters,
        on_progress: OnProgress | None = None,
    ) -> list[SampledResponse]:
        """See `interface.Sampler`."""
        responses: list[SampledResponse] = []
        for start in range(0, len(requests), self._batch_size):
            batch = requests[start : start + self._batch_size]
            growing = Responses(batch, parameters, self._eos, self._decode)
            prompts = [request.prompt_token_ids for request in batch]
            decode(self._model, prompts, self._pad, parameters.max_new_tokens, growing)
            responses += growing.finished()
            if on_progress:
                on_progress(len(responses), len(requests))
        return responses

    @torch.inference_mode()
    def score(
        self,
        sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        temperature: float,
        on_progress: OnProgress | None = None,
    ) -> list[npt.NDArray[np.float32]]:
        """See `interface.Scorer`."""
        scored: dict[int, npt.NDArray[np.float32]] = {}
        for rows in self._batches(sequences):
            batch = [sequences[row] for row in rows]
            values = token_logprobs(self._model, collate(batch, self._pad, self._model.device), temperature)
            for row, logprobs in zip(rows, values.cpu().numpy(), strict=True):
                scored[row] = logprobs[: len(sequences[row][1])].copy()
            if on_progress:
                on_progress(len(scored), len(sequences))
        return [scored[index] for index in range(len(sequences))]

    @torch.inference_mode()
    def score_truncated(
        self,
        sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
        parameters: SamplingParameters,
        supports: Sequence[Support] | None,
    ) -> list[ScoredResponse]:
        """See `interface.Scorer`."""
        scored: dict[int, ScoredResponse] = {}
        for rows in self._batches(sequences):
            known = None if supports is None else [supports[row] for row in rows]
            batch = collate([sequences[row] for row in rows], self._pad, self._model.device, known)
            scores = support_scores(
                self._model, batch, parameters.temperature, top_p=parameters.top_p, top_k=parameters.top_k
            )
            counts = [len(sequences[row][1]) for row in rows]
            ends = np.cumsum(counts)[:-1]
            parts = [np.split(values.cpu().numpy(), ends) for values in (scores.logprobs, scores.support_logprobs)]
            for row, *columns in zip(rows, *parts, scores.support.supports(counts), strict=True):
                scored[row] = ScoredResponse(*columns)
        return [scored[index] for index in range(len(sequences))]

    def _batches(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[list[int]]:
        """Which sequences are scored together: those of similar length."""
        lengths = [len(prompt) + len(response) for prompt, response in sequences]
        order = sorted(range(len(sequences)), key=lengths.__getitem__)
        tokens = most_tokens(self._batch_tokens, self._model.device.type)
        for part in batches([lengths[index] for index in order], most_rows=self._batch_size, most_tokens=tokens):
            yield [order[at] for at in part]
