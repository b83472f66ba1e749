"""An agent's evaluation tables as numbers: what status, report, export and retention read of held-out results.

Everything is taken from the tables, so another headline or another k needs no new sampling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from hacpo.artifacts import tables
from hacpo.artifacts.layout import Layout
from hacpo.artifacts.run_files import RunFiles
from hacpo.evaluation.metrics import Estimate, of_problem, over_problems, paired_change, plain_mean
from hacpo.settings.evaluation import EvaluationSettings
from hacpo.settings.root import Settings
from hacpo.settings.series import Metric, Series

Values = Mapping[tuple[str, Metric], Mapping[str, float]]
"""(benchmark, metric) -> problem_id -> value."""


class Response(NamedTuple):
    """A row of the evaluations table, as far as metrics need it (`metrics.Judged`)."""

    reward: float
    verdict: str
    extracted: str | None


def read_values(layout: Layout, run: str, step: int, agent: str, series: Sequence[Series]) -> Values:
    """What one evaluation says of each problem, for every part of `series`; empty where it was not made.

    A metric that does not fit the number of responses in the table (they were drawn under other settings) is left out.

    Raises:
        ArtifactError: the table is damaged or belongs to another run.
    """
    files = RunFiles(run, layout)
    path = layout.evaluation(step, agent)
    if not path.exists():
        return {}
    parts = tuple(dict.fromkeys(part for each in series for part in each.parts))
    shards = sorted(path.glob("*")) if path.is_dir() else [path]
    state = tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in shards)
    return _values(files, step, agent, state, parts)


@lru_cache(maxsize=1024)
def _values(
    files: RunFiles,
    step: int,
    agent: str,
    state: tuple[tuple[str, int, int], ...],  # noqa: ARG001  # what makes a table that was written again another one
    parts: tuple[tuple[str, Metric], ...],
) -> Values:
    import pyarrow.compute as pc

    columns = ["benchmark", "problem_id", "sample", "reward", "verdict", "extracted"]
    table = files.read(tables.EVALUATIONS, step, agent, columns=columns)
    table = table.take(pc.sort_indices(table, [(name, "ascending") for name in columns[:3]]))
    benchmarks: dict[str, dict[str, list[Response]]] = {}
    for benchmark, problem, _, *rest in zip(*(table[name].to_pylist() for name in columns), strict=True):
        benchmarks.setdefault(benchmark, {}).setdefault(problem, []).append(Response(*rest))
    return {
        (benchmark, metric): {problem: of_problem(metric, responses) for problem, responses in problems.items()}
        for benchmark, metric in parts
        if (problems := benchmarks.get(benchmark))
        and all(metric.fits(len(responses)) for responses in problems.values())
    }


def estimate(series: Series, values: Values) -> Estimate | None:
    """The series at one evaluation; None where a part of it is not there."""
    if not all(values.get(part) for part in series.parts):
        return None
    estimates = [over_problems([*values[part].values()]) for part in series.parts]
    return estimates[0] if len(estimates) == 1 else plain_mean(estimates)


def change(series: Series, before: Values, after: Values) -> Estimate | None:
    """after - before, paired by problem; None where a part of the series has no problem in common."""
    changes = [paired_change(before.get(part, {}), after.get(part, {})) for part in series.parts]
    known = [one for one in changes if one is not None]
    if len(known) < len(changes):
        return None
    return known[0] if len(known) == 1 else plain_mean(known)


def result(
    layout: Layout, run: str, settings: EvaluationSettings, series: Series, step: int, agent: str
) -> float | None:
    """One held-out number of an agent after a step, from its evaluation; None where it was not made."""
    mean = estimate(series, read_values(layout, run, step, agent, settings.series))
    return None if mean is None else mean.mean


def accuracies(layout: Layout, run: str, settings: Settings, name: str, agent: str) -> list[tuple[int, float]]:
    """(step, result) of every evaluation there is; a benchmark's name stands for its headline (`series.Series`)."""
    series = next(one for one in settings.evaluation.series if one.name == name)
    curve = [
        (step, result(layout, run, settings.evaluation, series, step, agent)) for step in range(settings.steps + 1)
    ]
    return [(step, value) for step, value in curve if value is not None]


def best_step(results: Mapping[int, float]) -> int | None:
    """The step with the largest result; of equal ones (to nine decimals) the earliest. None if there is no number.

    Rounding: means of the same rewards, added up in another order, differ in their last bits.
    """
    numbers = {step: round(value, 9) for step, value in results.items() if math.isfinite(value)}
    return min(numbers, key=lambda step: (-numbers[step], step), default=None)
