"""The two small files beside the page: metrics.json for `dvc metrics show`, curves.csv for `dvc plots`."""

from __future__ import annotations

import csv
import io
from typing import Any

from hacpo.pipeline.catalogue import GENERATE, SIDE_GENERATE
from hacpo.settings.root import Settings
from hacpo.tools.report.collect import Measurements

_DIGITS = 4


def metrics(results: Measurements, settings: Settings) -> dict[str, Any]:
    """Held-out results at the first and the latest evaluation, and what the run has cost.

    Returns:
        Few and short keys, because `dvc metrics show` makes a column of each: name of a series (a benchmark for its
        headline, `<benchmark>.<metric>` for others, `average`) -> result of every agent at the latest evaluation, their
        `(mean)`, its `(gain)` since the first, and the `(best)` mean of an evaluation that all agents have (these where
        every agent was evaluated); `steps` trained; rollouts, sampled tokens and seconds added up over agents;
        `side_rollouts` where there are side samples for capability.
    """
    accuracy: dict[str, dict[str, float]] = {}
    for name in (series.name for series in settings.evaluation.series):
        curves = {
            agent: results.accuracy[agent, name] for agent in results.agents if results.accuracy.get((agent, name))
        }
        ends = {agent: (curve[min(curve)].mean, curve[max(curve)].mean) for agent, curve in curves.items()}
        if not ends:
            continue
        accuracy[name] = {agent: _rounded(final) for agent, (_, final) in ends.items()}
        if len(ends) == len(results.agents):
            start, final = (sum(values) / len(values) for values in zip(*ends.values(), strict=True))
            accuracy[name] |= {"(mean)": _rounded(final), "(gain)": _rounded(final - start)}
            common = set.intersection(*(set(curve) for curve in curves.values()))
            means = [sum(curve[step].mean for curve in curves.values()) / len(curves) for step in sorted(common)]
            accuracy[name] |= {"(best)": _rounded(max(means))} if means else {}
    side = round(sum(results.total(SIDE_GENERATE, "rollouts", agent) for agent in results.agents))
    return {
        **accuracy,
        **({"side_rollouts": side} if side else {}),
        "steps": results.steps_trained,
        "rollouts": round(sum(results.total(GENERATE, "rollouts", agent) for agent in results.agents)),
        "tokens": round(sum(results.total(GENERATE, "tokens", agent) for agent in results.agents)),
        "seconds": round(sum(values.get("seconds", 0.0) for values in results.metrics.values()), 1),
    }


def curves_csv(results: Measurements, settings: Settings) -> str:
    """One row per evaluated step; `<agent>.<series>` for every series and agent, empty where there is none."""
    keys = [(agent, series.name) for series in settings.evaluation.series for agent in results.agents]
    steps = sorted({step for curve in results.accuracy.values() for step in curve})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", *(f"{agent}.{name}" for agent, name in keys)])
    for step in steps:
        estimates = [results.accuracy.get(key, {}).get(step) for key in keys]
        writer.writerow([step, *("" if estimate is None else f"{estimate.mean:.{_DIGITS}f}" for estimate in estimates)])
    return text.getvalue()


def _rounded(value: float) -> float:
    return round(value, _DIGITS)
