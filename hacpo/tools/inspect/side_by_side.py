"""What every agent answered to one problem, what the verifier said, and what every learner made of it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from hacpo.algorithm.advantage_table import best_responses
from hacpo.artifacts import tables
from hacpo.errors import SettingsError
from hacpo.evaluation.measure import measure
from hacpo.tools.inspect.step_reader import Missing, Row, StepReader, rows_where


@dataclass(frozen=True)
class Worth:
    """A response's row in a learner's advantages table."""

    baseline: float
    sigma: float
    advantage: float
    omega: float
    effective_advantage: float
    uniform: bool
    guarded: bool


@dataclass(frozen=True)
class Terms:
    """What a response did in one update: its row in a learner's trace. Log-probabilities are means per scored token."""

    update: int
    learner_logprob: float
    source_logprob: float
    ratio: float
    lower: float
    upper: float
    clipped: bool
    is_weight: float
    objective: float


@dataclass(frozen=True)
class Use:
    """What one learner made of a response; a part is None or empty where its table is not there yet."""

    learner: str
    is_self: bool
    status: str | None
    roundtrip: bool | None
    learner_tokens: int | None
    worth: Worth | None
    updates: tuple[Terms, ...]


@dataclass(frozen=True)
class Response:
    """One response; verdict, reward and extracted are None where it is not verified yet."""

    rollout_id: str
    agent: str
    sample: int
    text: str
    finish_reason: str
    tokens: int
    verdict: str | None
    reward: float | None
    extracted: str | None
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class SideBySide:
    """One problem of a step.

    Attributes:
        measure: what a mean of rewards is called (`hacpo.evaluation.measure`).
        agents: every agent, in the order of params.yaml.
        learners: those whose numbers are shown.
        capability: agent -> its smoothed capability in this step; empty if it is not there yet.
        responses: by agent and sample.
        missing: tables that are not there yet.
    """

    run: str
    step: int
    problem_id: str
    problem: str
    answer: str
    measure: str
    agents: tuple[str, ...]
    learners: tuple[str, ...]
    capability: dict[str, float]
    responses: tuple[Response, ...]
    missing: tuple[Missing, ...]

    def of(self, agent: str) -> list[Response]:
        """One agent's responses, by sample."""
        return [response for response in self.responses if response.agent == agent]


@dataclass(frozen=True)
class ProblemLine:
    """One problem of a step, to choose from.

    Attributes:
        correct: agent -> correct responses, and all; absent where not verified yet, and with a reward function.
        mean_reward: agent -> mean reward of its responses; absent where not verified yet.
        live: learner -> whether its group carries a signal; absent where there are no advantages yet.
        guarded: learners for whom a baseline was guarded.
        punished: responses that no other one to the problem beats (with the math verifier the correct ones), of those
            that a learner learns from, with a negative effective advantage; added up over learners.
    """

    position: int
    problem_id: str
    problem: str
    answer: str
    correct: dict[str, tuple[int, int]]
    mean_reward: dict[str, float]
    live: dict[str, bool]
    guarded: tuple[str, ...]
    punished: int


def read_side_by_side(reader: StepReader, problem_id: str, learners: Sequence[str]) -> SideBySide:
    """Everything there is on one problem of a step.

    Raises:
        SettingsError: the step has no such problem.
        MissingInputError: there is no schedule yet.
        ArtifactError: a table is damaged or belongs to another run.
    """
    problem = _chosen(reader, problem_id)
    agents = list(reader.pipeline.settings.agents)
    responses: list[Row] = []
    verdicts: dict[str, Row] = {}
    for agent in agents:
        drawn = ["rollout_id", "problem_id", "sample", "token_ids", "text", "finish_reason"]
        table = reader.optional(tables.ROLLOUTS, agent, drawn)
        responses += [{**row, "agent": agent} for row in rows_where(table, "problem_id", [problem_id])]
        judged = ["rollout_id", "problem_id", "reward", "verdict", "extracted"]
        table = reader.optional(tables.VERDICTS, agent, judged)
        verdicts |= {row["rollout_id"]: row for row in rows_where(table, "problem_id", [problem_id])}
    uses = {learner: _uses(reader, learner, problem_id) for learner in learners}
    # What omega was made of.
    column = "oracle" if reader.pipeline.settings.algorithm.advantage.baseline == "oracle" else "capability"
    capability = reader.optional(tables.CAPABILITY, columns=["agent", column])
    return SideBySide(
        run=reader.pipeline.run,
        step=reader.step,
        problem_id=problem_id,
        problem=problem["problem"],
        answer=problem["answer"],
        measure=measure(reader.pipeline.settings.verification),
        agents=tuple(agents),
        learners=tuple(learners),
        capability={row["agent"]: row[column] for row in rows_where(capability, "agent", None)},
        responses=tuple(
            _response(row, verdicts.get(row["rollout_id"], {}), [uses[learner] for learner in learners])
            for row in sorted(responses, key=lambda row: (agents.index(row["agent"]), row["sample"]))
        ),
        missing=tuple(reader.missing),
    )


def _response(row: Row, verdict: Row, uses: Sequence[dict[str, Use]]) -> Response:
    name = row["rollout_id"]
    return Response(
        rollout_id=name,
        agent=row["agent"],
        sample=row["sample"],
        text=row["text"],
        finish_reason=row["finish_reason"],
        tokens=len(row["token_ids"]),
        verdict=verdict.get("verdict"),
        reward=verdict.get("reward"),
        extracted=verdict.get("extracted"),
        uses=tuple(by_rollout[name] for by_rollout in uses if name in by_rollout),
    )


