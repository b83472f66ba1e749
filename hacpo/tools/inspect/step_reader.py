"""Tables of one step, as far as they are there: a run may still be at work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from hacpo.artifacts import tables
from hacpo.artifacts.problem_rows import ScheduledProblem
from hacpo.artifacts.run_files import RunFiles
from hacpo.artifacts.tables import Row
from hacpo.errors import MissingInputError, SettingsError
from hacpo.pipeline.catalogue import maker_of
from hacpo.pipeline.project import Pipeline


@dataclass(frozen=True)
class Missing:
    """A table that is not there yet, and the command that makes it."""

    table: str
    of: str
    """The agent or learner it belongs to; empty if it serves all."""
    command: str


@dataclass
class StepReader:
    """Reads the tables of one step and remembers those that are missing."""

    pipeline: Pipeline
    step: int
    missing: list[Missing] = field(default_factory=list)

    def __post_init__(self) -> None:
        steps = self.pipeline.settings.steps
        if not 1 <= self.step <= steps:
            raise SettingsError(
                "--step is out of range", where=self.pipeline.folder, expected=f"1 to {steps}", found=self.step
            )

    def problems(self) -> list[ScheduledProblem]:
        """The step's problems in the order of its batch.

        Raises:
            MissingInputError: the run has no schedule yet.
        """
        return sorted(ScheduledProblem.of(self.required(tables.PROMPTS)), key=lambda asked: asked.position)

    def required(self, table: tables.Table, agent: str = "", columns: Sequence[str] | None = None) -> pa.Table:
        """A table that must be there, an agent's or learner's where each has one.

        Raises:
            MissingInputError: it is not.
            ArtifactError: it is damaged or belongs to another run, step or agent.
        """
        if not self.files.has(table, self.step, agent):
            remedy = f"`{self.pipeline.command('run')}` makes it"
            where = self.files.path(table, self.step, agent)
            raise MissingInputError(f"the {table.title} table is missing", where=where, remedy=remedy)
        return self.files.read(table, self.step, agent, columns=columns, made_by=self._command(table, agent))

    def optional(self, table: tables.Table, agent: str = "", columns: Sequence[str] | None = None) -> pa.Table | None:
        """A table, or None if it is missing.

        Raises:
            ArtifactError: as `required`.
        """
        if self.files.has(table, self.step, agent):
            return self.required(table, agent, columns)
        self.missing.append(Missing(table.title, agent, self._command(table, agent)))
        return None

    @property
    def files(self) -> RunFiles:
        """The run's tables."""
        return RunFiles(self.pipeline.run, self.pipeline.layout)

    def _command(self, table: tables.Table, agent: str) -> str:
        return self.pipeline.command_for(maker_of(table), self.step, agent)


def rows_where(table: pa.Table | None, column: str, values: Sequence[str]) -> list[Row]:
    """The few rows whose `column` is one of `values`, in order; none if there is no table."""
    if table is None:
        return []
    return list(table.filter(pc.is_in(table[column], value_set=pa.array(values, pa.string()))).to_pylist())


def learners_of(pipeline: Pipeline, learner: str | None) -> list[str]:
    """Every agent, or the one that is asked for.

    Raises:
        SettingsError: there is no such agent.
    """
    agents = list(pipeline.settings.agents)
    if learner is not None and learner not in agents:
        raise SettingsError(
            f"no agent {learner!r} in params.yaml",
            where=pipeline.folder,
            expected=f"--learner with one of {', '.join(agents)}",
        )
    return agents if learner is None else [learner]
