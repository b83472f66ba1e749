"""Files and folders that no stage of the run makes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from hacpo.audit.run import AuditRun
from hacpo.layout import Layout, step_dir
from hacpo.weights import optimizer_files

CHECK = "unknown"
_IGNORED = {".gitignore", ".locks", ".saved", ".merged"}
"""DVC's own, the locks between processes, and what an unfinished stage keeps for its next start or replaces then."""
_STEP = re.compile(r"step=(\d{4})")
_SHARD = re.compile(r"part-\d{5}\.parquet")
_PER_AGENT = {
    "rollouts": "agent",
    "verdicts": "agent",
    "side_rollouts": "agent",
    "side_verdicts": "agent",
    "pool": "learner",
    "advantages": "learner",
    "updates": "agent",
    "checkpoints": "agent",
    "evaluations": "agent",
}
_FOLDERS = {"data", "prompts", "capability", "metrics", "report", *_PER_AGENT}
_MADE_BESIDE: dict[str, Callable[[Layout, int, str], Path]] = {
    "prepare": lambda layout, _step, _agent: layout.schedule,
    "warmup": Layout.checkpoint,
    "generate": Layout.rollouts,
    "verify": Layout.verdicts,
    "side_generate": Layout.side_rollouts,
    "side_verify": Layout.side_verdicts,
    "pool": Layout.pool,
    "advantage": lambda layout, step, _agent: layout.capability(step),
    "update": Layout.trace,
    "evaluate": Layout.evaluation,
}
"""Stage -> what it makes beside its metrics file, of a step and an agent."""
_FROM_START = {"checkpoints", "evaluations", "metrics"}
"""What there is of step 0 too."""


def check_leftovers(run: AuditRun, holes: Collection[Path] = ()) -> None:
    """Name what is in the run's folder and should not be. What belongs to steps beyond the last is not looked at: a run
    made shorter keeps it, and can be made longer again.

    Args:
        holes: missing tables that are findings already; metrics of theirs are not named again.
    """
    root = run.layout.root
    for path in _entries(root):
        name = path.name
        if name in ("settings.json", "schedule.parquet", run.layout.pruned.name):
            _expect(run, path, folder=False)
        elif name not in _FOLDERS or not path.is_dir() or _is_unasked(run, name):
            _unknown(run, path)
        elif name == "data":
            _check_data(run, path)
        elif name == "report":
            for inner in _entries(path):
                if inner.name not in ("index.html", "curves.csv", "metrics.json"):
                    _unknown(run, inner)
        elif name == "metrics":
            for stage in _entries(path):
                _check_metrics(run, stage, holes)
        else:
            for step in _steps(run, path):
                _check_step(run, name, step)


def _is_unasked(run: AuditRun, name: str) -> bool:
    """Whether it is of a side sample that the settings do not ask for."""
    return name.startswith("side_") and run.settings.algorithm.capability.oracle_samples is None


def _entries(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (path for path in sorted(folder.iterdir()) if path.name not in _IGNORED)


def _unknown(run: AuditRun, path: Path) -> None:
    note = "left by a command that was killed, or is at work" if path.name.startswith(".") else ""
    run.find(CHECK, path, expected="nothing", found="a folder" if path.is_dir() else "a file", note=note)


def _expect(run: AuditRun, path: Path, *, folder: bool) -> None:
    if path.is_dir() != folder:
        _unknown(run, path)


def _steps(run: AuditRun, table: Path) -> Iterator[Path]:
    """The folders of the run's steps; everything else beside them is unknown."""
    for path in _entries(table):
        match = _STEP.fullmatch(path.name)
        step = int(match[1]) if match else -1
        if step > run.settings.steps:
            run.skip(f"{table.name} of steps beyond the last", f"the run has {run.settings.steps} steps")
        elif step > 0 or (step == 0 and table.name in _FROM_START) or (step == 0 and table.parent.name in _FROM_START):
            yield path
        else:
            _unknown(run, path)


def _check_step(run: AuditRun, table: str, step: Path) -> None:
    """One step's folder of a table."""
    if table == "prompts":
        _check_shards(run, step)
    elif table == "capability":
        for path in _entries(step):
            if path.name != "capability.parquet":
                _unknown(run, path)
    else:
        agents = {f"{_PER_AGENT[table]}={name}" for name in run.agents}
        for path in _entries(step):
            if path.name not in agents or not path.is_dir():
                _unknown(run, path)
            elif table == "updates":
                for inner in _entries(path):
                    if inner.name != "trace.parquet":
                        _unknown(run, inner)
            elif table == "checkpoints":
                _check_checkpoint(run, path)
            else:
                _check_shards(run, path)


def _check_shards(run: AuditRun, folder: Path) -> None:
    for path in _entries(folder):
        if not _SHARD.fullmatch(path.name):
            _unknown(run, path)


def _check_checkpoint(run: AuditRun, folder: Path) -> None:
    """Which files a model folder holds is the model's affair, but nothing begins with a dot or lies in folders."""
    for path in _entries(folder):
        if path.name.startswith(".") or (path.is_dir() and path.name != "trainer"):
            _unknown(run, path)
    for path in _entries(folder / "trainer"):
        if path.name != "state.json" and path not in optimizer_files(folder / "trainer"):
            _unknown(run, path)


def _check_data(run: AuditRun, folder: Path) -> None:
    known = {run.layout.problems(name) for name in run.settings.data.sets}
    for path in _entries(folder):
        if not any(path in table.parents for table in known):
            _unknown(run, path)
            continue
        for inner in _entries(path):
            if inner not in known:
                _unknown(run, inner)


def _check_metrics(run: AuditRun, stage: Path, holes: Collection[Path]) -> None:
    whole = {"prepare": ["all"], "advantage": ["all"]}.get(stage.name, run.agents)
    if stage.name not in _MADE_BESIDE or _is_unasked(run, stage.name):
        _unknown(run, stage)
        return
    for step in _steps(run, stage):
        if stage.name in ("prepare", "warmup") and step.name != step_dir(0):
            _unknown(run, step)
            continue
        for path in _entries(step):
            if path.name not in {f"{name}.json" for name in whole}:
                _unknown(run, path)
                continue
            if stage.name == "warmup" and 0 in run.not_here:
                continue
            made = _MADE_BESIDE[stage.name](run.layout, int(step.name.removeprefix("step=")), path.stem)
            if not made.exists() and made not in holes:
                run.find(CHECK, path, expected="nothing", found="a file", note=f"what {stage.name} made is not there")
