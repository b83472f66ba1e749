"""The artifact contract: what a run consists of, where each part lies, and one Arrow schema per table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any]
"""One row of a table, to be looked at and never changed."""

_IDS = "list<int32>"

_LOGPROBS = "list<float32>"

SUPPORT = "list<list<int32>>"
"""One list of kept token ids per token of a response (`hacpo.algorithm.support`)."""

_WINDOW = "list<float64>"

_WINDOW_OF_LISTS = "list<list<float64>>"


@dataclass(frozen=True)
class Column:
    """A column of a table: its name, its type as `arrow_type` reads it, and whether it may be null."""

    name: str
    kind: str
    nullable: bool = False


def arrow_type(kind: str) -> pa.DataType:
    """The Arrow type that a column names: one of Arrow's own names, or `list<...>` of one, no element of it null."""
    import pyarrow as pa  # here, so that whoever asks where files lie alone need not load it

    if kind.startswith("list<"):
        return pa.list_(pa.field("element", arrow_type(kind.removeprefix("list<").removesuffix(">")), nullable=False))
    return pa.type_for_alias(kind)


def _columns(**types: str | tuple[str, None]) -> tuple[Column, ...]:
    """Columns in the given order; a `(type, None)` column may be null."""
    return tuple(
        Column(name, kind[0], nullable=True) if isinstance(kind, tuple) else Column(name, kind)
        for name, kind in types.items()
    )


OWNERS = ("agent", "learner")
"""Whose a part of a step can be, as its folder names it."""


def step_named(number: str) -> str:
    """`step=0007`: a step's folder, of its number in four digits or of what stands for one."""
    return f"step={number}"


def step_dir(step: int) -> str:
    """A step's folder: zero-padded, so that names sort by step."""
    return step_named(f"{step:04d}")


_ANY_STEP = step_named("(?P<step>[0-9]{4})")
"""For regular expressions."""

EVERY_STEP = step_named("*")
"""For `glob`."""


def step_of(folder: str) -> int | None:
    """The step of a folder that `step_dir` names; None of any other name."""
    match = re.fullmatch(_ANY_STEP, folder)
    return None if match is None else int(match["step"])


def owner_dir(kind: str, name: str) -> str:
    """`agent=ada`, `learner=ada`: the folder of whose part of a step it is; `kind` is one of `OWNERS`."""
    return f"{kind}={name}"


def owner_of(folder: str) -> str:
    """The agent or learner of a folder that `owner_dir` names; empty of any other name."""
    kind, _, name = folder.partition("=")
    return name if kind in OWNERS else ""


@dataclass(frozen=True)
class Artifact:
    """One kind of output of a run, and where it lies below the run's root, `artifacts/<run>`.

    Attributes:
        name: of the kind.
        folder: below the run's root.
        per: what has one of its own: the run, each step, or each agent (as an agent, or as a learner) in each step.
        file: its name in that folder; empty where the folder is the output.
        about: what it is, for docs/artifacts.md; empty where its columns say so.
    """

    name: str
    folder: str
    per: Literal["run", "step", "agent", "learner"]
    file: str = ""
    about: str = ""

    @property
    def pattern(self) -> str:
        """A regular expression of where it lies below a run's root, of any step and agent (groups `step`, `agent`)."""
        return self.path(_ANY_STEP, "(?P<agent>[^/]+)")

    def place_of(self, path: str) -> tuple[int, str] | None:
        """(step, whose) of a path that ends where a part of it lies, or where all of a step do (with an empty name);
        None of any other."""
        for place in (self.pattern, self.within(_ANY_STEP)):
            if found := re.fullmatch(f"(?s:.*/)?{place}", path):
                return int(found["step"]), found.groupdict().get("agent", "")
        return None

    def within(self, step: str = "", agent: str = "") -> str:
        """Its folder, of one step (as `step_dir` spells it) and agent where these are given: all of them else."""
        if self.per == "run":
            return self.folder
        parts = [self.folder, step, owner_dir(self.per, agent) if agent and self.per != "step" else ""]
        return "/".join(part for part in parts if part)

    def path(self, step: str = "", agent: str = "") -> str:
        """The file or folder itself: `rollouts/step=0007/agent=ada`."""
        return "/".join(part for part in (self.within(step, agent), self.file) if part)


def metrics_file(stage: str, step: str, agent: str) -> str:
    """Where a stage's numbers lie below the run's root: of a step (as `step_dir` spells it), and of an agent unless it
    serves all at once."""
    return f"{METRICS.folder}/{stage}/{step}/{agent or WHOLE_STEP}.json"


