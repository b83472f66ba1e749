"""From measurements to the page's figures: which lines, bands and bars each shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hacpo.config import Settings
from hacpo.report.charts import Bars, Line, Rule, bar_chart, extent, line_chart
from hacpo.report.collect import Curve, Measurements, Ratios
from hacpo.report.scales import COUNT, NUMBER, PERCENT, POWER, SECONDS, Format, Scale, linear_scale, log_scale

VERDICTS = ("correct", "wrong", "no_answer", "truncated", "timeout", "error")
_NO_BOUND = 1e4
"""Clip bounds beyond this mean that nothing is clipped (`hacpo.importance.UNCLIPPED`)."""


@dataclass(frozen=True)
class Panel:
    """One chart with its heading; `color` is the colour of its agent."""

    title: str
    chart: str
    color: str = ""


Rows = list[list[Panel]]
"""A figure's panels, row by row; an empty row is left out."""


def color_of(found: Measurements, agent: str) -> str:
    """The CSS class of an agent's colour, the same everywhere on the page."""
    return f"c-agent-{found.agents.index(agent) % 8}"


def accuracy(found: Measurements, settings: Settings) -> Rows:
    """Held-out accuracy: one panel per benchmark, one line per agent, and their mean."""
    panels = []
    for name, benchmark in settings.evaluation.benchmarks.items():
        lines, rules, means = [], [], []
        for agent in found.agents:
            estimates = found.accuracy.get((agent, name))
            if not estimates:
                continue
            values = {step: estimate.mean for step, estimate in estimates.items()}
            band = {step: estimate.interval for step, estimate in estimates.items()}
            lines.append(Line(agent, color_of(found, agent), values, band, dots=True))
            rules.append(Rule(values[min(values)], "", color_of(found, agent)))
            means.append(values)
        if len(lines) > 1:
            lines.append(Line("mean", "c-ink", _mean(means), dashed=True))
        if not lines:
            continue
        drawn = "greedy" if benchmark.temperature == 0 else f"sampled at temperature {benchmark.temperature:g}"
        chart = line_chart(
            lines,
            title=f"{name}: held-out accuracy of every agent by step",
            last_step=found.last_step,
            form=_reward_format(lines),
            rules=rules,
        )
        panels.append(Panel(f"{name} ({drawn})", chart))
    return [panels]


def reward(found: Measurements, settings: Settings) -> Rows:  # noqa: ARG001
    """Mean training reward of every agent."""
    lines = _agent_lines(found, found.reward)
    return [_panel("", lines, found, "mean training reward by step", _reward_format(lines))]


def rollouts(found: Measurements, settings: Settings) -> Rows:  # noqa: ARG001
    """Rollouts and tokens so far, stacked by agent."""
    panels = []
    for key, title in (("rollouts", "rollouts so far"), ("tokens", "sampled tokens so far")):
        parts = [
            Bars(agent, color_of(found, agent), _cumulative(found.metric("generate", agent, key)))
            for agent in found.agents
        ]
        if any(part.values for part in parts):
            chart = bar_chart(parts, title=f"{title}, by step and agent", last_step=found.last_step, form=COUNT)
            panels.append(Panel(title, chart))
    return [panels]


def time(found: Measurements, settings: Settings) -> Rows:  # noqa: ARG001
    """Seconds per step by stage, and sampling speed."""
    parts = []
    for stage in ("update", "generate", "evaluate", "verify", "pool", "advantage"):
        seconds = _summed(found.metric(stage, agent, "seconds") for agent in (*found.agents, "all"))
        parts.append(Bars(stage, f"c-stage-{stage}", {step: value for step, value in seconds.items() if step > 0}))
    panels = []
    if any(part.values for part in parts):
        chart = bar_chart(parts, title="seconds by step and stage", last_step=found.last_step, form=SECONDS)
        panels.append(Panel("seconds per step", chart))
    speed = {}
    for agent in found.agents:
        tokens, taken = (found.metric("generate", agent, key) for key in ("tokens", "seconds"))
        speed[agent] = {step: tokens[step] / taken[step] for step in tokens if taken.get(step)}
    lines = _agent_lines(found, speed)
    return [
        panels,
        _panel("sampled tokens per second", lines, found, "sampled tokens per second by step", COUNT, _from_zero(lines)),
    ]


