"""What one agent is: where its weights come from, how it is asked, and how it samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from hacpo.settings.base import Section, knob
from hacpo.settings.gym_tasks import GymTask, refuse_other_tasks


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
    mixture: dict[str, GymTask] = knob(
        default_factory=dict,
        doc="Problems to learn from: tasks of reasoning-gym, as in `data.sets` (docs/data.md); their `train` split "
        "alone. Empty: the four families of arithmetic.",
    )
    problems: int = knob(4000, doc="With `mixture`: how many problems.", unit="problems", ge=1)
    guessing: dict[str, float] = knob(
        default_factory=dict,
        doc="Task family (`chains`, `linear`, `modular`, `words`, or the mixture's tasks) -> how often the agent is "
        "taught to begin with a box, guessing, instead of a step: a high share makes the family a weak one. Families "
        "not named: 0.",
    )

    @model_validator(mode="after")
    def _shares(self) -> WarmupSettings:
        refuse_other_tasks(self.mixture)
        for family, share in self.guessing.items():
            if not 0 <= share <= 1:
                raise ValueError(f"guessing.{family} must be a share from 0 to 1, found {share}")
        return self


class ModelWarmupSettings(Section):
    """Short supervised warm-up of a model that exists, before step 0."""

    steps: int = knob(doc="Optimizer steps.", unit="steps", ge=1)
    batch_size: int = knob(8, doc="Texts per optimizer step.", unit="texts", ge=1)
    learning_rate: float = knob(
        2e-5, doc="Peak: a linear rise over a twentieth of the steps, then a cosine to zero.", gt=0
    )
    families: tuple[str, ...] = knob(
        (),
        doc="Families of arithmetic to learn from (`chains`, `linear`, `modular`, `words`); empty: all four, or the "
        "`mixture`.",
        strict=False,
    )
    mixture: dict[str, GymTask] = knob(
        default_factory=dict,
        doc="Problems to learn from instead: tasks of reasoning-gym, as in `data.sets` (docs/data.md); their `train` "
        "split alone.",
    )
    problems: int = knob(4000, doc="With `mixture`: how many problems.", unit="problems", ge=1)
    prompt: PromptSettings = knob(
        default_factory=PromptSettings, doc="What is asked in it, which the run's `prompt` does not say."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> ModelWarmupSettings:
        if self.families and self.mixture:
            raise ValueError("give `families` of arithmetic or a `mixture` of reasoning-gym's tasks, not both")
        refuse_other_tasks(self.mixture)
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
    vocabulary: Literal["characters", "numbers_words", "digits_words", "gym_characters", "gym_numbers", "gym_words"] = (
        knob(
            doc="Tokens: single characters; characters, numbers 10-99 and whole words; or digits and whole words. "
            "`gym_...`: the same for short tasks of reasoning-gym, whose phrases are one token each (`gym_words`: "
            "their words)."
        )
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
        doc="A Hugging Face model folder with its tokenizer, or a GGUF file (or a folder that holds one), relative to "
        "the project's root; or, where no such folder is there, `owner/name` on the hub, which `warmup` downloads "
        "(docs/models.md).",
    )
    revision: str | None = knob(
        None,
        doc="With a `model` on the hub: its branch, tag or commit; null: the main branch as it is when downloaded. The "
        "checkpoints hold the commit. Of a GGUF file: the SHA-256 that it must have.",
    )
    chat_template: str | None = knob(
        None,
        doc="With `model`: a Jinja file, relative to the project's root, instead of the folder's chat template; null: "
        "the folder's own, or a plain one where it has none (docs/tokenizers.md).",
    )
    warmup: ModelWarmupSettings | None = knob(
        None,
        doc="With `model`: train all of its weights on worked solutions before step 0 (docs/models.md); null: it "
        "starts as it is.",
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
        if self.warmup is not None and self.model is None:
            raise ValueError("`warmup` belongs to `model`; a `tiny` model has its own, `tiny.warmup`")
        if self.chat_template is not None and self.model is None:
            raise ValueError("`chat_template` belongs to `model`; a `tiny` model is made with its own")
        return self


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
