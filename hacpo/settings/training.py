"""One step's batch, the pool it learns from, and the optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from hacpo.settings.base import Section, knob


class BatchSettings(Section):
    """How much each step and each update sees."""

    prompts: int = knob(doc="Prompts per step, the same for every agent.", unit="prompts", ge=1)
    minibatch_prompts: int = knob(
        doc="Prompts per update when an agent learns from its own G responses only. Recipes with more responses per "
        "prompt take fewer prompts per update, so that an update always sees about as many responses.",
        unit="prompts",
        source="section 5.1",
        ge=1,
    )


class PoolSettings(Section):
    """What a learner takes from the others."""

    max_tokens: int | None = knob(
        None,
        doc="Longest prompt plus response a learner trains on; null: its model's context length.",
        unit="tokens",
        ge=1,
    )
    retokenise: Literal["auto", "always"] = knob(
        "auto",
        doc="Whose responses go through text into the learner's tokens: those of agents with another tokenizer, while "
        "equal tokenizers share token ids as sampled (docs/tokenizers.md), or all others'.",
        source="section 3.3",
    )


class OptimizerSettings(Section):
    """AdamW, and how an update's gradient is computed."""

    learning_rate: float = knob(doc="Step size.", gt=0)
    beta1: float = knob(0.9, doc="Decay of the gradient's mean.", ge=0, lt=1)
    beta2: float = knob(0.95, doc="Decay of the gradient's square.", ge=0, lt=1)
    epsilon: float = knob(1e-8, doc="Added to the root of the square.", gt=0)
    weight_decay: float = knob(0.0, doc="Decoupled weight decay.", ge=0)
    max_grad_norm: float = knob(1.0, doc="Gradients are scaled down to this global norm.", gt=0)
    warmup_updates: int = knob(
        0, doc="Updates over which the step size rises linearly from zero.", unit="updates", ge=0
    )
    schedule: Literal["constant", "linear", "cosine"] = knob(
        "constant",
        doc="What the step size does after the warm-up: stays, or falls to `final_rate` of itself by update "
        "`schedule_updates`.",
    )
    schedule_updates: int | None = knob(
        None, doc="Under `linear` and `cosine`: length of the schedule; null: all updates of the run.", ge=1
    )
    final_rate: float = knob(
        0.1, doc="Share of `learning_rate` left at the end, under `linear` and `cosine`.", ge=0, le=1
    )
    micro_batch_size: int = knob(
        64, doc="Most responses per forward pass; gradients add up over an update.", unit="responses", ge=1
    )
    micro_batch_tokens: int | None = knob(
        None,
        doc="Most tokens per forward pass, prompts and padding included (one response may be longer); null: on a CPU "
        "2048, on a GPU only `micro_batch_size` counts.",
        unit="tokens",
        ge=1,
    )
    gradient_checkpointing: bool = knob(
        False,
        doc="Keep only every layer's input for the backward pass and compute the rest again: less memory, same bits.",
    )

    @model_validator(mode="after")
    def _schedule_has_a_length(self) -> OptimizerSettings:
        if self.schedule == "constant" and self.schedule_updates is not None:
            raise ValueError("schedule_updates belongs to schedule linear or cosine")
        return self