def _uses(reader: StepReader, learner: str, problem_id: str) -> dict[str, Use]:
    """rollout_id -> what `learner` made of it, for the problem's responses that are in any of its tables."""
    pooled = ["rollout_id", "problem_id", "is_self", "status", "roundtrip", "learner_tokens"]
    pool = {
        row["rollout_id"]: row
        for row in rows_where(
            reader.optional(tables.POOL, learner, pooled),
            "problem_id",
            [problem_id],
        )
    }
    worth = {
        row["rollout_id"]: row
        for row in rows_where(reader.optional(tables.ADVANTAGES, learner), "problem_id", [problem_id])
    }
    terms: dict[str, list[Terms]] = {}
    trace = reader.optional(tables.TRACE, learner, ["rollout_id", *Terms.__dataclass_fields__])
    for row in rows_where(trace, "rollout_id", list(pool.keys() | worth.keys())):
        terms.setdefault(row.pop("rollout_id"), []).append(Terms(**row))
    return {
        name: Use(
            learner=learner,
            is_self=(pool.get(name) or worth[name])["is_self"],
            status=pool[name]["status"] if name in pool else None,
            roundtrip=pool[name]["roundtrip"] if name in pool else None,
            learner_tokens=pool[name]["learner_tokens"] if name in pool else None,
            worth=Worth(**{key: worth[name][key] for key in Worth.__dataclass_fields__}) if name in worth else None,
            updates=tuple(terms.get(name, ())),
        )
        for name in {**pool, **worth}
    }


def list_problems(reader: StepReader, learners: Sequence[str]) -> list[ProblemLine]:
    """Every problem of the step with what each agent earned and whether its group carries a signal.

    Raises:
        MissingInputError, ArtifactError: as `read_side_by_side`.
    """
    problems = reader.problems()
    rewards: dict[str, dict[str, list[float]]] = {row["problem_id"]: {} for row in problems}
    for agent in reader.pipeline.settings.agents:
        table = reader.optional(tables.VERDICTS, agent, ["rollout_id", "problem_id", "reward"])
        for row in rows_where(table, "problem_id", None):
            rewards[row["problem_id"]].setdefault(agent, []).append(row["reward"])
    is_math = reader.pipeline.settings.verification.is_math
    live: dict[str, dict[str, bool]] = {row["problem_id"]: {} for row in problems}
    guarded: dict[str, list[str]] = {row["problem_id"]: [] for row in problems}
    punished = dict.fromkeys(live, 0)
    for learner in learners:
        worth = ["rollout_id", "problem_id", "reward", "effective_advantage", "uniform", "guarded"]
        table = reader.optional(tables.ADVANTAGES, learner, worth)
        groups: dict[str, list[Row]] = {}
        for row in rows_where(table, "problem_id", None):
            groups.setdefault(row["problem_id"], []).append(row)
        for problem_id, rows in groups.items():
            live[problem_id][learner] = not rows[0]["uniform"]
            if any(row["guarded"] for row in rows):
                guarded[problem_id].append(learner)
            punished[problem_id] += _punished(rows)
    return [
        ProblemLine(
            position=row["position"],
            problem_id=row["problem_id"],
            problem=row["problem"],
            answer=row["answer"],
            correct={
                agent: (sum(reward == 1 for reward in values), len(values))
                for agent, values in rewards[row["problem_id"]].items()
                if is_math
            },
            mean_reward={
                agent: math.fsum(values) / len(values) for agent, values in rewards[row["problem_id"]].items()
            },
            live=live[row["problem_id"]],
            guarded=tuple(guarded[row["problem_id"]]),
            punished=punished[row["problem_id"]],
        )
        for row in problems
    ]


def _punished(rows: Sequence[Row]) -> int:
    """How many of a learner's responses to one problem are as good as its best, and pushed down all the same."""
    best = best_responses(np.zeros(len(rows)), np.array([row["reward"] for row in rows], dtype=np.float64))
    pushed = np.array([not row["uniform"] and row["effective_advantage"] < 0 for row in rows])
    return int((best & pushed).sum())


def _chosen(reader: StepReader, problem_id: str) -> Row:
    """The schedule's row of the problem; if there is none, one line that says where it is or what is alike."""
    problems = {row["problem_id"]: row for row in reader.problems()}
    if problem_id in problems:
        return problems[problem_id]
    elsewhere: list[int] = []
    if reader.pipeline.layout.schedule.is_file():
        table = reader.files.read(tables.SCHEDULE, columns=["step", "problem_id"])
        elsewhere = table.filter(pc.equal(table["problem_id"], problem_id))["step"].to_pylist()
    holding = [name for name in problems if problem_id in name]
    near = (holding or difflib.get_close_matches(problem_id, problems, n=3, cutoff=0.4))[:3]
    remedy = f"near: {', '.join(near)}" if near else "without --problem all are listed"
    if elsewhere:
        remedy = f"it is in step {', '.join(map(str, sorted(elsewhere)[:5]))}"
    raise SettingsError(f"no problem {problem_id!r} in step {reader.step}", where="--problem", remedy=remedy)
