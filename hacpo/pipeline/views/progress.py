"""What a run has done, what comes next, and what came out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hacpo.artifacts.storage import disk_bytes
from hacpo.artifacts.tables import CHECKPOINT, REPORT
from hacpo.errors import harmless
from hacpo.evaluation.measure import described, is_share
from hacpo.evaluation.metrics import summarised
from hacpo.evaluation.values import best_step, result
from hacpo.phrases import mebibytes, ranges
from hacpo.pipeline.catalogue import EVALUATE, GENERATE, PIPELINE, SIDE_GENERATE, UPDATE, StageSpec, step_stages
from hacpo.pipeline.noted import numbers
from hacpo.pipeline.policies import holds_others
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.elsewhere import described as described_elsewhere
from hacpo.pipeline.records.elsewhere import not_here
from hacpo.pipeline.retention.pruned import checkpoints_there, read_record
from hacpo.pipeline.views import lessons
from hacpo.pipeline.views.made_otherwise import alike_until, in_words
from hacpo.settings.series import Series


def step_outputs(pipeline: Pipeline, step: int) -> list[tuple[StageSpec, str, Path]]:
    """(stage, agent, output) of everything of a step, in the order in which it is made."""
    layout, agents = pipeline.layout, list(pipeline.settings.agents)
    before = [spec for spec in PIPELINE if spec.at == "before" and step]
    stages = [*before, *step_stages(pipeline.settings, step)]
    return [
        (spec, agent, layout.path(use.artifact, step, owner))
        for spec in stages
        for agent in (agents if spec.per != "run" else [""])
        for use in spec.writes
        if use.artifact.per != "run"
        for _, owner in use.parts(agents, agent, (step, step - 1, 0))
    ]


def next_command(pipeline: Pipeline) -> str | None:
    """The first command whose output is not there; None when all are. Whether they are current, only DVC knows."""
    once = [spec for spec in PIPELINE if not _is_made(pipeline, spec)]
    first = next((spec for spec in once if spec.at == "before"), None)
    if first is not None:
        return pipeline.command_for(first)
    elsewhere = not_here(pipeline)
    for step in range(pipeline.settings.steps + 1):
        for stage, agent, output in step_outputs(pipeline, step):
            if stage.makes(CHECKPOINT) and step in elsewhere:
                continue
            if not _is_done(pipeline, step, stage, agent, output):
                return pipeline.command_for(stage, step, agent)
    return next((pipeline.command_for(spec) for spec in once if spec.at == "after"), None)


def _is_made(pipeline: Pipeline, spec: StageSpec) -> bool:
    """Whether all is there that a stage makes once for the run."""
    made = [use.artifact for use in spec.writes if use.artifact.per == "run"]
    places = [(artifact.file, pipeline.layout.path(artifact)) for artifact in made]
    return all(path.is_file() if file else path.is_dir() for file, path in places)


def finished_steps(pipeline: Pipeline) -> int:
    """How many training steps have all their outputs."""
    done, elsewhere = 0, not_here(pipeline)
    for step in range(1, pipeline.settings.steps + 1):
        outputs = step_outputs(pipeline, step)
        if step in elsewhere:
            outputs = [output for output in outputs if not output[0].makes(CHECKPOINT)]
        if not all(_is_done(pipeline, step, stage, agent, output) for stage, agent, output in outputs):
            break
        done = step
    return done


def _is_done(pipeline: Pipeline, step: int, stage: StageSpec, agent: str, output: Path) -> bool:
    """Whether an output is there, or is a checkpoint that may be missing because the next step has begun from it. One
    with other weights, or another config or tokenizer, than this run's is not done."""
    if stage.makes(CHECKPOINT) and holds_others(pipeline.layout, step, agent):
        return False
    if output.exists() or not stage.makes(CHECKPOINT) or step in (0, pipeline.settings.steps):
        return output.exists()
    return pipeline.layout.trace(step, agent).exists() and pipeline.layout.rollouts(step + 1, agent).exists()


