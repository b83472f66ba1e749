"""A run's accuracy by what was spent, and numbers read off it, problem by problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import polars as pl

from hacpo.errors import ArtifactError
from hacpo.evaluation.bootstrap import Array
from hacpo.evaluation.budgets import area, at_budget
from hacpo.tools.compare.grouping import Group

AXES = ("rollouts", "steps", "sampled_tokens", "training_tokens", "updates", "seconds")
"""What accuracy can be set against; all but steps as each agent's own sum up to the evaluation."""

MEASURES = ("area", "at_budget", "last")
"""`area`: the mean accuracy on the way from the start to the budget. `at_budget`: the accuracy there. `last`: that of
the last evaluation, whatever was spent."""

_AT_ONCE = 16
"""Evaluations whose problems are Python objects at the same time."""


@dataclass(frozen=True, eq=False)
class Answers:
    """An agent's held-out results on one benchmark in one run.

    Attributes:
        places: axis -> what had been spent at each evaluation.
        correct: (evaluations, problems): share of correct responses.
        samples: (evaluations, problems): responses.
    """

    places: dict[str, list[float]]
    correct: Array
    samples: Array

    @cached_property
    def rows(self) -> dict[float, int]:
        """Step -> which evaluation was after it."""
        return {step: row for row, step in enumerate(self.places["steps"])}


def answers(run: pl.DataFrame, benchmark: str, problems: tuple[str, ...]) -> dict[str, Answers]:
    """What a run's results say of each of its agents, of some problems in their order.

    Raises:
        ArtifactError: an agent was not evaluated.
    """
    agents = list(dict.fromkeys(run["agent"]))
    parts = run.filter(pl.col("benchmark") == benchmark).sort("step").partition_by("agent", as_dict=True)
    absent = next((agent for agent in agents if (agent,) not in parts), None)
    if absent is not None:
        raise ArtifactError(f"{absent} has no results of {benchmark}", where=run["run"][0])
    return {agent: _of_agent(parts[agent,], problems) for agent in agents}


def _of_agent(rows: pl.DataFrame, problems: tuple[str, ...]) -> Answers:
    correct, samples = [], []
    for ids, given, right in rows.select("problem_ids", "samples", "correct").iter_rows(buffer_size=_AT_ONCE):
        of = {problem: (n, c) for problem, n, c in zip(ids, given, right, strict=True)}
        samples.append([float(of[problem][0]) for problem in problems])
        correct.append([of[problem][1] / of[problem][0] for problem in problems])
    places = {axis: [float(value) for value in rows["step" if axis == "steps" else axis]] for axis in AXES}
    return Answers(places, np.array(correct), np.array(samples))


def common_problems(groups: Sequence[Group], benchmark: str) -> tuple[str, ...]:
    """The problems that every evaluation of a benchmark asks.

    Raises:
        ArtifactError: there are none.
    """
    asked = [run.filter(pl.col("benchmark") == benchmark) for group in groups for run in group.runs.values()]
    evaluations = sum(run.height for run in asked)
    times = pl.concat([run.select(pl.col("problem_ids").explode()) for run in asked]).group_by("problem_ids").len()
    common = times.filter(pl.col("len") == evaluations)["problem_ids"].to_list()
    if not common:
        raise ArtifactError(f"the runs have no problem of {benchmark} in common", where=groups[0].name)
    return tuple(sorted(common))


def most_spent(every: Sequence[Answers], axis: str) -> float:
    """The budget that all curves reach."""
    return min(each.places[axis][-1] for each in every)


def shared_places(every: Sequence[Answers], axis: str) -> frozenset[float]:
    """What had been spent at some evaluation of each of them."""
    return frozenset.intersection(*(frozenset(each.places[axis]) for each in every))


def measured(
    every: Sequence[Answers], measure: str, axis: str, budget: float, shared: frozenset[float] = frozenset()
) -> tuple[Array, Array]:
    """A run's number by problem, the mean of its agents, and the variance that the drawing of responses gives it.

    A share p of n responses that are drawn anew from them varies by p (1 - p) / n, and the number is a sum of shares
    with weights w (`hacpo.evaluation.budgets`): by the sum of w^2 p (1 - p) / n.

    Args:
        every: the results of each agent of the run.
        shared: what had been spent at evaluations of the run that it is compared with, too; for `area`.
    """
    values, variances = [], []
    for each in every:
        weights = np.array(_weights(tuple(each.places[axis]), measure, budget, shared))[:, None]
        values.append((weights * each.correct).sum(axis=0))
        variances.append((weights**2 * each.correct * (1 - each.correct) / each.samples).sum(axis=0))
    return np.mean(values, axis=0), np.sum(variances, axis=0) / len(every) ** 2


@lru_cache(maxsize=4096)
def _weights(places: tuple[float, ...], measure: str, budget: float, shared: frozenset[float]) -> list[float]:
    if measure == "last":
        return [0.0] * (len(places) - 1) + [1.0]
    return area(places, budget, shared) if measure == "area" else at_budget(places, budget)
