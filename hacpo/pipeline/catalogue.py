"""The whole pipeline on one page: every stage with the settings and files that it reads, and what it writes.

From an entry follow: the DVC entry (`dvc_files`), the options of its command (`stage_command`) and that there is one
(`hacpo.cli`), the check that it opens and writes nothing else (`declared.DeclaredLayout`) and reads no other setting
(`settings.params.restrict`), what status and audit look for, and which command makes what is missing. A stage is its
body (`stages/`), and its entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from hacpo.artifacts.tables import (
    ADVANTAGES,
    CAPABILITY,
    CHECKPOINT,
    CURVES,
    EVALUATIONS,
    HEADLINES,
    METRICS,
    POOL,
    PROBLEMS,
    PROMPTS,
    REPORT,
    ROLLOUTS,
    SCHEDULE,
    SETTINGS,
    SIDE_ROLLOUTS,
    SIDE_VERDICTS,
    TRACE,
    VERDICTS,
    Artifact,
)
from hacpo.settings import params
from hacpo.settings.agents import INHERITED, AgentSettings
from hacpo.settings.model_source import hub_repository
from hacpo.settings.root import Settings
from hacpo.verifying.function import module_file

if TYPE_CHECKING:
    from pathlib import Path

_T = TypeVar("_T")
When = Callable[[Settings, int], bool]
"""Whether something holds for the settings of a run at a step."""


class RunFolder(Protocol):
    """What an entry may ask of the run (`project.Pipeline`) whose stage it is."""

    @property
    def settings(self) -> Settings:
        """All of them."""

    @property
    def root(self) -> Path:
        """The project's folder."""

    @property
    def settings_files(self) -> tuple[str, ...]:
        """params.yaml and what it extends, relative to the root."""


@dataclass(frozen=True)
class Use:
    """An artifact as a stage reads or writes it.

    Attributes:
        step: that of the stage (`this`), the one before, the first (0), or all of them.
        whose: the agent's whose part of the step it is, or every agent's.
        when: only under some settings or at some steps.
        only: one file of its folder alone.
        without: settings by their block that its stage reads and what it writes here does not depend on: its files do
            not name them, so that changing them leaves its bytes alone.
    """

    artifact: Artifact
    step: Literal["this", "before", "start", "all"] = "this"
    whose: Literal["own", "all"] = "own"
    when: When | None = None
    only: Callable[[Settings], str] | None = None
    without: tuple[str, ...] = ()

    def holds(self, settings: Settings, step: int) -> bool:
        """Whether the stage uses it."""
        return self.when is None or self.when(settings, step)

    def parts(self, agents: Iterable[str], mine: str, steps: tuple[_T, _T, _T]) -> list[tuple[_T | None, str]]:
        """(step, whose) of every part of the artifact that a stage uses: None for all steps, an empty name for what is
        not one agent's.

        Args:
            agents: all of the run; one empty name for all of them together.
            mine: the stage's agent; empty if it serves all.
            steps: the stage's own, the one before, and the start, as the parts shall name them.
        """
        per = self.artifact.per
        if per == "run":
            return [(None, "")]
        step = dict(zip(("this", "before", "start"), steps, strict=True)).get(self.step)
        own = [mine] if mine else []
        return [(step, whose) for whose in ([""] if per == "step" else agents if self.whose == "all" else own)]

    def covers(self, artifact: Artifact, step: int | None, whose: str, *, at: int, mine: str) -> bool:
        """Whether a stage of the step `at` and the agent `mine` uses this artifact, of that step (None: of all of them)
        and of the agent `whose` (empty: of all of them)."""
        parts = self.parts([""], mine, (at, at - 1, 0)) if self.artifact == artifact else []
        return any(of_step in (None, step) and owner in ("", whose) for of_step, owner in parts)


def this(artifact: Artifact, when: When | None = None) -> Use:
    """The agent's own of this step (or the step's, or the run's, where agents or steps have none of their own)."""
    return Use(artifact, when=when)


def before(artifact: Artifact, when: When | None = None) -> Use:
    """The agent's own of the step before."""
    return Use(artifact, "before", when=when)


