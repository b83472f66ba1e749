"""What figures are made of: panels in rows, one colour per agent, and lines that all agents share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hacpo.settings.verification import VerificationSettings
from hacpo.tools.report.charts import Line, Rule, extent, line_chart
from hacpo.tools.report.collect import Curve, Measurements
from hacpo.tools.report.scales import NUMBER, PERCENT, Format, Scale, linear_scale

GROUP_SHARES = {"uniform": "no signal", "baseline_above_one": "baseline above one", "guarded": "guarded"}
"""Shares of problems in the advantage stage's metrics, and what the page calls them."""

ANSWER_SHARES = {
    "punished_correct": "punished correct",
    "punished_correct_own": "punished correct, own",
    "punished_correct_cross": "punished correct, of others",
}
"""Shares of the best answers to problems with signal; the last only where answers are shared."""


@dataclass(frozen=True)
class Panel:
    """One chart with its heading; `color` is the colour of its agent."""

    title: str
    chart: Markup
    color: str = ""


Rows = list[list[Panel]]
"""A figure's panels, row by row; an empty row is left out."""


def panel(
    title: str,
    lines: Sequence[Line],
    results: Measurements,
    described: str,
    form: Format,
    scale: Scale | None = None,
    rules: Sequence[Rule] = (),
    color: str = "",
) -> list[Panel]:
    """One panel of lines, or none if there is nothing to draw."""
    if not any(line.values for line in lines):
        return []
    chart = line_chart(lines, title=described, last_step=results.last_step, form=form, scale=scale, rules=rules)
    return [Panel(title, chart, color)]


def agent_lines(results: Measurements, curves: Mapping[str, Curve]) -> list[Line]:
    """One line per agent; a single one where all agents have the same values and would hide each other."""
    drawn = [curve for curve in curves.values() if curve]
    if len(drawn) == len(results.agents) > 1 and all(curve == drawn[0] for curve in drawn):
        return [Line("all agents", "c-ink", drawn[0])]
    return [Line(agent, results.color_of(agent), curves[agent]) for agent in results.agents if curves.get(agent)]


def reward_format(verification: VerificationSettings) -> Format:
    """Of mean rewards: percent where they are accuracies."""
    return PERCENT if verification.is_binary else NUMBER


def answer_shares(verification: VerificationSettings) -> dict[str, str]:
    """`ANSWER_SHARES` as the page calls them: with a reward function no answer is correct, some are the best."""
    if verification.is_binary:
        return ANSWER_SHARES
    return {key: title.replace("punished correct", "punished best") for key, title in ANSWER_SHARES.items()}


def from_zero(lines: Sequence[Line]) -> Scale:
    """A linear scale from 0 that holds all lines and bands."""
    return linear_scale([0.0, *(value for line in lines for value in extent(line))], low=0.0)
