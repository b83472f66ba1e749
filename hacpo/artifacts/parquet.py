"""Tables in Parquet files: written atomically, and validated where they are read.

Every Parquet file carries, as key-value metadata, `hacpo.schema` (table name and version), `hacpo.run`,
`hacpo.partition` (`step=0007/agent=ada`), `hacpo.shard` (`0/2`: the first of two) and `hacpo.settings` (JSON of the
resolved settings that the stage reads). Data pages carry checksums, so a flipped bit is an error and never a number.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hacpo.artifacts.encodings import layout
from hacpo.artifacts.row_stream import Pieces
from hacpo.artifacts.shards import Oddity, Shard, Wanted, read_shards, settings_text
from hacpo.artifacts.storage import atomic
from hacpo.artifacts.tables import Table
from hacpo.artifacts.text_files import check_regular, parse_json
from hacpo.errors import ArtifactError, MissingInputError, NotParquetError, first_line

_AT_ONCE = 256
"""Values of a column that are Python objects at the same time where it is gone through."""


def to_arrow(table: Table, rows: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> pa.Table:
    """Rows, or a mapping of columns, as an Arrow table of exactly the contract's types; a mapping may leave out columns
    that the table may lack."""
    if isinstance(rows, Mapping):
        schema = _present(table, rows)
        return pa.table({name: rows[name] for name in schema.names}, schema=schema)
    return pa.Table.from_pylist(list(rows), schema=table.schema)


def _present(table: Table, names: Container[str]) -> pa.Schema:
    """The schema without columns that may be lacking, and are."""
    return pa.schema([field for field in table.schema if field.name in names or field.name not in table.added])


def write_table(
    path: Path,
    table: Table,
    content: pa.Table | Pieces,
    *,
    run: str,
    partition: str = "",
    settings: Mapping[str, Any] | None = None,
    rows_per_shard: int | None = None,
) -> None:
    """Write a table atomically: to one file if `path` ends in .parquet, else to shards `part-00000.parquet`... in a
    folder.

    Args:
        content: rows in the contract's order; nulls only where the contract allows them.
        partition: the Hive partition that the table belongs to, for example `step=0007/agent=ada`.
        settings: what the stage read, for `hacpo.settings`.
        rows_per_shard: most rows in one file of a folder.

    Raises:
        StorageError: the disk refuses.
    """
    single = path.suffix == ".parquet"
    size = max(len(content) if single or rows_per_shard is None else rows_per_shard, 1)
    shards = max(-(-len(content) // size), 1)
    with atomic(path) as scratch:
        if not single:
            scratch.mkdir()
        for index, shard in enumerate(_cut(content, size)):
            file = scratch if single else scratch / shard_name(index)
            _write_shard(file, table, shard, f"{index}/{shards}", run, partition, settings)


def write_shards(
    folder: Path,
    table: Table,
    content: pa.Table | Pieces,
    *,
    first: int,
    shards: int,
    rows_per_shard: int,
    run: str,
    partition: str,
    settings: Mapping[str, Any],
) -> None:
    """Write some shards of a table, each atomically: the same bytes as `write_table` of all of it gives them.

    Args:
        content: the rows of these shards.
        first: the number of the first of them.
        shards: how many the table has.

    Raises:
        StorageError: the disk refuses.
    """
    for index, shard in enumerate(_cut(content, rows_per_shard), start=first):
        with atomic(folder / shard_name(index)) as scratch:
            _write_shard(scratch, table, shard, f"{index}/{shards}", run, partition, settings)


def shard_name(index: int) -> str:
    """The file of a table's shard."""
    return f"part-{index:05d}.parquet"


def _write_shard(
    file: Path,
    table: Table,
    shard: pa.Table,
    place: str,
    run: str,
    partition: str,
    settings: Mapping[str, Any] | None,
) -> None:
    metadata = {
        "hacpo.schema": table.identity,
        "hacpo.run": run,
        "hacpo.partition": partition,
        "hacpo.shard": place,
        "hacpo.settings": settings_text(settings or {}),
    }
    schema = _present(table, shard.column_names)
    with pq.ParquetWriter(file, schema, **layout(table)) as writer:
        writer.write_table(shard.cast(schema))
        writer.add_key_value_metadata(metadata)