def capability(found: Measurements, settings: Settings) -> Rows:  # noqa: ARG001
    """Accuracy and capability per agent, and omega per learner."""
    lines = [
        line
        for agent in found.agents
        for line in (
            Line(
                f"{agent} (this step)",
                f"{color_of(found, agent)} faint",
                found.batch_accuracy.get(agent, {}),
                dots=True,
                label=False,
            ),
            Line(agent, color_of(found, agent), found.capability.get(agent, {})),
        )
    ]
    described = "capability of every agent by step"
    first = _panel("capability and accuracy of each step", lines, found, described, _reward_format(lines))
    panels: list[Panel] = []
    omegas = {
        learner: [
            Line(source, color_of(found, source), found.omega[learner, source])
            for source in found.agents
            if (learner, source) in found.omega
        ]
        for learner in found.agents
    }
    scale = log_scale([1.0, *(value for lines in omegas.values() for line in lines for value in line.values.values())])
    for learner, sources in omegas.items():
        panels += _panel(
            f"omega for {learner}",
            sources,
            found,
            f"factor on the answers that {learner} learns from, by author and step",
            NUMBER,
            scale,
            [Rule(1.0, "equals")],
            color_of(found, learner),
        )
    return [first, panels]


def own_ratio(found: Measurements, settings: Settings) -> Rows:  # noqa: ARG001
    """Ratios of own responses with their bounds, and what the bounds silenced."""
    return [_ratio_panels(found, "own", "own answers"), _clip_panels(found, "own", "own answers")]


def cross_ratio(found: Measurements, settings: Settings) -> Rows:
    """Ratios of other agents' responses, what was silenced, and the importance weights."""
    weights = _ratio_lines(found, "cross", lambda ratios: ratios.weight, lambda ratios: ratios.weight_band)
    scale = linear_scale([1.0, *(value for line in weights.values() for value in extent(line))])
    panels: list[Panel] = []
    for learner, line in weights.items():
        title = f"importance weight of the answers that {learner} learns from"
        panels += _panel(
            f"{learner}, importance weight", [line], found, title, NUMBER, scale, (), color_of(found, learner)
        )
    rows = [_ratio_panels(found, "cross", "answers of others"), _clip_panels(found, "cross", "answers of others")]
    return [*rows, panels if settings.algorithm.importance.alpha else []]


def groups(found: Measurements, settings: Settings) -> Rows:  # noqa: ARG001
    """Shares of the advantage stage's metrics, one panel each."""
    panels = []
    for key, title in (
        ("uniform", "no signal"),
        ("baseline_above_one", "baseline above one"),
        ("guarded", "guarded"),
        ("punished_correct", "punished correct"),
    ):
        curves = {agent: found.metric("advantage", "all", f"{agent}.{key}") for agent in found.agents}
        lines = _agent_lines(found, curves)
        top = max([0.05, *(value for line in lines for value in line.values.values())])
        panels += _panel(title, lines, found, f"share of answers: {title}, by step", PERCENT, _share_scale(top))
    return [panels[:2], panels[2:]]


def sampler(found: Measurements, settings: Settings) -> Rows:  # noqa: ARG001
    """Difference between the sampler's and the trainer's log-probabilities."""
    panels = []
    for key, title in (("mean", "mean difference"), ("max", "largest difference")):
        curves = {agent: found.metric("generate", agent, f"sampler_difference_{key}") for agent in found.agents}
        positive = {agent: {s: v for s, v in curve.items() if v > 0} for agent, curve in curves.items()}
        lines = _agent_lines(found, positive)
        scale = log_scale([value for line in lines for value in line.values.values()], decades=True)
        panels += _panel(title, lines, found, f"{title} of log-probabilities by step, in nats", POWER, scale)
    return [panels]


