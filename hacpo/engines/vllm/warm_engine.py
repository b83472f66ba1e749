"""A vLLM engine that stays in memory while its agent's weights change, and is trusted only after it has been checked.

Taking over new weights takes milliseconds, a new engine many seconds. But a reload can fail without a word (weights
that stay as they were, stale caches), so after every one a probe is scored by vLLM and by the training stack from the
same checkpoint; where they disagree, the engine is started anew and checked again before a single rollout is drawn.

The engine lives in this process (`VllmEngine`), or is a server that somebody else runs (`VllmServer`): then to start it
anew is to connect and load once more.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hacpo.engines.interface import VLLM_SECONDS, Sampler, Scorer
from hacpo.engines.models.merge import merged_folder
from hacpo.errors import HacpoError, ModelError
from hacpo.settings.engine import EngineSettings
from hacpo.tokens.tokenizers import ChatTokenizer

PROBE_TOKENS = 64
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest mean difference of the probe's log-probabilities, in nats per token. Measured in float32: 3e-6; a head left
over from other weights: whole nats. bfloat16 rounds logits of unlikely tokens by up to a tenth."""


class Reloadable(Sampler, Protocol):
    """A sampler whose weights can be replaced."""

    @property
    def remedy(self) -> str:
        """What a user can do if it computes something else than the training stack."""

    @property
    def longest(self) -> int:
        """Most tokens of a sequence, prompt and response."""

    def load(self, folder: Path) -> None:
        """Take over the weights of a model folder; wakes up if asleep."""

    def probe(self, token_ids: Sequence[int]) -> list[npt.NDArray[np.float64]]:
        """Log-probability (nats) of every token but the first, at temperature 1: float64 [tokens - 1] from each copy of
        the model."""

    def sleep(self) -> bool:
        """Sampling is over for now: give memory back. Returns whether the weights must be loaded again."""

    def close(self) -> None:
        """End."""


Start = Callable[[Path, ChatTokenizer], Reloadable]
"""From a model folder and its tokenizer to an engine with its weights."""


@dataclass
class Resident:
    """One agent's engine, the policy whose weights it holds, and what it took to bring it there."""

    settings: EngineSettings
    start: Start
    engine: Reloadable | None = None
    policy: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last `at`: starts, reloads, seconds, probe difference."""

    def at(self, folder: Path, policy: str, tokenizer: ChatTokenizer, scorer: Scorer, scratch: Path) -> Reloadable:
        """The engine with the weights of `folder`, checked against `scorer` unless it already held them.

        Args:
            scratch: where an adapter is merged with its base, if the folder holds one (see `merged_folder`).

        Raises:
            ModelError: vLLM does not start, or disagrees with the training stack even after a fresh start.
        """
        self.metrics = {"vllm_starts": 0, "vllm_reloads": 0, VLLM_SECONDS: 0.0}
        if self.engine is not None and self.policy == policy:
            return self.engine
        self.policy = ""  # not known while its weights are being replaced
        begun = time.perf_counter()
        with merged_folder(folder, scratch, self.settings) as whole:
            difference = self._reloaded(whole, tokenizer, scorer) if self.engine is not None else float("inf")
            if not difference <= TOLERANCE[self.settings.dtype]:
                difference = self._started(whole, tokenizer, scorer)
        self.policy = policy
        self.metrics |= {VLLM_SECONDS: round(time.perf_counter() - begun, 3), "vllm_probe_difference": difference}
        assert self.engine is not None
        return self.engine

    def release_memory(self) -> None:
        """Sampling is over for now: what runs next may have the memory (`engine.vllm.sleep`), and a server may be given
        other weights. The next `at` loads and checks them again."""
        if self.engine is not None and self.policy and self.engine.sleep():
            self.policy = ""

    def close(self) -> None:
        """Give the engine's memory back."""
        if self.engine is not None:
            self.engine.close()
        self.engine, self.policy = None, ""

    def _reloaded(self, folder: Path, tokenizer: ChatTokenizer, scorer: Scorer) -> float:
        assert self.engine is not None
        self.metrics["vllm_reloads"] = 1
        try:
            self.engine.load(folder)
            difference = _probe_difference(self.engine, tokenizer, scorer)
        except Exception as error:
            # Whatever vLLM raises, an engine that failed a reload is in no known state.
            _tell(f"{folder}: vLLM could not take over the weights ({error}); once more from the start")
            return float("inf")
        if not difference <= TOLERANCE[self.settings.dtype]:
            _tell(f"{folder}: after the reload vLLM is off by {difference:.3g} nats a token; once more from the start")
        return difference

    def _started(self, folder: Path, tokenizer: ChatTokenizer, scorer: Scorer) -> float:
        self.close()
        self.metrics["vllm_starts"] = 1
        self.engine = self.start(folder, tokenizer)
        try:
            difference = _probe_difference(self.engine, tokenizer, scorer)
        except HacpoError:
            self.close()
            raise
        if not difference <= TOLERANCE[self.settings.dtype]:
            remedy = self.engine.remedy
            self.close()
            raise ModelError(
                "vLLM and the training stack disagree about this model, so no rollout was drawn",
                where=folder,
                expected=f"log-probabilities within {TOLERANCE[self.settings.dtype]:g} nats a token",
                found=f"{difference:.3g}",
                remedy=remedy,
            )
        return difference


def _probe_difference(engine: Reloadable, tokenizer: ChatTokenizer, scorer: Scorer) -> float:
    """Mean difference of a fixed sequence's log-probabilities between vLLM and the training stack, at temperature 1;
    of several copies the worst."""
    prompt = tokenizer.render("probe", [{"role": "user", "content": "1+1=?"}])
    drawn = np.random.Generator(np.random.Philox(0)).integers(0, tokenizer.vocabulary_size, PROBE_TOKENS)
    longest = engine.longest - 1  # scoring a sequence takes one new token
    token_ids = [*prompt, *(int(token) for token in drawn)][:longest]
    wanted = scorer.score([(token_ids[:1], token_ids[1:])], temperature=1.0)[0]
    return float(np.max([np.abs(found - wanted).mean() for found in engine.probe(token_ids)]))


def _tell(line: str) -> None:
    print(f"hacpo: {line}", file=sys.stderr)
