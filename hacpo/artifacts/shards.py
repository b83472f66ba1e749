"""A table read shard by shard, and everything about its files that is not as it must be.

`read_shards` says what is odd and goes on as far as it can: a reader that works with the table raises the first oddity
(`parquet.whole_shards`), an audit notes them all.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hacpo.artifacts.storage import MACHINES, refusal
from hacpo.artifacts.tables import Table
from hacpo.artifacts.text_files import LARGEST, check_regular, parse_json
from hacpo.errors import ArtifactError, first_line

ABSENT = "not there"
"""Stands for a value that is on one side only."""


@dataclass(frozen=True)
class Wanted:
    """What the files of a table must be, beside what holds for every table; None: that is not checked.

    Attributes:
        run, partition: what `hacpo.run` and `hacpo.partition` say.
        settings: what `hacpo.settings` says.
        rows_per_shard: rows of every file of a folder but the last.
        finite: no number may be infinite, or so large that a sum is, or none (NaN). An audit, which says of what row it
            is, looks by itself.
    """

    run: str | None = None
    partition: str | None = None
    settings: Mapping[str, Any] | None = None
    rows_per_shard: int | None = None
    finite: bool = False


@dataclass(frozen=True)
class Oddity:
    """Something about a table that is not as it must be.

    Attributes:
        check: the invariant that does not hold, as an audit calls it.
        where: the file; the table's folder where it has none.
        problem: what is wrong, in words.
        row, column: which; empty if it is no single one.
        expected, found: both sides.
        count: how many rows are concerned.
        note: what a finding adds.
        says_all: an error needs no more words than `problem`.
        unusable: the table cannot be read on.
    """

    check: str
    where: Path
    problem: str
    expected: object
    found: object
    row: str = ""
    column: str = ""
    count: int = 1
    note: str = ""
    says_all: bool = False
    unusable: bool = False

    def error(self, remedy: str = "") -> ArtifactError:
        """The oddity as an error of whoever needs the table."""
        if self.says_all:
            return ArtifactError(self.problem, where=self.where, remedy=remedy)
        return ArtifactError(self.problem, where=self.where, expected=self.expected, found=self.found, remedy=remedy)


@dataclass(frozen=True)
class Shard:
    """One file of a table, its rows, and the number that the first of them has in the table."""

    path: Path
    content: pa.Table
    first: int = 0


def read_shards(
    path: Path, table: Table, wanted: Wanted, columns: Sequence[str] | None = None, rows: range | None = None
) -> Iterator[Oddity | Shard]:
    """Every shard of a table in order, and what is odd about it: whole regular files with right checksums, of this
    table and as `wanted`, complete, with the contract's columns and types, texts in UTF-8, no nulls where it allows
    none, and no key twice. The first shard that cannot be used is the last that is looked at.

    Args:
        path: a .parquet file or a folder of shards.
        columns: only these (others are neither read nor looked at; keys only if all of theirs are among them).
        rows: only shards with some of these; of the others no more is read than how many rows they say they have.
    """
    files = [path] if path.is_file() else sorted(path.glob("part-*.parquet"))
    if not files:
        yield Oddity(
            "files",
            path,
            "holds no Parquet shard",
            expected=f"the {table.title} table",
            found="holds no Parquet file",
            says_all=True,
            unusable=True,
        )
    names = [name for name in table.schema.names if columns is None or name in columns]
    keyed = set(table.key) <= set(names)
    keys: list[Shard] = []
    first = 0
    for number, file in enumerate(files):
        if rows is not None and not _overlap(file, first, rows):
            first += _length(file)
            continue
        content = yield from _read_shard(file, f"{number}/{len(files)}", table, wanted, names)
        name = f"part-{number:05d}.parquet"
        if not path.is_file() and file.name != name:
            problem, note = "a shard is missing, renamed or left over", "a shard is missing"
            yield Oddity("files", file, problem, expected=name, found=file.name, note=note)
        if content is None:
            return
        yield Shard(file, content, first)
        first += len(content)
        keys.append(Shard(file, content.select(table.key if keyed else [])))
    if wanted.rows_per_shard is not None and not path.is_file():
        yield from _odd_sizes(keys, wanted.rows_per_shard)
    if keyed and keys:
        yield from _repeated_keys(table, keys)


def _overlap(file: Path, first: int, rows: range) -> bool:
    """Whether a shard whose first row has this number has one of these, or cannot be asked."""
    length = _length(file)
    return length < 0 or (first < rows.stop and first + length > rows.start)


def _length(file: Path) -> int:
    """How many rows a shard says that it has; -1 if it is none."""
    try:
        check_regular(file)
        return int(pq.read_metadata(file).num_rows)
    except (OSError, pa.ArrowException, ValueError):
        return -1


def _read_shard(
    file: Path, place: str, table: Table, wanted: Wanted, names: Sequence[str]
) -> Generator[Oddity, None, pa.Table | None]:
    """The named columns of one shard, and what is odd about it; None if it cannot be used."""
    try:
        check_regular(file)
        with pq.ParquetFile(file, page_checksum_verification=True) as opened:
            schema = opened.schema_arrow
            metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
            once = [name for name in names if schema.names.count(name) == 1]
            content = opened.read(columns=once)
    except Exception as error:  # a damaged file makes pyarrow raise whatever its damage leads to
        if (refused := refusal(error)) is not None and refused.number in MACHINES:
            raise
        reason = first_line(error)
        problem = f"damaged or truncated: {reason}"
        whole = "a whole Parquet file"
        yield Oddity("files", file, problem, expected=whole, found=problem, says_all=True, unusable=True)
        return None
    yield from _odd_metadata(file, metadata, place, table, wanted)
    usable = True
    for field in (table.schema.field(name) for name in names):
        times = schema.names.count(field.name)
        absent = times == 0 and field.name in table.added
        odd = None if absent else _odd_column(file, field, times, content, finite=wanted.finite)
        if odd is not None:
            yield odd
            usable = False
    if not usable:
        return None
    whole = with_added(content, table, names).replace_schema_metadata(None)
    return whole.cast(pa.schema([table.schema.field(name) for name in names]))


def _odd_metadata(
    file: Path, metadata: Mapping[str, str], place: str, table: Table, wanted: Wanted
) -> Iterator[Oddity]:
    must = {"schema": table.identity, "run": wanted.run, "partition": wanted.partition, "shard": place}
    for name, value in must.items():
        stated = metadata.get(f"hacpo.{name}")
        if value is not None and stated != value:
            problem = "a shard is missing, renamed or left over" if name == "shard" else f"belongs to another {name}"
            yield Oddity("metadata", file, problem, expected=value, found=stated, column=f"hacpo.{name}")
    if wanted.settings is None:
        return
    text, problem = metadata.get("hacpo.settings", ""), "was made with other settings"
    if text == settings_text(wanted.settings):
        return
    try:
        recorded = parse_json(text)
    except (ValueError, RecursionError):
        yield Oddity("metadata", file, problem, expected="JSON", found=text[:80], column="hacpo.settings")
        return
    for key, expected, value in differences(wanted.settings, recorded):
        yield Oddity("metadata", file, problem, expected=expected, found=value, column=f"hacpo.settings {key}")


def _odd_column(file: Path, field: pa.Field, times: int, content: pa.Table, *, finite: bool) -> Oddity | None:
    """What is wrong with a column that is there so many times; None if all is well."""
    named, expected, seen = f"column {field.name!r}", field.type, None
    count, says_all = 1, True
    if times == 0:
        problem, seen = "is missing", "no such column"
    elif times > 1:
        problem, expected, seen = "is there twice", "this column once", "twice"
    elif content[field.name].type != field.type:
        problem, seen, says_all = "has the wrong type", content[field.name].type, False
    elif content[field.name].null_count and not field.nullable:
        problem, expected, seen, count = "has nulls", "a value", "null", content[field.name].null_count
    elif not _is_whole(content[field.name]):  # Arrow looks at no text that it reads, and Python fails where it does
        problem, expected, seen = "holds what is no text in UTF-8", "UTF-8", "other bytes"
    elif finite and not _is_finite(content[field.name]):
        problem, expected, seen = "holds a number that is not finite", "finite numbers", "infinite, or NaN"
    else:
        return None
    return Oddity(
        "columns",
        file,
        f"{named} {problem}",
        expected=expected,
        found=seen,
        column=field.name,
        count=count,
        says_all=says_all,
        unusable=True,
    )


def _is_whole(values: pa.ChunkedArray) -> bool:
    """Whether its bytes are what its type says: of all types here only texts can be something else."""
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _is_finite(values: pa.ChunkedArray | pa.Array) -> bool:
    """Whether all its numbers are, those within lists too, and so are their sums; of what holds none as well."""
    while pa.types.is_list(values.type):
        values = pc.list_flatten(values)
    if not pa.types.is_floating(values.type):
        return True
    wide = pa.types.is_float64(values.type)
    fine = pc.less_equal(pc.abs(values), LARGEST) if wide else pc.is_finite(values)
    return bool(pc.all(fine, min_count=0).as_py())


def _odd_sizes(shards: Sequence[Shard], full: int) -> Iterator[Oddity]:
    """Every file but the last must be full."""
    for number, shard in enumerate(shards):
        size, last = len(shard.content), number == len(shards) - 1
        if size > full or (size < full and not last) or (size == 0 and number > 0):
            expected = f"{'at most ' if last else ''}{full} rows"
            yield Oddity("files", shard.path, "is of another size", expected=expected, found=f"{size} rows")


def _repeated_keys(table: Table, shards: Sequence[Shard]) -> Iterator[Oddity]:
    """The first row whose key another has had before it."""
    content = pa.concat_tables([shard.content for shard in shards])
    if _are_distinct([content[name] for name in table.key]):
        return  # without the engine for groups, which takes longer to load than most tables to read
    groups = content.group_by(list(table.key)).aggregate([([], "count_all")])
    if len(groups) == len(content):
        return
    twice = {key: groups.filter(pc.greater(groups["count_all"], 1))[key][0] for key in table.key}
    same = np.logical_and.reduce([np.asarray(pc.equal(content[key], value)) for key, value in twice.items()])
    starts = np.cumsum([0, *(len(shard.content) for shard in shards[:-1])])
    second = shards[int(np.searchsorted(starts, np.flatnonzero(same)[1], side="right")) - 1]
    values = {key: value.as_py() for key, value in twice.items()}
    named = ", ".join(f"{key} {value!r}" for key, value in values.items())
    yield Oddity(
        "keys",
        second.path,
        f"the same row twice (found {named})",
        expected="this row once",
        found="twice",
        row=" ".join(map(str, values.values())),
        count=len(content) - len(groups),
        says_all=True,
    )


def _are_distinct(columns: Sequence[pa.ChunkedArray]) -> bool:
    """Whether no row has the values of another; no value is null."""
    if len(columns) == 1:
        return len(pc.unique(columns[0])) == len(columns[0])
    codes = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        encoded = column.combine_chunks().dictionary_encode()
        codes = codes * len(encoded.dictionary) + np.asarray(encoded.indices)
    return len(np.unique(codes)) == len(codes)


def with_added(content: pa.Table, table: Table, names: Sequence[str]) -> pa.Table:
    """The named columns in this order, those that the table was made without (`Table.added`) as nulls."""
    for name in table.added:
        if name in names and name not in content.column_names:
            content = content.append_column(name, pa.nulls(len(content), table.schema.field(name).type))
    return content.select(list(names))


def settings_text(settings: Mapping[str, Any]) -> str:
    """What `hacpo.settings` says of settings: JSON without spaces, by name."""
    return json.dumps(settings, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def differences(wanted: Any, recorded: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Dotted keys at which two trees of settings differ, with both values."""
    if not isinstance(wanted, Mapping) or not isinstance(recorded, Mapping):
        return [] if wanted == recorded and type(wanted) is type(recorded) else [(prefix, wanted, recorded)]
    return [
        item
        for key in dict.fromkeys((*wanted, *recorded))
        for item in differences(
            wanted.get(key, ABSENT), recorded.get(key, ABSENT), f"{prefix}.{key}" if prefix else key
        )
    ]
