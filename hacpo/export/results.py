"""What the held-out evaluations say about one agent, and which of its steps is the best."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from hacpo import schema
from hacpo.config import Settings
from hacpo.errors import MissingInputError, SettingsError
from hacpo.layout import Layout
from hacpo.report.collect import gather
from hacpo.report.estimates import Estimate, over_problems

Curves = dict[str, dict[int, Estimate]]
"""Benchmark -> step -> mean reward."""


@dataclass(frozen=True)
class Choice:
    """The step to export, and how it was found: by the user, or as the best of `candidates` by `benchmark`."""

    step: int
    benchmark: str | None = None
    candidates: int = 0


def held_out(layout: Layout, run: str, settings: Settings, agent: str) -> Curves:
    """Every evaluation of an agent that is there.

    Raises:
        ArtifactError: one of them is damaged or belongs to another run.
    """
    places = [(step, agent, layout.evaluation(step, agent)) for step in range(settings.steps + 1)]
    table = gather(run, schema.EVALUATIONS, places, ["benchmark", "problem_id", "reward"])
    means = table.group_by("benchmark", "at", "problem_id").agg(pl.col("reward").cast(pl.Float64).mean())
    curves: Curves = {}
    for (benchmark, step), rows in means.sort("benchmark", "at", "problem_id").group_by(
        "benchmark", "at", maintain_order=True
    ):
        curves.setdefault(str(benchmark), {})[int(str(step))] = over_problems(rows["reward"].to_list())
    return curves


def choose_step(asked: str, by: str | None, curves: Curves, settings: Settings, where: object) -> Choice:
    """The step that `--step` and `--by` mean. The earliest of several equally good ones is the best.

    Raises:
        SettingsError: neither a step of the run nor `best`, or it is not clear by which benchmark.
        MissingInputError: nothing has been evaluated.
    """
    if asked != "best":
        if by is not None:
            raise SettingsError("--by belongs to --step best", where=where)
        if not asked.isdecimal() or int(asked) > settings.steps:
            raise SettingsError(
                "--step is no step of this run", where=where, expected=f"0 to {settings.steps}, or best", found=asked
            )
        return Choice(int(asked))
    known = ", ".join(settings.evaluation.benchmarks)
    if by is None:
        if len(settings.evaluation.benchmarks) != 1:
            raise SettingsError("--step best by which benchmark?", where=where, expected=f"--by one of {known}")
        (by,) = settings.evaluation.benchmarks
    if by not in settings.evaluation.benchmarks:
        raise SettingsError(f"no benchmark {by!r}", where=where, expected=f"one of {known}")
    curve = curves.get(by)
    if not curve:
        raise MissingInputError(f"no step has been evaluated on {by}", where=where, remedy="run `hacpo run`")
    return Choice(min(curve, key=lambda step: (-curve[step].mean, step)), by, len(curve))
