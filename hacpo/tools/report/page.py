"""Puts facts, figures and rollouts into `template.html`: one file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from hacpo.evaluation.measure import measure
from hacpo.pipeline.catalogue import GENERATE, SIDE_GENERATE
from hacpo.pipeline.views.made_otherwise import alike_until, in_words
from hacpo.settings.agents import AgentSampling
from hacpo.settings.root import Settings
from hacpo.tools.report import held_out
from hacpo.tools.report import html_tables as tables
from hacpo.tools.report.browser import LEARNER_FIELDS, RESPONSE_FIELDS, Embedded, filters, script_json
from hacpo.tools.report.checks import checks
from hacpo.tools.report.collect import Measurements
from hacpo.tools.report.facts import AgentFacts, ProblemSet, setting_rows
from hacpo.tools.report.figures import FIGURES
from hacpo.tools.report.markup import environment, parts
from hacpo.tools.report.scales import count

_WORDS = {2: "Two", 3: "Three", 4: "Four", 5: "Five", 6: "Six"}


def render(
    run: str,
    settings: Settings,
    results: Measurements,
    agents: Sequence[AgentFacts],
    sets: Sequence[ProblemSet],
    embedded: Embedded,
    otherwise: Mapping[int, str],
) -> str:
    """The page as HTML; the same arguments give the same text.

    Args:
        otherwise: steps that are not of these settings (`made_otherwise`).
    """
    captions = tomllib.loads(resource("captions.toml"))
    script, recipe, graded = resource("report.js"), settings.algorithm.recipe, not settings.verification.is_binary
    words = {name: caption_of(caption, graded) for name, caption in captions["figures"].items()}
    figures = {
        name: parts().figure(name, [row for row in draw(results, settings) if row], words[name])
        for name, draw in FIGURES.items()
    }
    template = environment().get_template("template.html")
    return template.render(
        figures=figures,
        parts=parts(),
        run=run,
        style=resource("report.css"),
        script=script,
        script_hash=script_digest(script),
        settings=settings,
        results=results,
        number=_WORDS.get(len(results.agents), count(len(results.agents))),
        totals=_totals(results),
        temperature=_of_each(settings, lambda sampling: f"{sampling.temperature:g}"),
        most_tokens=_of_each(settings, lambda sampling: count(sampling.max_new_tokens)),
        measure=measure(settings.verification),
        reward_meaning=captions["reward"]["graded" if graded else "plain"],
        recipe=recipe,
        recipe_sentence=captions["recipes"].get(recipe, ""),
        rows=setting_rows(settings),
        headline=held_out.headline(results, settings),
        standings=held_out.standings(results, settings),
        checks=checks(results, settings),
        otherwise=in_words(otherwise) if otherwise else "",
        done=alike_until(otherwise, results.steps_trained),
        agents=agents,
        sets=sets,
        benchmarks=held_out.benchmarks(results, settings),
        cost=tables.cost(results),
        times=tables.times(results),
        shares=tables.shares(results, settings),
        pool=tables.pool(results),
        embedded=embedded,
        payloads=_payloads(results, settings, embedded),
    )


def caption_of(caption: Mapping[str, Any], graded: bool) -> Mapping[str, str]:
    """A figure's words; `graded` ones in place of those that speak of right and wrong answers."""
    return {**caption, **(caption.get("graded", {}) if graded else {})}


def resource(name: str) -> str:
    """One of the files beside this one."""
    return files("hacpo.tools.report").joinpath(name).read_text(encoding="utf-8").strip("\n")


def script_digest(script: str) -> str:
    """What a page's policy names its script by, which stands between line breaks there."""
    return f"sha256-{base64.b64encode(hashlib.sha256(f'{chr(10)}{script}{chr(10)}'.encode()).digest()).decode()}"


def _totals(results: Measurements) -> dict[str, float]:
    """Rollouts and tokens of all agents, and rollouts of their side samples."""
    keys = {
        "rollouts": (GENERATE, "rollouts"),
        "tokens": (GENERATE, "tokens"),
        "side": (SIDE_GENERATE, "rollouts"),
    }
    return {
        name: sum(results.total(stage, key, agent) for agent in results.agents) for name, (stage, key) in keys.items()
    }


def _of_each(settings: Settings, value: Callable[[AgentSampling], str]) -> str:
    """One value if all agents have the same, else each agent's."""
    values = {name: value(agent.sampling) for name, agent in settings.agents.items()}
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return ", ".join(f"{text} for {name}" for name, text in values.items())


def _payloads(results: Measurements, settings: Settings, embedded: Embedded) -> list[tuple[str, str]]:
    """(id, JSON) of what the page's script reads."""
    index: dict[str, Any] = {
        "agents": [{"name": agent, "color": results.color_of(agent)} for agent in results.agents],
        "imitates": settings.algorithm.clip.cross == "likelihood",
        "filters": list(filters(settings.verification).items()),
        "graded": not settings.verification.is_binary,
        "learnerFields": LEARNER_FIELDS,
        "responseFields": RESPONSE_FIELDS,
        "rewards": [results.grades.low, results.grades.high],
        "shared": settings.algorithm.rollouts.share,
        "steps": embedded.index,
    }
    steps = [(f"reader-step-{step}", payload) for step, payload in embedded.payloads.items()]
    return [("reader-index", script_json(index)), *steps]
