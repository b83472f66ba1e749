"""From measurements to the page's figures: which lines, bands and bars each shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hacpo.artifacts.tables import WHOLE_STEP
from hacpo.evaluation.measure import described, is_share, measure, measured
from hacpo.pipeline.catalogue import ADVANTAGE, EVALUATE, GENERATE, POOL_STAGE, UPDATE, VERIFY
from hacpo.settings.root import Settings
from hacpo.settings.series import AVERAGE
from hacpo.tools.report.charts import Bars, Line, Rule, bar_chart, extent, line_chart
from hacpo.tools.report.collect import STAGES, Curve, Measurements
from hacpo.tools.report.panels import (
    GROUP_SHARES,
    Panel,
    Rows,
    agent_lines,
    answer_shares,
    from_zero,
    panel,
    reward_format,
)
from hacpo.tools.report.ratio_figures import cross_ratio, own_ratio
from hacpo.tools.report.reward_figures import verdicts
from hacpo.tools.report.scales import COUNT, NUMBER, PERCENT, POWER, SECONDS, linear_scale, log_scale


def held_out(results: Measurements, settings: Settings) -> Rows:
    """Held-out results: the average, and one panel per benchmark, with one line per agent, and their mean."""
    panels = []
    benchmarks = settings.evaluation.benchmarks
    shown = [series for series in settings.evaluation.series if series.name in (AVERAGE, *benchmarks)]
    for series in sorted(shown, key=lambda series: series.name != AVERAGE):
        name, lines, rules, means = series.name, [], [], []
        share = is_share(series, settings.verification)
        for agent in results.agents:
            estimates = results.accuracy.get((agent, name))
            if not estimates:
                continue
            values = {step: estimate.mean for step, estimate in estimates.items()}
            band = {step: _within(estimate.interval, share) for step, estimate in estimates.items()}
            lines.append(Line(agent, results.color_of(agent), values, band, dots=True))
            rules.append(Rule(values[min(values)], "", results.color_of(agent)))
            means.append(values)
        if len(lines) > 1:
            lines.append(Line("mean", "c-ink", _mean(means), dashed=True))
        if not lines:
            continue
        chart = line_chart(
            lines,
            title=f"{series.title}: held-out {measured(series, settings.verification)} of every agent by step",
            last_step=results.last_step,
            form=PERCENT if share else NUMBER,
            rules=rules,
        )
        panels.append(Panel(described(series, settings), chart))
    return [panels]


def reward(results: Measurements, settings: Settings) -> Rows:
    """Mean training reward of every agent."""
    lines = agent_lines(results, results.reward)
    return [panel("", lines, results, "mean training reward by step", reward_format(settings.verification))]


def rollouts(results: Measurements, settings: Settings) -> Rows:  # noqa: ARG001
    """Rollouts and tokens so far, stacked by agent."""
    panels = []
    for key, title in (("rollouts", "rollouts so far"), ("tokens", "sampled tokens so far")):
        parts = [
            Bars(agent, results.color_of(agent), _cumulative(results.metric(GENERATE, key, agent)))
            for agent in results.agents
        ]
        if any(part.values for part in parts):
            chart = bar_chart(parts, title=f"{title}, by step and agent", last_step=results.last_step, form=COUNT)
            panels.append(Panel(title, chart))
    return [panels]


def time(results: Measurements, settings: Settings) -> Rows:  # noqa: ARG001
    """Seconds per step by stage, and sampling speed."""
    parts = []
    for stage in (UPDATE, GENERATE, EVALUATE, VERIFY, POOL_STAGE, ADVANTAGE):
        # A side sample's seconds are sampling and verification too.
        specs = [spec for spec in STAGES if spec.command == stage.command]
        seconds = _summed(
            results.metric(spec, "seconds", agent) for spec in specs for agent in (*results.agents, WHOLE_STEP)
        )
        values = {step: value for step, value in seconds.items() if step > 0}
        parts.append(Bars(stage.name, f"c-stage-{stage.name}", values))
    panels = []
    if any(part.values for part in parts):
        chart = bar_chart(parts, title="seconds by step and stage", last_step=results.last_step, form=SECONDS)
        panels.append(Panel("seconds per step", chart))
    speed = {}
    for agent in results.agents:
        tokens, taken = (results.metric(GENERATE, key, agent) for key in ("tokens", "seconds"))
        speed[agent] = {step: tokens[step] / taken[step] for step in tokens if taken.get(step)}
    lines = agent_lines(results, speed)
    return [
        panels,
        panel(
            "sampled tokens per second", lines, results, "sampled tokens per second by step", COUNT, from_zero(lines)
        ),
    ]


def capability(results: Measurements, settings: Settings) -> Rows:
    """Each step's result (P_t) and capability per agent, and omega per learner."""
    result = _step_result(settings)
    form = PERCENT if result == _POSITIVE else reward_format(settings.verification)
    lines = [
        line
        for agent in results.agents
        for line in (
            Line(
                f"{agent} (this step)",
                f"{results.color_of(agent)} faint",
                results.batch_accuracy.get(agent, {}),
                dots=True,
                label=False,
            ),
            Line(agent, results.color_of(agent), results.capability.get(agent, {})),
        )
    ]
    described = "capability of every agent by step"
    first = panel(f"capability and {result} of each step", lines, results, described, form)
    panels: list[Panel] = []
    omegas = {
        learner: [
            Line(source, results.color_of(source), results.omega[learner, source])
            for source in results.agents
            if (learner, source) in results.omega
        ]
        for learner in results.agents
    }
    scale = log_scale([1.0, *(value for lines in omegas.values() for line in lines for value in line.values.values())])
    for learner, sources in omegas.items():
        panels += panel(
            f"omega for {learner}",
            sources,
            results,
            f"factor on the answers that {learner} learns from, by author and step",
            NUMBER,
            scale,
            [Rule(1.0, "equals")],
            results.color_of(learner),
        )
    return [first, panels]


