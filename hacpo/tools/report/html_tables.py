"""The page's tables and cards as HTML. Whatever comes from files is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from hacpo.settings.root import Settings
from hacpo.tools.report.checks import checks
from hacpo.tools.report.collect import STAGES, Measurements
from hacpo.tools.report.facts import AgentFacts, ProblemSet, SettingRow
from hacpo.tools.report.panels import GROUP_SHARES, answer_shares, color_of
from hacpo.tools.report.scales import count, percent, seconds, short_count

_NONE = '<span class="none">not there</span>'


def grid(header: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str, kind: str = "") -> str:
    """A table; the first cell of a row is its heading. Cells are HTML, header and caption are text."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{cells[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in cells[1:]) + "</tr>"
        for cells in rows
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table class="grid {kind}">'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def named(found: Measurements, agent: str) -> str:
    """An agent's name with its colour."""
    return f'<span class="agent"><i class="swatch {color_of(found, agent)}"></i>{escape(agent)}</span>'


def agents(found: Measurements, facts: Sequence[AgentFacts]) -> str:
    """Who took part."""

    def cell(value: int | str | None, *, full: bool = True) -> str:
        if value is None:
            return _NONE
        return escape(value) if isinstance(value, str) else (count(value) if full else short_count(value))

    rows = [
        [
            named(found, agent.name),
            cell(agent.architecture),
            cell(agent.parameters, full=False),
            f"{cell(agent.layers)} × {cell(agent.width)}" if agent.layers and agent.width else cell(None),
            cell(agent.vocabulary),
            cell(agent.context),
            escape(agent.origin),
        ]
        for agent in facts
    ]
    header = ["agent", "architecture", "parameters", "layers × width", "vocabulary", "context", "where from"]
    return grid(header, rows, caption="Agents", kind="agents")


def problem_sets(sets: Sequence[ProblemSet]) -> str:
    """What was asked."""
    rows = []
    for entry in sets:
        example = (
            "" if entry.example is None else f"<q>{_short(entry.example[0])}</q> → <q>{_short(entry.example[1])}</q>"
        )
        size = _NONE if entry.problems is None else count(entry.problems)
        rows.append(
            [f"<code>{escape(entry.name)}</code>", escape(", ".join(entry.roles)), size, example, escape(entry.origin)]
        )
    header = ["set", "used for", "problems", "its first problem and answer", "where from"]
    return grid(header, rows, caption="Problems", kind="sets")


def _short(text: str, most: int = 160) -> str:
    """Escaped, cut, and isolated, so that writing-direction marks in it reach no further."""
    return f"<bdi>{escape(text if len(text) <= most else text[: most - 1] + '…')}</bdi>"


