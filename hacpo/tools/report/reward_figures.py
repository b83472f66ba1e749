"""Figures of what the answers earned: verdicts, or rewards where a function grades, and what the limit cut off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from hacpo.settings.root import Settings
from hacpo.tools.report.charts import Bars, bar_chart
from hacpo.tools.report.collect import Curve, Measurements
from hacpo.tools.report.panels import Panel, Rows, agent_lines, panel
from hacpo.tools.report.scales import COUNT, PERCENT, linear_scale
from hacpo.verifying.judgement import GAVE_UP, Outcome

VERDICTS = get_args(Outcome)


def verdicts(results: Measurements, settings: Settings) -> Rows:
    """What the answers earned, one panel per agent: shares of verdicts, or of rewards where a function grades. Then how
    many the length limit cut off, whatever they earned."""
    panels = []
    for agent in results.verdicts:
        parts = _verdict_parts(results, agent) if settings.verification.is_binary else _grade_parts(results, agent)
        what = "verdicts on" if settings.verification.is_binary else "rewards of"
        described = f"{what} {agent}'s answers by step"
        chart = bar_chart(parts, title=described, last_step=results.last_step, form=COUNT, shares=True)
        panels.append(Panel(agent, chart, results.color_of(agent)))
    lines = agent_lines(results, {agent: _cut_off(reasons) for agent, reasons in results.finish_reasons.items()})
    scale = linear_scale([0.05, *(value for line in lines for value in line.values.values())], low=0.0)
    return [panels, panel("cut off by the length limit", lines, results, "share of answers cut off", PERCENT, scale)]


def _verdict_parts(results: Measurements, agent: str) -> list[Bars]:
    counts = results.verdicts[agent]
    names = [name for name in VERDICTS if name in counts] + sorted(counts.keys() - set(VERDICTS))
    colors = {"correct": results.color_of(agent)}
    return [Bars(name, colors.get(name, f"c-verdict-{name}"), counts[name]) for name in names]


def _grade_parts(results: Measurements, agent: str) -> list[Bars]:
    """The rewards from the lowest to the highest, in colours that say how high, and what could not be judged."""
    names = results.grades.names
    colors = [f"c-grade-{round(4 * place / (len(names) - 1)) if len(names) > 1 else 2}" for place in range(len(names))]
    counts = results.grades.counts.get(agent, [{} for _ in names])
    graded = [Bars(name, color, curve) for name, color, curve in zip(names, colors, counts, strict=True)]
    return graded + [
        Bars(name, f"c-verdict-{name}", results.verdicts[agent][name])
        for name in GAVE_UP
        if name in results.verdicts[agent]
    ]


def _cut_off(reasons: Mapping[str, Curve]) -> Curve:
    """Step -> share of answers that the length limit cut off."""
    total: Curve = {}
    for curve in reasons.values():
        for step, count in curve.items():
            total[step] = total.get(step, 0.0) + count
    return {step: reasons.get("length", {}).get(step, 0.0) / count for step, count in sorted(total.items())}
