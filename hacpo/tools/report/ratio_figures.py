"""Figures of the importance ratio: how far it strays, what the clip bounds silence, and how much a response counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hacpo.algorithm.trace import is_unclipped
from hacpo.settings.root import Settings
from hacpo.tools.report.charts import Bars, Line, Rule, bar_chart, extent
from hacpo.tools.report.collect import Measurements, Ratios
from hacpo.tools.report.panels import Panel, Rows, panel
from hacpo.tools.report.scales import NUMBER, PERCENT, linear_scale


def own_ratio(results: Measurements, settings: Settings) -> Rows:  # noqa: ARG001
    """Ratios of own responses with their bounds, and what the bounds silenced."""
    return [_ratio_panels(results, "own", "own answers"), _clip_panels(results, "own", "own answers")]


def cross_ratio(results: Measurements, settings: Settings) -> Rows:
    """Ratios of other agents' responses, what was silenced, and the importance weights."""
    weights = _ratio_lines(results, "cross", lambda ratios: ratios.weight, lambda ratios: ratios.weight_band)
    scale = linear_scale([1.0, *(value for line in weights.values() for value in extent(line))])
    panels: list[Panel] = []
    for learner, line in weights.items():
        title = f"importance weight of the answers that {learner} learns from"
        panels += panel(
            f"{learner}, importance weight", [line], results, title, NUMBER, scale, (), results.color_of(learner)
        )
    rows = [_ratio_panels(results, "cross", "answers of others"), _clip_panels(results, "cross", "answers of others")]
    return [*rows, panels if settings.algorithm.importance.alpha else []]


def _ratio_lines(
    results: Measurements,
    kind: str,
    middle: Callable[[Ratios], float],
    band: Callable[[Ratios], tuple[float, float]],
    inner: Callable[[Ratios], tuple[float, float]] | None = None,
) -> dict[str, Line]:
    lines = {}
    for learner in results.agents:
        steps = results.ratios.get((learner, kind), {})
        if steps:
            lines[learner] = Line(
                "mean",
                results.color_of(learner),
                {step: middle(ratios) for step, ratios in steps.items()},
                {step: band(ratios) for step, ratios in steps.items()},
                {step: inner(ratios) for step, ratios in steps.items()} if inner else None,
            )
    return lines


def _ratio_panels(results: Measurements, kind: str, whose: str) -> list[Panel]:
    lines = _ratio_lines(
        results,
        kind,
        lambda ratios: ratios.mean,
        lambda ratios: (ratios.quantiles[0], ratios.quantiles[4]),
        lambda ratios: (ratios.quantiles[1], ratios.quantiles[3]),
    )
    rules = {learner: _bounds(list(results.ratios[learner, kind].values())) for learner in lines}
    # The mean may run away with a few answers; the range is that of the bands and bounds.
    edges = [edge for line in lines.values() if line.band for pair in line.band.values() for edge in pair]
    scale = linear_scale(
        [1.0, *edges, *(rule.value for lines_of_reference in rules.values() for rule in lines_of_reference)]
    )
    panels: list[Panel] = []
    for learner, line in lines.items():
        several = [line]
        sources = {name for ratios in results.ratios[learner, kind].values() for name in ratios.by_source}
        if len(sources) > 1:
            for source in (name for name in results.agents if name in sources):
                means = {
                    s: r.by_source[source] for s, r in results.ratios[learner, kind].items() if source in r.by_source
                }
                several.append(Line(f"from {source}", results.color_of(source), means, dashed=True))
        described = f"importance ratio of {whose} that {learner} learns from, by step"
        panels += panel(
            f"{learner}, ratio", several, results, described, NUMBER, scale, rules[learner], results.color_of(learner)
        )
    return panels


def _bounds(steps: Sequence[Ratios]) -> list[Rule]:
    low, high = min(ratios.lower[0] for ratios in steps), max(ratios.lower[1] for ratios in steps)
    upper = max(ratios.upper for ratios in steps)
    rules = [Rule(low, "lower bound", "c-bound", under=True)] if low > 0 else []
    if high > low:
        rules.append(Rule(high, "", "c-bound"))
    return rules if is_unclipped(upper) else [*rules, Rule(upper, "upper bound", "c-bound")]


def _clip_panels(results: Measurements, kind: str, whose: str) -> list[Panel]:
    panels = []
    for learner in results.agents:
        steps = results.ratios.get((learner, kind))
        if not steps:
            continue
        parts = [
            Bars("below the bounds", "c-below", {step: ratios.below for step, ratios in steps.items()}),
            Bars("above them", "c-above", {step: ratios.above for step, ratios in steps.items()}),
        ]
        described = f"share of {whose} that {learner} could not learn from because of a clip bound, by step"
        chart = bar_chart(parts, title=described, last_step=results.last_step, form=PERCENT)
        panels.append(Panel(f"{learner}, silenced by a bound", chart, results.color_of(learner)))
    return panels
