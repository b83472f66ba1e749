"""What every agent answered to one problem, what the verifier said, and what every learner made of it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hacpo.artifacts import tables
from hacpo.artifacts.problem_rows import ScheduledProblem
from hacpo.errors import SettingsError
from hacpo.evaluation.measure import measure
from hacpo.tools.inspect.step_reader import Missing, StepReader
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
        problem=problem.problem,
        answer=problem.answer,
        measure=measure(reader.pipeline.settings.verification),
        agents=tuple(agents),
        learners=tuple(learners),
        capability={}
        if capability is None
        else dict(zip(capability["agent"].to_pylist(), capability[column].to_pylist(), strict=True)),
        responses=tuple(responses),
        missing=tuple(reader.missing),
    )


def list_problems(reader: StepReader, learners: Sequence[str]) -> list[ProblemLine]:
    """Every problem of the step with what each agent earned and whether its group carries a signal.

    Raises:
        MissingInputError, ArtifactError: as `read_side_by_side`.
    """
    problems = reader.problems()
    is_binary = reader.pipeline.settings.verification.is_binary
    verdicts = {
        agent: _by_problem(reader.optional(tables.VERDICTS, agent, ["rollout_id", "problem_id", "reward"]), ["reward"])
        for agent in reader.pipeline.settings.agents
    }
    wanted = ["reward", "effective_advantage", "uniform", "guarded"]
    worth = {
        learner: _by_problem(reader.optional(tables.ADVANTAGES, learner, ["rollout_id", "problem_id", *wanted]), wanted)
        for learner in learners
    }
    lines = []
    for asked in problems:
        earned = {agent: of[asked.problem_id][0].tolist() for agent, of in verdicts.items() if asked.problem_id in of}
        groups = {learner: of[asked.problem_id] for learner, of in worth.items() if asked.problem_id in of}
        lines.append(
            ProblemLine(
                position=asked.position,
                problem_id=asked.problem_id,
                problem=asked.problem,
                answer=asked.answer,
                correct={agent: (rewards.count(1), len(rewards)) for agent, rewards in earned.items() if is_binary},
                mean_reward={agent: math.fsum(rewards) / len(rewards) for agent, rewards in earned.items()},
                live={learner: not uniform.all() for learner, (_, _, uniform, _) in groups.items()},
                guarded=tuple(learner for learner, (_, _, _, guarded) in groups.items() if guarded.any()),
                punished=sum(punished_best(rewards, effective) for rewards, effective, _, _ in groups.values()),
            )
        )
    return lines


def _by_problem(table: pa.Table | None, columns: Sequence[str]) -> dict[str, list[NDArray[Any]]]:
    """problem_id -> the columns' values in its rows, in order; empty if there is no table, or no row in it."""
    if table is None or not len(table):
        return {}
    encoded = table["problem_id"].combine_chunks().dictionary_encode()
    order = np.argsort(encoded.indices, kind="stable")
    starts = np.cumsum(np.bincount(encoded.indices))[:-1]
    parts = (np.split(table[name].to_numpy()[order], starts) for name in columns)
    return {name: list(values) for name, *values in zip(encoded.dictionary.to_pylist(), *parts, strict=True)}


def _chosen(reader: StepReader, problem_id: str) -> ScheduledProblem:
    """The problem as it is scheduled; if there is none, one line that says where it is or what is alike."""
    problems = {asked.problem_id: asked for asked in reader.problems()}
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
