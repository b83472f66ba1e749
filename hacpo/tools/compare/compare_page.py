"""A comparison as one HTML page that needs nothing else, in the looks of a run's report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader
from markupsafe import Markup

from hacpo.artifacts.text_files import read_bytes
from hacpo.evaluation.bootstrap import Uncertain
from hacpo.phrases import amount
from hacpo.tools.compare.compare_view import TITLES, WORDS, possible
from hacpo.tools.compare.comparing import Compared, Comparison, Difference, Point
from hacpo.tools.compare.curves import AXES
from hacpo.tools.compare.grouping import Group, differences
from hacpo.tools.report.charts import STEP, Line, line_chart
from hacpo.tools.report.markup import environment, parts
from hacpo.tools.report.page import resource as report_resource
from hacpo.tools.report.page import script_digest
from hacpo.tools.report.panels import Panel
from hacpo.tools.report.scales import PERCENT, percent, points

_COLORS = 8
_HEAD = 1 << 20
"""Bytes that hold the title of any page."""


def render(compared: Compared, title: str) -> str:
    """The page as HTML; the same arguments give the same text."""
    script = report_resource("report.js")
    judged = dict.fromkeys((comparison.base, comparison.benchmark) for comparison in compared.comparisons)
    drawn = dict.fromkeys((base, benchmark) for base, _, benchmark in compared.curves)
    return (
        _environment()
        .get_template("compare.html")
        .render(
            title=title,
            parts=parts(),
            style=report_resource("report.css"),
            script=script,
            script_hash=script_digest(script),
            index=Markup(json.dumps({"steps": []})),
            groups=parts().grid(
                ["group", "runs", "seed, start_seed"], [_group(group) for group in compared.groups], "Groups"
            ),
            settings=Markup("").join(_settings(of_base) for of_base in _by_base(compared.groups)),
            verdicts=[(*place, _verdicts(compared, *place)) for place in judged],
            curves=[(*place, _panels(compared, *place)) for place in drawn],
            problems=[(comparison, _problems(comparison)) for comparison in compared.comparisons],
        )
    )


def is_page(path: Path) -> bool:
    """Whether a file is such a page."""
    try:
        return b" hacpo compare</title>" in read_bytes(path, _HEAD)
    except OSError:
        return False


@cache
def _environment() -> Environment:
    base = environment()
    assert base.loader is not None
    return base.overlay(loader=ChoiceLoader([PackageLoader("hacpo.tools.compare", ""), base.loader]))


def _group(group: Group) -> list[str]:
    name = f"{group.base}/{group.name}" if group.base else group.name
    return [name, str(len(group.runs)), "; ".join(f"{seed}, {start}" for seed, start in sorted(group.runs))]


def _by_base(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups that are compared with each other."""
    bases = {group.base: 0 for group in groups}
    return [[group for group in groups if group.base == base] for base in bases]


def _settings(groups: Sequence[Group]) -> Markup:
    rows = [[key, *(parts().isolated(json.dumps(value)) for value in values)] for key, values in differences(groups)]
    header = ["setting", *(f"{group.base}/{group.name}" if group.base else group.name for group in groups)]
    return Markup(parts().grid(header, rows, "Settings that differ") if rows else "")


def _verdicts(compared: Compared, base: str, benchmark: str) -> Markup:
    of_place = [each for each in compared.comparisons if (each.base, each.benchmark) == (base, benchmark)]
    rows = [_verdict(comparison, difference) for comparison in of_place for difference in comparison.differences]
    header = ["group", "verdict", "agent", "number", "its result", "against", "difference", "95 % interval", "p"]
    others = " and ".join({comparison.against: 0 for comparison in of_place})
    caption = f"Paired differences to {others}, in percentage points; p is corrected"
    return Markup(parts().grid(header, rows, caption) if rows else "")


def _verdict(comparison: Comparison, difference: Difference) -> list[str]:
    pairs = len(comparison.pairs)
    title = TITLES[difference.measure]
    if difference.measure != "last":
        title += f" ({amount(comparison.budget)} {WORDS[comparison.axis]})"
    verdict = f"{difference.verdict} ({pairs} {'pair' if pairs == 1 else 'pairs'})"
    return [
        comparison.group,
        "" if difference.agent else verdict,
        difference.agent or "mean of all",
        title,
        percent(difference.result),
        percent(difference.reference),
        points(difference.change.mean),
        _interval(difference.change),
        "" if difference.corrected is None else f"{difference.corrected:.3f}",
    ]


def _interval(change: Uncertain) -> str:
    low, high = possible(change)
    return "none" if low is None or high is None else f"{points(low)} to {points(high)}"


def _panels(compared: Compared, base: str, benchmark: str) -> list[Panel]:
    """Accuracy by everything that was spent, all groups in each."""
    curves = [(name, points) for (at, name, of), points in compared.curves.items() if (at, of) == (base, benchmark)]
    panels = []
    for axis in AXES:
        lines = [_line(name, points, number, axis) for number, (name, points) in enumerate(curves)]
        last = max(place for line in lines for place in line.values)
        word = STEP if axis == "steps" else WORDS[axis]
        described = f"{benchmark}: accuracy by {word}, mean of runs and agents"
        chart = line_chart(lines, title=described, last_step=last, form=PERCENT, axis=word)
        panels.append(Panel(f"accuracy by {WORDS[axis]}", chart))
    return panels


def _line(name: str, points: Sequence[Point], number: int, axis: str) -> Line:
    values, band = {}, {}
    for point in points:
        place = round(point.spent[axis])
        values[place] = point.accuracy.mean
        if point.accuracy.low is not None and point.accuracy.high is not None:
            band[place] = (max(point.accuracy.low, 0.0), min(point.accuracy.high, 1.0))
    return Line(name, f"c-agent-{number % _COLORS}", values, band or None, dots=True)


def _problems(comparison: Comparison) -> Markup:
    rows = [
        [word, problem, percent(there), percent(here), points(here - there)]
        for word, listed in (("won", comparison.problems.most_won), ("lost", comparison.problems.most_lost))
        for problem, there, here in listed
    ]
    header = ["", "problem", comparison.against, comparison.group, "difference"]
    caption = f"{comparison.group} against {comparison.against}, {comparison.benchmark}: single problems"
    return Markup(parts().grid(header, rows, caption, "numeric") if rows else "")