def optimizer(found: Measurements, settings: Settings) -> Rows:
    """Gradient norm and loss."""
    norms, losses = (
        _agent_lines(found, {agent: found.metric("update", agent, key) for agent in found.agents})
        for key in ("grad_norm", "loss")
    )
    largest = settings.optimizer.max_grad_norm
    return [
        _panel("gradient norm", norms, found, "gradient norm by step", NUMBER, _from_zero(norms), [Rule(largest, "limit")])
        + _panel("loss", losses, found, "loss by step", NUMBER)
    ]


def verdicts(found: Measurements, settings: Settings) -> Rows:  # noqa: ARG001
    """Shares of verdicts, one panel per agent."""
    panels = []
    for agent, counts in found.verdicts.items():
        names = [name for name in VERDICTS if name in counts] + sorted(counts.keys() - set(VERDICTS))
        parts = [
            Bars(name, color_of(found, agent) if name == "correct" else f"c-verdict-{name}", counts[name])
            for name in names
        ]
        chart = bar_chart(
            parts, title=f"verdicts on {agent}'s answers by step", last_step=found.last_step, form=COUNT, shares=True
        )
        panels.append(Panel(agent, chart, color_of(found, agent)))
    return [panels]


def pool(found: Measurements, settings: Settings) -> Rows:  # noqa: ARG001
    """Round-trip share per learner (of the texts of others)."""
    curves: dict[str, Curve] = {}
    for learner in found.agents:
        sums: dict[int, list[float]] = {}
        for entry in found.pool:
            if entry.learner == learner and entry.source != learner:
                size = sum(entry.statuses.values())
                whole = sums.setdefault(entry.step, [0.0, 0.0])
                whole[0] += entry.roundtrip * size
                whole[1] += size
        curves[learner] = {step: same / size for step, (same, size) in sums.items() if size}
    lines = _agent_lines(found, curves)
    lowest = min([0.9, *(value for line in lines for value in line.values.values())])
    scale = linear_scale([lowest], high=1.0)
    return [_panel("texts that come back unchanged", lines, found, "round-trip share by step", PERCENT, scale)]


FIGURES: dict[str, Callable[[Measurements, Settings], Rows]] = {
    "accuracy": accuracy,
    "reward": reward,
    "rollouts": rollouts,
    "time": time,
    "capability": capability,
    "own_ratio": own_ratio,
    "cross_ratio": cross_ratio,
    "groups": groups,
    "sampler": sampler,
    "optimizer": optimizer,
    "verdicts": verdicts,
    "pool": pool,
}
"""Every figure of the page by its name in `captions.toml` and in `template.html`."""


# --- pieces ------------------------------------------------------------------------------------------------------------


def _panel(
    title: str,
    lines: Sequence[Line],
    found: Measurements,
    described: str,
    form: Format,
    scale: Scale | None = None,
    rules: Sequence[Rule] = (),
    color: str = "",
) -> list[Panel]:
    """One panel of lines, or none if there is nothing to draw."""
    if not any(line.values for line in lines):
        return []
    chart = line_chart(lines, title=described, last_step=found.last_step, form=form, scale=scale, rules=rules)
    return [Panel(title, chart, color)]


def _agent_lines(found: Measurements, curves: dict[str, Curve]) -> list[Line]:
    """One line per agent; a single one where all agents have the same values and would hide each other."""
    there = [curve for curve in curves.values() if curve]
    if len(there) == len(found.agents) > 1 and all(curve == there[0] for curve in there):
        return [Line("all agents", "c-ink", there[0])]
    return [Line(agent, color_of(found, agent), curves[agent]) for agent in found.agents if curves.get(agent)]


def _ratio_lines(
    found: Measurements,
    kind: str,
    middle: Callable[[Ratios], float],
    band: Callable[[Ratios], tuple[float, float]],
    inner: Callable[[Ratios], tuple[float, float]] | None = None,
) -> dict[str, Line]:
    lines = {}
    for learner in found.agents:
        steps = found.ratios.get((learner, kind), {})
        if steps:
            lines[learner] = Line(
                "mean",
                color_of(found, learner),
                {step: middle(ratios) for step, ratios in steps.items()},
                {step: band(ratios) for step, ratios in steps.items()},
                {step: inner(ratios) for step, ratios in steps.items()} if inner else None,
            )
    return lines