def _prose(text: str) -> str:
    """Escaped, with `code` set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def setting_table(rows: Sequence[SettingRow]) -> str:
    """Every resolved setting; those that differ from the recipe or the default are marked."""
    words = {"recipe": "recipe", "default": "default", "given": "params.yaml"}
    cells = []
    for row in rows:
        standing = (
            words.get(row.standing) or f"<strong>changed</strong>, otherwise <code>{_short(row.reference)}</code>"
        )
        value = f"<code>{_short(row.value, 400)}</code>"
        cells.append([f"<code>{escape(row.key)}</code>", value, standing, _prose(row.meaning)])
    return grid(["setting", "value", "origin", "meaning"], cells, caption="All settings", kind="settings")


def changed_settings(rows: Sequence[SettingRow]) -> str:
    """A sentence with the settings of the algorithm that differ from the recipe."""
    changed = [row for row in rows if row.standing == "changed" and row.key.startswith("algorithm.")]
    if not changed:
        return "All its settings are the recipe's own."
    listed = ", ".join(
        f"<code>{escape(row.key.removeprefix('algorithm.'))}</code> {escape(row.value)} (recipe: "
        f"{escape(row.reference)})"
        for row in changed
    )
    return f"Changed from the recipe: {listed}."


def check_list(found: Measurements, settings: Settings) -> str:
    """The questions of `checks` as a list."""
    items = []
    for check in checks(found, settings):
        state, word = (
            ("open", "no data yet") if check.answer is None else ("fine", "fine") if check.fine else ("look", "look")
        )
        answer = "" if check.answer is None else f"{escape(check.answer)}; "
        items.append(
            f'<li class="check {state}"><span class="state">{word}</span><a href="#{check.figure}">'
            f"{escape(check.question)}</a>"
            f'<span class="because">{answer}rule of thumb: {escape(check.rule)}</span></li>'
        )
    return f'<ul class="checks">{"".join(items)}</ul>'


def cost(found: Measurements) -> str:
    """Rollouts, tokens, updates and memory per agent and in all."""
    evaluation = [
        sum(value for key, value in _added(found, "evaluate", agent).items() if key.endswith(".tokens"))
        for agent in found.agents
    ]
    rows = [
        [title, *(count(value) if value else "" for value in values), count(sum(values))]
        for title, values in (
            ("rollouts sampled", [found.total("generate", agent, "rollouts") for agent in found.agents]),
            ("tokens sampled", [found.total("generate", agent, "tokens") for agent in found.agents]),
            *(
                (
                    f"{what} of side samples, for capability",
                    [found.total("side_generate", a, key) for a in found.agents],
                )
                for what, key in (("rollouts", "rollouts"), ("tokens", "tokens"))
            ),
            ("tokens of their prompts", [found.total("generate", agent, "prompt_tokens") for agent in found.agents]),
            ("tokens learned from", [found.total("update", agent, "tokens") for agent in found.agents]),
            ("updates", [found.total("update", agent, "updates") for agent in found.agents]),
            ("tokens sampled in evaluations", evaluation),
        )
        if sum(values)
    ]
    return grid(["", *found.agents, "all"], rows, caption="Spent so far", kind="numeric") if rows else ""


def times(found: Measurements) -> str:
    """Seconds per stage and agent, and the most memory that each agent's processes took."""
    columns = [*found.agents, "all"]
    spent = {stage: [found.total(stage, agent, "seconds") for agent in columns] for stage in STAGES}
    everything = sum(map(sum, spent.values()))
    if not everything:
        return ""
    rows = []
    for stage, values in [*spent.items(), ("in all", [sum(column) for column in zip(*spent.values(), strict=True)])]:
        if sum(values):
            cells = [seconds(value) if value else "" for value in values[:-1]]
            title = f"<strong>{stage}</strong>" if stage == "in all" else f"<code>{stage}</code>"
            rows.append([title, *cells, seconds(sum(values)), percent(sum(values) / everything)])
    peaks = [
        max([v.get("peak_memory_mib", 0.0) for (_, _, name), v in found.metrics.items() if name == agent], default=0.0)
        for agent in found.agents
    ]
    rows.append(["peak memory", *(f"{count(peak)} MiB" if peak else "" for peak in peaks), "", ""])
    return grid(["stage", *columns, "share"], rows, caption="Time so far, added up over agents", kind="numeric")


def shares(found: Measurements, settings: Settings) -> str:
    """What the baseline does in the latest step of each learner."""
    titles = GROUP_SHARES | answer_shares(settings.verification)
    rows = []
    for agent in found.agents:
        curves = {key: found.metric("advantage", "all", f"{agent}.{key}") for key in ("live_groups", "groups", *titles)}
        if not curves["groups"]:
            continue
        step = max(curves["groups"])
        cells = [percent(curve[step]) if step in curve else "" for curve in (curves[key] for key in titles)]
        live = f"{count(curves['live_groups'].get(step, 0.0))} of {count(curves['groups'][step])}"
        rows.append([named(found, agent), str(step), live, *cells])
    header = ["learner", "at step", "problems with signal", *titles.values()]
    return grid(header, rows, caption="Baselines in the latest step", kind="numeric") if rows else ""


def _added(found: Measurements, stage: str, agent: str) -> dict[str, float]:
    """A stage's metrics of one agent, added up over all steps."""
    total: dict[str, float] = {}
    for (name, _, owner), values in sorted(found.metrics.items()):
        if (name, owner) == (stage, agent):
            for key, value in values.items():
                total[key] = total.get(key, 0.0) + value
    return total


def pool(found: Measurements) -> str:
    """How many of each author's answers each learner could use."""
    rows = []
    names = sorted({name for entry in found.pool for name in entry.statuses} - {"kept"})
    for learner in found.agents:
        for source in sorted(found.agents, key=lambda name: name != learner):
            entries = [entry for entry in found.pool if (entry.learner, entry.source) == (learner, source)]
            total = sum(sum(entry.statuses.values()) for entry in entries)
            if not total:
                continue
            counts = [sum(entry.statuses.get(name, 0) for entry in entries) for name in ("kept", *names)]
            same = sum(entry.roundtrip * sum(entry.statuses.values()) for entry in entries) / total
            authored = sum(entry.source_tokens for entry in entries)
            needed = sum(entry.learner_tokens for entry in entries)
            rows.append(
                [
                    named(found, learner),
                    named(found, source) if source != learner else "itself",
                    count(total),
                    *(f"{count(value)} <span class='error'>{percent(value / total)}</span>" for value in counts),
                    percent(same),
                    f"{needed / authored:.2f}" if authored else "",
                ]
            )
    header = ["learner", "author", "answers", "kept", *names, "round trip", "learner's tokens per author's"]
    return grid(header, rows, caption="Pools of all steps", kind="numeric from-3") if rows else ""