def start(artifact: Artifact, when: When | None = None) -> Use:
    """The agent's own of step 0."""
    return Use(artifact, "start", when=when)


def of_all(artifact: Artifact, step: Literal["this", "start", "all"] = "this", when: When | None = None) -> Use:
    """Every agent's, or every step's."""
    return Use(artifact, step, "all", when)


@dataclass(frozen=True)
class StageSpec:
    """What a stage is.

    Attributes:
        name: in DVC, in its metrics' folder, and of its command, which those of a side sample share with the others.
        at: when it runs: before all steps, at the start (step 0), in every step, where agents are evaluated, or after
            all.
        per: whether each agent has one (named by `--agent`, or as a learner by `--learner`), or one serves all.
        settings: dotted keys that it reads, `{agent}` standing for the agent's name; DVC re-runs it for these alone.
        reads: artifacts of the run; an attempt to read another is refused.
        writes: artifacts of the run.
        outside: files of the project that it reads, of a run and for an agent, relative to the project's root.
        when: only under some settings.
        metrics: whether it leaves numbers in `metrics/<name>`.
        side_of: the stage that it is for a side sample: its command with `--side`.
        sliced: whether several processes can make its table, each some of the files (`--shard`).
    """

    name: str
    at: Literal["before", "start", "step", "evaluation", "after"]
    per: Literal["run", "agent", "learner"]
    settings: tuple[str, ...]
    reads: tuple[Use, ...]
    writes: tuple[Use, ...]
    outside: Callable[[RunFolder, str], tuple[str, ...]] = field(default=lambda _pipeline, _agent: ())
    when: When | None = None
    metrics: bool = True
    side_of: StageSpec | None = None
    sliced: bool = False

    @property
    def side(self) -> bool:
        """Whether it draws or verifies a side sample."""
        return self.side_of is not None

    @property
    def command(self) -> str:
        """The command that runs it."""
        return self.name if self.side_of is None else self.side_of.name

    def makes(self, *artifacts: Artifact) -> bool:
        """Whether it writes one of these."""
        return any(use.artifact in artifacts for use in self.writes)

    def asked_for(self, settings: Settings, step: int) -> bool:
        """Whether the settings ask for it at all, at a step that has one."""
        return self.when is None or self.when(settings, step)

    def runs(self, settings: Settings, step: int) -> bool:
        """Whether it is one of a step's stages (0: the start's)."""
        due = {"start": step == 0, "step": step > 0, "evaluation": settings.evaluated(step)}.get(self.at, False)
        return due and self.asked_for(settings, step)

    def recorded(self, artifact: Artifact, settings: Settings, agent: str | None) -> dict[str, Any]:
        """The settings that the files of an artifact say it was made with, nested (`hacpo.settings` in a table).

        Args:
            settings: those of the run.
            agent: whose stage it is, where each agent has one.
        """
        without = {block for use in self.writes if use.artifact == artifact for block in use.without}
        read = params.reads(settings, self.settings, agent)
        return {block: value for block, value in read.items() if block not in without}


# --- what uses depend on ---------------------------------------------------------------------------------------------


def _adapters(settings: Settings, step: int) -> bool:
    """The weights of a checkpoint after step 0 are in part those of its base, where any agent trains an adapter."""
    return step > 0 and any(agent.adapter is not None for agent in settings.agents.values())


def _adapters_before(settings: Settings, step: int) -> bool:
    return _adapters(settings, step - 1)


def _later(_settings: Settings, step: int) -> bool:
    """Not in the first step, where the one before is the start: DVC accepts no dependency twice."""
    return step > 1


def _side_sample(settings: Settings, _step: int) -> bool:
    return settings.algorithm.capability.oracle_samples is not None


def _graded(settings: Settings, _step: int) -> bool:
    """Scorers and reward functions get of the problem's row what prompts do not hold."""
    return not settings.verification.is_math


# --- files of the project --------------------------------------------------------------------------------------------


def _settings_files(pipeline: RunFolder, _agent: str) -> tuple[str, ...]:
    return pipeline.settings_files


