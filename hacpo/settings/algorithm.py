"""The algorithm's block: which rollouts, capabilities, advantages, importance ratios, clip intervals and loss."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import model_validator

from hacpo.settings.base import Section, knob


class RolloutUse(Section):
    """Which rollouts an agent learns from."""

    share: bool = knob(doc="Learn from every agent's rollouts (true) or only from one's own.", source="section 3.1")
    group_multiplier: int = knob(
        doc="Each agent samples this many times `sampling.group_size` responses per prompt, "
        "and makes as many times the updates (`gspo_x2`: 2).",
        unit="times",
        source="section 5.1",
        ge=1,
    )
    passes: int = knob(
        doc="How many times a step's updates go through its responses, each time in another order of prompts; ratios "
        "divide by the policy before the first of them.",
        unit="times",
        source="PPO's epochs",
        ge=1,
    )
    share_rewards: bool = knob(
        doc="Beside `share: false`: a response is measured against every agent's rewards (true), although only one's "
        "own responses are learned from, or against the rewards of one's own alone (false).",
        source="XGRPO, arXiv 2605.07244",
    )

    select: Literal["all", "rescue", "sample"] = knob(
        doc="Which of the shared responses a learner trains on: `all`; `rescue`, its own and, for a problem that it "
        "fails and others solve, one of the others' right responses; `sample`, groups (an agent's responses to one "
        "problem) drawn at random.",
        source="`rescue`: SGT, arXiv 2605.07244; `sample`: SAPO, arXiv 2509.08721",
    )
    own_fraction: float = knob(
        doc="Under `select: sample`: own groups trained on, I.", unit="of a step's problems", gt=0, le=1
    )
    external_fraction: float = knob(
        doc="Under `select: sample`: groups of all other agents together trained on, J.",
        unit="of a step's problems",
        ge=0,
    )
    draw_seed: int | None = knob(
        doc="Of what is drawn under `select: rescue` and `sample`. null: the run's `seed`.", ge=0
    )

    @property
    def coupled(self) -> bool:
        """Whether what one agent samples has a part in what another learns."""
        return self.share or self.share_rewards

    def groups_drawn(self, problems: int) -> tuple[int, int]:
        """I, at least 1, and J (others' groups, as far as there are so many) of a step with so many problems under
        `select: sample`; halves are rounded up."""
        own, external = (math.floor(part * problems + 0.5) for part in (self.own_fraction, self.external_fraction))
        return max(1, own), external


class CapabilitySettings(Section):
    """Smoothed capability of each agent."""

    metric: Literal["reward_mean", "positive_rate"] = knob(
        doc="P_t: mean reward of the agent's own responses, or the share of them with a positive reward.",
        source="eq. 9",
    )
    window: int = knob(doc="K: steps that the smoothed capability averages over.", unit="steps", source="eq. 9", ge=1)
    samples: int | None = knob(
        doc="m: P_t is the mean over the first so many of an agent's responses to each problem; all G of them train. "
        "null: over all G.",
        unit="responses",
        source="the authors' later trainer",
        ge=1,
    )
    oracle_table: str | None = knob(
        doc="An oracle for `advantage.baseline: oracle`: a Parquet file with step, agent and capability, relative to "
        "the project's root. null: none.",
    )
    oracle_samples: int | None = knob(
        doc="S, an oracle for `advantage.baseline: oracle`: the mean reward of so many further responses of an agent "
        "to each problem of the step, sampled and verified apart and never learned from. null: none.",
        unit="responses",
        ge=1,
        le=32767,
    )
    floor: float = knob(doc="Smallest smoothed capability, so that a ratio is always finite.", source="eq. 9", gt=0)
    ratio_min: float = knob(doc="Lower bound of the capability ratio omega.", source="eq. 8", gt=0, le=1)
    ratio_max: float = knob(doc="Upper bound of the capability ratio omega.", source="eq. 8", ge=1)


class AdvantageSettings(Section):
    """Baseline, scale and capability discrepancy coefficient."""

    epsilon: float = knob(doc="Added to sigma_joint in the denominator.", source="eq. 6", ge=0)
    baseline: Literal["capability", "oracle", "joint", "own", "shrunk", "group"] = knob(
        doc="mu: `capability` (eq. 7); `oracle`, the same with the omega, here and in `discrepancy`, of "
        "`capability.oracle_table` or `oracle_samples` instead of the window's; `joint`, the plain mean of all rewards "
        "(omega = 1); `own`, the learner's own group mean for own and cross responses; `shrunk`, "
        "the own mean shrunk towards the bounded joint mean; `group`, the mean of the responses that the same agent "
        "gave, and their standard deviation in place of sigma_joint.",
        source="eq. 7",
    )
    kappa: float = knob(
        doc="Weight of the joint mean under `shrunk`, in responses; 0 is `own`.", unit="responses", ge=0
    )
    discrepancy: bool = knob(doc="Multiply a cross advantage by omega (source relative to learner).", source="eq. 10")
    cross_baseline: Literal["source", "learner"] = knob(
        doc="Whose baseline a cross response is measured against, under `capability` and `oracle`: the source's (eq. "
        "10) or the learner's (eq. 50).",
        source="eq. 10, 50",
    )
    baseline_guard: bool = knob(
        doc="Where rewards are 0/1 and a baseline exceeds 1, take that agent's own group mean instead and mark the row."
    )


class ImportanceSettings(Section):
    """Importance ratio and its exponential weight."""

    alpha: float = knob(
        doc="Exponent of the detached ratio that weighs cross responses where it is below 1; 0 is off.",
        source="eq. 12",
        ge=0,
    )
    ratio_norm: Literal["learner_tokens", "own_tokens", "bytes"] = knob(
        doc="Length that a cross log-ratio is divided by: the learner's tokens, each side by its own tokens, or "
        "UTF-8 bytes.",
        source="eq. 11",
    )
    level: Literal["sequence", "token"] = knob(
        doc="Ratio of own responses: one per sequence (GSPO) or one per token (GRPO)."
    )
    reference: Literal["source", "self"] = knob(
        doc="Whose old policy a cross ratio divides by: the source's (eq. 11) or the learner's own.", source="eq. 11"
    )
    score_eos: bool = knob(
        doc="Score the EOS that ends a response, on both sides (true), or leave it out of the pool (false). A response "
        "that is nothing but EOS keeps it."
    )


class ClipSettings(Section):
    """Clip intervals of the importance ratio."""

    own_low: float = knob(doc="Own responses: the ratio is clipped below 1 - own_low.", source="GSPO", ge=0, lt=1)
    own_high: float = knob(doc="Own responses: the ratio is clipped above 1 + own_high.", source="GSPO", ge=0)
    cross: Literal["stepwise", "own", "none", "likelihood"] = knob(
        doc="Cross responses: `stepwise` [min(1, 1 - cross_delta + m cross_step), 1]; `own`, the same min/clip as own "
        "responses; `none`, unclipped; `likelihood`, whatever their ratio and advantage: the learner's mean "
        "log-probability of their tokens is raised, as in supervised training.",
        source="eq. 13, 14; `likelihood`: SGT",
    )
    cross_delta: float = knob(doc="delta: the first update's lower bound is 1 - delta.", source="eq. 13", ge=0, le=1)
    cross_step: float = knob(
        doc="delta_step: how much the lower bound rises with each update within a step.",
        unit="per update",
        source="eq. 14",
        ge=0,
    )


class LossSettings(Section):
    """From per-response terms to one number."""

    aggregation: Literal["sum", "mean"] = knob(
        doc="`sum`: mean over own responses plus, for every other agent, the mean over its responses; `mean`: one "
        "mean over all responses.",
        source="eq. 47",
    )
    cross_weight: float = knob(
        doc="Factor on the terms of cross responses, a KL penalty of theirs included.", source="SGT: lambda", ge=0
    )
    minibatch_order: Literal["mixed", "self_first", "balanced"] = knob(
        doc="`mixed`: prompts shuffled, all their responses in one update; `self_first`: own responses before cross "
        "ones, so that with one rank the earlier updates see own ones; `balanced`: in the order of agents, dealt to "
        "`ranks` by length (docs/reference_code.md).",
        source="`self_first`, `balanced`: the authors' code",
    )
    ranks: int = knob(
        doc="Under `self_first` and `balanced`: deal a step's responses to so many ranks, each of which cuts its part "
        "into the step's updates, as verl does. An order of responses only: no processes are started.",
        unit="ranks",
        source="the authors' code",
        ge=1,
    )
    shuffle: bool = knob(doc="Shuffle a step's prompts before they are split over its updates.")
    kl_coef: float = knob(doc="Weight of the KL penalty to the initial policy (k3 estimator); 0 is off.", ge=0)
    kl_cap: float | None = knob(
        doc="Largest k3 of a token; above it there is no gradient. null: none.", unit="nats", source="verl: 10", gt=0
    )
    kl_responses: Literal["all", "own"] = knob(
        doc="Which responses carry the KL penalty. k3 is unbiased only on the learner's own."
    )
    sampler_correction: Literal["none", "truncated"] = knob(
        doc="Own responses: `truncated` weighs a response's term by min(sampler_correction_cap, p / q), p its "
        "probability under the training stack and q under the engine that sampled it (truncated importance sampling).",
        source="TRL `sequence_truncate`, verl `rollout_is: sequence`",
    )
    sampler_correction_cap: float = knob(doc="Largest weight under `sampler_correction: truncated`.", gt=0)


class AlgorithmSettings(Section):
    """HACPO and what it is compared with, as switches over one code path."""

    recipe: str = knob(doc="The preset that gives every key of this block that the file does not.")
    rollouts: RolloutUse
    capability: CapabilitySettings
    advantage: AdvantageSettings
    importance: ImportanceSettings
    clip: ClipSettings
    loss: LossSettings

    @model_validator(mode="after")
    def _shares_once(self) -> AlgorithmSettings:
        if self.rollouts.share and self.rollouts.share_rewards:
            raise ValueError(
                "rollouts.share_rewards: true shares rewards alone and needs `rollouts.share: false`; "
                "`rollouts.share: true` shares rewards with the responses"
            )
        return self

    @model_validator(mode="after")
    def _selects_what_is_there(self) -> AlgorithmSettings:
        rollouts, order = self.rollouts, self.loss.minibatch_order
        if rollouts.select != "all" and not rollouts.share:
            raise ValueError(f"rollouts.select: {rollouts.select} chooses among shared responses: needs `share: true`")
        if rollouts.select != "all" and order != "mixed":
            raise ValueError(
                f"rollouts.select: {rollouts.select} needs `loss.minibatch_order: mixed`, and it is {order}"
            )
        if rollouts.select != "sample" and (rollouts.own_fraction, rollouts.external_fraction) != (1.0, 1.0):
            raise ValueError(
                "rollouts.own_fraction, rollouts.external_fraction: only `select: sample` draws groups, and it is "
                f"{rollouts.select}"
            )
        return self

    @model_validator(mode="after")
    def _oracle_is_one(self) -> AlgorithmSettings:
        given = [key for key in ("oracle_table", "oracle_samples") if getattr(self.capability, key) is not None]
        if len(given) == 2:
            raise ValueError("capability: give one of `oracle_table` and `oracle_samples`, not both")
        if self.advantage.baseline == "oracle" and not given:
            raise ValueError(
                "advantage.baseline: oracle needs `capability.oracle_table` or `capability.oracle_samples`"
            )
        return self
