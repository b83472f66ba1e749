"""An estimate on a terminal of 100 columns, and as JSON."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from hacpo.phrases import amount, duration, size
from hacpo.tools.estimate.memory import total
from hacpo.tools.estimate.totals import RunEstimate

_SECTIONS = ("sampling", "rescoring", "training")

_NO_TIME = "time: not known before it is measured; run one step, or name a finished run: --throughput PIPELINE"


def _table(*columns: str, left: int = 1) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < left else "right", no_wrap=True)
    return table


def print_run(console: Console, run: RunEstimate) -> None:
    """One run, section by section."""
    settings, work = run.settings, run.work
    console.print(run.run, style="bold")
    console.print(
        f"  {settings.algorithm.recipe}: {settings.steps} steps x {settings.batch.prompts} prompts x "
        f"{settings.responses_per_prompt} responses from each of {len(run.agents)} agents"
    )
    for note in run.notes:
        console.print(f"  {note}")
    sections = [_agents(run), _work(run), _memory(run), _disk(run)]
    if run.run_seconds is not None:
        sections.append(_time(run))
    for section in sections:
        console.print()
        console.print(section)
    if run.run_seconds is not None:
        console.print(f"{run.hardware}: {run.device.source}")
    console.print()
    time = "" if run.run_seconds is None else f", {duration(run.run_seconds)} on {run.hardware}"
    console.print(f"{amount(work.rollouts())} rollouts, {size(run.disk.kept)} on disk at the end{time}")
    if run.device.memory_gib is not None:
        console.print(_fits(run, run.device.memory_gib))
    if run.measured_seconds is not None:
        console.print(f"at the pace of the finished steps: {duration(run.measured_seconds)}")
    if run.run_seconds is None and run.measured_seconds is None:
        console.print(_NO_TIME)


def _agents(run: RunEstimate) -> Table:
    table = _table("agent", "model", "parameters", "trained", "context", "prompt", "response", "at most", left=2)
    for name, agent in run.agents.items():
        lengths = agent.training
        table.add_row(
            name,
            agent.model if len(agent.model) <= 24 else f"…{agent.model[-23:]}",
            amount(agent.parameters),
            amount(agent.trained),
            "-" if agent.shape.context is None else f"{agent.shape.context:,}",
            f"{lengths.prompt:,.0f}",
            f"{lengths.response:,.0f}",
            f"{lengths.most:,}",
        )
    return table


def _work(run: RunEstimate) -> Table:
    work = run.work
    table = _table("sampled and learned", "a step", "an evaluation", "the run")
    agents = list(work.agents.values())
    evaluations = [agent.evaluation for agent in agents]
    own, side = (sum(getattr(a, kind).responses for a in agents) for kind in ("step", "side"))
    table.add_row("rollouts", amount(own), "", amount(work.rollouts() - work.side()))
    if side:
        table.add_row("side sample, for capability", amount(side), "", amount(work.side()))
    table.add_row("evaluation answers", "", amount(sum(e.responses for e in evaluations)), amount(work.answers()))
    table.add_row(
        "sampled tokens",
        amount(sum(a.step.tokens + a.side.tokens for a in agents)),
        amount(sum(e.tokens for e in evaluations)),
        amount(work.sampled_tokens()),
    )
    table.add_row(
        "  at most",
        amount(sum(a.step.most_tokens + a.side.most_tokens for a in agents)),
        amount(sum(e.most_tokens for e in evaluations)),
        amount(work.most_sampled_tokens()),
    )
    table.add_row("responses in updates", amount(sum(a.learned for a in agents)), "", amount(work.learned()))
    table.add_row(
        "their tokens, with prompts", amount(sum(a.learned_tokens for a in agents)), "", amount(work.learned_tokens())
    )
    table.add_row(
        "optimizer updates",
        amount(sum(a.updates for a in agents)),
        "",
        amount(work.steps * sum(a.updates for a in agents)),
    )
    flops = [agent.flops for agent in run.agents.values()]
    table.add_row(
        "floating-point operations",
        amount(sum(each.step for each in flops)),
        amount(sum(each.evaluation for each in flops)),
        amount(run.flops),
    )
    return table


def _memory(run: RunEstimate) -> Table:
    where = "process" if run.device.memory_gib is None else "GPU"
    table = _table(f"memory of one {where}", *run.agents)
    for phase in _SECTIONS:
        each = [agent.memory[phase] for agent in run.agents.values()]
        with_engine = {"sampling": f"sampling ({run.engine})", "training": _training(run)}.get(phase, phase)
        table.add_row(with_engine, *(size(total(parts)) for parts in each), style="bold")
        bytes_of = [{part.name: part.bytes for part in parts} for parts in each]
        for name in dict.fromkeys(name for parts in bytes_of for name in parts):
            table.add_row(f"  {name}", *(size(parts[name]) if name in parts else "-" for parts in bytes_of))
    if any(agent.host for agent in run.agents.values()):
        table.add_row("the machine's own, loading", *(size(agent.host) for agent in run.agents.values()), style="bold")
    return table


def _training(run: RunEstimate) -> str:
    launcher = run.settings.launcher
    batch = max((agent.micro_batch for agent in run.agents.values()), key=lambda each: each.tokens)
    return f"training (of {launcher.world_size}; {batch.sequences} x {batch.longest:,} tokens a pass)"


def _disk(run: RunEstimate) -> Table:
    disk = run.disk
    table = _table("disk", "a step", "the run")
    steps = run.settings.steps
    for name, bytes_of_step in disk.step.items():
        table.add_row(name, size(bytes_of_step), size(bytes_of_step * steps))
    table.add_row("evaluations", "", size(disk.evaluation * run.work.evaluations))
    table.add_row("checkpoints, all of them", size(disk.checkpoint), size(disk.written - disk.tables))
    table.add_row("in all, without retention", "", size(disk.written), style="bold")
    table.add_row("after retention", "", size(disk.kept), style="bold")
    table.add_row("at most on the way", "", size(disk.most))
    table.add_row("DVC's cache beside it", "", size(disk.cached))
    return table


def _time(run: RunEstimate) -> Table:
    table = _table("time of a step", *run.agents)
    each = [agent.seconds for agent in run.agents.values() if agent.seconds is not None]
    for name in ("sampling", "update", "other"):
        table.add_row(name, *(duration(getattr(seconds, name)) for seconds in each))
    table.add_row("an evaluation", *(duration(seconds.evaluation) for seconds in each))
    return table


def _fits(run: RunEstimate, memory_gib: float) -> str:
    peak = run.peak()
    phase = max(peak, key=lambda name: peak[name])
    verdict = "fits into" if peak[phase] <= memory_gib * 2**30 else "DOES NOT FIT into"
    return f"{phase} takes most memory of a GPU: {size(peak[phase])}, which {verdict} {memory_gib:g} GiB"


def print_comparison(console: Console, runs: Sequence[RunEstimate]) -> None:
    """Several runs, one a line, with each one's rollouts as a multiple of the least."""
    common = os.path.commonpath([os.path.dirname(run.run) for run in runs])
    table = _table(f"{common}/" if common else "run", "rollouts", "x", "sampled", "learned", "memory", "disk", "time")
    least = min(run.work.rollouts() for run in runs)
    for run in runs:
        table.add_row(
            os.path.relpath(run.run, common or "."),
            amount(run.work.rollouts()),
            f"{run.work.rollouts() / least:,.3g}",
            amount(run.work.sampled_tokens()),
            amount(run.work.learned_tokens()),
            size(max(run.peak().values())),
            size(run.disk.kept),
            "-" if (seconds := run.run_seconds or run.measured_seconds) is None else duration(seconds),
        )
    console.print(table)
    console.print("sampled: response tokens, evaluations included; learned: tokens of all updates, prompts included;")
    console.print("memory: of the largest process; disk: at the end, after retention")
    for note in dict.fromkeys(note for run in runs for note in run.notes):
        of = [os.path.relpath(run.run, common or ".") for run in runs if note in run.notes]
        console.print(f"  {note}" if len(of) == len(runs) else f"  {note}: {', '.join(of)}")
    if all(run.run_seconds is None and run.measured_seconds is None for run in runs):
        console.print(_NO_TIME)