def estimate(results: Measurements, settings: Settings) -> Rows:
    """omega with its interval, one panel per learner, and what the estimates behind it are off by."""
    panels: list[Panel] = []
    for learner in results.agents:
        lines = []
        for source in results.agents:
            values, lows, highs = (
                results.metric(ADVANTAGE, f"{source}.{learner}.omega{end}") for end in ("", "_low", "_high")
            )
            band = {step: (lows[step], highs[step]) for step in lows}
            lines.append(Line(source, results.color_of(source), values, band))
            oracle = results.metric(ADVANTAGE, f"{source}.{learner}.omega_oracle")
            lines.append(Line(f"{source}, oracle", results.color_of(source), oracle, dashed=True))
        scale = log_scale([1.0, *(value for line in lines for value in extent(line))])
        described = f"ability relative to {learner}, with its 95 % interval, by step"
        panels += panel(
            f"relative to {learner}",
            lines,
            results,
            described,
            NUMBER,
            scale,
            [Rule(1.0, "equals")],
            results.color_of(learner),
        )
    errors = []
    first = "the first answers to each problem minus all of them"
    for key, title, difference in (
        ("accuracy_error", f"error of a step's {_step_result(settings)}", first),
        ("capability_error", "error of capability", first),
        ("oracle_error", "capability minus the oracle's", "the window's estimate minus what the oracle says"),
    ):
        curves = {agent: results.metric(ADVANTAGE, f"{agent}.{key}") for agent in results.agents}
        described = f"{title}: {difference}, by step"
        errors += panel(title, agent_lines(results, curves), results, described, NUMBER, rules=[Rule(0.0, "")])
    return [panels, errors]


