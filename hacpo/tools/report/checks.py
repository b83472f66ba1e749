"""A few questions that decide whether a run can be trusted, answered from the numbers with a rule of thumb each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hacpo.evaluation.measure import is_share
from hacpo.pipeline.catalogue import ADVANTAGE, GENERATE
from hacpo.settings.root import Settings
from hacpo.tools.report.collect import Curve, Measurements
from hacpo.tools.report.scales import number, percent
from hacpo.verifying.judgement import GAVE_UP


@dataclass(frozen=True)
class Check:
    """One question.

    Attributes:
        answer: the number that decides, in words; None if there is no data yet.
        fine: whether it is within the rule.
        rule: the rule of thumb.
        figure: the figure that shows more.
    """

    question: str
    answer: str | None
    fine: bool
    rule: str
    figure: str


def checks(results: Measurements, settings: Settings) -> list[Check]:
    """All questions that apply to this run."""
    best_answers = "correct answers" if settings.verification.is_binary else "best answers"
    result = [
        *([_fallen(results, settings)] if settings.evaluation.series else []),
        _at_most(
            "Do sampler and trainer agree on log-probabilities?",
            _worst(results.metric(GENERATE, "sampler_difference_mean", agent).values() for agent in results.agents),
            0.02,
            "largest mean difference of a step: {} nats",
            "at most 0.02 nats",
            "sampler",
            exact=True,
        ),
        _at_most(
            "Is there something to learn from most problems?",
            _mean_of(results, "uniform"),
            0.5,
            "problems without signal, worst learner: {}",
            "at most half",
            "groups",
        ),
        _steps_without_signal(results),
        _at_most(
            f"Are {'correct' if settings.verification.is_binary else 'the best'} answers spared?",
            _mean_of(results, "punished_correct"),
            0.01,
            f"{best_answers} pushed down, worst learner: {{}}",
            "at most 1 %",
            "groups",
        ),
        _at_most(
            "Does the verifier cope with every answer?",
            _share_of(results.verdicts, GAVE_UP),
            0.0,
            "timeouts and errors: {}",
            "none",
            "verdicts",
        ),
        _at_most(
            "Do answers fit into the length limit?",
            # Not the verdict `truncated`: a reward function may give others to what was cut off.
            _share_of(results.finish_reasons, ("length",)),
            0.1,
            "answers cut off: {}",
            "at most 10 %",
            "verdicts",
        ),
        _at_most(
            "Do the own clip bounds leave most gradients alone?",
            _silenced(results, "own"),
            0.5,
            "own answers silenced, worst learner: {}",
            "at most half",
            "own_ratio",
        ),
    ]
    if settings.algorithm.rollouts.share and len(results.agents) > 1:
        result += [
            _at_most(
                "Can learners use what the others wrote?",
                _unused(results),
                0.01,
                "answers of others left out, worst learner: {}",
                "at most 1 %",
                "pool",
            ),
            _at_most(
                "Do most answers of others get through the clip bounds?",
                _silenced(results, "cross"),
                0.5,
                "answers of others silenced, worst learner: {}",
                "at most half",
                "cross_ratio",
            ),
        ]
    return result


def _steps_without_signal(results: Measurements) -> Check:
    """How many steps had no problem with unequal rewards for a learner; the learner with the most."""
    question, rule = "Does every step have something to teach?", "none"
    curves = {agent: results.metric(ADVANTAGE, f"{agent}.live_groups") for agent in results.agents}
    silent = {agent: sum(live == 0 for live in curve.values()) for agent, curve in curves.items() if curve}
    if not silent:
        return Check(question, None, True, rule, "groups")
    agent = max(silent, key=lambda name: silent[name])
    answer = f"steps in which all rewards were equal, worst learner: {silent[agent]} of {len(curves[agent])}"
    return Check(question, answer, not silent[agent], rule, "groups")


def _at_most(
    question: str, value: float | None, limit: float, answer: str, rule: str, figure: str, *, exact: bool = False
) -> Check:
    if value is None:
        return Check(question, None, True, rule, figure)
    shown = number(value) if exact else percent(value)
    return Check(question, answer.format(shown), value <= limit, rule, figure)


def _worst(curves: Iterable[Iterable[float]]) -> float | None:
    return max((value for curve in curves for value in curve), default=None)


def _mean_of(results: Measurements, key: str) -> float | None:
    """Of the advantage metrics over all steps, for a punished share those with signal; the learner with the most."""
    curves = []
    for agent in results.agents:
        live = results.metric(ADVANTAGE, f"{agent}.live_groups")
        curve = results.metric(ADVANTAGE, f"{agent}.{key}")
        curves.append([value for step, value in curve.items() if key == "uniform" or live.get(step, 1.0)])
    return max((sum(curve) / len(curve) for curve in curves if curve), default=None)


def _share_of(counted: Mapping[str, Mapping[str, Curve]], names: tuple[str, ...]) -> float | None:
    """Of agent -> name -> step -> count: the share that has one of the names."""
    counts = [
        (name, count) for by_name in counted.values() for name, curve in by_name.items() for count in curve.values()
    ]
    total = sum(count for _, count in counts)
    return sum(count for name, count in counts if name in names) / total if total else None


def _fallen(results: Measurements, settings: Settings) -> Check:
    """Whether a held-out result has fallen since its best evaluation; the one that fell most is named."""
    question, rule = "Is the latest model the best one?", "at most two standard errors below its best"
    series = {each.name: each for each in settings.evaluation.series}
    several = [key for key, curve in results.accuracy.items() if len(curve) > 1]
    if not several:
        return Check(question, None, True, rule, "held_out")
    fallen = [key for key in several if results.has_fallen(*key)]
    if not fallen:
        return Check(
            question, "no held-out result is further below its best than chance explains", True, rule, "held_out"
        )
    agent, name = max(fallen, key=lambda key: results.fall[key].mean)
    curve, best, last = results.accuracy[agent, name], results.best(agent, name), max(results.accuracy[agent, name])
    shown = percent if is_share(series[name], settings.verification) else number
    answer = (
        f"has fallen since its best: {agent}, {series[name].title}, from {shown(curve[best].mean)} at step {best} to "
        f"{shown(curve[last].mean)} at step {last}"
    )
    return Check(question, answer, False, rule, "held_out")


def _silenced(results: Measurements, kind: str) -> float | None:
    """Share of rows that a bound silenced over all steps; the learner with the most."""
    shares = []
    for agent in results.agents:
        steps = list(results.ratios.get((agent, kind), {}).values())
        if steps:
            rows = sum(ratios.rows for ratios in steps)
            shares.append(sum((ratios.below + ratios.above) * ratios.rows for ratios in steps) / rows)
    return max(shares, default=None)


def _unused(results: Measurements) -> float | None:
    shares = []
    for learner in results.agents:
        counts = [entry.statuses for entry in results.pool if entry.learner == learner and entry.source != learner]
        total = sum(sum(statuses.values()) for statuses in counts)
        if total:
            shares.append(1 - sum(statuses.get("kept", 0) for statuses in counts) / total)
    return max(shares, default=None)
