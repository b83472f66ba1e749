"""What a stage asks of an engine, whichever library does the work.

Everything passes as token ids and numpy arrays. An engine reports log-probabilities at the temperature it samples at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

OnProgress = Callable[[int, int], None]
"""Called with (responses done, responses in all)."""


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
        stop: texts that end a response with the token that completes the first of them (`hacpo.stopping`).
    """

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class SampledResponse:
    """One drawn response.

    Attributes:
        token_ids: as sampled, with EOS when it stopped by itself, or with the token that completes a stop string.
        logprobs: float32, one per token, of the distribution sampled from.
        finish_reason: `stop` (EOS or a stop string) or `length`.
    """

    token_ids: list[int]
    logprobs: npt.NDArray[np.float32]
    finish_reason: Literal["stop", "length"]


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
        """Log-probability of every response token of each (prompt, response), float32."""
