"""A vLLM engine that stays in memory while its agent's weights change, and is trusted only after it has been checked.

Taking over new weights takes milliseconds, a new engine many seconds. But a reload can fail without a word (weights
that stay as they were, stale caches), so after every one a probe is scored by vLLM and by the training stack from the
same checkpoint; where they disagree, the engine is started anew and checked again before a single rollout is drawn.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hacpo.config import EngineSettings
from hacpo.engines.base import Scorer
from hacpo.engines.tokenizers import ChatTokenizer
from hacpo.engines.vllm import VllmEngine
from hacpo.errors import ModelError

PROBE_TOKENS = 64
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest mean difference of the probe's log-probabilities, in nats per token. Measured in float32: 3e-6; a head left
over from other weights: whole nats. bfloat16 rounds logits of unlikely tokens by up to a tenth."""


@dataclass
class Resident:
    """One agent's engine, the policy whose weights it holds, and what it took to bring it there."""

    settings: EngineSettings
    engine: VllmEngine | None = None
    policy: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last `at`: starts, reloads, seconds, probe difference."""

    def at(self, folder: Path, policy: str, tokenizer: ChatTokenizer, scorer: Scorer) -> VllmEngine:
        """The engine with the weights of `folder`, checked against `scorer` unless it already held them.

        Raises:
            ModelError: vLLM does not start, or disagrees with the training stack even after a fresh start.
        """
        self.metrics = {"vllm_starts": 0, "vllm_reloads": 0, "vllm_seconds": 0.0}
        if self.engine is not None and self.policy == policy:
            return self.engine
        begun = time.perf_counter()
        difference = self._reloaded(folder, tokenizer, scorer) if self.engine is not None else float("inf")
        if not difference <= TOLERANCE[self.settings.dtype]:
            difference = self._started(folder, tokenizer, scorer)
        self.policy = policy
        self.metrics |= {"vllm_seconds": round(time.perf_counter() - begun, 3), "vllm_probe_difference": difference}
        assert self.engine is not None
        return self.engine

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
            _tell(f"{folder}: vLLM could not take over the weights ({error}); it is started again")
            return float("inf")
        if not difference <= TOLERANCE[self.settings.dtype]:
            _tell(f"{folder}: after the reload vLLM is off by {difference:.3g} nats a token; it is started again")
        return difference

    def _started(self, folder: Path, tokenizer: ChatTokenizer, scorer: Scorer) -> float:
        self.close()
        self.metrics["vllm_starts"] = 1
        self.engine = VllmEngine(folder, self.settings, eos_token_ids=tokenizer.stop_token_ids)
        difference = _probe_difference(self.engine, tokenizer, scorer)
        if not difference <= TOLERANCE[self.settings.dtype]:
            self.close()
            raise ModelError(
                "vLLM and the training stack disagree about this model, so no rollout was drawn",
                where=folder,
                expected=f"log-probabilities within {TOLERANCE[self.settings.dtype]:g} nats a token",
                found=f"{difference:.3g}",
                remedy="set engine.name to transformers, or engine.dtype to float32",
            )
        return difference


def _probe_difference(engine: VllmEngine, tokenizer: ChatTokenizer, scorer: Scorer) -> float:
    """Mean difference of a fixed sequence's log-probabilities between vLLM and the training stack, at temperature 1."""
    prompt = tokenizer.render("probe", [{"role": "user", "content": "1+1=?"}])
    drawn = np.random.Generator(np.random.Philox(0)).integers(0, tokenizer.vocabulary_size, PROBE_TOKENS)
    longest = engine.longest - 1  # scoring a sequence takes one new token
    token_ids = [*prompt, *(int(token) for token in drawn)][:longest]
    wanted = scorer.score([(token_ids[:1], token_ids[1:])], temperature=1.0)[0]
    return float(np.abs(engine.probe(token_ids) - wanted).mean())


def _tell(line: str) -> None:
    print(f"hacpo: {line}", file=sys.stderr)