def as_json(run: RunEstimate) -> dict[str, Any]:
    """Everything as plain values: bytes, tokens and seconds."""
    work, disk = run.work, run.disk
    return {
        "run": run.run,
        "recipe": run.settings.algorithm.recipe,
        "engine": run.engine,
        "hardware": {"name": run.hardware, "source": run.device.source, "memory_gib": run.device.memory_gib},
        "notes": run.notes,
        "totals": {
            "rollouts": work.rollouts(),
            "side_rollouts": work.side(),
            "answers": work.answers(),
            "sampled_tokens": work.sampled_tokens(),
            "most_sampled_tokens": work.most_sampled_tokens(),
            "learned_responses": work.learned(),
            "learned_tokens": work.learned_tokens(),
            "evaluations": work.evaluations,
            "flops": run.flops,
            "step_seconds": run.step_seconds,
            "run_seconds": run.run_seconds,
            "measured_seconds": run.measured_seconds,
        },
        "disk_bytes": asdict(disk),
        "agents": {
            name: {
                "model": agent.model,
                "shape": agent.shape.dimensions,
                "parameters": agent.parameters,
                "trained": agent.trained,
                "lengths": asdict(agent.training),
                "work": asdict(work.agents[name]),
                "memory_bytes": {
                    phase: {"total": total(parts), "parts": [asdict(part) for part in parts]}
                    for phase, parts in agent.memory.items()
                },
                "micro_batch": asdict(agent.micro_batch),
                "host_bytes": agent.host,
                "flops": asdict(agent.flops),
                "seconds": None if agent.seconds is None else asdict(agent.seconds),
            }
            for name, agent in run.agents.items()
        },
    }
