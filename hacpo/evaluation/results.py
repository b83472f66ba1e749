"""What the held-out evaluations say about one agent, and which of its steps is the best."""

from __future__ import annotations

from dataclasses import dataclass

from hacpo.artifacts.layout import Layout
from hacpo.errors import MissingInputError, SettingsError
from hacpo.evaluation.metrics import Estimate
from hacpo.evaluation.values import best_step, estimate, read_values
from hacpo.settings.root import Settings

Curves = dict[str, dict[int, Estimate]]
"""Name of a series (a benchmark's stands for its headline) -> step -> result."""


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
    curves: Curves = {}
    for step in range(settings.steps + 1):
        values = read_values(layout, run, step, agent, settings.evaluation.series)
        for series in settings.evaluation.series:
            result = estimate(series, values)
            if result is not None:
                curves.setdefault(series.name, {})[step] = result
    return curves


def choose_step(asked: str, by: str | None, curves: Curves, settings: Settings, where: object) -> Choice:
    """The step that `--step` and `--by` mean: by a benchmark's headline, or by the average. The earliest of several
    equally good ones is the best.

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
    names = settings.evaluation.headlines
    known = ", ".join(names)
    if by is None:
        if len(names) != 1:
            raise SettingsError("--step best by which benchmark?", where=where, expected=f"--by one of {known}")
        (by,) = names
    if by not in names:
        raise SettingsError(f"no benchmark {by!r}", where=where, expected=f"one of {known}")
    curve = curves.get(by, {})
    best = best_step({step: estimate.mean for step, estimate in curve.items()})
    if best is None:
        raise MissingInputError(f"no step has been evaluated on {by}", where=where, remedy="run `hacpo run`")
    return Choice(best, by, len(curve))
