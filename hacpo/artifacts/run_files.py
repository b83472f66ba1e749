"""One way to read a run: any of its tables, of any step and agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from hacpo.artifacts import parquet
from hacpo.artifacts.layout import Layout
from hacpo.artifacts.tables import Table


@dataclass(frozen=True)
class RunFiles:
    """The tables of one run.

    Attributes:
        name: the run's, which every file of it repeats.
        layout: where its artifacts lie.
    """

    name: str
    layout: Layout

    def path(self, table: Table, step: int | None = None, agent: str = "") -> Path:
        """Where a table lies: `step` and `agent` as far as the table has one for each."""
        return self.layout.path(table, step, agent)

    def has(self, table: Table, step: int | None = None, agent: str = "") -> bool:
        """Whether a table is there."""
        return self.path(table, step, agent).exists()

    def read(
        self,
        table: Table,
        step: int | None = None,
        agent: str = "",
        *,
        columns: Sequence[str] | None = None,
        made_by: str = "",
    ) -> pa.Table:
        """A checked table (`parquet.read_table`).

        Args:
            made_by: the command that makes it, for the message when it is missing.

        Raises:
            MissingInputError: it is not there.
            ArtifactError: it is damaged, incomplete, or of another run, step or agent.
        """
        return parquet.read_table(
            self.path(table, step, agent),
            table,
            run=self.name,
            partition=table.partition(step, agent),
            columns=columns,
            made_by=made_by,
        )
