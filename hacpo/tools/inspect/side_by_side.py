"""What every agent answered to one problem, what the verifier said, and what every learner made of it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow.compute as pc

from hacpo.artifacts import tables
from hacpo.artifacts.tables import Row
from hacpo.errors import SettingsError
from hacpo.evaluation.measure import measure
from hacpo.tools.inspect.step_reader import Missing, StepReader, rows_where
from hacpo.tools.inspect.step_view import Response, punished_best, read_responses


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
    responses = read_responses(reader.optional, agents, learners, [problem_id])[problem_id]
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
        responses=tuple(responses),
        missing=tuple(reader.missing),
    )


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
            punished[problem_id] += punished_best([(row["reward"], row["effective_advantage"]) for row in rows])
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
