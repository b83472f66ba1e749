"""Files and folders that no stage of the run makes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from hacpo.artifacts.layout import LOCKS, MERGED, SAVED, SLICES
from hacpo.artifacts.tables import (
    CHECKPOINT,
    METRICS,
    PROBLEMS,
    PROMPTS,
    REPORT,
    SCHEDULE,
    WHOLE_STEP,
    Artifact,
    owner_dir,
    step_dir,
    step_of,
)
from hacpo.artifacts.weights import optimizer_files
from hacpo.pipeline.catalogue import PIPELINE, STAGES, StageSpec
from hacpo.tools.audit.audit_run import AuditRun

CHECK = "unknown"
_IGNORED = {".gitignore", LOCKS, SAVED, SLICES, MERGED}
"""DVC's own, the locks between processes, and what an unfinished stage keeps for its next start or replaces then."""
_SHARD = re.compile(r"part-\d{5}\.parquet")
_MADE = [use.artifact for spec in PIPELINE for use in spec.writes]
_PARTS = {made.folder: made for made in _MADE if made.per != "run"}
"""Folder -> what lies in it, of what every step has, or every step's agents."""
_FOLDERS = {METRICS.folder, *(made.folder for made in _MADE if made.folder)}
_FILES = {made.path() for made in _MADE if made.per == "run" and not made.folder}
_IN_REPORT = {made.file for made in _MADE if made.folder == REPORT.folder}
_AT_START = {
    METRICS.folder,
    *(use.artifact.folder for spec in PIPELINE if spec.at in ("before", "start", "evaluation") for use in spec.writes),
} - {PROMPTS.folder}
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
        if name == run.layout.pruned.name:
            _check_pruned(run, path)
        elif name in _FILES:
            _expect(run, path, folder=False)
        elif name not in _FOLDERS or not path.is_dir() or _is_unasked(run, name):
            _unknown(run, path)
        elif name == PROBLEMS.folder:
            _check_data(run, path)
        elif name == REPORT.folder:
            for inner in _entries(path):
                if inner.name not in _IN_REPORT:
                    _unknown(run, inner)
        elif name == METRICS.folder:
            for stage in _entries(path):
                _check_metrics(run, stage, holes)
        else:
            for step in _steps(run, path):
                _check_step(run, name, step)


def _made_beside(spec: StageSpec) -> Artifact:
    """What a stage makes beside its metrics."""
    made = [use.artifact for use in spec.writes]
    return SCHEDULE if SCHEDULE in made else made[0]


def _is_unasked(run: AuditRun, name: str) -> bool:
    """Whether it is of stages that the settings do not ask for."""
    makers = [spec for spec in PIPELINE if any(use.artifact.folder == name for use in spec.writes)]
    return bool(makers) and not any(spec.asked_for(run.settings, 1) for spec in makers)


def _entries(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (path for path in sorted(folder.iterdir()) if path.name not in _IGNORED)


def _unknown(run: AuditRun, path: Path) -> None:
    note = "left by a command that was killed, or is at work" if path.name.startswith(".") else ""
    run.find(CHECK, path, expected="nothing", found="a folder" if path.is_dir() else "a file", note=note)


def _expect(run: AuditRun, path: Path, *, folder: bool) -> None:
    if path.is_dir() != folder:
        _unknown(run, path)


def _check_pruned(run: AuditRun, path: Path) -> None:
    """The record of pruned checkpoints; one that is damaged is a finding where it is read, here at the latest."""
    for agent in sorted(run.pruned.keys() - set(run.agents)):
        run.find(CHECK, path, agent, expected="the run's agents alone", found=agent)


def _steps(run: AuditRun, table: Path) -> Iterator[Path]:
    """The folders of the run's steps; everything else beside them is unknown."""
    for path in _entries(table):
        known = step_of(path.name)
        step = -1 if known is None else known
        if step > run.settings.steps:
            run.skip(f"{table.name} of steps beyond the last", f"the run has {run.settings.steps} steps")
        elif step > 0 or (step == 0 and table.name in _AT_START) or (step == 0 and table.parent.name in _AT_START):
            yield path
        else:
            _unknown(run, path)


def _check_step(run: AuditRun, folder: str, step: Path) -> None:
    """One step's folder of an artifact."""
    artifact = _PARTS[folder]
    if artifact.per == "step":
        _check_content(run, artifact, step)
        return
    agents = {owner_dir(artifact.per, name) for name in run.agents}
    for path in _entries(step):
        if path.name not in agents or not path.is_dir():
            _unknown(run, path)
        elif artifact == CHECKPOINT:
            _check_checkpoint(run, path)
        else:
            _check_content(run, artifact, path)


def _check_content(run: AuditRun, artifact: Artifact, folder: Path) -> None:
    """The one file of a table, or its shards."""
    for path in _entries(folder):
        if path.name != artifact.file if artifact.file else not _SHARD.fullmatch(path.name):
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
    spec = STAGES.get(stage.name)
    if spec is None or not spec.metrics or not spec.asked_for(run.settings, 1):
        _unknown(run, stage)
        return
    for step in _steps(run, stage):
        if spec.at in ("before", "start") and step.name != step_dir(0):
            _unknown(run, step)
            continue
        for path in _entries(step):
            if path.name not in {f"{name}.json" for name in ([WHOLE_STEP] if spec.per == "run" else run.agents)}:
                _unknown(run, path)
                continue
            if spec.at == "start" and 0 in run.not_here:
                continue
            made = run.layout.root / _made_beside(spec).path(step.name, path.stem)
            if not made.exists() and made not in holes:
                run.find(CHECK, path, expected="nothing", found="a file", note=f"what {stage.name} made is not there")