def steps_beyond(pipeline: Pipeline) -> str | None:
    """Which steps were made while the run had more of them, in words; None if there are none."""
    numbers = [path.parent.name for path in (pipeline.folder / "steps").glob("*/dvc.lock")]
    beyond = sorted(int(name) for name in numbers if name.isdecimal() and int(name) > pipeline.settings.steps)
    if not beyond:
        return None
    return f"made while `steps` was larger: steps {ranges(beyond)}; they are kept, and the run's again once it is"


def totals(pipeline: Pipeline, stage: StageSpec, agent: str) -> dict[str, float]:
    """A stage's metrics added up over the run's steps, for one agent."""
    total: dict[str, float] = {}
    for step in range(pipeline.settings.steps + 1):
        for key, value in numbers(pipeline.layout, stage, step, agent).items():
            total[key] = total.get(key, 0) + value
    return total


def changed_settings(pipeline: Pipeline, most: int = 5) -> list[str]:
    """What params.yaml says differently than the settings that the run's files were made with, `key old -> new`."""
    try:
        changes = pipeline.changed_settings()
    except ValueError:
        return [f"{pipeline.layout.settings} is not readable"]
    lines = [described_change(key, *values) for key, values in sorted(changes.items())]
    return lines[:most] + ([f"and {len(lines) - most} more"] if len(lines) > most else [])


def described_change(key: str, was: object, now: object) -> str:
    """`key old -> new`."""
    return harmless(f"{key} {json.dumps(was)} -> {json.dumps(now)}")


def _what_follows(pipeline: Pipeline, changed: bool, otherwise: Mapping[int, str]) -> str:
    run, following = pipeline.command("run"), next_command(pipeline)
    if otherwise:
        return f"{run} makes the rest again"
    if following is not None:
        return f"{run} (alone, what comes first: {following})"
    return f"{run} repeats what depends on the settings below" if changed else "nothing, all outputs are there"


def print_status(pipeline: Pipeline, otherwise: Mapping[int, str]) -> None:
    """Done, next, rollouts, tokens and disk; `otherwise` is `made_otherwise`'s."""
    console = Console()
    settings, layout = pipeline.settings, pipeline.layout
    done = alike_until(otherwise, finished_steps(pipeline))
    console.print(f"[bold]{pipeline.run}[/]: {done} of {settings.steps} steps done", highlight=False)
    changes = changed_settings(pipeline)
    console.print(f"next: {_what_follows(pipeline, bool(changes), otherwise)}", highlight=False, soft_wrap=True)
    for change in changes:
        console.print(f"params.yaml has changed since: {change}", highlight=False, soft_wrap=True, markup=False)
    table = Table(box=None, padding=(0, 2))
    for name in ("agent", "rollouts", "sampled tokens", "sampling s", "update s"):
        table.add_column(name, justify="left" if name == "agent" else "right")
    for agent in settings.agents:
        sampled, updated = totals(pipeline, GENERATE, agent), totals(pipeline, UPDATE, agent)
        table.add_row(
            agent,
            f"{sampled.get('rollouts', 0):,.0f}",
            f"{sampled.get('tokens', 0):,.0f}",
            f"{sampled.get('seconds', 0):,.1f}",
            f"{updated.get('seconds', 0):,.1f}",
        )
    console.print(table)
    if settings.algorithm.capability.oracle_samples is not None:
        sums = [totals(pipeline, SIDE_GENERATE, agent) for agent in settings.agents]
        drawn, tokens = (sum(each.get(key, 0) for each in sums) for key in ("rollouts", "tokens"))
        console.print(
            f"beside them, for capability alone: {drawn:,.0f} rollouts, {tokens:,.0f} sampled tokens (side sample)",
            highlight=False,
        )
    if beyond := steps_beyond(pipeline):
        console.print(beyond, highlight=False, soft_wrap=True, markup=False)
    if elsewhere := not_here(pipeline):
        console.print(described_elsewhere(pipeline, elsewhere), highlight=False, soft_wrap=True, markup=False)
    for agent in settings.agents:
        others = [step for step in checkpoints_there(layout, agent) if holds_others(layout, step, agent)]
        if others:
            line = f"checkpoints of {agent}: not those that this run's files were made with: steps {ranges(others)}"
            console.print(line, highlight=False, soft_wrap=True, markup=False)
    for agent, pruned in read_record(layout).items():
        size = mebibytes(sum(entry.bytes for entry in pruned.values()))
        remaining = ranges(checkpoints_there(layout, agent))
        if pruned:
            line = f"checkpoints of {agent}: steps {remaining}; pruned: steps {ranges(sorted(pruned))} ({size})"
            console.print(line, highlight=False, soft_wrap=True, markup=False)
    parts = sorted(((disk_bytes(path), path.name) for path in layout.root.glob("*") if path.is_dir()), reverse=True)
    largest = ", ".join(f"{name} {size / 2**20:.1f}" for size, name in parts[:4])
    if parts:
        line = harmless(f"disk: {disk_bytes(layout.root) / 2**20:.1f} MiB ({largest})")
        console.print(line, highlight=False, markup=False)


