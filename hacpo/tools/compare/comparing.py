"""Groups of runs against one of them: paired differences, their intervals, and a verdict on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hacpo.errors import SettingsError
from hacpo.evaluation.bootstrap import Array, Uncertain, hierarchical, holm
from hacpo.tools.compare.curves import (
    AXES,
    MEASURES,
    Answers,
    answers,
    common_problems,
    measured,
    most_spent,
    shared_places,
)
from hacpo.tools.compare.grouping import Group, Unit

LEVEL = 0.05
"""Corrected p-values below it are a difference shown."""


@dataclass(frozen=True)
class Difference:
    """A group minus the one that it is compared with, over the seeds that both have.

    Attributes:
        measure: of `curves.MEASURES`.
        agent: whose; empty: the mean of all agents.
        reference, result: the two means over these seeds.
        change: result - reference.
        corrected: its p-value, corrected by Holm for all verdicts of this measure; None for single agents, on which
            there is no verdict, and with fewer than two seeds.
    """

    measure: str
    agent: str
    reference: float
    result: float
    change: Uncertain
    corrected: float | None = None

    @property
    def verdict(self) -> str:
        """`better`, `worse`, `no difference shown`, or that one pair of runs says nothing."""
        if self.change.runs < 2:
            return "one pair of runs: nothing shown"
        if self.corrected is None or self.corrected >= LEVEL:
            return "no difference shown"
        return "better" if self.change.mean > 0 else "worse"


@dataclass(frozen=True)
class Problems:
    """How single problems ended, by the mean of all runs' and agents' last evaluations.

    Attributes:
        won, lost, even: how many are answered better, worse and as often as by the other group.
        most_won, most_lost: (problem, the other's share, this one's share), the largest differences first.
    """

    won: int
    lost: int
    even: int
    most_won: list[tuple[str, float, float]]
    most_lost: list[tuple[str, float, float]]


@dataclass(frozen=True)
class Comparison:
    """One group against another on one benchmark."""

    base: str
    benchmark: str
    against: str
    group: str
    pairs: list[Unit]
    axis: str
    budget: float
    differences: list[Difference]
    problems: Problems


@dataclass(frozen=True)
class Point:
    """A group after one evaluation: mean over runs and agents, with its interval where there are two runs."""

    step: int
    spent: dict[str, float]
    accuracy: Uncertain


@dataclass(frozen=True)
class Compared:
    """Everything that is said.

    Attributes:
        groups: in their order; curves: (base, group, benchmark) -> its evaluations.
    """

    groups: list[Group]
    comparisons: list[Comparison]
    curves: dict[tuple[str, str, str], list[Point]] = field(default_factory=dict)


def compare(
    groups: Sequence[Group], *, against: str | None, axis: str, benchmarks: Sequence[str], seed: int, most: int = 8
) -> Compared:
    """Compare all groups of a base with one of them.

    Args:
        against: its name; None: the first of each base.
        axis: what `area` and `at_budget` count as spent.
        benchmarks: which; empty: all that every group has.
        seed: of the bootstrap.
        most: single problems to name.

    Raises:
        SettingsError: there is no such group or benchmark, or nothing to compare.
        ArtifactError: runs lack results, or problems in common.
    """
    bases: dict[str, list[Group]] = {}
    for group in groups:
        bases.setdefault(group.base, []).append(group)
    if against is not None and not any(group.name == against for group in groups):
        raise SettingsError(f"--against: there is no {against!r}", expected=", ".join({g.name: 0 for g in groups}))
    comparisons, curves = [], {}
    for base, members in bases.items():
        other = next((group for group in members if group.name == against), None if against else members[0])
        for benchmark in _benchmarks(members, benchmarks):
            problems = common_problems(members, benchmark)
            read = {group.name: _answers(group, benchmark, problems) for group in members}
            for group in members:
                curves[base, group.name, benchmark] = _curve(read[group.name], seed)
                if other is not None and group is not other:
                    comparisons.append(
                        _compared(
                            other, group, benchmark, problems, read[other.name], read[group.name], axis, seed, most
                        )
                    )
    if not comparisons:
        raise SettingsError(
            "there is one group of runs, and nothing to compare it with",
            where=groups[0].name,
            remedy="name other runs too; runs that differ in nothing but seeds are one group",
        )
    return Compared(list(groups), corrected(comparisons), curves)


def _benchmarks(groups: Sequence[Group], wanted: Sequence[str]) -> list[str]:
    of_runs = [list(dict.fromkeys(run["benchmark"])) for group in groups for run in group.runs.values()]
    in_all = set(of_runs[0]).intersection(*of_runs)
    common = [name for name in of_runs[0] if name in in_all]
    unknown = next((name for name in wanted if name not in common), None)
    if unknown is not None or not common:
        raise SettingsError(
            f"--benchmark: not all runs have {unknown!r}" if unknown else "the runs have no benchmark in common",
            expected=", ".join(common) or None,
        )
    return [name for name in common if not wanted or name in wanted]


_Read = dict[Unit, dict[str, Answers]]
"""Seeds -> agent -> its results."""


def _answers(group: Group, benchmark: str, problems: tuple[str, ...]) -> _Read:
    return {unit: answers(run, benchmark, problems) for unit, run in group.runs.items()}


def _compared(
    other: Group,
    group: Group,
    benchmark: str,
    problems: tuple[str, ...],
    reference: _Read,
    result: _Read,
    axis: str,
    seed: int,
    most: int,
) -> Comparison:
    pairs = [unit for unit in reference if unit in result]
    if not pairs:
        raise SettingsError(
            f"{group.name} and {other.name} have no seed in common, so no two of their runs are a pair",
            expected=", ".join(f"seed {first}, start_seed {second}" for first, second in list(reference)[:3]),
            found=", ".join(f"seed {first}, start_seed {second}" for first, second in list(result)[:3]),
        )
    budget = most_spent([each for read in (reference, result) for unit in pairs for each in read[unit].values()], axis)
    agents = [
        agent
        for agent in result[pairs[0]]
        if all(agent in read[unit] for read in (reference, result) for unit in pairs)
    ]
    differences = [
        _difference(reference, result, pairs, measure, agent, axis, budget, seed)
        for measure in MEASURES
        for agent in ["", *(agents if len(agents) > 1 else [])]
    ]
    ends = [
        np.mean([measured([*read[u].values()], "last", axis, 0)[0] for u in pairs], axis=0)
        for read in (reference, result)
    ]
    return Comparison(
        group.base,
        benchmark,
        other.name,
        group.name,
        pairs,
        axis,
        budget,
        differences,
        _problems(problems, ends[0], ends[1], most),
    )


def _difference(
    reference: _Read,
    result: _Read,
    pairs: Sequence[Unit],
    measure: str,
    agent: str,
    axis: str,
    budget: float,
    seed: int,
) -> Difference:
    tables: list[tuple[Array, Array]] = []
    for read in (reference, result):
        of_runs = []
        for unit in pairs:
            shared = shared_places([each for run in (reference, result) for each in run[unit].values()], axis)
            of = [read[unit][agent]] if agent else [*read[unit].values()]
            of_runs.append(measured(of, measure, axis, budget, shared))
        tables.append((np.array([value for value, _ in of_runs]), np.array([variance for _, variance in of_runs])))
    (old, old_variance), (new, new_variance) = tables
    change = hierarchical(new - old, new_variance + old_variance, seed=seed)
    return Difference(measure, agent, float(old.mean()), float(new.mean()), change)


def _problems(names: Sequence[str], reference: Array, result: Array, most: int) -> Problems:
    change = np.round(result - reference, 12)
    order = sorted(range(len(names)), key=lambda index: (-change[index], names[index]))
    rows = [(names[index], float(reference[index]), float(result[index])) for index in order]
    won, lost = int((change > 0).sum()), int((change < 0).sum())
    return Problems(won, lost, len(names) - won - lost, rows[: min(most, won)], rows[::-1][: min(most, lost)])


def _curve(read: _Read, seed: int) -> list[Point]:
    """Of the evaluations that all runs and agents have."""
    every = [each for run in read.values() for each in run.values()]
    in_all = set(every[0].rows).intersection(*(each.rows for each in every))
    steps = [step for step in every[0].rows if step in in_all]
    points = []
    for step in steps:
        values, variances, spent = [], [], dict.fromkeys(AXES, 0.0)
        for run in read.values():
            at = [(each, each.rows[step]) for each in run.values()]
            values.append(np.mean([each.correct[row] for each, row in at], axis=0))
            of_agents = [each.correct[row] * (1 - each.correct[row]) / each.samples[row] for each, row in at]
            variances.append(np.sum(of_agents, axis=0) / len(at) ** 2)
            for axis in AXES:
                spent[axis] += sum(each.places[axis][row] for each, row in at) / len(every)
        points.append(
            Point(int(step), spent, hierarchical(np.array(values), np.array(variances), seed=seed, draws=2000))
        )
    return points


def corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same with p-values corrected for the number of verdicts of the same measure."""
    corrected_of: dict[tuple[int, int], float] = {}
    for measure in MEASURES:
        places = [
            (at, number, difference.change.p)
            for at, comparison in enumerate(comparisons)
            for number, difference in enumerate(comparison.differences)
            if difference.measure == measure and not difference.agent and difference.change.p is not None
        ]
        for (at, number, _), value in zip(places, holm([p for *_, p in places if p is not None]), strict=True):
            corrected_of[at, number] = value
    return [
        replace(
            comparison,
            differences=[
                replace(difference, corrected=corrected_of.get((at, number)))
                for number, difference in enumerate(comparison.differences)
            ],
        )
        for at, comparison in enumerate(comparisons)
    ]
