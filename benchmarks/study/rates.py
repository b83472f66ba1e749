"""Learning rates by the protocol's rule: each recipe's best of tuning, written into the sweeps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from hacpo.tools.compare.curves import answers, common_problems, measured, most_spent
from hacpo.tools.compare.grouping import Group

GRID = "-learning_rate-"
"""Between a recipe and its rate in the names that tuning's grid gives."""

INNER = ("0_00015", "0_0003", "0_0006")
"""The rates that are run of every recipe, as the names of cells have them."""
OUTER = {1.5e-4: "7_5e_05", 6e-4: "0_0012"}
"""An end of the inner rates -> the one beyond it, which is run of a recipe that is best there."""

Tuned = dict[str, dict[float, float]]
"""Recipe -> learning rate -> mean accuracy up to the budget."""


def tuned(groups: Sequence[Group], benchmark: str = "heldout") -> Tuned:
    """What each rate came to: mean over runs, agents and problems of the mean accuracy up to the rollouts that all
    reach."""
    problems = common_problems(groups, benchmark)
    read = {
        group.name: [[*answers(run, benchmark, problems).values()] for run in group.runs.values()] for group in groups
    }
    budget = most_spent([each for runs in read.values() for run in runs for each in run], "rollouts")
    result: Tuned = {}
    for group in groups:
        means = [measured(run, "area", "rollouts", budget)[0].mean() for run in read[group.name]]
        rate = float(group.settings["optimizer.learning_rate"])
        result.setdefault(group.name.partition(GRID)[0], {})[rate] = float(np.mean(means))
    return {recipe: dict(sorted(of_rates.items())) for recipe, of_rates in result.items()}


def chosen(means: Tuned) -> dict[str, float]:
    """The best rate of each recipe; of equals the smallest."""
    return {recipe: max(of_rates, key=of_rates.__getitem__) for recipe, of_rates in means.items()}


def beyond(means: Tuned) -> list[str]:
    """Patterns of the cells that are to be run too: one rate beyond, of recipes whose best is at an end."""
    return [f"*/{recipe}{GRID}{OUTER[rate]}/*" for recipe, rate in chosen(means).items() if rate in OUTER]


def rate_of(variant: str, rates: Mapping[str, float]) -> float:
    """A variant's rate: its own, or HACPO's, as an ablation of that."""
    return rates[variant] if variant in rates else rates["hacpo"]


def write(rates: Mapping[str, float], sweeps: Iterable[Path]) -> None:
    """Set the learning rate of every variant of some sweep.yaml, each a line."""
    line = re.compile(r"^(  (\w+): .*\"?learning_rate\"?: )[0-9.e+-]+", re.MULTILINE)
    for sweep in sweeps:
        text = sweep.read_text("utf-8")
        written = line.sub(lambda found: f"{found[1]}{rate_of(found[2], rates):.1e}", text)
        if written != text:
            sweep.write_text(written, encoding="utf-8")