def _cut(content: pa.Table | Pieces, size: int) -> Iterator[pa.Table]:
    """A table's rows, so many at a time; one table without rows if it has none."""
    if isinstance(content, pa.Table):
        for start in range(0, max(len(content), 1), size):
            yield content.slice(start, size)
        return
    held: list[pa.Table] = []
    for piece in content.tables:
        held.append(piece)
        while sum(map(len, held)) >= size:
            # In one piece, so that the same rows are the same bytes in a file.
            whole = pa.concat_tables(held).combine_chunks()
            yield whole.slice(0, size)
            held = [whole.slice(size)]
    if sum(map(len, held)) or not len(content):
        yield pa.concat_tables(held).combine_chunks()


def whole_shards(
    path: Path,
    table: Table,
    *,
    run: str | None = None,
    partition: str | None = None,
    columns: Sequence[str] | None = None,
    rows: range | None = None,
    made_by: str = "",
    finite: bool = True,
) -> Iterator[Shard]:
    """A table shard by shard, the first thing that is odd about it raised (`shards.read_shards`).

    Args:
        path: a .parquet file or a folder of shards.
        run, partition: what the metadata must say; None does not check.
        columns: only these (others are not read).
        rows: only shards with some of these.
        made_by: the command that makes the table, for messages.
        finite: refuse numbers that are infinite, or none (NaN): no stage writes such.

    Raises:
        MissingInputError: nothing there.
        ArtifactError: damaged, incomplete, or of another table, run or partition; a key that is there twice is known
            after the last shard.
    """
    if not path.exists():
        raise MissingInputError(f"the {table.name} table is missing", where=path, remedy=made_by and f"run `{made_by}`")
    for item in read_shards(path, table, Wanted(run, partition, finite=finite), columns, rows):
        if isinstance(item, Oddity):
            raise item.error(made_by and f"remake it with `{made_by}`")
        yield item


def read_table(
    path: Path,
    table: Table,
    *,
    run: str | None = None,
    partition: str | None = None,
    columns: Sequence[str] | None = None,
    made_by: str = "",
    finite: bool = True,
) -> pa.Table:
    """A whole table; arguments and errors as for `whole_shards`.

    Raises:
        ArtifactError: also where it holds no row, but must (`Table.filled`).
    """
    shards = whole_shards(path, table, run=run, partition=partition, columns=columns, made_by=made_by, finite=finite)
    content = pa.concat_tables(shard.content for shard in shards)
    if table.filled and not len(content):
        raise ArtifactError("holds no rows", where=path, remedy=made_by and f"remake it with `{made_by}`")
    return content


def values(column: pa.ChunkedArray) -> Iterator[Any]:
    """A column's values one after another; only a few at a time are Python objects."""
    for chunk in column.chunks:
        for start in range(0, len(chunk), _AT_ONCE):
            yield from chunk.slice(start, _AT_ONCE).to_pylist()


def read_given(path: Path, columns: Sequence[str] | None = None, *, optional: bool = False) -> pa.Table:
    """A Parquet file that users give, as it is: problems, capabilities. What it must hold its reader says.

    Args:
        columns: only these; others may hold anything, and any amount of it.
        optional: those that the file has not are left out.

    Raises:
        NotParquetError: it is none, or lacks one of the columns.
    """
    try:
        if columns is not None and optional:
            columns = [name for name in dict.fromkeys(pq.read_schema(path).names) if name in columns]
        content = pq.read_table(path, columns=columns)
        content.validate(full=True)  # texts are not looked at where they are read
        return content
    except (pa.ArrowException, OSError) as error:
        raise NotParquetError(where=path, reason=first_line(error)) from None


def read_metadata(path: Path) -> dict[str, Any]:
    """The `hacpo.*` metadata of a table's first shard, `settings` parsed.

    Raises:
        ArtifactError: no readable shard.
    """
    shard = path if path.is_file() else min(path.glob("part-*.parquet"), default=path)
    try:
        check_regular(shard)
        raw = pq.read_schema(shard).metadata or {}
        named = {key.decode(): value.decode() for key, value in raw.items() if key.startswith(b"hacpo.")}
        settings = parse_json(named.get("hacpo.settings", "{}"))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ArtifactError(f"not readable: {first_line(error)}", where=shard) from None
    if not isinstance(settings, dict):
        raise ArtifactError("hacpo.settings holds no settings", where=shard)
    return {**{name.removeprefix("hacpo."): value for name, value in named.items()}, "settings": settings}