def print_outcome(pipeline: Pipeline, otherwise: Mapping[int, str]) -> None:
    """Held-out results of every agent at the start, at the best and at the latest evaluation, which steps taught an
    agent nothing, and where the report is; before them, which steps are not this run's (`made_otherwise`)."""
    console = Console()
    if otherwise:
        console.print(in_words(otherwise), highlight=False, soft_wrap=True, markup=False)
    settings = pipeline.settings
    for series in settings.evaluation.series:
        table = Table(box=None, padding=(0, 2), title=None)
        table.add_column("")
        for name in ("start", "now", "change", "step", "best", "step"):
            table.add_column(name, justify="right")
        curves: list[dict[int, float]] = []
        for agent in settings.agents:
            curve = _curve(pipeline, series, agent)
            if not curve or 0 not in curve:
                continue
            if len(curve) == 1:
                table.add_row(agent, f"{curve[0]:.3f}", "-", "-", "not evaluated since")
                continue
            curves.append(curve)
            table.add_row(agent, *_course(curve))
        if len(curves) == len(settings.agents) > 1:
            common = sorted(set.intersection(*(set(curve) for curve in curves)))
            means = {step: sum(curve[step] for curve in curves) / len(curves) for step in common}
            if len(means) > 1:
                table.add_row("mean", *_course(means), style="bold")
        if table.row_count:
            console.print(described(series, settings), style="bold", highlight=False, soft_wrap=True, markup=False)
            console.print(table)
    for line in lessons.summary(pipeline):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    report = pipeline.layout.path(REPORT)
    if report.is_file():
        console.print(f"report: {report}", highlight=False, soft_wrap=True, markup=False)


def _curve(pipeline: Pipeline, series: Series, agent: str) -> dict[int, float]:
    """Step -> result, of every evaluation there is."""
    results = {step: _result(pipeline, series, step, agent) for step in range(pipeline.settings.steps + 1)}
    return {step: value for step, value in results.items() if value is not None}


def _result(pipeline: Pipeline, series: Series, step: int, agent: str) -> float | None:
    """What the stage noted beside its table where that is the same number, so that no table needs to be read; a mean of
    grades is not, which a table has in float32."""
    layout, settings = pipeline.layout, pipeline.settings
    if not layout.evaluation(step, agent).exists():
        return None
    exact = is_share(series, settings.verification)
    noted = summarised(series, numbers(layout, EVALUATE, step, agent)) if exact else None
    return result(layout, pipeline.run, settings.evaluation, series, step, agent) if noted is None else noted


def _course(curve: Mapping[int, float]) -> tuple[str, ...]:
    """Start, latest result, their difference and its step, best result and its step; the earliest of equal ones."""
    last, best = max(curve), best_step(curve)
    start, now = curve[min(curve)], curve[last]
    peak = ("-", "-") if best is None else (f"{curve[best]:.3f}", str(best))
    return f"{start:.3f}", f"{now:.3f}", f"{now - start:+.3f}", str(last), *peak