def _reward_file(pipeline: RunFolder, _agent: str) -> tuple[str, ...]:
    """The module of the run's reward function, where it is a file of the project: editing it re-runs what calls it."""
    verification = pipeline.settings.verification
    file = module_file(verification.reward, pipeline.root) if verification.is_function else None
    return () if file is None else (file.as_posix(),)


def _problem_files(pipeline: RunFolder, _agent: str) -> tuple[str, ...]:
    return tuple(source.path for source in pipeline.settings.data.sets.values() if source.path is not None)


def _model_folder(pipeline: RunFolder, agent: str) -> tuple[str, ...]:
    """The model folder an agent starts from; a model on the hub is no file that DVC could follow."""
    mine = pipeline.settings.agents[agent]
    folder = None if hub_repository(mine.model, pipeline.root) is not None else mine.model
    return tuple(path for path in (folder, mine.chat_template) if path is not None)


def _oracle_table(pipeline: RunFolder, _agent: str) -> tuple[str, ...]:
    table = pipeline.settings.algorithm.capability.oracle_table
    return () if table is None else (table,)


# --- the stages ------------------------------------------------------------------------------------------------------

_START = tuple(f"agents.{{agent}}.{name}" for name in AgentSettings.model_fields if name not in INHERITED)
"""What an agent starts from: all that is said of it but how it is asked and how it samples."""
_SAMPLING = ("seed", "agents.{agent}.sampling", "agents.{agent}.prompt")

_GRADED_BY = Use(PROBLEMS, when=_graded, only=lambda settings: f"{settings.data.train}.parquet")
"""What a scorer or a reward function is given beside a training response."""