@dataclass(frozen=True, kw_only=True)
class Table(Artifact):
    """An artifact of rows: its columns and key.

    Attributes:
        kind: what `hacpo.schema` calls it; several tables may be of one kind.
        added: columns that a table may lack, having been made before them or having nothing to say in them; they are
            null there.
        filled: whether a whole table has at least one row.
        notes: what a column holds where its name does not say so, for docs/artifacts.md.
    """

    columns: tuple[Column, ...]
    key: tuple[str, ...]
    kind: str = ""
    version: int = 1
    added: tuple[str, ...] = ()
    filled: bool = False
    notes: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def schema(self) -> pa.Schema:
        """Its columns as Arrow knows them."""
        import pyarrow as pa

        return pa.schema([pa.field(each.name, arrow_type(each.kind), nullable=each.nullable) for each in self.columns])

    def partition(self, step: int | None, agent: str = "") -> str:
        """What `hacpo.partition` says in a file of it: `step=0007/agent=ada`; empty where the run has one alone."""
        if self.per == "run" or step is None:
            return ""
        return "/".join([step_dir(step), *([owner_dir(self.per, agent)] if self.per != "step" else [])])

    @property
    def title(self) -> str:
        """What messages call it."""
        return self.kind or self.name

    @property
    def identity(self) -> str:
        """What `hacpo.schema` says, for example `rollouts/1`."""
        return f"{self.title}/{self.version}"


SETTINGS = Artifact(
    "settings", "", "run", "settings.json", "every setting, defaults and recipe filled in (docs/settings.md)"
)
CHECKPOINT = Artifact(
    "checkpoint",
    "checkpoints",
    "agent",
    about="a Hugging Face model folder (after step 0 of an agent with a [LoRA adapter](lora.md): the adapter alone), "
    "and `trainer/` (optimizer.safetensors, state.json); `started_from.json` where the agent came from the hub: "
    "repository and commit; or from a GGUF file: its name and SHA-256",
)
METRICS = Artifact("metrics", "metrics", "run")
WHOLE_STEP = "all"
"""Name of the metrics file of a stage that serves all agents at once."""
REPORT = Artifact("report", "report", "run", "index.html", "one page without anything from elsewhere")
CURVES = Artifact(
    "curves", "report", "run", "curves.csv", "held-out results by step, one column per series (docs/evaluation.md)"
)
HEADLINES = Artifact("headlines", "report", "run", "metrics.json", "the latest of them, for `dvc metrics show`")
PROBLEMS = Table(
    "problems",
    "data",
    "run",
    columns=_columns(
        problem_id="string",
        problem="string",
        answer="string",
        solution=("string", None),
        subject=("string", None),
        level=("int32", None),
        source="string",
        scorer=("string", None),
    ),
    key=("problem_id",),
    added=("scorer",),
    filled=True,
    notes={"scorer": "JSON, of reasoning-gym's problems: `task`, `options`, and the `metadata` that its scorer reads"},
)

SCHEDULE = Table(
    "schedule",
    "",
    "run",
    "schedule.parquet",
    columns=_columns(step="int32", position="int32", problem_id="string", problem="string", answer="string"),
    key=("step", "position"),
    filled=True,
)

PROMPTS = replace(
    SCHEDULE,
    name="prompts",
    folder="prompts",
    per="step",
    file="",
    kind="schedule",
    about="the schedule's rows of one step (a longer run leaves earlier steps' files alone)",
)
"""The schedule's rows of one step."""
ROLLOUTS = Table(
    "rollouts",
    "rollouts",
    "agent",
    columns=_columns(
        rollout_id="string",
        step="int32",
        agent="string",
        problem_id="string",
        sample="int16",
        prompt_token_ids=_IDS,
        token_ids=_IDS,
        text="string",
        finish_reason="string",
        sampler_logprobs=_LOGPROBS,
        logprobs=_LOGPROBS,
        policy="string",
        stop_string=("string", None),
        support=(SUPPORT, None),
        support_logprob=(_LOGPROBS, None),
    ),
    key=("rollout_id",),
    added=("support", "support_logprob"),
    notes={
        "rollout_id": "`<step>/<agent>/<problem_id>/<sample>`",
        "token_ids": "as sampled, EOS included",
        "finish_reason": "`stop`, `length`",
        "sampler_logprobs": "as the engine reported",
        "logprobs": "the same tokens rescored by the training stack: the behaviour policy, renormalised over `support` "
        "where there is one",
        "policy": "hash of the weights that drew it",
        "stop_string": "the text of `sampling.stop` that ended it; null: EOS or the limit did",
        "support": "per token the ids that `top_k` and `top_p` kept, ascending; null: nothing was cut",
        "support_logprob": "per token the log of their mass; `logprobs + support_logprob` is over the whole vocabulary",
    },
)

VERDICTS = Table(
    "verdicts",
    "verdicts",
    "agent",
    columns=_columns(
        rollout_id="string",
        reward="float32",
        verdict="string",
        extracted=("string", None),
        answer="string",
        problem_id="string",
        sample="int16",
        message=("string", None),
    ),
    key=("rollout_id",),
    notes={
        "verdict": "`correct`, `wrong`, `no_answer`, `truncated`, `timeout`, `error`",
        "message": "why nobody can tell: `error`, `timeout`",
    },
)