def groups(results: Measurements, settings: Settings) -> Rows:
    """Shares of the advantage stage's metrics, one panel each: first those of problems, then those of answers."""
    panels = []
    for of, shares in (("problems", GROUP_SHARES), ("best answers", answer_shares(settings.verification))):
        for key, title in shares.items():
            curves = {agent: results.metric(ADVANTAGE, f"{agent}.{key}") for agent in results.agents}
            lines = agent_lines(results, curves)
            top = max([0.05, *(value for line in lines for value in line.values.values())])
            described = f"share of {of}: {title}, by step"
            panels += panel(title, lines, results, described, PERCENT, linear_scale([top], low=0.0))
    return [panels]


def sampler(results: Measurements, settings: Settings) -> Rows:  # noqa: ARG001
    """Difference between the sampler's and the trainer's log-probabilities, and the effective sample size left."""
    panels = []
    for key, title in (("mean", "mean difference"), ("p99", "99th percentile"), ("max", "largest difference")):
        curves = {agent: results.metric(GENERATE, f"sampler_difference_{key}", agent) for agent in results.agents}
        positive = {agent: {s: v for s, v in curve.items() if v > 0} for agent, curve in curves.items()}
        lines = agent_lines(results, positive)
        scale = log_scale([value for line in lines for value in line.values.values()], decades=True)
        panels += panel(title, lines, results, f"{title} of log-probabilities by step, in nats", POWER, scale)
    sizes = agent_lines(results, {agent: results.metric(GENERATE, "sampler_ess", agent) for agent in results.agents})
    scale = linear_scale([1.0, *(value for line in sizes for value in line.values.values())], low=0.0)
    return [
        panels,
        panel("effective sample size", sizes, results, "effective share of answers by step", PERCENT, scale),
    ]


def optimizer(results: Measurements, settings: Settings) -> Rows:
    """Gradient norm and loss."""
    norms, losses = (
        agent_lines(results, {agent: results.metric(UPDATE, key, agent) for agent in results.agents})
        for key in ("grad_norm", "loss")
    )
    largest = settings.optimizer.max_grad_norm
    return [
        panel(
            "gradient norm", norms, results, "gradient norm by step", NUMBER, from_zero(norms), [Rule(largest, "limit")]
        )
        + panel("loss", losses, results, "loss by step", NUMBER)
    ]


def pool(results: Measurements, settings: Settings) -> Rows:  # noqa: ARG001
    """Round-trip share per learner (of the texts of others)."""
    curves: dict[str, Curve] = {}
    for learner in results.agents:
        sums: dict[int, list[float]] = {}
        for entry in results.pool:
            if entry.learner == learner and entry.source != learner:
                size = sum(entry.statuses.values())
                whole = sums.setdefault(entry.step, [0.0, 0.0])
                whole[0] += entry.roundtrip * size
                whole[1] += size
        curves[learner] = {step: same / size for step, (same, size) in sums.items() if size}
    lines = agent_lines(results, curves)
    lowest = min([0.9, *(value for line in lines for value in line.values.values())])
    scale = linear_scale([lowest], high=1.0)
    return [panel("texts that come back unchanged", lines, results, "round-trip share by step", PERCENT, scale)]


FIGURES: dict[str, Callable[[Measurements, Settings], Rows]] = {
    "held_out": held_out,
    "reward": reward,
    "rollouts": rollouts,
    "time": time,
    "capability": capability,
    "estimate": estimate,
    "own_ratio": own_ratio,
    "cross_ratio": cross_ratio,
    "groups": groups,
    "sampler": sampler,
    "optimizer": optimizer,
    "verdicts": verdicts,
    "pool": pool,
}
"""Every figure of the page by its name in `captions.toml` and in `template.html`."""


_POSITIVE = "share of positive rewards"


def _step_result(settings: Settings) -> str:
    """What P_t is called."""
    positive = settings.algorithm.capability.metric == "positive_rate"
    return _POSITIVE if positive else measure(settings.verification)


# --- pieces ----------------------------------------------------------------------------------------------------------


def _within(interval: tuple[float, float], share: bool) -> tuple[float, float]:
    """An interval around a share ends at 0 and 1."""
    low, high = interval
    return (max(low, 0.0), min(high, 1.0)) if share else interval


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
