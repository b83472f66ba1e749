"""Tables in Parquet files: written atomically, and validated where they are read.

Every Parquet file carries, as key-value metadata, `hacpo.schema` (table name and version), `hacpo.run`,
`hacpo.partition` (`step=0007/agent=ada`), `hacpo.shard` (`0/2`: the first of two) and `hacpo.settings` (JSON of the
resolved settings that the stage reads). Data pages carry checksums, so a flipped bit is an error and never a number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hacpo.artifacts.storage import atomic
from hacpo.artifacts.tables import Table
from hacpo.artifacts.text_files import check_regular, parse_json
from hacpo.errors import ArtifactError, MissingInputError


def to_arrow(table: Table, rows: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> pa.Table:
    """Rows, or a mapping of columns, as an Arrow table of exactly the contract's types."""
    if isinstance(rows, Mapping):
        return pa.table({name: rows[name] for name in table.schema.names}, schema=table.schema)
    return pa.Table.from_pylist(list(rows), schema=table.schema)


def write_table(
    path: Path,
    table: Table,
    content: pa.Table,
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
    size = len(content) if single or rows_per_shard is None else rows_per_shard
    starts = range(0, len(content), max(size, 1)) if len(content) else range(1)
    with atomic(path) as scratch:
        if not single:
            scratch.mkdir()
        for index, start in enumerate(starts):
            metadata = {
                "hacpo.schema": table.identity,
                "hacpo.run": run,
                "hacpo.partition": partition,
                "hacpo.shard": f"{index}/{len(starts)}",
                "hacpo.settings": json.dumps(settings or {}, sort_keys=True, ensure_ascii=False),
            }
            pq.write_table(
                content.slice(start, max(size, 1)).cast(table.schema).replace_schema_metadata(metadata),
                scratch if single else scratch / f"part-{index:05d}.parquet",
                compression="zstd",
                write_page_checksum=True,
            )


def read_table(
    path: Path,
    table: Table,
    *,
    run: str | None = None,
    partition: str | None = None,
    columns: Sequence[str] | None = None,
    made_by: str = "",
) -> pa.Table:
    """Read and check a table: every shard whole, of this table, run and partition, with the contract's columns and
    unique keys.

    Args:
        path: a .parquet file or a folder of shards.
        run, partition: what the metadata must say; None does not check.
        columns: only these (others are not read).
        made_by: the command that makes the table, for the message when it is missing.

    Raises:
        MissingInputError: nothing there.
        ArtifactError: damaged, incomplete, or of another table, run or partition.
    """
    if not path.exists():
        raise MissingInputError(f"the {table.name} table is missing", where=path, remedy=made_by and f"run `{made_by}`")
    shards = [path] if path.is_file() else sorted(path.glob("part-*.parquet"))
    if not shards:
        raise ArtifactError("holds no Parquet shard", where=path, remedy=made_by and f"remake it with `{made_by}`")
    pieces = [
        _read_shard(shard, index, len(shards), table, run, partition, columns, made_by)
        for index, shard in enumerate(shards)
    ]
    content = pa.concat_tables(pieces)
    if table.filled and not len(content):
        raise ArtifactError("holds no rows", where=path, remedy=made_by and f"remake it with `{made_by}`")
    _check_keys(path, table, content)
    return content


def _read_shard(
    shard: Path,
    index: int,
    count: int,
    table: Table,
    run: str | None,
    partition: str | None,
    columns: Sequence[str] | None,
    made_by: str,
) -> pa.Table:
    remedy = made_by and f"remake it with `{made_by}`"
    try:
        check_regular(shard)
        with pq.ParquetFile(shard, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
            for name in ("schema", "run", "partition"):
                wanted = {"schema": table.identity, "run": run, "partition": partition}[name]
                found = metadata.get(f"hacpo.{name}")
                if wanted is not None and found != wanted:
                    raise ArtifactError(
                        f"belongs to another {name}", where=shard, expected=wanted, found=found, remedy=remedy
                    )
            if metadata.get("hacpo.shard") != f"{index}/{count}":
                raise ArtifactError(
                    "a shard is missing, renamed or left over",
                    where=shard,
                    expected=f"{index}/{count}",
                    found=metadata.get("hacpo.shard"),
                    remedy=remedy,
                )
            for wanted_field in table.schema:
                if columns is not None and wanted_field.name not in columns:
                    continue
                times = schema.names.count(wanted_field.name)
                if times == 0 and wanted_field.name in table.added:
                    continue
                if times != 1:
                    problem = "is there twice" if times else "is missing"
                    raise ArtifactError(f"column {wanted_field.name!r} {problem}", where=shard, remedy=remedy)
                found_type = schema.field(wanted_field.name).type
                if found_type != wanted_field.type:
                    raise ArtifactError(
                        f"column {wanted_field.name!r} has the wrong type",
                        where=shard,
                        expected=wanted_field.type,
                        found=found_type,
                        remedy=remedy,
                    )
            names = [name for name in table.schema.names if columns is None or name in columns]
            content = with_added(file.read(columns=names), table, names).replace_schema_metadata(None)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"damaged or truncated: {str(error).splitlines()[0][:120]}", where=shard, remedy=remedy
        ) from None
    for name in names:
        if content.column(name).null_count and not table.schema.field(name).nullable:
            raise ArtifactError(f"column {name!r} has nulls", where=shard, remedy=remedy)
    return content.cast(pa.schema([table.schema.field(name) for name in names]))


def with_added(content: pa.Table, table: Table, names: Sequence[str]) -> pa.Table:
    """The named columns in this order, those that the table was made without (`Table.added`) as nulls."""
    for name in table.added:
        if name in names and name not in content.column_names:
            content = content.append_column(name, pa.nulls(len(content), table.schema.field(name).type))
    return content.select(list(names))


def _check_keys(path: Path, table: Table, content: pa.Table) -> None:
    if not set(table.key) <= set(content.column_names) or not len(content):
        return
    groups = content.group_by(list(table.key)).aggregate([([], "count_all")])
    if len(groups) != len(content):
        twice = groups.filter(pa.compute.greater(groups["count_all"], 1)).slice(0, 1).to_pylist()[0]
        named = ", ".join(f"{key} {twice[key]!r}" for key in table.key)
        raise ArtifactError("the same row twice", where=path, found=named)


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
        raise ArtifactError(f"not readable: {str(error).splitlines()[0][:120]}", where=shard) from None
    if not isinstance(settings, dict):
        raise ArtifactError("hacpo.settings holds no settings", where=shard)
    return {**{name.removeprefix("hacpo."): value for name, value in named.items()}, "settings": settings}