def _ratio_panels(found: Measurements, kind: str, whose: str) -> list[Panel]:
    lines = _ratio_lines(
        found,
        kind,
        lambda ratios: ratios.mean,
        lambda ratios: (ratios.quantiles[0], ratios.quantiles[4]),
        lambda ratios: (ratios.quantiles[1], ratios.quantiles[3]),
    )
    rules = {learner: _bounds(list(found.ratios[learner, kind].values())) for learner in lines}
    # The mean may run away with a few answers; the range is that of the bands and bounds.
    edges = [edge for line in lines.values() if line.band for pair in line.band.values() for edge in pair]
    scale = linear_scale([1.0, *edges, *(rule.value for found_rules in rules.values() for rule in found_rules)])
    panels: list[Panel] = []
    for learner, line in lines.items():
        several = [line]
        sources = {name for ratios in found.ratios[learner, kind].values() for name in ratios.by_source}
        if len(sources) > 1:
            for source in (name for name in found.agents if name in sources):
                means = {s: r.by_source[source] for s, r in found.ratios[learner, kind].items() if source in r.by_source}
                several.append(Line(f"from {source}", color_of(found, source), means, dashed=True))
        described = f"importance ratio of {whose} that {learner} learns from, by step"
        panels += _panel(
            f"{learner}, ratio", several, found, described, NUMBER, scale, rules[learner], color_of(found, learner)
        )
    return panels


def _bounds(steps: Sequence[Ratios]) -> list[Rule]:
    low, high = min(ratios.lower[0] for ratios in steps), max(ratios.lower[1] for ratios in steps)
    upper = max(ratios.upper for ratios in steps)
    rules = [Rule(low, "lower bound", "c-bound", under=True)] if low > 0 else []
    if high > low:
        rules.append(Rule(high, "", "c-bound"))
    return [*rules, Rule(upper, "upper bound", "c-bound")] if upper < _NO_BOUND else rules


def _clip_panels(found: Measurements, kind: str, whose: str) -> list[Panel]:
    panels = []
    for learner in found.agents:
        steps = found.ratios.get((learner, kind))
        if not steps:
            continue
        parts = [
            Bars("below the bounds", "c-below", {step: ratios.below for step, ratios in steps.items()}),
            Bars("above them", "c-above", {step: ratios.above for step, ratios in steps.items()}),
        ]
        described = f"share of {whose} that {learner} could not learn from because of a clip bound, by step"
        chart = bar_chart(parts, title=described, last_step=found.last_step, form=PERCENT)
        panels.append(Panel(f"{learner}, silenced by a bound", chart, color_of(found, learner)))
    return panels


def _reward_format(lines: Sequence[Line]) -> Format:
    """Percent where every value lies between 0 and 1."""
    values = [value for line in lines for value in line.values.values()]
    return PERCENT if all(0 <= value <= 1 for value in values) else NUMBER


def _from_zero(lines: Sequence[Line]) -> Scale:
    return linear_scale([0.0, *(value for line in lines for value in extent(line))], low=0.0)


def _share_scale(top: float) -> Scale:
    return linear_scale([top], low=0.0)


def _mean(curves: Sequence[Curve]) -> Curve:
    """Of the steps that all curves have."""
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    return {step: sum(curve[step] for curve in curves) / len(curves) for step in common}


def _summed(curves: Iterable[Curve]) -> Curve:
    total: Curve = {}
    for curve in curves:
        for step, value in curve.items():
            total[step] = total.get(step, 0.0) + value
    return dict(sorted(total.items()))


def _cumulative(curve: Curve) -> Curve:
    total, result = 0.0, {}
    for step in sorted(curve):
        total += curve[step]
        result[step] = total
    return result
