"""Floating-point operations: 2 for each parameter that a token is multiplied with, and attention on top."""

from __future__ import annotations

from dataclasses import dataclass

from hacpo.settings.root import Settings
from hacpo.tools.estimate.shapes import ModelShape
from hacpo.tools.estimate.workload import AgentWork, Drawn, together


@dataclass(frozen=True)
class Flops:
    """One agent's FLOPs of a step by part, and of one evaluation."""

    sampling: float
    rescoring: float
    update: float
    evaluation: float

    @property
    def step(self) -> float:
        """A step without its evaluation."""
        return self.sampling + self.rescoring + self.update


def forward_flops(shape: ModelShape, length: float) -> float:
    """FLOPs per token of a forward pass over sequences of `length` tokens: 2 a parameter, and 2 L A S of attention."""
    return 2 * shape.multiplied + 2 * shape.layers * shape.attention_width * length


def agent_flops(settings: Settings, shape: ModelShape, work: AgentWork) -> Flops:
    """FLOPs of one agent: a forward pass over what it samples, the same to rescore it, three or four to learn."""
    # Recomputed activations cost one more. So do a KL penalty, and the learner's own old policy of others' responses.
    passes = 4 if settings.optimizer.gradient_checkpointing else 3
    passes += settings.algorithm.loss.kl_coef > 0
    passes += work.pooled > work.step.responses and settings.algorithm.importance.reference == "self"
    sampled = _forward(shape, together([work.step, work.side]))
    learned = forward_flops(shape, work.learned_tokens / work.learned) * work.learned_tokens
    return Flops(sampled, sampled, passes * learned, _forward(shape, work.evaluation))


def _forward(shape: ModelShape, drawn: Drawn) -> float:
    tokens = drawn.prompt_tokens + drawn.tokens
    return tokens * forward_flops(shape, tokens / drawn.responses) if drawn.responses else 0.0
