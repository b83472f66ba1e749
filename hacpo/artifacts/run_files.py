"""One way to read a run: any of its tables, of any step and agent, whole or shard by shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from hacpo.artifacts.layout import Layout
from hacpo.artifacts.tables import EVERY_STEP, PROBLEMS, Table, owner_of, step_of

if TYPE_CHECKING:
    import pyarrow as pa

    from hacpo.artifacts.shards import Shard


class _Expected(TypedDict):
    run: str
    partition: str
    finite: bool


@dataclass(frozen=True)
class RunFiles:
    """The tables of one run.

    `step` and `whose` say which part of a table is meant, as far as it has parts: `whose` is an agent or a learner, and
    of the problems the name of the set (`<set>/<split>`).

    Attributes:
        name: the run's, which every file of it repeats.
        layout: where its artifacts lie.
        finite: whether numbers that are infinite, or none (NaN), are refused.
    """

    name: str
    layout: Layout
    finite: bool = True

    def path(self, table: Table, step: int | None = None, whose: str = "") -> Path:
        """Where a table lies."""
        return self.layout.problems(whose) if table == PROBLEMS else self.layout.path(table, step, whose)

    def has(self, table: Table, step: int | None = None, whose: str = "") -> bool:
        """Whether a table is there."""
        return self.path(table, step, whose).exists()

    def read(
        self,
        table: Table,
        step: int | None = None,
        whose: str = "",
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
        from hacpo.artifacts.parquet import read_table

        of = self._of(table, step, whose)
        return read_table(self.path(table, step, whose), table, columns=columns, made_by=made_by, **of)

    def shards(
        self,
        table: Table,
        step: int | None = None,
        whose: str = "",
        *,
        columns: Sequence[str] | None = None,
        rows: range | None = None,
        made_by: str = "",
    ) -> Iterator[Shard]:
        """A checked table, one shard after another; arguments and errors as for `read`.

        Args:
            rows: only shards with some of these.
        """
        from hacpo.artifacts.parquet import whole_shards

        of = self._of(table, step, whose)
        return whole_shards(self.path(table, step, whose), table, columns=columns, rows=rows, made_by=made_by, **of)

    def _of(self, table: Table, step: int | None, whose: str) -> _Expected:
        """What every file of it must be."""
        return {"run": self.name, "partition": table.partition(step, whose), "finite": self.finite}

    def parts(self, table: Table) -> Iterator[tuple[int | None, str]]:
        """Step and whose of every part of a table that is there, under the name that it has."""
        root = self.layout.root
        folder = root / table.folder
        if table == PROBLEMS:
            for file in sorted(folder.rglob("*.parquet")):
                yield None, file.relative_to(folder).with_suffix("").as_posix()
        elif table.per == "run":
            if self.path(table).is_file():
                yield None, ""
        else:
            for place in sorted(root.glob(table.within(EVERY_STEP, "*"))):
                step, *whose = place.relative_to(folder).parts
                number, name = step_of(step), owner_of("".join(whose))
                path = place / table.file
                if number is not None and path == self.path(table, number, name) and path.exists():
                    yield number, name
