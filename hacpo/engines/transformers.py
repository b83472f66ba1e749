"""Sampling and scoring with transformers.

Sampling is `generate` with a logits processor that draws each token by inverting the cumulative distribution at a
uniform number of the request's own random stream: a response depends on its request's seed, not on what else is in the
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hacpo.algorithm.batching import batches
from hacpo.algorithm.support import Support
from hacpo.callbacks import OnProgress
from hacpo.engines.interface import SampledResponse, SamplingParameters, SamplingRequest, ScoredResponse
from hacpo.engines.training.logprobs import collate, support_scores, token_logprobs
from hacpo.engines.truncation import SupportRecorder, truncated
from hacpo.tokens.stopping import StopStrings


class _SeededChoice(LogitsProcessor):  # type: ignore[misc]
    """Chooses the next token of every row and leaves only it possible; remembers its log-probability and, if that is
    asked for, what it was drawn from."""

    def __init__(self, uniforms: torch.Tensor, parameters: SamplingParameters) -> None:
        self.uniforms = uniforms  # float64 [B, T]
        self.temperature = parameters.temperature
        self.top_p = parameters.top_p
        self.top_k = parameters.top_k
        self.tokens: list[torch.Tensor] = []
        self.logprobs: list[torch.Tensor] = []
        self.support = SupportRecorder() if parameters.record and parameters.truncates else None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        logprobs = torch.log_softmax(scores.float() / (self.temperature or 1.0), dim=-1)
        if self.temperature == 0:
            chosen = logprobs.argmax(dim=-1, keepdim=True)
        else:
            logprobs = truncated(logprobs, top_p=self.top_p, top_k=self.top_k)
            if self.support is not None:
                self.support.add(logprobs.isfinite())
            cumulative = logprobs.double().exp().cumsum(dim=-1)
            drawn = self.uniforms[:, len(self.tokens), None] * cumulative[:, -1:]
            chosen = torch.searchsorted(cumulative, drawn, right=True).clamp_(max=logprobs.shape[-1] - 1)
        self.tokens.append(chosen.squeeze(-1))
        self.logprobs.append(logprobs.gather(-1, chosen).squeeze(-1))
        return torch.full_like(scores, float("-inf")).scatter_(-1, chosen, 0.0)


class _StopsAtStrings(StoppingCriteria):  # type: ignore[misc]
    """Ends each row with the token that completes a stop string in the row's own response.

    Not transformers' `stop_strings`, which also finds one that begins in the prompt.

    Attributes:
        counts: tokens of the response, of the rows that ended so.
    """

    def __init__(
        self, rows: int, prompt: int, stop: Sequence[str], eos: Sequence[int], decode: Callable[[list[int]], str]
    ) -> None:
        self.counts: dict[int, int] = {}
        self._prompt = prompt
        self._eos = eos
        self._growing = {row: StopStrings(stop, decode) for row in range(rows)}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:  # noqa: ARG002
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if row in self._growing and token in self._eos:
                del self._growing[row]
            elif row in self._growing and self._growing[row].completed_by(token):
                del self._growing[row]
                self.counts[row] = input_ids.shape[1] - self._prompt
        return torch.tensor([row in self.counts for row in range(len(input_ids))], device=input_ids.device)


class TransformersEngine:
    """A loaded model as sampler and scorer.

    Args:
        model: a causal language model in evaluation mode.
        eos_token_ids: tokens that end a response.
        pad_token_id: filler; never scored.
        batch_size: most responses handled together.
        batch_tokens: most tokens scored together, padding included; None: no bound.
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
            responses += self._sample_batch(batch, parameters)
            if on_progress:
                on_progress(len(responses), len(requests))
        return responses

    def _sample_batch(self, batch: Sequence[SamplingRequest], parameters: SamplingParameters) -> list[SampledResponse]:
        device = self._model.device
        longest = max(len(request.prompt_token_ids) for request in batch)
        input_ids = torch.full((len(batch), longest), self._pad, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for row, request in enumerate(batch):
            count = len(request.prompt_token_ids)
            input_ids[row, longest - count :] = torch.tensor(list(request.prompt_token_ids))
            attention_mask[row, longest - count :] = 1
        uniforms = np.stack(
            [np.random.Generator(np.random.Philox(r.seed)).random(parameters.max_new_tokens) for r in batch]
        )
        choice = _SeededChoice(torch.from_numpy(uniforms).to(device), parameters)
        ends: list[_StopsAtStrings] = []
        if parameters.stop:
            assert self._decode is not None, "stop strings need a tokenizer"
            ends.append(_StopsAtStrings(len(batch), longest, parameters.stop, self._eos, self._decode))
        self._model.generate(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            logits_processor=LogitsProcessorList([choice]),
            stopping_criteria=StoppingCriteriaList(ends),
            generation_config=GenerationConfig(
                max_new_tokens=parameters.max_new_tokens,
                do_sample=False,
                eos_token_id=self._eos,
                pad_token_id=self._pad,
            ),
        )
        tokens = torch.stack(choice.tokens, dim=1).cpu().numpy()
        logprobs = torch.stack(choice.logprobs, dim=1).float().cpu().numpy()
        ended = np.isin(tokens, self._eos)
        responses = []
        for row in range(len(batch)):
            stops = [stopping.counts[row] for stopping in ends if row in stopping.counts]
            stops += [*np.flatnonzero(ended[row])[:1] + 1]
            count = int(min(stops, default=tokens.shape[1]))
            responses.append(
                SampledResponse(
                    tokens[row, :count].tolist(),
                    logprobs[row, :count],
                    "stop" if stops else "length",
                    None if choice.support is None else choice.support.of(row, count),
                )
            )
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
        """Which sequences are scored together, in order of length where tokens are bounded."""
        lengths = [len(prompt) + len(response) for prompt, response in sequences]
        order = list(range(len(sequences)))
        if self._batch_tokens is not None:
            order.sort(key=lengths.__getitem__)
        for part in batches(
            [lengths[index] for index in order], most_rows=self._batch_size, most_tokens=self._batch_tokens
        ):
            yield [order[at] for at in part]