RESOLVE = StageSpec(
    "resolve",
    "before",
    "run",
    settings=(),  # every one, from params.yaml itself
    reads=(),
    writes=(this(SETTINGS),),
    outside=_settings_files,
    metrics=False,
)
PREPARE = StageSpec(
    "prepare",
    "before",
    "run",
    settings=("seed", "steps", "data", "batch.prompts"),
    reads=(),
    writes=(
        Use(PROBLEMS, without=("seed", "steps", "batch")),
        this(SCHEDULE),
        Use(PROMPTS, "all", "all", without=("steps", "data")),
    ),
    outside=_problem_files,
)
WARMUP = StageSpec(
    "warmup",
    "start",
    "agent",
    settings=("start_seed", *_START, "engine.threads"),
    reads=(),
    writes=(this(CHECKPOINT),),
    outside=_model_folder,
)
GENERATE = StageSpec(
    "generate",
    "step",
    "agent",
    settings=(*_SAMPLING, "sampling.group_size", "algorithm.rollouts", "engine", "storage"),
    reads=(this(PROMPTS), before(CHECKPOINT), start(CHECKPOINT, _adapters_before)),
    writes=(this(ROLLOUTS),),
    sliced=True,
)
VERIFY = StageSpec(
    "verify",
    "step",
    "agent",
    settings=("verification", "data.train", "storage"),
    reads=(this(PROMPTS), this(ROLLOUTS), _GRADED_BY),
    writes=(this(VERDICTS),),
    outside=_reward_file,
    sliced=True,
)
# A side sample (`capability.oracle_samples`) differs from the responses to learn from in their number alone.
SIDE_GENERATE = StageSpec(
    "side_generate",
    "step",
    "agent",
    settings=(*_SAMPLING, "engine", "storage", "algorithm.capability.oracle_samples"),
    reads=GENERATE.reads,
    writes=(this(SIDE_ROLLOUTS),),
    when=_side_sample,
    side_of=GENERATE,
    sliced=True,
)
SIDE_VERIFY = StageSpec(
    "side_verify",
    "step",
    "agent",
    settings=VERIFY.settings,
    reads=(this(PROMPTS), this(SIDE_ROLLOUTS), _GRADED_BY),
    writes=(this(SIDE_VERDICTS),),
    outside=_reward_file,
    when=_side_sample,
    side_of=VERIFY,
    sliced=True,
)
POOL_STAGE = StageSpec(
    "pool",
    "step",
    "learner",
    settings=(
        "agent_names",
        "pool",
        "agents.{agent}.prompt",
        "sampling.group_size",
        "algorithm.rollouts",
        "algorithm.importance.score_eos",
        "storage",
    ),
    reads=(this(PROMPTS), of_all(ROLLOUTS), of_all(VERDICTS), of_all(CHECKPOINT, "start")),
    writes=(this(POOL),),
    sliced=True,
)
ADVANTAGE = StageSpec(
    "advantage",
    "step",
    "run",
    settings=(
        "agent_names",
        "sampling.group_size",
        "algorithm.rollouts",
        "algorithm.capability",
        "algorithm.advantage",
        "storage",
    ),
    reads=(this(PROMPTS), of_all(VERDICTS), of_all(SIDE_VERDICTS, when=_side_sample), before(CAPABILITY, _later)),
    writes=(this(CAPABILITY), of_all(ADVANTAGES)),
    outside=_oracle_table,
)
UPDATE = StageSpec(
    "update",
    "step",
    "agent",
    settings=(
        "agent_names",
        "seed",
        "algorithm.rollouts",
        "algorithm.importance",
        "algorithm.clip",
        "algorithm.loss",
        "agents.{agent}.adapter",
        "agents.{agent}.sampling.temperature",
        "batch",
        "optimizer",
        "launcher.processes",
        "launcher.nodes",
        "launcher.replicas",
        "engine.device",
        "engine.dtype",
        "engine.attention",
        "engine.threads",
    ),
    reads=(this(ROLLOUTS), this(POOL), this(ADVANTAGES), before(CHECKPOINT), start(CHECKPOINT, _later)),
    writes=(this(TRACE), this(CHECKPOINT)),
)
EVALUATE = StageSpec(
    "evaluate",
    "evaluation",
    "agent",
    settings=(
        "seed",
        "evaluation.benchmarks",
        "agents.{agent}.sampling.max_new_tokens",
        "agents.{agent}.sampling.stop",
        "agents.{agent}.prompt",
        "engine",
        "verification",
        "storage",
    ),
    reads=(this(PROBLEMS), this(CHECKPOINT), start(CHECKPOINT, _adapters)),
    writes=(this(EVALUATIONS),),
    outside=_reward_file,
    sliced=True,
)
REPORT_STAGE = StageSpec(
    "report",
    "after",
    "run",
    settings=("report",),
    reads=(
        this(SETTINGS),
        this(PROBLEMS),
        this(SCHEDULE),
        of_all(CHECKPOINT, "start"),
        *(of_all(table, "all") for table in (ROLLOUTS, VERDICTS, CAPABILITY, POOL, ADVANTAGES, TRACE, EVALUATIONS)),
        this(METRICS),
    ),
    writes=(this(REPORT), this(CURVES), this(HEADLINES)),
    metrics=False,
)

PIPELINE = (
    RESOLVE,
    PREPARE,
    WARMUP,
    GENERATE,
    VERIFY,
    SIDE_GENERATE,
    SIDE_VERIFY,
    POOL_STAGE,
    ADVANTAGE,
    UPDATE,
    EVALUATE,
    REPORT_STAGE,
)
"""Every stage, in the order in which they run."""

STAGES: Mapping[str, StageSpec] = {spec.name: spec for spec in PIPELINE}


def maker_of(artifact: Artifact, step: int | None = None) -> StageSpec:
    """The stage that writes an artifact (of a step, where the start's is made by another).

    Raises:
        LookupError: none does, or each stage a part of it (metrics).
    """
    makers = [spec for spec in PIPELINE if spec.makes(artifact)]
    if not makers:
        raise LookupError(f"no stage alone makes {artifact.name}")
    return next((spec for spec in makers if (spec.at == "start") == (step == 0)), makers[0])


def step_stages(settings: Settings, step: int) -> list[StageSpec]:
    """A step's stages in order (0: the start's)."""
    return [spec for spec in PIPELINE if spec.runs(settings, step)]
