"""A copy of a finished run that tests may damage, and that can be put back (`sandbox` in tests/conftest.py)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.small_project import RUN

Change = Callable[[Any], Any]


@dataclass
class Sandbox:
    """A copy of a finished project; `restore` undoes whatever was done to its files."""

    root: Path
    _bytes: dict[Path, bytes] = field(default_factory=dict, repr=False)
    _linked: dict[Path, Path] = field(default_factory=dict, repr=False)
    _known: set[Path] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        self._bytes = {path: path.read_bytes() for path in self._files()}
        self._known = self._folders()
        self._linked = self._links()

    def _folders(self) -> set[Path]:
        return {Path(folder) for folder, _, _ in os.walk(self.root)}

    def _links(self) -> dict[Path, Path]:
        """Each symbolic link, and what it points to."""
        every = (Path(at) / name for at, folders, files in os.walk(self.root) for name in (*folders, *files))
        return {path: path.readlink() for path in every if path.is_symlink()}

    def _files(self) -> Iterator[Path]:
        for folder, folders, files in os.walk(self.root):
            folders[:] = [name for name in folders if name not in ("tmp", ".locks")]
            yield from (path for name in files if not (path := Path(folder) / name).is_symlink())

    def restore(self) -> None:
        for path in self._links().keys() - self._linked.keys():
            path.unlink()
        for path in set(self._files()) - self._bytes.keys():
            path.unlink()
        for folder in self._folders() - self._known:
            shutil.rmtree(folder, ignore_errors=True)
        for path, content in self._bytes.items():
            if not path.is_file() or path.read_bytes() != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        for path, target in self._linked.items():
            if not path.is_symlink():
                path.symlink_to(target)

    # --- places ------------------------------------------------------------------------------------------------------

    @property
    def pipeline(self) -> Path:
        return self.root / "pipelines" / RUN

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts" / RUN

    def lock(self, step: int | None = None) -> Path:
        return self.pipeline / "dvc.lock" if step is None else self.pipeline / "steps" / f"{step:04d}" / "dvc.lock"

    def shards(self, table: str) -> list[Path]:
        """The files of a table (`rollouts/step=0001/agent=ada`) or of several (`rollouts`)."""
        path = self.artifacts / table
        return [path] if path.is_file() else sorted(path.rglob("*.parquet"))

    # --- tables ------------------------------------------------------------------------------------------------------

    def rows(self, table: str) -> list[dict[str, Any]]:
        return [row for shard in self.shards(table) for row in pq.read_table(shard).to_pylist()]

    def rewrite(self, shard: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
        """Change the rows of one file and nothing else of it: same schema, metadata, compression and checksums."""
        before = pq.read_table(shard)
        after = pa.Table.from_pylist(change(before.to_pylist()), schema=before.schema)
        assert not after.equals(before), "nothing was changed"
        pq.write_table(after, shard, compression="zstd", write_page_checksum=True)

    def edit(
        self,
        table: str,
        column: str,
        change: Change,
        where: Callable[[dict[str, Any]], bool] = lambda row: True,
    ) -> dict[str, Any]:
        """Change one value, of the first row that fits.

        Returns:
            The row as it was, with the new value under `new` and the table's path below the run's under `table`.
        """
        for shard in self.shards(table):
            rows = pq.read_table(shard).to_pylist()
            at = next((number for number, row in enumerate(rows) if where(row)), None)
            if at is None:
                continue
            old = dict(rows[at])

            def changed(rows: list[dict[str, Any]], at: int = at) -> list[dict[str, Any]]:
                rows[at][column] = change(rows[at][column])
                return rows

            self.rewrite(shard, changed)
            place = shard.parent if shard.name.startswith("part-") else shard
            new = pq.read_table(shard).to_pylist()[at][column]
            return {**old, "new": new, "table": place.relative_to(self.artifacts).as_posix()}
        raise AssertionError(f"no row of {table} fits")

    def garble(self, table: str, column: str) -> None:
        """Put bytes that are no UTF-8 in the place of a text, in the first row."""
        shard = self.shards(table)[0]
        content = pq.read_table(shard, partitioning=None)
        texts = pa.array([b"\xff\xfe", *(text.encode() for text in content[column].to_pylist()[1:])], pa.binary())
        field = content.schema.field(column)
        garbled = pa.Array.from_buffers(pa.string(), len(texts), texts.buffers())
        content = content.set_column(content.schema.names.index(column), field, garbled)
        pq.write_table(content, shard, compression="zstd", write_page_checksum=True)

    def replace(self, path: Path, old: str, new: str) -> None:
        """Replace a text in a file, once; it must be there."""
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{path} has no {old!r}"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")

    def flip(self, path: Path, at: int) -> None:
        """Flip one bit of a byte, leaving size and times as they were."""
        status = path.stat()
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(bytes(content))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
