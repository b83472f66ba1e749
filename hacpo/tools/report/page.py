"""Puts facts, figures and rollouts into `template.html`: one file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from hacpo.evaluation.measure import measure
from hacpo.settings.agents import AgentSampling
from hacpo.settings.root import Settings
from hacpo.tools.report import held_out
from hacpo.tools.report import html_tables as tables
from hacpo.tools.report.browser import LEARNER_FIELDS, RESPONSE_FIELDS, Embedded, filters, script_json
from hacpo.tools.report.collect import Measurements
from hacpo.tools.report.facts import AgentFacts, ProblemSet, setting_rows
from hacpo.tools.report.figures import FIGURES
from hacpo.tools.report.panels import Rows, color_of
from hacpo.tools.report.scales import count

_WORDS = {2: "Two", 3: "Three", 4: "Four", 5: "Five", 6: "Six"}


def render(
    run: str,
    settings: Settings,
    found: Measurements,
    agents: Sequence[AgentFacts],
    sets: Sequence[ProblemSet],
    embedded: Embedded,
) -> str:
    """The page as HTML; the same arguments give the same text."""
    captions = tomllib.loads(_resource("captions.toml"))
    script = _resource("report.js")
    rows = setting_rows(settings)
    recipe = settings.algorithm.recipe
    graded = not settings.verification.is_math
    figures = {
        f"figure_{name}": figure(name, draw(found, settings), caption_of(captions["figures"][name], graded))
        for name, draw in FIGURES.items()
    }
    return Template(_resource("template.html")).substitute(
        figures,
        run=escape(run),
        style=_resource("report.css"),
        script=script,
        script_hash=f"sha256-{_digest(f'{chr(10)}{script}{chr(10)}')}",
        lead=_lead(found, settings),
        badge=_badge(found, settings),
        fact_line=_fact_line(found),
        story=_story(settings),
        measure=measure(settings.verification),
        measure_heading=measure(settings.verification).capitalize(),
        reward_meaning=captions["reward"]["graded" if graded else "plain"],
        recipe=escape(recipe),
        recipe_sentence=captions["recipes"].get(recipe, ""),
        recipe_changes=tables.changed_settings(rows),
        headline=held_out.headline(found, settings),
        standings=held_out.standings(found, settings),
        checks=tables.check_list(found, settings),
        agents=tables.agents(found, agents),
        sets=tables.problem_sets(sets),
        settings=tables.setting_table(rows),
        setting_count=len(rows),
        changed_count=sum(row.standing == "changed" for row in rows),
        benchmarks=held_out.benchmarks(found, settings),
        cost=tables.cost(found),
        times=tables.times(found),
        shares=tables.shares(found, settings),
        pool=tables.pool(found),
        browser_note=_browser_note(run, settings, embedded),
        payloads=_payloads(found, settings, embedded),
    )


def caption_of(caption: Mapping[str, Any], graded: bool) -> Mapping[str, str]:
    """A figure's words; `graded` ones in place of those that speak of right and wrong answers."""
    return {**caption, **(caption.get("graded", {}) if graded else {})}


def figure(name: str, rows: Rows, caption: Mapping[str, str]) -> str:
    """A figure with its explanation beside it, or the reason why there is nothing to draw."""
    drawn = [row for row in rows if row]
    if not drawn:
        return (
            f'<figure class="figure absent" id="{name}"><figcaption><h3>{caption["title"]}</h3></figcaption>'
            f'<p class="note">{caption["absent"]}</p></figure>'
        )
    panels = "".join(
        f'<div class="panels of-{min(len(row), 4)}">'
        + "".join(
            '<div class="panel">'
            + (
                f'<h4 title="{escape(panel.title)}">{_swatch(panel.color)}{escape(panel.title)}</h4>'
                if panel.title
                else ""
            )
            + f"{panel.chart}</div>"
            for panel in row
        )
        + "</div>"
        for row in drawn
    )
    return (
        f'<figure class="figure" id="{name}"><figcaption><h3>{caption["title"]}</h3><p>{caption["what"]}</p>'
        f"</figcaption>"
        f'<div class="drawn">{panels}</div><div class="notes"><p><strong>How to read it.</strong> {caption["read"]}</p>'
        f"<p><strong>Healthy.</strong> {caption['healthy']}</p></div></figure>"
    )


def _swatch(color: str) -> str:
    return f'<i class="swatch {color}"></i>' if color else ""


