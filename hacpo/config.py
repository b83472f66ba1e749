"""One frozen tree of settings: what `pipelines/<run>/params.yaml` may say, with unit and equation for every key.

The file is YAML 1.2 (so `1e-6` is a number). Unknown keys are refused with the nearest known one. `algorithm.recipe`
names a preset (`RECIPES`); any key of the `algorithm` block that the file gives overrides it. The resolved tree is what
every stage reads and what `hacpo resolve` writes to `artifacts/<run>/settings.json`, where DVC tracks each key on its
own.
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hacpo.metrics import AVERAGE, Metric, Series

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,62}[A-Za-z0-9])?")
"""What an agent or run may be called: one path component that is also a DVC stage name."""

_FUNCTION = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""`package.module:function`."""


def knob(default: Any = ..., *, doc: str, unit: str = "", source: str = "", **constraints: Any) -> Any:
    """A documented setting; `unit` and `source` (paper, equation) go to docs/settings.md."""
    return Field(default, description=doc, json_schema_extra={"unit": unit, "source": source}, **constraints)


class Section(BaseModel):
    """Base of every block: frozen, strict types, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# --- algorithm
# ---------------------------------------------------------------------------------------------------------


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
    baseline: Literal["capability", "oracle", "joint", "own", "shrunk"] = knob(
        doc="mu: `capability` (eq. 7); `oracle`, the same with the omega, here and in `discrepancy`, of "
        "`capability.oracle_table` or `oracle_samples` instead of the window's; `joint`, the plain mean of all rewards "
        "(omega = 1); `own`, the learner's own group mean for own and cross responses; `shrunk`, "
        "the own mean shrunk towards the bounded joint mean.",
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
    cross: Literal["stepwise", "own", "none"] = knob(
        doc="Cross responses: `stepwise` [min(1, 1 - cross_delta + m cross_step), 1]; `own`, the same min/clip as own "
        "responses; `none`, unclipped.",
        source="eq. 13, 14",
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
    def _oracle_is_one(self) -> AlgorithmSettings:
        given = [key for key in ("oracle_table", "oracle_samples") if getattr(self.capability, key) is not None]
        if len(given) == 2:
            raise ValueError("capability: give one of `oracle_table` and `oracle_samples`, not both")
        if self.advantage.baseline == "oracle" and not given:
            raise ValueError(
                "advantage.baseline: oracle needs `capability.oracle_table` or `capability.oracle_samples`"
            )
        return self


_HACPO: dict[str, Any] = {
    "rollouts": {"share": True, "group_multiplier": 1},
    "capability": {
        "metric": "reward_mean",
        "window": 5,
        "samples": None,
        "oracle_table": None,
        "oracle_samples": None,
        "floor": 1e-8,
        "ratio_min": 0.1,
        "ratio_max": 10.0,
    },
    "advantage": {
        "epsilon": 1e-6,
        "baseline": "capability",
        "kappa": 4.0,
        "discrepancy": True,
        "cross_baseline": "source",
        "baseline_guard": True,
    },
    "importance": {
        "alpha": 1.0,
        "ratio_norm": "learner_tokens",
        "level": "sequence",
        "reference": "source",
        "score_eos": True,
    },
    "clip": {"own_low": 3e-4, "own_high": 4e-4, "cross": "stepwise", "cross_delta": 0.2, "cross_step": 0.025},
    "loss": {
        "aggregation": "sum",
        "minibatch_order": "mixed",
        "ranks": 1,
        "shuffle": True,
        "kl_coef": 0.0,
        "kl_cap": None,
        "kl_responses": "all",
        "sampler_correction": "none",
        "sampler_correction_cap": 2.0,
    },
}
_OWN_ONLY: dict[str, Any] = {"rollouts": {"share": False}, "advantage": {"baseline": "joint", "discrepancy": False}}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, block by block; neither is touched."""
    result = copy.deepcopy(dict(base))
    for key, value in changes.items():
        inner = result.get(key)
        result[key] = (
            merged(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else copy.deepcopy(value)
        )
    return result


RECIPES: dict[str, dict[str, Any]] = {
    name: merged(_HACPO, changes)
    for name, changes in {
        "hacpo": {},
        "gspo": _OWN_ONLY,
        "gspo_x2": merged(_OWN_ONLY, {"rollouts": {"group_multiplier": 2}}),
        "grpo": merged(_OWN_ONLY, {"importance": {"level": "token"}, "clip": {"own_low": 0.2, "own_high": 0.28}}),
        "naive": {
            "advantage": {"baseline": "joint", "discrepancy": False},
            "importance": {"alpha": 0.0},
            "clip": {"cross": "own"},
        },
        "no_capability_baseline": {"advantage": {"baseline": "joint"}},
        "no_discrepancy": {"advantage": {"discrepancy": False}},
        "no_clip": {"clip": {"cross": "none"}},
        "no_stepwise": {"clip": {"cross_step": 0.0}},
        "reference_code": {
            "capability": {"metric": "positive_rate"},
            "advantage": {"cross_baseline": "learner"},
            "importance": {"ratio_norm": "own_tokens", "score_eos": False},
            "loss": {
                "aggregation": "mean",
                "minibatch_order": "self_first",
                "ranks": 8,
                "shuffle": False,
                "kl_coef": 0.001,
                "kl_cap": 10.0,
                "kl_responses": "own",
            },
        },
        "reference_code_main": {
            "advantage": {"cross_baseline": "learner"},
            "importance": {"ratio_norm": "own_tokens"},
            "loss": {
                "aggregation": "mean",
                "minibatch_order": "balanced",
                "ranks": 8,
                "shuffle": False,
                "kl_coef": 0.001,
                "kl_cap": 10.0,
                "kl_responses": "own",
            },
        },
    }.items()
}
"""Every recipe of the paper as values of the `algorithm` block (ALGORITHM, "The recipes"), and what the authors' two
code bases do where they differ (docs/reference_code.md)."""


# --- agents
# ------------------------------------------------------------------------------------------------------------


def overridden(algorithm: AlgorithmSettings) -> list[str]:
    """The keys that differ from the recipe's preset, as `clip.own_low 0.03 (recipe: 0.0003)`."""
    preset, found = RECIPES[algorithm.recipe], algorithm.model_dump()
    return [
        f"{block}.{key} {found[block][key]} (recipe: {value})"
        for block, values in preset.items()
        for key, value in values.items()
        if found[block][key] != value
    ]


class PromptSettings(Section):
    """From a problem to the messages that a chat template renders."""

    system: str | None = knob(None, doc="A system message, before the user's.")
    user: str = knob("{problem}", doc="The user's message; `{problem}` is replaced by the problem's text.")
    thinking: bool | None = knob(
        None,
        doc="Given to the chat template as `enable_thinking` (and `thinking`): whether the model shall think before it "
        "answers. Refused where the template takes no notice. null: as the template has it (docs/sampling.md).",
    )


MOST_KEPT = 1024
"""`top_k` where `top_p` is given without one: what is kept at each position is stored, and a flat distribution would
keep nearly the whole vocabulary (docs/sampling.md)."""


class AgentSampling(Section):
    """How one agent's rollouts are drawn."""

    temperature: float = knob(1.0, doc="Sampling temperature; log-probabilities are taken at it too.", gt=0)
    top_p: float = knob(1.0, doc="Nucleus mass; below 1 the sampled distribution is truncated.", gt=0, le=1)
    top_k: int | None = knob(
        None,
        doc="Draw from the so many likeliest tokens only, before `top_p`; the sampled distribution is truncated. null: "
        f"from all, but from {MOST_KEPT} where `top_p` is below 1, for the kept ids of every token are stored.",
        unit="tokens",
        ge=1,
    )
    max_new_tokens: int = knob(doc="Longest response.", unit="tokens", ge=1)
    stop: tuple[str, ...] = knob(
        (),
        doc="Texts that end a response where its text first contains one; the token that completes it is the last. "
        "Such a response has no EOS (docs/sampling.md).",
        strict=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _bounded_support(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("top_k") is not None:
            return given
        top_p = given.get("top_p", 1.0)
        cuts = isinstance(top_p, (int, float)) and top_p < 1
        return {**given, "top_k": MOST_KEPT} if cuts else given

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from less than the whole vocabulary."""
        return self.top_p < 1 or self.top_k is not None

    @model_validator(mode="after")
    def _stops_are_text(self) -> AgentSampling:
        for text in self.stop:
            if not text or "\ufffd" in text:
                raise ValueError(f"stop: expected texts of at least one character, without U+FFFD, found {text!r}")
        return self


class WarmupSettings(Section):
    """Supervised warm start of an agent made from scratch."""

    steps: int = knob(doc="Optimizer steps.", unit="steps", ge=1)
    batch_size: int = knob(32, doc="Texts per optimizer step.", unit="texts", ge=1)
    learning_rate: float = knob(
        4e-3, doc="Peak: a linear rise over a twentieth of the steps, then a cosine to zero.", gt=0
    )
    drills: float = knob(
        0.5, doc="Share of texts that are rows of arithmetic facts; the rest are answers to problems.", ge=0, le=1
    )
    slips: float = knob(0.04, doc="Share of worked solutions whose second step is a little off.", ge=0, le=1)
    guessing: dict[str, float] = knob(
        default_factory=dict,
        doc="Task family (`chains`, `linear`, `modular`, `words`) -> how often the agent is taught to begin with a "
        "box, guessing, instead of a step: a high share makes the family a weak one. Families not named: 0.",
    )

    @model_validator(mode="after")
    def _shares(self) -> WarmupSettings:
        for family, share in self.guessing.items():
            if not 0 <= share <= 1:
                raise ValueError(f"guessing.{family} must be a share from 0 to 1, found {share}")
        return self


class TinySettings(Section):
    """A language model made from scratch, small enough for a laptop CPU."""

    architecture: Literal["qwen3", "llama", "gpt_neox"] = knob(doc="Transformers architecture.")
    layers: int = knob(doc="Decoder layers.", ge=1)
    hidden: int = knob(doc="Width of the residual stream.", unit="units", ge=8)
    heads: int = knob(doc="Attention heads.", ge=1)
    intermediate: int | None = knob(None, doc="Width of the MLP; null: four times `hidden`.", unit="units", ge=8)
    context: int = knob(96, doc="Longest prompt plus response.", unit="tokens", ge=16)
    initializer_range: float = knob(0.1, doc="Standard deviation of the initial weights.", gt=0)
    vocabulary: Literal["characters", "numbers_words", "digits_words"] = knob(
        doc="Tokens: single characters; characters, numbers 10-99 and whole words; or digits and whole words."
    )
    warmup: WarmupSettings

    @model_validator(mode="after")
    def _even_heads(self) -> TinySettings:
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden must be a multiple of twice the heads (of {2 * self.heads}), found {self.hidden}")
        return self


class AdapterSettings(Section):
    """A LoRA adapter: the model stays as it is, and two thin matrices beside each chosen layer are trained."""

    rank: int = knob(16, doc="Columns of the one and rows of the other matrix.", ge=1, source="LoRA, section 4.1")
    alpha: int = knob(32, doc="Their product is scaled by alpha / rank.", ge=1, source="LoRA, section 4.1")
    targets: str | list[str] = knob(
        "all-linear",
        doc="Layers that get an adapter: `all-linear` (all but the output head), or the names with which their paths "
        "end, such as [q_proj, v_proj].",
    )

    @model_validator(mode="after")
    def _names(self) -> AdapterSettings:
        if isinstance(self.targets, str):
            usable = self.targets == "all-linear"
        else:
            usable = 0 < len({*self.targets}) == len(self.targets)
        if not usable:
            raise ValueError(f"targets: give `all-linear`, or a list of names with each once, found {self.targets!r}")
        return self


class AgentSettings(Section):
    """One agent: a model folder, or a tiny model made from scratch."""

    model: str | None = knob(
        None,
        doc="A Hugging Face model folder with its tokenizer, relative to the project's root; or, where no such folder "
        "is there, `owner/name` on the hub, which `warmup` downloads (docs/models.md).",
    )
    revision: str | None = knob(
        None,
        doc="With a `model` on the hub: its branch, tag or commit; null: the main branch as it is when downloaded. The "
        "checkpoints hold the commit.",
    )
    chat_template: str | None = knob(
        None,
        doc="With `model`: a Jinja file, relative to the project's root, instead of the folder's chat template; null: "
        "the folder's own, or a plain one where it has none (docs/tokenizers.md).",
    )
    tiny: TinySettings | None = knob(None, doc="Make a tiny model from scratch instead.")
    adapter: AdapterSettings | None = knob(
        None, doc="Train a LoRA adapter beside the model (docs/lora.md); null: train all weights."
    )
    sampling: AgentSampling = knob(doc="How this agent samples; a key that is not given is the run's `sampling`.")
    prompt: PromptSettings = knob(doc="What this agent is asked; a key that is not given is the run's `prompt`.")

    @model_validator(mode="after")
    def _one_of(self) -> AgentSettings:
        if (self.model is None) == (self.tiny is None):
            raise ValueError("give exactly one of `model` (a folder) and `tiny` (made from scratch)")
        if self.revision is not None and self.model is None:
            raise ValueError("`revision` belongs to `model`")
        if self.chat_template is not None and self.model is None:
            raise ValueError("`chat_template` belongs to `model`; a `tiny` model is made with its own")
        return self


# --- data, prompts, sampling
# -------------------------------------------------------------------------------------------


class DataSet(Section):
    """Where the problems of one `<set>/<split>` come from."""

    path: str | None = knob(
        None, doc="A Parquet file with problem_id, problem, answer (solution, subject, level, source optional)."
    )
    task: Literal["arithmetic"] | None = knob(None, doc="Make the problems: short arithmetic in four families.")
    split: Literal["train", "heldout"] | None = knob(None, doc="With `task`: which side of the hash split.")
    problems: int | None = knob(None, doc="With `task`: how many.", unit="problems", ge=1)
    seed: int = knob(0, doc="With `task`: which problems are drawn.")

    @model_validator(mode="after")
    def _one_of(self) -> DataSet:
        if (self.path is None) == (self.task is None):
            raise ValueError("give exactly one of `path` and `task`")
        if self.task and (self.split is None or self.problems is None):
            raise ValueError("`task` needs `split` and `problems`")
        if self.path and (self.split is not None or self.problems is not None):
            raise ValueError("`split` and `problems` belong to `task`, not to `path`")
        return self


class DataSettings(Section):
    """Problems to train and evaluate on."""

    train: str = knob(doc="The `<set>/<split>` to train on.")
    sets: dict[str, DataSet] = knob(doc="`<set>/<split>` -> where it comes from.")


class SamplingSettings(AgentSampling):
    """How rollouts are drawn. All but `group_size` may differ between agents (`agents.<name>.sampling`)."""

    group_size: int = knob(doc="G: responses per prompt and agent.", unit="responses", source="section 3.1", ge=1)


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


class VllmSettings(Section):
    """How vLLM runs."""

    tensor_parallel: int = knob(1, doc="Processes that share each layer.", unit="processes", ge=1)
    memory_fraction: float = knob(
        0.45, doc="Share of a GPU's memory for weights and cache; the rest is for training.", gt=0, le=1
    )
    cpu_cache_gib: int = knob(1, doc="On CPU: memory for the cache.", unit="GiB", ge=1)
    max_model_len: int | None = knob(
        None, doc="Longest prompt plus response; null: the model's context length.", unit="tokens", ge=1
    )
    enforce_eager: bool = knob(False, doc="Neither compile nor capture graphs: a faster start, slower sampling.")
    data_parallel: int = knob(
        1, doc="With `vllm_server`: copies of the model behind one server (`hacpo serve`).", unit="copies", ge=1
    )
    sleep: bool = knob(
        True,
        doc="With `vllm` on a GPU: give weights and cache back to the GPU after each stage's sampling, for what runs "
        "next; the weights are loaded and checked again at the next use.",
    )


class EngineSettings(Section):
    """What samples and scores."""

    name: Literal["auto", "transformers", "vllm", "vllm_server"] = knob(
        "auto",
        doc="Sampling engine. `vllm`: in the stage's own process; `vllm_server`: the servers named in `servers.yaml` "
        "beside params.yaml (docs/engines.md); `auto`: vllm on a GPU where it is installed, else transformers.",
    )
    device: Literal["auto", "cpu", "cuda"] = knob("auto", doc="`auto`: cuda where there is one.")
    dtype: Literal["float32", "bfloat16"] = knob(
        "float32", doc="Of weights and activations; log-probabilities are float32."
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = knob(
        "auto",
        doc="Attention of the training stack. `auto`: what transformers chooses, PyTorch's SDPA where the model has "
        "it; `flash_attention_2` needs its package, a GPU and bfloat16.",
    )
    batch_size: int = knob(256, doc="Most responses sampled or rescored together.", unit="responses", ge=1)
    batch_tokens: int | None = knob(
        None,
        doc="Most tokens rescored together, prompts and padding included; responses of similar length then share a "
        "pass. null: only `batch_size` counts.",
        unit="tokens",
        ge=1,
    )
    save_every: int = knob(
        1024,
        doc="Responses sampled between two saves: after a kill only what was not saved is sampled again.",
        unit="responses",
        ge=1,
    )
    vllm: VllmSettings = VllmSettings()
    threads: int | None = knob(
        None, doc="CPU threads per process; null: all cores. Results are the same bytes only for the same number.", ge=1
    )

    @model_validator(mode="after")
    def _copies_have_a_server(self) -> EngineSettings:
        if self.vllm.data_parallel > 1 and self.name != "vllm_server":
            raise ValueError(
                f"vllm.data_parallel: {self.vllm.data_parallel} copies of a model need a server; set name to "
                "vllm_server and start `hacpo serve`"
            )
        return self


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


class VerificationSettings(Section):
    """How responses are rewarded, and how far hostile text gets."""

    reward: str = knob(
        "math",
        doc="`math`: 1 where the last box holds the gold answer, else 0. `package.module:function`: what this function "
        "of yours returns (docs/verification.md).",
    )
    truncated: Literal["wrong", "boxed"] = knob(
        "wrong",
        doc="What `math` makes of a response that the limit on new tokens cut: `wrong`, no reward whatever it "
        "contains; `boxed`, its last box is judged like any other (without one: no reward).",
        source="`boxed`: verl",
    )
    max_error_rate: float | None = knob(
        None,
        doc="Largest share of `error` and `timeout` among the responses of one table; with more, the stage writes the "
        "table and fails. null: 0.1 with a function, 1 with `math`.",
        ge=0,
        le=1,
    )
    timeout_seconds: float = knob(
        5.0, doc="Longest time for one response; then its verdict is `timeout`.", unit="s", gt=0
    )
    patience_seconds: float = knob(
        60.0,
        doc="Worker time that timeouts may cost one batch of responses; after it the others' limit is a tenth.",
        unit="s",
        ge=0,
    )
    memory_mib: int = knob(
        1024,
        doc="Memory a verification worker may add to its start size; then the verdict is `error`.",
        unit="MiB",
        ge=64,
    )
    workers: int = knob(1, doc="Verification processes.", unit="processes", ge=1)
    max_characters: int = knob(
        1000,
        doc="Longest boxed answer that is parsed; the verdict on a longer one is `error`.",
        unit="characters",
        ge=1,
    )
    max_nesting: int = knob(
        10,
        doc="Deepest nesting of brackets that is parsed (parsing time grows exponentially with it).",
        unit="levels",
        ge=1,
    )
    max_extracted: int = knob(
        200,
        doc="Longest `extracted` kept in a table; of a longer one a digest takes the place of the rest.",
        unit="characters",
        ge=1,
    )

    @property
    def is_math(self) -> bool:
        """Whether answers are compared, rather than responses given to a function."""
        return self.reward == "math"

    @property
    def error_limit(self) -> float:
        """`max_error_rate`, or its default: errors come from the text with `math`, from the code with a function."""
        if self.max_error_rate is not None:
            return self.max_error_rate
        return 1.0 if self.is_math else 0.1

    @model_validator(mode="after")
    def _names_a_function(self) -> VerificationSettings:
        if not self.is_math and not _FUNCTION.fullmatch(self.reward):
            raise ValueError(f"reward must be `math` or `package.module:function`, found {self.reward!r}")
        if not self.is_math and self.truncated != "wrong":
            raise ValueError("truncated is for reward `math`; a function is given the finish reason and decides itself")
        return self


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
        doc="Most tokens per forward pass, prompts and padding included (one response may be longer); null: only "
        "`micro_batch_size` counts.",
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


class LauncherSettings(Section):
    """Processes that compute one agent's update together."""

    processes: int = knob(1, doc="Processes on each machine: one per GPU.", unit="processes", ge=1)
    nodes: int = knob(1, doc="Machines.", unit="machines", ge=1)
    replicas: int = knob(
        1,
        doc="Copies of the model: each is sharded over its part of the processes. 1: one copy over all (FSDP); as many "
        "as there are processes: nothing is sharded (DDP).",
        unit="copies",
        ge=1,
    )
    command: str | None = knob(
        None,
        doc="What starts the processes, followed by `-m stages.update ...`; `{processes}` and `{nodes}` are filled in. "
        "null: `accelerate launch` on this machine.",
    )
    accelerate_config: str | None = knob(
        None,
        doc="File made by `accelerate config` that `accelerate launch` shall follow, relative to the project's root; "
        "`default`: the one in the user's own cache. What it says must fit the other settings (docs/update.md). "
        "null: none, not even that one.",
    )

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.processes * self.nodes

    @property
    def started_by(self) -> list[str] | None:
        """`command` in words, filled in.

        Raises:
            ValueError: it cannot be.
        """
        if self.command is None:
            return None
        try:
            return shlex.split(self.command.format(processes=self.processes, nodes=self.nodes))
        except (KeyError, IndexError):
            raise ValueError("command: only {processes} and {nodes} are filled in; write other braces twice") from None
        except ValueError as error:
            raise ValueError(f"command: {error}") from None

    @model_validator(mode="after")
    def _fits(self) -> LauncherSettings:
        if self.command is not None and self.world_size == 1:
            raise ValueError("command starts several processes; set processes or nodes")
        if self.started_by == []:
            raise ValueError("command is empty")
        if self.accelerate_config is not None and (self.command is not None or self.world_size == 1):
            raise ValueError(
                "accelerate_config is for `accelerate launch`, which starts several processes: "
                + ("name the file in `command`" if self.command is not None else "set processes")
            )
        if self.world_size % self.replicas:
            raise ValueError(f"replicas must divide the {self.world_size} processes, found {self.replicas}")
        if self.nodes > 1 and self.command is None:
            raise ValueError(
                "several nodes need `command`, such as srun --nodes={nodes} --ntasks-per-node=1 torchrun "
                "--nnodes={nodes} --nproc-per-node={processes} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500"
            )
        return self


class Benchmark(Section):
    """One held-out measurement."""

    data: str = knob(doc="The `<set>/<split>` to answer.")
    samples: int = knob(1, doc="Responses per problem.", unit="responses", ge=1)
    temperature: float = knob(0.0, doc="0 is greedy.", ge=0)
    top_p: float = knob(1.0, doc="Nucleus mass.", gt=0, le=1)
    top_k: int | None = knob(
        None, doc="Draw from the so many likeliest tokens only; null: from all.", unit="tokens", ge=1
    )
    max_new_tokens: int | None = knob(
        None, doc="Longest response; null: as in the agent's `sampling`.", unit="tokens", ge=1
    )

    @property
    def drawn(self) -> str:
        """How responses are drawn, for readers."""
        return "greedy" if self.temperature == 0 else f"sampled at temperature {self.temperature:g}"


class EvaluationSettings(Section):
    """When and on what agents are evaluated."""

    every: int = knob(
        5, doc="Evaluate after every so many steps; also before the first and after the last.", unit="steps", ge=1
    )
    benchmarks: dict[str, Benchmark] = knob(doc="Name -> what to measure.")
    metrics: dict[str, list[str]] = knob(
        {},
        doc="Benchmark -> what to report of it, its headline first: `avg`, `best`, `maj`, `pass@k` "
        "(docs/evaluation.md). Of a benchmark that is not named: `avg`. Changing it samples nothing again.",
    )
    average: list[str] | None = knob(
        None,
        doc="Benchmarks whose headlines are averaged, each counting once (the paper's AVG); null: all, if there are "
        "several and no two have the same `data`.",
    )

    def reported(self, benchmark: str) -> tuple[Metric, ...]:
        """What is reported of a benchmark, its headline first."""
        samples = self.benchmarks[benchmark].samples
        return tuple(Metric.parse(text, samples) for text in self.metrics.get(benchmark, ["avg"]))

    @property
    def averaged(self) -> tuple[str, ...]:
        """The benchmarks of the average, in their order; empty where there is none."""
        if self.average is not None:
            return tuple(name for name in self.benchmarks if name in self.average)
        data = [benchmark.data for benchmark in self.benchmarks.values()]
        return tuple(self.benchmarks) if len(data) > 1 and len({*data}) == len(data) else ()

    @property
    def series(self) -> tuple[Series, ...]:
        """What is followed over steps: every benchmark's headline, what else is reported of them, the average."""
        headlines, others = [], []
        for name in self.benchmarks:
            first, *rest = self.reported(name)
            headlines.append(Series(name, name if first.kind == "avg" else f"{name} {first.label}", ((name, first),)))
            others += [Series(f"{name}.{one.label}", f"{name} {one.label}", ((name, one),)) for one in rest]
        averaged = tuple(part for one in headlines if one.name in self.averaged for part in one.parts)
        if averaged:
            others.append(Series(AVERAGE, f"average of {len(averaged)} benchmarks", averaged))
        return (*headlines, *others)

    @property
    def headlines(self) -> tuple[str, ...]:
        """What a step can be the best by: names of benchmarks, and of the average if there is one."""
        return (*self.benchmarks, *([AVERAGE] if self.averaged else []))

    @property
    def leading(self) -> Series | None:
        """The one number where there is room for one: the average, else the first benchmark's headline."""
        series = self.series
        return next((one for one in series if one.name == AVERAGE), series[0] if series else None)

    @model_validator(mode="after")
    def _metrics_fit(self) -> EvaluationSettings:
        known = ", ".join(self.benchmarks)
        if AVERAGE in self.benchmarks:
            raise ValueError(f"benchmarks: {AVERAGE!r} cannot be a name; it stands for the mean over benchmarks")
        for name, listed in self.metrics.items():
            if name not in self.benchmarks:
                raise ValueError(f"metrics: {name!r} is not in evaluation.benchmarks ({known})")
            try:
                metrics = self.reported(name)
            except ValueError as error:
                raise ValueError(f"metrics.{name}: {error}") from None
            if not metrics or len({*metrics}) < len(metrics):
                raise ValueError(f"metrics.{name}: name at least one metric, and each once, found {listed}")
            repeated = next((one.label for one in metrics if one.kind != "avg" and one.k > 1), None)
            if repeated is not None and self.benchmarks[name].temperature == 0:
                raise ValueError(
                    f"metrics.{name}: {repeated} compares responses that differ, but at temperature 0 they are all the "
                    f"same; set evaluation.benchmarks.{name}.temperature"
                )
        if self.average is not None:
            unknown = next((name for name in self.average if name not in self.benchmarks), None)
            if unknown is not None:
                raise ValueError(f"average: {unknown!r} is not in evaluation.benchmarks ({known})")
            if len({*self.average}) < len(self.average) or len(self.average) == 1:
                raise ValueError(f"average: name several benchmarks, each once, or none, found {self.average}")
        return self


class StorageSettings(Section):
    """How tables are cut into files."""

    rows_per_shard: int = knob(4096, doc="Most rows in one Parquet file.", unit="rows", ge=1)


class DiskSettings(Section):
    """How writes reach the disk. No stage reads this: changing it runs nothing again (docs/reliability.md)."""

    fsync: bool = knob(
        True,
        doc="Flush every output, then its folder, before it gets its name, so that a power cut leaves nothing half. "
        "false: for scratch disks, and files that are worth less than the wait. `HACPO_FSYNC=0` in the environment "
        "turns it off for one command or machine.",
        source="fsync(2)",
    )


class RetentionSettings(Section):
    """Which checkpoints stay on disk: the start, the newest, and what a rule names; without a rule, all.

    No stage reads this: changing it trains nothing again (docs/retention.md).
    """

    keep_last: int | None = knob(None, doc="Keep the newest so many checkpoints.", unit="checkpoints", ge=1)
    keep_every: int | None = knob(None, doc="Keep the checkpoint of every so many steps.", unit="steps", ge=1)
    keep_best: str | None = knob(
        None,
        doc="Keep each agent's best checkpoint by the headline of this benchmark, or by `average`; the earliest of "
        "equally good ones.",
    )
    cache: Literal["last", "kept", "none"] | None = knob(
        None,
        doc="Which of the checkpoints that stay are in DVC's cache, by link, so that they follow `dvc checkout` and "
        "travel with `dvc push`: the start and the newest (`last`), all (`kept`) or none. Null: `last`, where that "
        "costs no second copy on disk and nothing private becomes readable to all.",
    )

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is pruned."""
        return self.keep_last is None and self.keep_every is None and self.keep_best is None


class ReportSettings(Section):
    """What the HTML page carries."""

    problems_per_step: int = knob(8, doc="Problems per step whose rollouts can be browsed.", unit="problems", ge=0)
    max_characters: int = knob(4000, doc="Longest response text shown.", unit="characters", ge=80)
    browser_steps: int = knob(40, doc="Steps whose rollouts can be browsed, spread evenly.", unit="steps", ge=0)
    browser_mebibytes: float = knob(
        8.0,
        doc="Most that all browsable rollouts may take; beyond it fewer problems per step are shown, then shorter "
        "texts.",
        unit="MiB",
        gt=0,
    )


INHERITED = ("sampling", "prompt")
"""Blocks of an agent that are laid over the run's block of the same name."""


def _inherited(agents: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Agents with the run's `INHERITED` blocks below their own, so that each says everything about itself."""
    result = {}
    for name, agent in agents.items():
        complete = dict(agent) if isinstance(agent, Mapping) else agent
        for block in INHERITED if isinstance(complete, dict) else ():
            common, own = run.get(block) or {}, complete.get(block) or {}
            if isinstance(common, Mapping) and isinstance(own, Mapping):
                complete[block] = {key: value for key, value in common.items() if key != "group_size"} | dict(own)
        result[name] = complete
    return result


class Settings(Section):
    """Everything a run depends on."""

    seed: int = knob(doc="Every random choice derives from it.", ge=0)
    steps: int = knob(doc="T: training steps.", unit="steps", ge=1, le=9999)
    agents: dict[str, AgentSettings] = knob(doc="Name -> agent; any number of them.", min_length=1)
    algorithm: AlgorithmSettings
    data: DataSettings
    prompt: PromptSettings = PromptSettings()
    sampling: SamplingSettings
    batch: BatchSettings
    engine: EngineSettings = EngineSettings()
    pool: PoolSettings = PoolSettings()
    verification: VerificationSettings = VerificationSettings()
    optimizer: OptimizerSettings
    launcher: LauncherSettings = LauncherSettings()
    evaluation: EvaluationSettings
    storage: StorageSettings = StorageSettings()
    retention: RetentionSettings = RetentionSettings()
    disk: DiskSettings = DiskSettings()
    report: ReportSettings = ReportSettings()

    @model_validator(mode="before")
    @classmethod
    def _agents_inherit(cls, given: Any) -> Any:
        agents = given.get("agents") if isinstance(given, dict) else None
        return {**given, "agents": _inherited(agents, given)} if isinstance(agents, Mapping) else given

    @property
    def agent_names(self) -> tuple[str, ...]:
        """Agents in the order of params.yaml."""
        return tuple(self.agents)

    @property
    def responses_per_prompt(self) -> int:
        """Responses each agent samples per prompt (G times the recipe's multiplier)."""
        return self.sampling.group_size * self.algorithm.rollouts.group_multiplier

    @property
    def sources(self) -> int:
        """Agents whose responses one learns from."""
        return len(self.agents) if self.algorithm.rollouts.share else 1

    @property
    def dealt(self) -> bool:
        """Whether a step's responses are dealt to ranks one by one, rather than split over its updates by prompt."""
        loss = self.algorithm.loss
        return loss.minibatch_order == "balanced" or loss.ranks > 1

    @property
    def updates_per_step(self) -> int:
        """Updates of one agent in one step: U, times n when sharing, times the group multiplier."""
        rollouts = self.algorithm.rollouts
        base = -(-self.batch.prompts // self.batch.minibatch_prompts)
        return base * rollouts.group_multiplier * self.sources

    @model_validator(mode="after")
    def _fit_together(self) -> Settings:
        for name in self.agents:
            if not NAME.fullmatch(name):
                raise ValueError(
                    f"agents: {name!r} cannot be a name; a name is one path component of letters, digits, '-' and '_'"
                )
        for where, wanted in [("data.train", self.data.train)] + [
            (f"evaluation.benchmarks.{name}.data", benchmark.data)
            for name, benchmark in self.evaluation.benchmarks.items()
        ]:
            if wanted not in self.data.sets:
                raise ValueError(f"{where}: {wanted!r} is not in data.sets ({', '.join(sorted(self.data.sets))})")
        for name in self.data.sets:
            if not all(NAME.fullmatch(part) for part in name.split("/")) or name.count("/") != 1:
                raise ValueError(f"data.sets: {name!r} is not of the form <set>/<split>")
        for name in self.evaluation.benchmarks:
            if not NAME.fullmatch(name):
                raise ValueError(f"evaluation.benchmarks: {name!r} cannot be a name")
        best, known = self.retention.keep_best, self.evaluation.headlines
        if best is not None and best not in known:
            raise ValueError(f"retention.keep_best: {best!r} is none of {', '.join(known)}")
        compared = self.sources * self.responses_per_prompt
        if compared < 2:
            raise ValueError(
                f"sampling.group_size: recipe {self.algorithm.recipe!r} compares responses to one prompt and needs at "
                f"least 2, found {compared}"
            )
        baseline = self.algorithm.advantage.baseline
        if baseline == "own" and self.responses_per_prompt < 2:
            raise ValueError(
                "sampling.group_size: baseline 'own' compares an agent's own responses to one prompt and needs at "
                f"least 2, found {self.responses_per_prompt}"
            )
        return self

    @model_validator(mode="after")
    def _capability_has_samples(self) -> Settings:
        samples, most = self.algorithm.capability.samples, self.responses_per_prompt
        if samples is not None and samples > most:
            raise ValueError(
                f"algorithm.capability.samples: {samples} is more than the {most} responses that an agent gives to a "
                "problem (sampling.group_size)"
            )
        return self

    @model_validator(mode="after")
    def _prompts_have_the_problem(self) -> Settings:
        asked = {"prompt": self.prompt} | {f"agents.{name}.prompt": one.prompt for name, one in self.agents.items()}
        for where, prompt in asked.items():
            if "{problem}" not in prompt.user:
                raise ValueError(f"{where}.user: must contain {{problem}}")
        return self

    @model_validator(mode="after")
    def _votes_have_answers(self) -> Settings:
        for name in self.evaluation.benchmarks:
            if not self.verification.is_math and any(one.kind == "maj" for one in self.evaluation.reported(name)):
                raise ValueError(
                    f"evaluation.metrics.{name}: maj needs answers to vote on, but verification.reward is a function, "
                    "which extracts none"
                )
        return self

    @model_validator(mode="after")
    def _prompts_have_room(self) -> Settings:
        longest = self.engine.vllm.max_model_len
        for name, agent in self.agents.items():
            if longest is not None and agent.sampling is not None and longest <= agent.sampling.max_new_tokens:
                raise ValueError(
                    f"engine.vllm.max_model_len: {longest} tokens leave {name}'s responses of max_new_tokens "
                    f"{agent.sampling.max_new_tokens} no room for a prompt"
                )
        return self

    @model_validator(mode="after")
    def _flash_attention_fits(self) -> Settings:
        if self.engine.attention == "flash_attention_2" and (
            self.engine.dtype == "float32" or self.engine.device == "cpu"
        ):
            raise ValueError("engine.attention: flash_attention_2 needs a GPU and engine.dtype bfloat16")
        return self

    @model_validator(mode="after")
    def _ranks_deal_evenly(self) -> Settings:
        loss, updates = self.algorithm.loss, self.updates_per_step
        if loss.minibatch_order == "mixed" and loss.ranks > 1:
            raise ValueError(
                "algorithm.loss.ranks: responses are dealt to ranks under algorithm.loss.minibatch_order self_first or "
                f"balanced, and it is mixed (found {loss.ranks} ranks)"
            )
        responses = self.batch.prompts * self.responses_per_prompt * self.sources
        if self.dealt and responses % (loss.ranks * updates):
            remedy = (
                "make batch.prompts a multiple of batch.minibatch_prompts"
                if responses % updates
                else f"take a divisor of {responses // updates}"
            )
            raise ValueError(
                f"algorithm.loss.ranks: the {responses} responses of a step cannot be dealt evenly to {loss.ranks} "
                f"ranks with {updates} updates each; {remedy}"
            )
        return self

    @model_validator(mode="after")
    def _updates_have_prompts(self) -> Settings:
        updates, rollouts = self.updates_per_step, self.algorithm.rollouts
        if self.dealt:
            return self
        if rollouts.share and len(self.agents) > 1 and self.algorithm.loss.minibatch_order == "self_first":
            updates -= updates // len(self.agents)  # own responses have their updates, cross responses the others
        if updates > self.batch.prompts:
            raise ValueError(
                f"batch.prompts: {self.batch.prompts} prompts cannot be split over {updates} updates; "
                "raise batch.prompts or batch.minibatch_prompts"
            )
        return self
