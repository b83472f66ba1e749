"""Everything a run depends on, as one frozen tree: what `pipelines/<run>/params.yaml` may say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from hacpo.settings.agents import AgentSampling, AgentSettings, PromptSettings, _inherited
from hacpo.settings.algorithm import AlgorithmSettings
from hacpo.settings.base import NAME, Section, knob
from hacpo.settings.engine import EngineSettings, LauncherSettings
from hacpo.settings.evaluation import EvaluationSettings
from hacpo.settings.executor import ExecutorSettings
from hacpo.settings.gym_tasks import GymTask, refuse_other_tasks
from hacpo.settings.training import BatchSettings, OptimizerSettings, PoolSettings
from hacpo.settings.verification import VerificationSettings

SPLITS = ("train", "heldout", "final")
"""What the problems of a task are divided into by their texts' hashes; `arithmetic` has no `final`."""


class DataSet(Section):
    """Where the problems of one `<set>/<split>` come from."""

    path: str | None = knob(
        None, doc="A Parquet file with problem_id, problem, answer (solution, subject, level, source optional)."
    )
    task: Literal["arithmetic", "reasoning_gym"] | None = knob(
        None, doc="Make the problems: short arithmetic in four families, or a mixture of reasoning-gym's tasks."
    )
    mixture: dict[str, GymTask] = knob(
        default_factory=dict, doc="With `task: reasoning_gym`: task -> its share and options (docs/data.md)."
    )
    split: Literal["train", "heldout", "final"] | None = knob(
        None,
        doc="With `task`: which side of the hash split. `final`, which `reasoning_gym` alone has, is a second held-out "
        "fifth, for a study to look at once.",
    )
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

    @model_validator(mode="after")
    def _mixed(self) -> DataSet:
        if bool(self.mixture) != (self.task == "reasoning_gym"):
            raise ValueError("`mixture` belongs to `task: reasoning_gym`, which needs one")
        if self.split == "final" and self.task != "reasoning_gym":
            raise ValueError("`split: final` belongs to `task: reasoning_gym`")
        refuse_other_tasks(self.mixture)
        return self


class DataSettings(Section):
    """Problems to train and evaluate on."""

    train: str = knob(doc="The `<set>/<split>` to train on.")
    sets: dict[str, DataSet] = knob(doc="`<set>/<split>` -> where it comes from.")


class SamplingSettings(AgentSampling):
    """How rollouts are drawn. All but `group_size` may differ between agents (`agents.<name>.sampling`)."""

    group_size: int = knob(doc="G: responses per prompt and agent.", unit="responses", source="section 3.1", ge=1)


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


class Settings(Section):
    """Everything a run depends on."""

    seed: int = knob(doc="Every random choice derives from it.", ge=0)
    start_seed: int | None = knob(
        None,
        doc="What the warm-up of agents made from scratch derives from instead, so that runs of different `seed` may "
        "begin with the same agents (docs/sweep.md). null: `seed`.",
        ge=0,
    )
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
    executor: ExecutorSettings = ExecutorSettings()

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

    def learned_from(self, learner: str) -> list[str]:
        """The agents whose responses a learner trains on, in the order of params.yaml."""
        return list(self.agents) if self.algorithm.rollouts.share else [learner]

    def compared_with(self, learner: str) -> list[str]:
        """The agents whose rewards a learner's responses are measured against, in the order of params.yaml."""
        return list(self.agents) if self.algorithm.rollouts.coupled else [learner]

    @property
    def dealt(self) -> bool:
        """Whether a step's responses are dealt to ranks one by one, rather than split over its updates by prompt."""
        loss = self.algorithm.loss
        return loss.minibatch_order == "balanced" or loss.ranks > 1

    @property
    def fsdp(self) -> bool:
        """Whether FSDP holds the model that is trained: several processes share it, or it has bfloat16's float32
        masters."""
        return self.launcher.world_size > 1 or self.engine.dtype != "float32"

    def evaluated(self, step: int) -> bool:
        """Whether the agents are evaluated after `step`: at the start, every so many steps, and at the end."""
        return step % self.evaluation.every == 0 or step == self.steps

    @property
    def updates_per_step(self) -> int:
        """Updates of one agent in one step: those of a pass over its responses, times the passes."""
        return self.updates_per_pass * self.algorithm.rollouts.passes

    @property
    def updates_per_pass(self) -> int:
        """Updates that see a response once: U, times the group multiplier, times the groups trained on for each
        problem: n when sharing, under `select: rescue` 1, under `sample` the two fractions together (halves up)."""
        base = -(-self.batch.prompts // self.batch.minibatch_prompts) * self.algorithm.rollouts.group_multiplier
        rollouts = self.algorithm.rollouts
        if rollouts.select == "sample" and len(self.agents) > 1:
            return max(1, math.floor(base * (rollouts.own_fraction + rollouts.external_fraction) + 0.5))
        return base * (self.sources if rollouts.select == "all" else 1)

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
        compared = (len(self.agents) if self.algorithm.rollouts.coupled else 1) * self.responses_per_prompt
        if compared < 2:
            raise ValueError(
                f"sampling.group_size: recipe {self.algorithm.recipe!r} compares responses to one prompt and needs at "
                f"least 2, found {compared}"
            )
        baseline = self.algorithm.advantage.baseline
        if baseline in ("own", "group") and self.responses_per_prompt < 2:
            raise ValueError(
                f"sampling.group_size: baseline {baseline!r} compares an agent's own responses to one prompt and needs "
                f"at least 2, found {self.responses_per_prompt}"
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
            if self.verification.is_function and any(one.kind == "maj" for one in self.evaluation.reported(name)):
                raise ValueError(
                    f"evaluation.metrics.{name}: maj needs answers to vote on, but verification.reward is a function, "
                    "which extracts none"
                )
        return self

    @model_validator(mode="after")
    def _gym_scores_gym(self) -> Settings:
        by_gym = self.verification.is_gym
        for name in sorted({self.data.train, *(benchmark.data for benchmark in self.evaluation.benchmarks.values())}):
            task = self.data.sets[name].task
            if task == "reasoning_gym" and self.verification.is_math:
                raise ValueError(
                    f"data.sets.{name}: reasoning_gym's problems have its scorers; set verification.reward: "
                    "reasoning_gym"
                )
            if task not in (None, "reasoning_gym") and by_gym:
                raise ValueError(
                    f"data.sets.{name}: verification.reward: reasoning_gym scores its own problems alone, and these "
                    f"are of task {task}"
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
        loss, updates = self.algorithm.loss, self.updates_per_pass
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
        updates, rollouts = self.updates_per_pass, self.algorithm.rollouts
        if self.dealt:
            return self
        if rollouts.share and len(self.agents) > 1 and self.algorithm.loss.minibatch_order == "self_first":
            updates -= updates // len(self.agents)  # own responses have their updates, cross responses the others
        if rollouts.select == "sample":
            groups, _ = rollouts.groups_drawn(self.batch.prompts)
            if updates > groups:
                raise ValueError(
                    f"algorithm.rollouts.own_fraction: {groups} own groups cannot be split over {updates} updates; "
                    "raise it, batch.prompts or batch.minibatch_prompts"
                )
        if updates > self.batch.prompts:
            raise ValueError(
                f"batch.prompts: {self.batch.prompts} prompts cannot be split over {updates} updates; "
                "raise batch.prompts or batch.minibatch_prompts"
            )
        return self