def _resource(name: str) -> str:
    return files("hacpo.tools.report").joinpath(name).read_text(encoding="utf-8").strip("\n")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _listed(names: Sequence[str]) -> str:
    shown = [f"<strong>{escape(name)}</strong>" for name in names]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _lead(found: Measurements, settings: Settings) -> str:
    names, judged = _listed(found.agents), "checked" if settings.verification.is_math else "rewarded"
    if len(found.agents) == 1:
        return f"One language model, {names}, learned from {judged} answers of its own."
    shared = settings.algorithm.rollouts.share
    how = (
        f"learned from their own and from each other's {judged} answers"
        if shared
        else f"each learned from its own {judged} answers"
    )
    number = _WORDS.get(len(found.agents), count(len(found.agents)))
    return f"{number} language models, {names}, {how}."


def _badge(found: Measurements, settings: Settings) -> str:
    done, planned = found.steps_trained, settings.steps
    state, word = ("done", "complete") if done == planned else ("open", "in progress")
    return f'<span class="badge {state}">{word}: {done} of {planned} steps</span>'


def _fact_line(found: Measurements) -> str:
    rollouts, tokens = (
        sum(found.total("generate", agent, key) for agent in found.agents) for key in ("rollouts", "tokens")
    )
    side = sum(found.total("side_generate", agent, "rollouts") for agent in found.agents)
    more = f", and {count(side)} rollouts of side samples for capability" if side else ""
    return f"{count(rollouts)} rollouts, {count(tokens)} sampled tokens{more}" if rollouts else "nothing sampled yet"


def _story(settings: Settings) -> str:
    """What a step is in this run, in two sentences."""
    group, prompts, updates = settings.responses_per_prompt, settings.batch.prompts, settings.updates_per_step
    answers = group * prompts
    several = len(settings.agents) > 1
    who = "every agent answers the same" if several else "the agent answers"
    pool = answers * len(settings.agents) if settings.algorithm.rollouts.share else answers
    learner = "every agent" if several else "it"
    temperature = _of_each(settings, lambda sampling: f"{sampling.temperature:g}")
    most = _of_each(settings, lambda sampling: count(sampling.max_new_tokens))
    judge = "A program compares each answer with the reference and rewards it"
    if not settings.verification.is_math:
        judge = f"The function <code>{escape(settings.verification.reward)}</code> rewards each answer"
    return (
        f"In each of {count(settings.steps)} steps {who} {count(prompts)} problems, {count(group)} times each "
        f"({count(answers)} answers{' per agent' if several else ''}, at temperature {temperature}, "
        f"at most {most} tokens). {judge}; then {learner} learns from {count(pool)} answers in "
        f"{_many(updates, 'update')}."
    )


def _of_each(settings: Settings, value: Callable[[AgentSampling], str]) -> str:
    """One value if all agents have the same, else each agent's."""
    values = {name: value(agent.sampling) for name, agent in settings.agents.items()}
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return ", ".join(f"{text} for {name}" for name, text in values.items())


def _many(number: int, what: str) -> str:
    return f"{count(number)} {what}{'s' if number != 1 else ''}"


def _browser_note(run: str, settings: Settings, embedded: Embedded) -> str:
    shown = len(embedded.index)
    folder = f"<code>artifacts/{escape(run)}/rollouts</code>"
    if not shown:
        return (
            "No answers can be browsed: none have been sampled yet, or the report's settings embed none. The "
            f"tables below {folder} hold all of them."
        )
    steps = "all" if shown == embedded.steps_there else f"{shown} of"
    most = max((len(entry["problems"]) for entry in embedded.index), default=0)
    text = (
        f"The answers of {steps} {_many(embedded.steps_there, 'sampled step')}, and of each step the first {most} of "
        f"{_many(embedded.problems_there, 'problem')} (their order is random, so they are a fair sample). Texts are "
        f"shown up to {count(settings.report.max_characters)} characters."
    )
    if embedded.shortened:
        size = f"{settings.report.browser_mebibytes:g} MiB"
        text += f" To keep these answers below {size}, some steps show fewer problems or shorter texts."
    return (
        f"{text} Everything else is in {folder} and the tables beside it; what the page embeds is set by the "
        "<code>report</code> block of params.yaml."
    )


def _payloads(found: Measurements, settings: Settings, embedded: Embedded) -> str:
    index: dict[str, Any] = {
        "agents": [{"name": agent, "color": color_of(found, agent)} for agent in found.agents],
        "filters": list(filters(settings.verification).items()),
        "graded": not settings.verification.is_math,
        "learnerFields": LEARNER_FIELDS,
        "responseFields": RESPONSE_FIELDS,
        "rewards": [found.grades.low, found.grades.high],
        "shared": settings.algorithm.rollouts.share,
        "steps": embedded.index,
    }
    blocks = [("reader-index", script_json(index))]
    blocks += [(f"reader-step-{step}", payload) for step, payload in embedded.payloads.items()]
    return "\n".join(f'<script type="application/json" id="{name}">{text}</script>' for name, text in blocks)