SIDE_ROLLOUTS = replace(
    ROLLOUTS,
    name="side_rollouts",
    folder="side_rollouts",
    about="with `capability.oracle_samples` alone: the columns of `rollouts`, of S further responses to each problem, "
    "`<step>/<agent>/<problem_id>/side-<sample>`; in no pool, and learned from by nobody",
)

SIDE_VERDICTS = replace(
    VERDICTS, name="side_verdicts", folder="side_verdicts", about="the columns of `verdicts`, of the side sample"
)

CAPABILITY = Table(
    "capability",
    "capability",
    "step",
    "capability.parquet",
    columns=_columns(
        agent="string",
        accuracy="float64",
        window=_WINDOW,
        capability="float64",
        accuracy_all="float64",
        window_all=_WINDOW,
        window_covariance=_WINDOW_OF_LISTS,
        standard_error=("float64", None),
        oracle=("float64", None),
    ),
    key=("agent",),
    filled=True,
    notes={
        "accuracy": "P_t",
        "window": "oldest first",
        "capability": "Phat_t",
        "accuracy_all": "P of all G responses, which differs under `capability.samples`",
        "window_all": "the same, of the window",
        "window_covariance": "of each step's accuracy with every agent's; agents by name",
        "standard_error": "of capability",
        "oracle": "capability as the oracle says it",
    },
)

POOL = Table(
    "pool",
    "pool",
    "learner",
    columns=_columns(
        rollout_id="string",
        problem_id="string",
        sample="int16",
        source="string",
        is_self="bool",
        reward="float32",
        prompt_token_ids=_IDS,
        token_ids=_IDS,
        source_logprob="float64",
        source_tokens="int32",
        learner_tokens="int32",
        text_bytes="int32",
        status="string",
        roundtrip="bool",
        as_sampled="bool",
        source_terminal=("int32", None),
        learner_terminal=("int32", None),
        support=(SUPPORT, None),
    ),
    key=("rollout_id",),
    added=("support",),
    notes={
        "token_ids": "the scored tokens, in the learner's vocabulary",
        "source_logprob": "sum over the source's scored tokens",
        "source_tokens": "scored tokens of the source",
        "learner_tokens": "scored tokens of the learner",
        "status": "`kept`, `too_long`, `empty`, `not_representable`, `error`",
        "as_sampled": "token_ids are the source's own: the tokenizers are the same, or the response is; else the "
        "response went through text",
        "source_terminal": "the token id that ends the response in the source's vocabulary; null where none did or it "
        "is not scored",
        "learner_terminal": "the same in the learner's; also null where token_ids is empty",
        "support": "the source's, of others' responses that are `as_sampled`",
    },
)

ADVANTAGES = Table(
    "advantages",
    "advantages",
    "learner",
    columns=_columns(
        rollout_id="string",
        problem_id="string",
        source="string",
        is_self="bool",
        reward="float32",
        baseline="float64",
        sigma="float64",
        advantage="float64",
        omega="float64",
        effective_advantage="float64",
        uniform="bool",
        guarded="bool",
        selected=("bool", None),
    ),
    key=("rollout_id",),
    added=("selected",),
    notes={
        "baseline": "the mu used",
        "omega": "the factor applied",
        "selected": "whether the learner trains on it; only where a recipe does not take all (`rollouts.select`)",
    },
)

TRACE = Table(
    "trace",
    "updates",
    "agent",
    "trace.parquet",
    columns=_columns(
        rollout_id="string",
        source="string",
        is_self="bool",
        update="int32",
        learner_logprob="float64",
        source_logprob="float64",
        ratio="float64",
        lower="float64",
        upper="float64",
        clipped="bool",
        is_weight="float64",
        objective="float64",
        sampler_weight="float64",
    ),
    key=("rollout_id", "update"),
    notes={
        "update": "m, from 0",
        "learner_logprob": "mean per scored token",
        "source_logprob": "mean per scored token",
    },
)

EVALUATIONS = Table(
    "evaluations",
    "evaluations",
    "agent",
    columns=_columns(
        benchmark="string",
        problem_id="string",
        sample="int16",
        text="string",
        token_count="int32",
        finish_reason="string",
        reward="float32",
        verdict="string",
        extracted=("string", None),
        message=("string", None),
    ),
    key=("benchmark", "problem_id", "sample"),
)

ARTIFACTS: tuple[Artifact, ...] = (
    SETTINGS,
    CHECKPOINT,
    METRICS,
    REPORT,
    CURVES,
    HEADLINES,
    PROBLEMS,
    SCHEDULE,
    PROMPTS,
    ROLLOUTS,
    VERDICTS,
    SIDE_ROLLOUTS,
    SIDE_VERDICTS,
    CAPABILITY,
    POOL,
    ADVANTAGES,
    TRACE,
    EVALUATIONS,
)
TABLES = {artifact.name: artifact for artifact in ARTIFACTS if isinstance(artifact, Table)}
