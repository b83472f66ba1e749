"""The page's tables and cards as HTML. Whatever comes from files is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from hacpo.config import Settings
from hacpo.report.checks import checks
from hacpo.report.collect import STAGES, Measurements
from hacpo.report.estimates import Estimate
from hacpo.report.facts import AgentFacts, ProblemSet, SettingRow
from hacpo.report.panels import ANSWER_SHARES, GROUP_SHARES, color_of
from hacpo.report.scales import count, number, percent, points, seconds, short_count

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


def headline(found: Measurements, settings: Settings) -> str:
    """One card per agent with the first benchmark's accuracy before and after, and one with the mean."""
    benchmark = next((name for name in settings.evaluation.benchmarks if _evaluated(found, name)), None)
    if benchmark is None:
        return '<p class="note">No evaluation has finished yet, so there is no held-out accuracy to show.</p>'
    agents = _evaluated(found, benchmark)
    cards = []
    for agent in agents:
        curve = found.accuracy[agent, benchmark]
        first, final = curve[min(curve)], curve[max(curve)]
        cards.append(_card(named(found, agent), first, final, found.change.get((agent, benchmark))))
    if len(agents) > 1 and len(agents) == len(found.agents):
        ends = [found.accuracy[agent, benchmark] for agent in agents]
        first, final = (
            Estimate(sum(curve[pick(curve)].mean for curve in ends) / len(ends), None, 0) for pick in (min, max)
        )
        cards.append(_card("Mean of all agents", first, final, None, kind="mean"))
    steps = sorted({step for agent in agents for step in found.accuracy[agent, benchmark]})
    moment = "before training" if steps[-1] == 0 else f"after step {steps[-1]}, against step {steps[0]}"
    return (
        f'<p class="eyebrow">Held-out accuracy, <strong>{escape(benchmark)}</strong>, {moment}</p>'
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


def benchmarks(found: Measurements, settings: Settings) -> str:
    """Accuracy at the first and latest evaluation, with errors, for every benchmark and agent."""
    rows = []
    for name in settings.evaluation.benchmarks:
        agents = _evaluated(found, name)
        for agent in agents:
            curve = found.accuracy[agent, name]
            change = found.change.get((agent, name))
            estimates = [curve[min(curve)], curve[max(curve)], change]
            cells = [_estimate(estimate, signed=estimate is change) for estimate in estimates]
            label = escape(name) if agent == agents[0] else f'<span class="again">{escape(name)}</span>'
            rows.append([label, named(found, agent), *cells, str(max(curve)), count(curve[max(curve)].problems)])
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
    return grid(header, rows, caption=caption, kind="numeric from-3") if rows else ""


def _evaluated(found: Measurements, benchmark: str) -> list[str]:
    return [agent for agent in found.agents if found.accuracy.get((agent, benchmark))]


def _share(*values: float) -> bool:
    return all(0 <= value <= 1 for value in values)


def _plain(value: float) -> str:
    return percent(value) if _share(value) else number(value)


def _estimate(estimate: Estimate | None, *, signed: bool) -> str:
    if estimate is None:
        return ""
    shown = points(estimate.mean) if signed else _plain(estimate.mean)
    error = "" if estimate.error is None else f' <span class="error">± {100 * estimate.error:.1f}</span>'
    return shown + error


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


def shares(found: Measurements) -> str:
    """What the baseline does in the latest step of each learner."""
    titles = GROUP_SHARES | ANSWER_SHARES
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
