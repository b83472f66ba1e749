"""What a stage asks of an engine, whichever library does the work.

Everything passes as token ids and numpy arrays. An engine reports log-probabilities at the temperature it samples at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from hacpo.algorithm.support import Support
from hacpo.callbacks import OnProgress

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingRequest:
    """One response to draw. The same seed gives the same response, whatever else is in the batch (up to rounding)."""

    prompt_token_ids: Sequence[int]
    seed: int


@dataclass(frozen=True)
class SamplingParameters:
    """How responses are drawn.

    Attributes:
        temperature: 0 is greedy.
        max_new_tokens: longest response.
        top_p: nucleus mass, of what `top_k` leaves.
        top_k: draw from the so many likeliest tokens; None: from all.
        stop: texts that end a response with the token that completes the first of them (`hacpo.tokens.stopping`).
        record: whether responses shall say what each token was drawn from, if the engine knows.
    """

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    record: bool = False

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from less than the whole vocabulary."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k is not None)


VLLM_SECONDS = "vllm_seconds"
"""Key, among a stage's metrics, of how long vLLM took to start or to load weights: no other engine's stage has it."""


@dataclass(frozen=True)
class SampledResponse:
    """One drawn response.

    Attributes:
        token_ids: as sampled, with EOS when it stopped by itself, or with the token that completes a stop string.
        logprobs: float32, one per token, of the distribution sampled from.
        finish_reason: `stop` (EOS or a stop string) or `length`.
        support: what truncated sampling kept at each position; None where nothing was cut, it was not asked for, or the
            engine does not say.
    """

    token_ids: list[int]
    logprobs: npt.NDArray[np.float32]
    finish_reason: FinishReason
    support: Support | None = None


@dataclass(frozen=True)
class ScoredResponse:
    """One response under the training stack.

    Attributes:
        logprobs: float32, one per token, renormalised over the support if there is one.
        support_logprob: float32, log of the mass that the support holds, one per token; None without a support. Added
            to `logprobs` it gives log-probabilities over the whole vocabulary.
        support: what each token was drawn from: as sampled, or what the training stack keeps by the same rule.
    """

    logprobs: npt.NDArray[np.float32]
    support_logprob: npt.NDArray[np.float32] | None = None
    support: Support | None = None


class Sampler(Protocol):
    """Draws responses."""

    def sample(
        self,
        requests: Sequence[SamplingRequest],
        parameters: SamplingParameters,
        on_progress: OnProgress | None = None,
    ) -> list[SampledResponse]:
        """One response per request, in order."""


class Scorer(Protocol):
    """Rescores given responses with the weights and code that training uses."""

    def score(
        self,
        sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        temperature: float,
        on_progress: OnProgress | None = None,
    ) -> list[npt.NDArray[np.float32]]:
        """Log-probability (nats) of every response token of each (prompt, response) at the temperature.

        Returns:
            For each sequence, in order, float32 [tokens of its response].
        """

    def score_truncated(
        self,
        sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
        parameters: SamplingParameters,
        supports: Sequence[Support] | None,
    ) -> list[ScoredResponse]:
        """The same within what truncated sampling kept; where the sampler did not say (None), within what these weights
        and logits keep by the same rule, the sampled token always among it."""


def rescored(
    scorer: Scorer,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    parameters: SamplingParameters,
    supports: Sequence[Support | None],
) -> list[ScoredResponse]:
    """The behaviour policy's log-probability of sampled tokens: of the distribution that `parameters` draw from.

    Args:
        supports: of each response what its sampler kept, for all of them or for none.
    """
    if not parameters.truncates:
        return [ScoredResponse(logprobs) for logprobs in scorer.score(sequences, temperature=parameters.temperature)]
    known = [support for support in supports if support is not None]
    return scorer.score_truncated(sequences, parameters, known if len(known) == len(supports) else None)
