"""Held-out results on the page: cards, the table of agents by benchmarks, and every number with its error."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from hacpo.evaluation.measure import is_share, measure, measured
from hacpo.evaluation.metrics import Estimate
from hacpo.evaluation.values import best_step
from hacpo.settings.root import Settings
from hacpo.settings.series import AVERAGE, Series
from hacpo.tools.report import html_tables as tables
from hacpo.tools.report.collect import Measurements
from hacpo.tools.report.scales import count, number, percent, points

_METRICS = {
    "pass": "<strong>pass@k</strong>: the share of problems that k answers are expected to solve at least once.",
    "best": "<strong>best@n</strong>: the share of problems that at least one of all n answers solves.",
    "maj": "<strong>maj@n</strong>: the share of problems whose most frequent of n answers is right.",
}


def headline(found: Measurements, settings: Settings) -> str:
    """One card per agent with the average (without one: the first benchmark's headline) at the start, at its best and
    at the latest evaluation, and one with the mean."""
    series = _leading(found, settings)
    if series is None:
        return '<p class="note">No evaluation has finished yet, so there is no held-out result to show.</p>'
    agents, share = _evaluated(found, series.name), is_share(series, settings.verification)
    cards = [_card(tables.named(found, agent), _ends(found, agent, series.name), share) for agent in agents]
    mean = _mean_ends(found, series.name)
    if mean is not None:
        cards.append(_card("Mean of all agents", mean, share, kind="mean"))
    steps = sorted({step for agent in agents for step in found.accuracy[agent, series.name]})
    moment = "before training" if steps[-1] == 0 else f"after step {steps[-1]}, against step {steps[0]}"
    what = measured(series, settings.verification)
    return (
        f'<p class="eyebrow">Held-out {what}, <strong>{escape(series.title)}</strong>, {moment}</p>'
        f'<div class="cards">{"".join(cards)}</div>'
    )


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


def _ends(found: Measurements, agent: str, name: str) -> _Ends:
    curve, key = found.accuracy[agent, name], (agent, name)
    first, best, last = ((step, curve[step].mean) for step in (min(curve), found.best(agent, name), max(curve)))
    return _Ends(first, best, last, found.change.get(key), found.fall.get(key), found.has_fallen(agent, name))


def _mean_ends(found: Measurements, name: str) -> _Ends | None:
    """Of the mean over several agents, at the evaluations that every one has; it has fallen where an agent has. None
    for a single agent, or without such an evaluation."""
    curves = [found.accuracy.get((agent, name), {}) for agent in found.agents]
    common = set.intersection(*(set(curve) for curve in curves))
    if len(curves) < 2 or not common:
        return None
    means = {step: sum(curve[step].mean for curve in curves) / len(curves) for step in sorted(common)}
    last, best = max(means), best_step(means)
    if best is None or round(means[best] - means[last], 9) <= 0:
        best = last
    fallen = best != last and any(found.has_fallen(agent, name) for agent in found.agents)
    first, best_one, last_one = ((step, means[step]) for step in (min(means), best, last))
    return _Ends(first, best_one, last_one, None, None, fallen)


def _card(name: str, ends: _Ends, share: bool, kind: str = "") -> str:
    shown = percent if share else number
    (start, first), (peak, best), (end, last) = ends.first, ends.best, ends.last
    if end == start:
        said = "not evaluated since"
    elif ends.fallen:
        fell = _moved(last - best, ends.fall, share, kind="fell")
        said = f"from {shown(first)}, best {shown(best)} at step {peak}, {fell} since its best"
    else:
        also = "its best" if peak == end else f"best {shown(best)} at step {peak}"
        said = f"from {shown(first)}, {_moved(last - first, ends.change, share)}; {also}"
    return (
        f'<div class="card {kind}"><h3>{name}</h3><p class="big">{shown(last)}</p>'
        f'{_bar(first, best, last) if share else ""}<p class="from-to">{said}</p></div>'
    )


def _moved(difference: float, estimate: Estimate | None, share: bool, kind: str = "") -> str:
    """A difference with its standard error where there is one."""
    error = "" if estimate is None or estimate.error is None else _error(estimate.error, share)
    unit = " points" if share else ""
    return f'<strong class="{kind}">{_signed(difference, share)}{unit}</strong>{error}'


def _bar(first: float, best: float, last: float) -> str:
    low, high = min(first, last), max(first, best, last)
    places = {"from": first, "best": best, "to": last}
    marks = "".join(f'<i class="{name}" style="left:{100 * at:.1f}%"></i>' for name, at in places.items())
    return (
        f'<div class="move" aria-hidden="true"><i class="span" style="left:{100 * low:.1f}%;'
        f'width:{100 * (high - low):.1f}%"></i>{marks}</div>'
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
    average_is_share = all(is_share(one, settings.verification) for one in columns)
    for agent in agents:
        curve, name = found.accuracy[agent, AVERAGE], tables.named(found, agent)
        moments: dict[int, list[str]] = {}
        for step, word in ((min(curve), "start"), (found.best(agent, AVERAGE), "best"), (max(curve), "latest")):
            moments.setdefault(step, []).append(word)
        for step, words in moments.items():
            cells = [
                _estimate(found.accuracy[agent, one.name].get(step), is_share(one, settings.verification))
                for one in columns
            ]
            label = name if "start" in words else f'<span class="again">{name}</span>'
            when = f"{', '.join(words)} <span class='error'>step {step}</span>"
            rows.append([label, when, *cells, f"<strong>{_estimate(curve[step], average_is_share)}</strong>"])
    labels = [f"{name} {metric.label}" for ((name, metric),) in (one.parts for one in columns)]
    caption = "Held-out results of every agent on every benchmark, with their average"
    return tables.grid(["agent", "", *labels, "average"], rows, caption=caption, kind="numeric from-3 standings") + (
        '<p class="note">Plus or minus one standard error over problems. The average is the plain mean of the '
        "benchmarks. <em>best</em> is the evaluation with the highest average; it was chosen by these very numbers, so "
        "it is too good by the luck of the choice.</p>"
    )


def benchmarks(found: Measurements, settings: Settings) -> str:
    """Every held-out result at the first, the best and the latest evaluation, with errors, for every agent."""
    rows = []
    for series in settings.evaluation.series:
        name, title, share = series.name, escape(series.title), is_share(series, settings.verification)
        agents = _evaluated(found, name)
        for agent in agents:
            curve = found.accuracy[agent, name]
            first, best, last = min(curve), found.best(agent, name), max(curve)
            rows.append(
                [
                    title if agent == agents[0] else f'<span class="again">{title}</span>',
                    tables.named(found, agent),
                    *(_estimate(curve[step], share) for step in (first, best)),
                    str(best),
                    _estimate(curve[last], share),
                    str(last),
                    _estimate(found.change.get((agent, name)), share, signed=True),
                    count(curve[last].problems),
                ]
            )
        ends, shown = _mean_ends(found, name), percent if share else number
        if ends is not None:
            (_, first_mean), (at, best_mean), (_, last_mean) = ends.first, ends.best, ends.last
            change = _signed(last_mean - first_mean, share)
            cells = [shown(first_mean), shown(best_mean), str(at), shown(last_mean), "", change, ""]
            rows.append([f'<span class="again">{title}</span>', "<em>mean</em>", *cells])
    header = ["benchmark", "agent", "start", "best", "at step", "latest", "at step", "change", "problems"]
    caption = f"Held-out {measure(settings.verification)}, plus or minus one standard error over problems"
    return tables.grid(header, rows, caption=caption, kind="numeric from-3") + _metric_words(settings) if rows else ""


def _metric_words(settings: Settings) -> str:
    """What the metrics beside the mean reward mean, of those in use."""
    used = {metric.kind for series in settings.evaluation.series for _, metric in series.parts}
    said = " ".join(words for kind, words in _METRICS.items() if kind in used)
    plain = measure(settings.verification)
    return said and f'<p class="note">A benchmark without a metric beside its name shows the {plain}. {said}</p>'


def _evaluated(found: Measurements, benchmark: str) -> list[str]:
    return [agent for agent in found.agents if found.accuracy.get((agent, benchmark))]


def _signed(difference: float, share: bool) -> str:
    """A difference: of shares in percentage points."""
    return points(difference) if share else f"{'+' if difference > 0 else ''}{number(difference)}"


def _error(error: float, share: bool) -> str:
    return f' <span class="error">± {f"{100 * error:.1f}" if share else f"{error:.2g}"}</span>'


def _estimate(estimate: Estimate | None, share: bool, *, signed: bool = False) -> str:
    if estimate is None:
        return ""
    shown = _signed(estimate.mean, share) if signed else percent(estimate.mean) if share else number(estimate.mean)
    return shown + ("" if estimate.error is None else _error(estimate.error, share))
