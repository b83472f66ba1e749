"""Tables that several processes make, each some of the files, on one machine or on many.

Every file is written whole and under its final name, but beside the table, in a folder that is named by what the table
is made of. When all are there the folder takes the table's place: that is the completion marker which later stages and
DVC see. So making a file twice is harmless, a file that was made of something else is never taken, and the bytes are
those of one process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacpo.artifacts import storage
from hacpo.artifacts.text_files import load_json
from hacpo.errors import SettingsError

if TYPE_CHECKING:
    import pyarrow as pa

    from hacpo.artifacts.row_stream import Pieces
    from hacpo.artifacts.tables import Table

_TEXT = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")
_REPORTS = "reports"


@dataclass(frozen=True)
class Slice:
    """One of `of` parts of the work on a table, `number` from 0."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Slice:
        """`2/8`: the third of eight.

        Raises:
            SettingsError: it is none.
        """
        match = _TEXT.fullmatch(text)
        if match is None or not int(match[1]) < int(match[2]):
            raise SettingsError("--shard is no part of a step", expected="i/n with i from 0 to n - 1", found=text)
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def shards(self, count: int) -> range:
        """Which of a table's `count` files are its own: as many as of any other slice, or one more."""
        return range(self.number * count // self.of, (self.number + 1) * count // self.of)


def stamps(root: Path, paths: Iterable[Path]) -> list[list[object]]:
    """What tells files and folders from others that may come to lie there: names below a root, sizes and times of
    modification."""
    seen: list[list[object]] = []
    for path in paths:
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        for file in files:
            with contextlib.suppress(OSError):
                status = file.stat()
                seen.append([os.path.relpath(file, root), status.st_size, status.st_mtime_ns])
    return seen


def digest(made_of: object) -> str:
    """A name for what a table is made of."""
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Staging:
    """The files of one table on their way.

    Attributes:
        folder: where they are put, all of them of the same inputs and settings.
        rows: of the whole table.
        rows_per_shard: of every file but the last.
        run, partition, settings: what every file says of itself (`parquet.write_table`).
    """

    folder: Path
    table: Table
    rows: int
    rows_per_shard: int
    run: str
    partition: str
    settings: Mapping[str, Any]

    @property
    def shards(self) -> int:
        """How many files the table has."""
        return max(-(-self.rows // self.rows_per_shard), 1)

    @property
    def begun(self) -> bool:
        """Whether somebody has made one."""
        return self.folder.is_dir()

    def missing(self, among: range | None = None) -> Iterator[range]:
        """The rows of files that are not there, those of neighbours together, in order."""
        from hacpo.artifacts.parquet import shard_name

        start = None
        every = range(self.shards) if among is None else among
        for index in every:
            is_made = (self.folder / shard_name(index)).is_file()
            if is_made and start is not None:
                yield self._rows(start, index)
                start = None
            elif not is_made and start is None:
                start = index
        if start is not None:
            yield self._rows(start, every.stop)

    def _rows(self, first: int, end: int) -> range:
        return range(first * self.rows_per_shard, min(end * self.rows_per_shard, self.rows))

    def write(self, rows: range, content: pa.Table | Pieces) -> None:
        """Write the files of some rows, which `missing` has named.

        Raises:
            StorageError: the disk refuses.
        """
        from hacpo.artifacts.parquet import write_shards

        write_shards(
            self.folder,
            self.table,
            content,
            first=rows.start // self.rows_per_shard,
            shards=self.shards,
            rows_per_shard=self.rows_per_shard,
            run=self.run,
            partition=self.partition,
            settings=self.settings,
        )

    def report(self, part: Slice, numbers: Mapping[str, float]) -> None:
        """Note what a slice has cost."""
        storage.write_json(self._reports / f"{part.number}-of-{part.of}.json", dict(numbers))

    def reported(self) -> list[dict[str, float]]:
        """What the slices have noted."""
        found = []
        for file in sorted(self._reports.glob("*.json")):
            with contextlib.suppress(OSError, ValueError):
                content = load_json(file)
                found.append({key: value for key, value in content.items() if isinstance(value, int | float)})
        return found

    @property
    def _reports(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.{_REPORTS}")

    def publish(self, path: Path) -> None:
        """Put the files, all of which are there, in the table's place, and forget what else was on its way.

        Raises:
            StorageError: the disk refuses.
        """
        storage.put(self.folder, path)
        storage.remove(self.folder.parent)
        for folder in list(self.folder.parents)[1:4]:
            with contextlib.suppress(OSError):  # another agent's are still there
                folder.rmdir()
