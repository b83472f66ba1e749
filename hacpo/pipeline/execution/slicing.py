"""What a table that is made in slices is made of: files of other inputs or settings are never taken for its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hacpo.artifacts.model_folder import config_hash
from hacpo.artifacts.slices import stamps
from hacpo.artifacts.tables import CHECKPOINT, PROBLEMS
from hacpo.pipeline.catalogue import StageSpec
from hacpo.pipeline.policies import policy_of
from hacpo.pipeline.project import Pipeline
from hacpo.settings import params


def made_of(
    spec: StageSpec, pipeline: Pipeline, step: int, agent: str, limit: int | None, overrides: Sequence[str]
) -> dict[str, Any]:
    """All that a stage's output depends on, as JSON: what it reads of the settings, and what tells its inputs from
    others.

    Checkpoints are told by the hashes of what they hold, for retention may give their files other times; everything
    else by sizes and times, as DVC does.
    """
    files, checkpoints = [], []
    for path, at, whose, mine in _inputs(spec, pipeline, step, agent):
        if at is None:
            files.append(path)
        elif path.is_dir():
            checkpoints.append([at, whose, config_hash(path), policy_of(pipeline.layout, at, whose) if mine else ""])
    return {
        "hacpo": version("hacpo"),
        "stage": spec.name,
        "step": step,
        "agent": agent,
        "settings": params.reads(pipeline.settings, spec.settings, agent or None),
        "limit": limit,
        "overrides": list(overrides),
        "files": stamps(pipeline.root, [*files, *(pipeline.root / name for name in spec.outside(pipeline, agent))]),
        "checkpoints": checkpoints,
    }


def _inputs(spec: StageSpec, pipeline: Pipeline, step: int, agent: str) -> Iterator[tuple[Path, int | None, str, bool]]:
    """Where each input lies; of a checkpoint its step, whose it is, and whether that is the stage's own agent."""
    settings, layout = pipeline.settings, pipeline.layout
    for use in spec.reads:
        if not use.holds(settings, step):
            continue
        for at, whose in use.parts(settings.agents, agent, (step, step - 1, 0)):
            path = layout.path(use.artifact, at, whose)
            if use.artifact == PROBLEMS and use.only is not None:
                path = path / use.only(settings)
            yield path, at if use.artifact == CHECKPOINT else None, whose, use.whose == "own"
