"""Held-out results on the page: cards, the table of agents by benchmarks, and every number with its error."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from hacpo.evaluation.measure import is_share, measure, measured
from hacpo.evaluation.metrics import Estimate
from hacpo.evaluation.values import best_step
from hacpo.settings.root import Settings
from hacpo.settings.series import AVERAGE, Series, leading
from hacpo.tools.report import html_tables as tables
from hacpo.tools.report.collect import Measurements
from hacpo.tools.report.markup import parts, signed
from hacpo.tools.report.scales import count, number, percent


def headline(results: Measurements, settings: Settings) -> Markup:
    """One card per agent with the average (without one: the first benchmark's headline) at the start, at its best and
    at the latest evaluation, and one with the mean."""
    series = _leading(results, settings)
    if series is None:
        return Markup('<p class="note">No evaluation has finished yet, so there is no held-out result to show.</p>')
    agents, share = _evaluated(results, series.name), is_share(series, settings.verification)
    cards = [(tables.named(results, agent), _ends(results, agent, series.name), "") for agent in agents]
    mean = _mean_ends(results, series.name)
    if mean is not None:
        cards.append((Markup("Mean of all agents"), mean, "mean"))
    steps = sorted({step for agent in agents for step in results.accuracy[agent, series.name]})
    moment = "before training" if steps[-1] == 0 else f"after step {steps[-1]}, against step {steps[0]}"
    what = measured(series, settings.verification)
    return Markup(parts().headline(what, series.title, moment, cards, share))


@dataclass(frozen=True)
class _Ends:
    """A held-out result at three evaluations.

    Attributes:
        first, best, last: (step, mean); the best is the last where no other was better.
        change: last minus first; `fall`: best minus last. None where it has no error of its own.
        fallen: whether the fall is more than chance would make it.
    """

    first: tuple[int, float]
    best: tuple[int, float]
    last: tuple[int, float]
    change: Estimate | None
    fall: Estimate | None
    fallen: bool


def _ends(results: Measurements, agent: str, name: str) -> _Ends:
    curve, key = results.accuracy[agent, name], (agent, name)
    first, best, last = ((step, curve[step].mean) for step in (min(curve), results.best(agent, name), max(curve)))
    return _Ends(first, best, last, results.change.get(key), results.fall.get(key), results.has_fallen(agent, name))


def _mean_ends(results: Measurements, name: str) -> _Ends | None:
    """Of the mean over several agents, at the evaluations that every one has; it has fallen where an agent has. None
    for a single agent, or without such an evaluation."""
    curves = [results.accuracy.get((agent, name), {}) for agent in results.agents]
    common = set.intersection(*(set(curve) for curve in curves))
    if len(curves) < 2 or not common:
        return None
    means = {step: sum(curve[step].mean for curve in curves) / len(curves) for step in sorted(common)}
    last, best = max(means), best_step(means)
    if best is None or round(means[best] - means[last], 9) <= 0:
        best = last
    fallen = best != last and any(results.has_fallen(agent, name) for agent in results.agents)
    first, peak, end = ((step, means[step]) for step in (min(means), best, last))
    return _Ends(first, peak, end, None, None, fallen)


def _leading(results: Measurements, settings: Settings) -> Series | None:
    """The average where there is one, else the first headline that there is."""
    return leading([series for series in settings.evaluation.series if _evaluated(results, series.name)])


def standings(results: Measurements, settings: Settings) -> Markup:
    """Agents by benchmarks with their average, as in the paper's Table 1: at the start, at the best and at the latest
    evaluation. Empty for a run without an average."""
    columns = [series for series in settings.evaluation.series if series.name in settings.evaluation.averaged]
    agents = _evaluated(results, AVERAGE)
    if not columns or not agents:
        return Markup()
    rows, shares = [], [is_share(series, settings.verification) for series in columns]
    for agent in agents:
        curve, name = results.accuracy[agent, AVERAGE], tables.named(results, agent)
        moments: dict[int, list[str]] = {}
        for step, word in ((min(curve), "start"), (results.best(agent, AVERAGE), "best"), (max(curve), "latest")):
            moments.setdefault(step, []).append(word)
        for step, words in moments.items():
            cells = [
                parts().estimated(results.accuracy[agent, series.name].get(step), share)
                for series, share in zip(columns, shares, strict=True)
            ]
            label = name if "start" in words else parts().again(name)
            average = parts().strong(parts().estimated(curve[step], all(shares)))
            rows.append([label, parts().aside(", ".join(words), f"step {step}"), *cells, average])
    labels = [f"{name} {metric.label}" for ((name, metric),) in (series.parts for series in columns)]
    caption = "Held-out results of every agent on every benchmark, with their average"
    return Markup(parts().standings(["agent", "", *labels, "average"], rows, caption))


def benchmarks(results: Measurements, settings: Settings) -> Markup:
    """Every held-out result at the first, the best and the latest evaluation, with errors, for every agent."""
    rows = []
    for series in settings.evaluation.series:
        name, title, share = series.name, series.title, is_share(series, settings.verification)
        agents = _evaluated(results, name)
        for agent in agents:
            curve = results.accuracy[agent, name]
            first, best, last = min(curve), results.best(agent, name), max(curve)
            label = title if agent == agents[0] else parts().again(title)
            start, peak, end = (parts().estimated(curve[step], share) for step in (first, best, last))
            change = parts().difference(results.change.get((agent, name)), share)
            number_of_problems = count(curve[last].problems)
            rows.append([label, tables.named(results, agent), start, peak, best, end, last, change, number_of_problems])
        ends = _mean_ends(results, name)
        if ends is not None:
            (_, start_mean), (at, best_mean), (_, last_mean) = ends.first, ends.best, ends.last
            shown = percent if share else number
            change = signed(last_mean - start_mean, share)
            cells = [shown(start_mean), shown(best_mean), at, shown(last_mean), "", change, ""]
            rows.append([parts().again(title), Markup("<em>mean</em>"), *cells])
    if not rows:
        return Markup()
    header = ["benchmark", "agent", "start", "best", "at step", "latest", "at step", "change", "problems"]
    plain = measure(settings.verification)
    caption = f"Held-out {plain}, plus or minus one standard error over problems"
    kinds = {metric.kind for series in settings.evaluation.series for _, metric in series.parts}
    return Markup(parts().benchmarks(header, rows, caption, plain, kinds))


def _evaluated(results: Measurements, benchmark: str) -> list[str]:
    return [agent for agent in results.agents if results.accuracy.get((agent, benchmark))]
