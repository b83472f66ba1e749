"""A comparison as a printed table, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from hacpo.evaluation.bootstrap import Uncertain
from hacpo.phrases import amount
from hacpo.tools.compare.comparing import Compared, Comparison, Difference
from hacpo.tools.compare.grouping import Group, differences
from hacpo.tools.inspect.plain import excerpt, harmless

TITLES = {"area": "mean accuracy up to the budget", "at_budget": "accuracy at the budget", "last": "last evaluation"}
WORDS = {
    "rollouts": "rollouts",
    "steps": "steps",
    "sampled_tokens": "sampled tokens",
    "training_tokens": "training tokens",
    "updates": "updates",
    "seconds": "seconds",
}
_MOST_SETTINGS = 12


def print_compared(console: Console, compared: Compared) -> None:
    """What is compared, in what it differs, and every difference with its interval and verdict."""
    _print_groups(console, compared.groups)
    for comparison in compared.comparisons:
        place = f"{comparison.base}, " if comparison.base else ""
        budget = f"{amount(comparison.budget)} {WORDS[comparison.axis]} of an agent"
        console.print(
            harmless(f"\n{place}{comparison.benchmark}: {comparison.group} against {comparison.against}", "bold")
        )
        console.print(harmless(f"{_pairs(comparison)}; budget: {budget}"))
        table = Table(box=None, padding=(0, 2))
        table.add_column("")
        for name in (comparison.against, comparison.group, "difference", "95 % interval", "p, corrected"):
            table.add_column(harmless(name), justify="right")
        table.add_column("verdict")
        for difference in comparison.differences:
            table.add_row(*(harmless(cell) for cell in _row(difference)))
        console.print(table)
        problems = comparison.problems
        console.print(
            f"problems at the last evaluation: {problems.won} won, {problems.lost} lost, {problems.even} even",
            highlight=False,
        )


def _print_groups(console: Console, groups: Sequence[Group]) -> None:
    for group in groups:
        units = sorted(group.runs)
        seeds = ", ".join(str(seed) for seed in dict.fromkeys(seed for seed, _ in units))
        starts = {start for seed, start in units if start != seed}
        of_starts = f", starts {', '.join(map(str, sorted({start for _, start in units})))}" if starts else ""
        place = f"{group.base}/" if group.base else ""
        console.print(
            harmless(
                f"{place}{group.name}: {len(units)} {'run' if len(units) == 1 else 'runs'}, seeds {seeds}{of_starts}"
            )
        )
    rows = differences(groups)
    if rows:
        table = Table(box=None, padding=(0, 2))
        for name in ("setting", *(f"{group.base}/{group.name}" if group.base else group.name for group in groups)):
            table.add_column(harmless(name))
        for key, values in rows[:_MOST_SETTINGS]:
            table.add_row(harmless(excerpt(key, 80)), *(harmless(excerpt(json.dumps(value), 40)) for value in values))
        console.print(table)
    if len(rows) > _MOST_SETTINGS:
        console.print(f"and {len(rows) - _MOST_SETTINGS} more settings that differ", highlight=False)


def _pairs(comparison: Comparison) -> str:
    count = len(comparison.pairs)
    return f"{count} {'pair' if count == 1 else 'pairs'} of runs of the same seeds"


def _row(difference: Difference) -> list[str]:
    change = difference.change
    title = f"  {difference.agent}" if difference.agent else TITLES[difference.measure]
    corrected = "" if difference.corrected is None else f"{difference.corrected:.3f}"
    return [
        title,
        f"{difference.reference:.3f}",
        f"{difference.result:.3f}",
        f"{change.mean:+.3f}",
        interval(change),
        corrected,
        "" if difference.agent else difference.verdict,
    ]


def interval(change: Uncertain) -> str:
    """`-0.010 to +0.043`, or that there is none."""
    low, high = possible(change)
    return "none" if low is None or high is None else f"{low:+.3f} to {high:+.3f}"


def possible(change: Uncertain) -> tuple[float | None, float | None]:
    """The part of an interval that a difference of accuracies can be in, -1 to 1: a t-interval of few runs is wider."""
    if change.low is None or change.high is None:
        return None, None
    return max(change.low, -1.0), min(change.high, 1.0)


def as_json(compared: Compared) -> dict[str, Any]:
    """Everything that is said, as plain values."""
    groups = [
        {
            "base": group.base,
            "name": group.name,
            "runs": [
                {"run": run["run"][0], "seed": seed, "start_seed": start} for (seed, start), run in group.runs.items()
            ],
        }
        for group in compared.groups
    ]
    return {
        "groups": groups,
        "settings": [{"key": key, "values": values} for key, values in differences(compared.groups)],
        "comparisons": [
            {
                **asdict(comparison),
                "differences": [
                    {**asdict(difference), "verdict": difference.verdict} for difference in comparison.differences
                ],
            }
            for comparison in compared.comparisons
        ],
        "curves": [
            {"base": base, "group": group, "benchmark": benchmark, "points": [asdict(point) for point in points]}
            for (base, group, benchmark), points in compared.curves.items()
        ],
    }
