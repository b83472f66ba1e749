"""Which steps of a run are of other settings, or of other training, than the rest of it: a run that was begun again
after a change, and stopped on the way, has files of both. Its settings and the files beside each other are all there,
so what counts them alone takes it for whole.

What a table was made with stands in its metadata; no weights are read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hacpo.artifacts import tables
from hacpo.artifacts.layout import Layout
from hacpo.errors import ArtifactError, HacpoError, harmless
from hacpo.phrases import ranges
from hacpo.pipeline.catalogue import maker_of
from hacpo.pipeline.policies import drawn_from_others
from hacpo.pipeline.project import Pipeline
from hacpo.settings import params
from hacpo.settings.root import Settings

UNTRAINED = ("retention", "disk", "report")
"""Blocks of settings for which no step is made again."""

MEANINGLESS = (*UNTRAINED, "storage")
"""Blocks of settings that no number of a run depends on."""

_TABLES = (tables.ROLLOUTS, tables.VERDICTS, tables.POOL, tables.ADVANTAGES, tables.TRACE, tables.EVALUATIONS)
"""A side sample's settings are among those of the responses to learn from and of the advantages."""


def made_otherwise(
    layout: Layout, settings: Settings, agents: Collection[str] | None = None, last: int | None = None
) -> dict[int, str]:
    """Step -> why what is there of it is not of a run with these settings, in words; steps of which nothing else is
    there are left out, and tables that cannot be read passed over.

    Args:
        agents: whose; None: all.
        last: up to this step; None: up to the run's last.
    """
    expected = _Expected(settings)
    reasons: dict[int, str] = {}
    for step in range((settings.steps if last is None else last) + 1):
        for agent in settings.agents if agents is None else agents:
            why = next(_differences(layout, expected, step, agent), None)
            if why is not None:
                reasons[step] = why
                break
    return reasons


def recorded_settings(pipeline: Pipeline) -> Settings:
    """The settings that the run's files are to be of: those of settings.json, or of params.yaml where it says none."""
    try:
        recorded = params.recorded(pipeline.layout.settings)
        return params.resolve({key: value for key, value in recorded.items() if key != "agent_names"})
    except (HacpoError, OSError, ValueError):
        return pipeline.settings


def alike_until(otherwise: Mapping[int, str], done: int) -> int:
    """How many of the steps that are `done` come before those of `made_otherwise`."""
    return min([done, *(max(step - 1, 0) for step in otherwise)])


def in_words(steps: Mapping[int, str]) -> str:
    """The steps of `made_otherwise`, and why the first of them is one."""
    first = min(steps)
    several = "steps" if len(steps) > 1 else "step"
    whose = f" (step {first}: {steps[first]})" if len(steps) > 1 else f" ({steps[first]})"
    return f"{several} {ranges(sorted(steps))} made with other settings, or of another training, than the rest{whose}"


def check_made_alike(pipeline: Pipeline, settings: Settings, agents: Collection[str], last: int | None = None) -> None:
    """Refuse a run whose files were not all made with one and the same settings.

    Args:
        settings: those that it goes by.
        agents: whose files matter. Those of all do where they learn from each other.
        last: the step that matters, with those before it; None: the run's last.

    Raises:
        ArtifactError: a step is of others.
    """
    whose = settings.agents if settings.algorithm.rollouts.coupled else agents
    if steps := made_otherwise(pipeline.layout, settings, whose, last):
        raise ArtifactError(in_words(steps), where=pipeline.folder, remedy=f"finish it: `{pipeline.command('run')}`")


class _Expected:
    """What a table's `hacpo.settings` must say, by table and agent."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: dict[tuple[str, str], dict[str, Any]] = {}

    def of(self, table: tables.Table, agent: str) -> dict[str, Any]:
        key = (table.name, agent)
        if key not in self._known:
            read = maker_of(table).recorded(table, self._settings, agent)
            self._known[key] = params.spoken_out(json.loads(json.dumps(read)))
        return self._known[key]


def _differences(layout: Layout, expected: _Expected, step: int, agent: str) -> Iterator[str]:
    """What an agent's files of a step say otherwise. Keys that a table lacks, or has above those of today, are those of
    another version of the program."""
    from hacpo.artifacts import parquet

    for table in _TABLES:
        path = layout.path(table, step, agent)
        if not path.exists():
            continue
        with contextlib.suppress(HacpoError):
            recorded = params.spoken_out(parquet.read_metadata(path)["settings"])
            for key, (was, wanted) in params.changed(recorded, expected.of(table, agent), in_both=True).items():
                if key.partition(".")[0] in MEANINGLESS:
                    continue
                yield harmless(f"{table.name} of {agent} with {key} {json.dumps(was)}, not {json.dumps(wanted)}")
    if step > 0 and drawn_from_others(layout, step, agent):
        yield f"{agent}'s rollouts were drawn from another checkpoint than step {step - 1} has made"
