"""Held-out results on the page: cards, the table of agents by benchmarks, and every number with its error."""

from __future__ import annotations

from html import escape

from hacpo.config import Settings
from hacpo.metrics import AVERAGE, Estimate, Series
from hacpo.report import tables
from hacpo.report.collect import Measurements
from hacpo.report.scales import count, number, percent, points
from hacpo.retention import best_step

_METRICS = {
    "pass": "<strong>pass@k</strong>: the share of problems that k answers are expected to solve at least once.",
    "best": "<strong>best@n</strong>: the share of problems that at least one of all n answers solves.",
    "maj": "<strong>maj@n</strong>: the share of problems whose most frequent of n answers is right.",
}


def headline(found: Measurements, settings: Settings) -> str:
    """One card per agent with the average (without one: the first benchmark's headline) before and after, and one with
    the mean."""
    series = _leading(found, settings)
    if series is None:
        return '<p class="note">No evaluation has finished yet, so there is no held-out accuracy to show.</p>'
    benchmark, agents = series.name, _evaluated(found, series.name)
    cards = []
    for agent in agents:
        curve = found.accuracy[agent, benchmark]
        first, final = curve[min(curve)], curve[max(curve)]
        cards.append(_card(tables.named(found, agent), first, final, found.change.get((agent, benchmark))))
    if len(agents) > 1 and len(agents) == len(found.agents):
        ends = [found.accuracy[agent, benchmark] for agent in agents]
        first, final = (
            Estimate(sum(curve[pick(curve)].mean for curve in ends) / len(ends), None, 0) for pick in (min, max)
        )
        cards.append(_card("Mean of all agents", first, final, None, kind="mean"))
    steps = sorted({step for agent in agents for step in found.accuracy[agent, benchmark]})
    moment = "before training" if steps[-1] == 0 else f"after step {steps[-1]}, against step {steps[0]}"
    return (
        f'<p class="eyebrow">Held-out accuracy, <strong>{escape(series.title)}</strong>, {moment}</p>'
        f'<div class="cards">{"".join(cards)}</div>'
    )


def _card(name: str, first: Estimate, final: Estimate, change: Estimate | None, kind: str = "") -> str:
    shown = percent if min(first.mean, final.mean) >= 0 and max(first.mean, final.mean) <= 1 else number
    share = shown is percent
    difference = final.mean - first.mean if change is None else change.mean
    moved = f"{points(difference)} points" if share else f"{difference:+.4g}"
    error = ""
    if change is not None and change.error is not None:
        size = f"{100 * change.error:.1f}" if share else number(change.error)
        error = f' <span class="error">± {size}</span>'
    bar = ""
    if share:
        low, high = sorted((first.mean, final.mean))
        bar = (
            f'<div class="move" aria-hidden="true"><i class="span" style="left:{100 * low:.1f}%;'
            f'width:{100 * (high - low):.1f}%"></i><i class="from" style="left:{100 * first.mean:.1f}%"></i>'
            f'<i class="to" style="left:{100 * final.mean:.1f}%"></i></div>'
        )
    return (
        f'<div class="card {kind}"><h3>{name}</h3><p class="big">{shown(final.mean)}</p>{bar}'
        f'<p class="from-to">from {shown(first.mean)}, <strong>{moved}</strong>{error}</p></div>'
    )


def _leading(found: Measurements, settings: Settings) -> Series | None:
    """The average where there is one, else the first headline that there is."""
    there = [series for series in settings.evaluation.series if _evaluated(found, series.name)]
    return next((series for series in there if series.name == AVERAGE), there[0] if there else None)


def standings(found: Measurements, settings: Settings) -> str:
    """Agents by benchmarks with their average, as in the paper's Table 1: at the start, at the best and at the latest
    evaluation. Empty for a run without an average."""
    columns = [series for series in settings.evaluation.series if series.name in settings.evaluation.averaged]
    agents = _evaluated(found, AVERAGE)
    if not columns or not agents:
        return ""
    rows = []
    for agent in agents:
        curve, name = found.accuracy[agent, AVERAGE], tables.named(found, agent)
        best = best_step({step: one.mean for step, one in curve.items()})
        moments: dict[int, list[str]] = {}
        for step, word in ((min(curve), "start"), (best, "best"), (max(curve), "latest")):
            if step is not None:
                moments.setdefault(step, []).append(word)
        for step, words in moments.items():
            cells = [_estimate(found.accuracy[agent, one.name].get(step)) for one in columns]
            label = name if "start" in words else f'<span class="again">{name}</span>'
            when = f"{', '.join(words)} <span class='error'>step {step}</span>"
            rows.append([label, when, *cells, f"<strong>{_estimate(curve[step])}</strong>"])
    labels = [f"{name} {metric.label}" for ((name, metric),) in (one.parts for one in columns)]
    caption = "Held-out results of every agent on every benchmark, with their average"
    return tables.grid(["agent", "", *labels, "average"], rows, caption=caption, kind="numeric from-3 standings") + (
        '<p class="note">Plus or minus one standard error over problems. The average is the plain mean of the '
        "benchmarks. <em>best</em> is the evaluation with the highest average; it was chosen by these very numbers, so "
        "it is too good by the luck of the choice.</p>"
    )


def benchmarks(found: Measurements, settings: Settings) -> str:
    """Every held-out result at the first and latest evaluation, with errors, for every agent."""
    rows = []
    for series in settings.evaluation.series:
        name, title = series.name, escape(series.title)
        agents = _evaluated(found, name)
        for agent in agents:
            curve = found.accuracy[agent, name]
            change = found.change.get((agent, name))
            estimates = [curve[min(curve)], curve[max(curve)], change]
            cells = [_estimate(estimate, signed=estimate is change) for estimate in estimates]
            label = title if agent == agents[0] else f'<span class="again">{title}</span>'
            rows.append([label, tables.named(found, agent), *cells, str(max(curve)), count(curve[max(curve)].problems)])
        if len(agents) == len(found.agents) > 1:
            curves = [found.accuracy[agent, name] for agent in agents]
            start, final = (sum(curve[pick(curve)].mean for curve in curves) / len(curves) for pick in (min, max))
            cells = [
                _plain(start),
                _plain(final),
                points(final - start) if _share(start, final) else number(final - start),
            ]
            rows.append([label, "<em>mean</em>", *cells, "", ""])
    header = ["benchmark", "agent", "start", "latest", "change in points", "at step", "problems"]
    caption = "Held-out accuracy, plus or minus one standard error over problems"
    return tables.grid(header, rows, caption=caption, kind="numeric from-3") + _metric_words(settings) if rows else ""


def _metric_words(settings: Settings) -> str:
    """What the metrics beside the mean reward mean, of those in use."""
    used = {metric.kind for series in settings.evaluation.series for _, metric in series.parts}
    said = " ".join(words for kind, words in _METRICS.items() if kind in used)
    return said and f'<p class="note">A benchmark without a metric beside its name shows the mean reward. {said}</p>'


def _evaluated(found: Measurements, benchmark: str) -> list[str]:
    return [agent for agent in found.agents if found.accuracy.get((agent, benchmark))]


def _share(*values: float) -> bool:
    return all(0 <= value <= 1 for value in values)


def _plain(value: float) -> str:
    return percent(value) if _share(value) else number(value)


def _estimate(estimate: Estimate | None, *, signed: bool = False) -> str:
    if estimate is None:
        return ""
    shown = points(estimate.mean) if signed else _plain(estimate.mean)
    error = "" if estimate.error is None else f' <span class="error">± {100 * estimate.error:.1f}</span>'
    return shown + error
