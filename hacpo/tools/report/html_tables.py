"""The page's tables of numbers."""

from __future__ import annotations

from markupsafe import Markup

from hacpo.artifacts.tables import WHOLE_STEP
from hacpo.pipeline.catalogue import ADVANTAGE, EVALUATE, GENERATE, SIDE_GENERATE, UPDATE, StageSpec
from hacpo.settings.root import Settings
from hacpo.tools.report.collect import STAGES, Measurements
from hacpo.tools.report.markup import parts
from hacpo.tools.report.panels import GROUP_SHARES, answer_shares
from hacpo.tools.report.scales import count, percent, seconds


def named(results: Measurements, agent: str) -> Markup:
    """An agent's name with its colour."""
    return Markup(parts().named(results.color_of(agent), agent))


def cost(results: Measurements) -> Markup:
    """Rollouts, tokens, updates and memory per agent and in all."""
    evaluation = [
        sum(value for key, value in _added(results, EVALUATE, agent).items() if key.endswith(".tokens"))
        for agent in results.agents
    ]
    rows = [
        [title, *(count(value) if value else "" for value in values), count(sum(values))]
        for title, values in (
            ("rollouts sampled", [results.total(GENERATE, "rollouts", agent) for agent in results.agents]),
            ("tokens sampled", [results.total(GENERATE, "tokens", agent) for agent in results.agents]),
            *(
                (
                    f"{what} of side samples, for capability",
                    [results.total(SIDE_GENERATE, key, agent) for agent in results.agents],
                )
                for what, key in (("rollouts", "rollouts"), ("tokens", "tokens"))
            ),
            (
                "tokens of their prompts",
                [results.total(GENERATE, "prompt_tokens", agent) for agent in results.agents],
            ),
            ("tokens learned from", [results.total(UPDATE, "tokens", agent) for agent in results.agents]),
            ("updates", [results.total(UPDATE, "updates", agent) for agent in results.agents]),
            ("tokens sampled in evaluations", evaluation),
        )
        if sum(values)
    ]
    return Markup(parts().grid(["", *results.agents, "all"], rows, "Spent so far", "numeric") if rows else "")


def times(results: Measurements) -> Markup:
    """Seconds per stage and agent, and the most memory that each agent's processes took."""
    columns = [*results.agents, WHOLE_STEP]
    spent = {stage.name: [results.total(stage, "seconds", agent) for agent in columns] for stage in STAGES}
    everything = sum(map(sum, spent.values()))
    if not everything:
        return Markup()
    rows = []
    for stage, values in [*spent.items(), ("in all", [sum(column) for column in zip(*spent.values(), strict=True)])]:
        if sum(values):
            cells = [seconds(value) if value else "" for value in values[:-1]]
            title = parts().strong(stage) if stage == "in all" else parts().code(stage)
            rows.append([title, *cells, seconds(sum(values)), percent(sum(values) / everything)])
    peaks = [
        max(
            [v.get("peak_memory_mib", 0.0) for (_, _, name), v in results.metrics.items() if name == agent], default=0.0
        )
        for agent in results.agents
    ]
    rows.append(["peak memory", *(f"{count(peak)} MiB" if peak else "" for peak in peaks), "", ""])
    return Markup(parts().grid(["stage", *columns, "share"], rows, "Time so far, added up over agents", "numeric"))


def shares(results: Measurements, settings: Settings) -> Markup:
    """What the baseline does in the latest step of each learner."""
    titles = GROUP_SHARES | answer_shares(settings.verification)
    rows = []
    for agent in results.agents:
        curves = {key: results.metric(ADVANTAGE, f"{agent}.{key}") for key in ("live_groups", "groups", *titles)}
        if not curves["groups"]:
            continue
        step = max(curves["groups"])
        cells = [percent(curve[step]) if step in curve else "" for curve in (curves[key] for key in titles)]
        live = f"{count(curves['live_groups'].get(step, 0.0))} of {count(curves['groups'][step])}"
        rows.append([named(results, agent), str(step), live, *cells])
    header = ["learner", "at step", "problems with signal", *titles.values()]
    return Markup(parts().grid(header, rows, "Baselines in the latest step", "numeric") if rows else "")


def _added(results: Measurements, stage: StageSpec, agent: str) -> dict[str, float]:
    """A stage's metrics of one agent, added up over all steps."""
    total: dict[str, float] = {}
    for (recorded, _, owner), values in results.metrics.items():
        if (recorded, owner) == (stage, agent):
            for key, value in values.items():
                total[key] = total.get(key, 0.0) + value
    return total


def pool(results: Measurements) -> Markup:
    """How many of each author's answers each learner could use."""
    rows = []
    names = sorted({name for entry in results.pool for name in entry.statuses} - {"kept"})
    for learner in results.agents:
        for source in sorted(results.agents, key=lambda name: name != learner):
            entries = [entry for entry in results.pool if (entry.learner, entry.source) == (learner, source)]
            total = sum(sum(entry.statuses.values()) for entry in entries)
            if not total:
                continue
            counts = [sum(entry.statuses.get(name, 0) for entry in entries) for name in ("kept", *names)]
            same = sum(entry.roundtrip * sum(entry.statuses.values()) for entry in entries) / total
            authored = sum(entry.source_tokens for entry in entries)
            needed = sum(entry.learner_tokens for entry in entries)
            rows.append(
                [
                    named(results, learner),
                    named(results, source) if source != learner else "itself",
                    count(total),
                    *(parts().aside(count(value), percent(value / total)) for value in counts),
                    percent(same),
                    f"{needed / authored:.2f}" if authored else "",
                ]
            )
    header = ["learner", "author", "answers", "kept", *names, "round trip", "learner's tokens per author's"]
    return Markup(parts().grid(header, rows, "Pools of all steps", "numeric from-3") if rows else "")
