"""Reading a table as an audit must: whatever is odd about a file is a finding, and the rest of it is looked at."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hacpo.artifacts import parquet, tables
from hacpo.artifacts.layout import partition
from hacpo.artifacts.text_files import check_regular, parse_json
from hacpo.pipeline.catalogue import maker_of
from hacpo.settings import params as settings_of
from hacpo.tools.audit.audit_run import AuditRun


@dataclass(frozen=True)
class Content:
    """A table that could be read.

    Attributes:
        shards: its files, and the row at which each begins.
    """

    path: Path
    table: tables.Table
    arrow: pa.Table
    shards: list[tuple[int, Path]]

    def file_of(self, row: int) -> Path:
        """The file that holds a row."""
        return next(path for start, path in reversed(self.shards) if start <= row)


def read(
    run: AuditRun,
    path: Path,
    table: tables.Table,
    *,
    step: int | None = None,
    without: Sequence[str] = (),
    **agent: str,
) -> Content | None:
    """Read a table of the run with every check that needs nothing but the table itself: whole files with right
    checksums, of this table, run and partition, made with this run's settings, shards complete and of the right size,
    the contract's columns and types without nulls, and no key twice.

    Args:
        without: settings of the stage that this table's files leave out (see `Stage.write`).

    Returns:
        None if nothing can be read; a finding says why.
    """
    shards = [path] if path.is_file() else sorted(path.glob("part-*.parquet"))
    if not shards:
        run.find("files", path, expected=f"the {table.name} table", found="holds no Parquet file")
        return None
    wanted = {
        "schema": table.identity,
        "run": run.pipeline.run,
        "partition": "" if step is None else partition(step, **agent),
    }
    settings = stage_settings(run, table, without, *agent.values())
    pieces = []
    for number, shard in enumerate(shards):
        if not path.is_file() and shard.name != f"part-{number:05d}.parquet":
            run.find("files", shard, expected=f"part-{number:05d}.parquet", found=shard.name, note="a shard is missing")
        piece = _read_shard(run, shard, table, {**wanted, "shard": f"{number}/{len(shards)}"}, settings)
        if piece is None:
            return None
        pieces.append(piece)
    if not path.is_file():
        _check_sizes(run, shards, [len(piece) for piece in pieces])
    content = pa.concat_tables(pieces)
    starts = np.cumsum([0, *(len(piece) for piece in pieces)]).tolist()
    run.looked_at(table.name, len(content), len(shards))
    result = Content(path, table, content, list(zip(starts, shards, strict=False)))
    _check_keys(run, result)
    return result


def stage_settings(
    run: AuditRun, table: tables.Table, without: Sequence[str] = (), agent: str | None = None
) -> Mapping[str, Any]:
    """What the files of a table (of an agent's, if each has its own) must say that their stage read."""
    key = (table.name, agent or "", *without)
    if key not in run.stage_settings:
        settings = settings_of.reads(run.settings, maker_of(table).settings, agent)
        kept = {name: value for name, value in settings.items() if name not in without}
        run.stage_settings[key] = json.loads(json.dumps(kept))
    return run.stage_settings[key]


def _read_shard(
    run: AuditRun, shard: Path, table: tables.Table, wanted: Mapping[str, str], settings: Mapping[str, Any]
) -> pa.Table | None:
    try:
        check_regular(shard)
        with pq.ParquetFile(shard, page_checksum_verification=True) as file:
            found = file.schema_arrow
            metadata = {key.decode(): value.decode() for key, value in (found.metadata or {}).items()}
            twice = [name for name in table.schema.names if found.names.count(name) > 1]
            types = {name: found.field(name).type for name in table.schema.names if name in found.names and not twice}
            content = file.read(columns=list(types))
    except Exception as error:
        # A damaged file makes pyarrow raise whatever its damage leads to.
        said = (str(error).splitlines() or [type(error).__name__])[0][:120]
        run.find("files", shard, expected="a whole Parquet file", found=f"damaged or truncated: {said}")
        return None
    if twice:
        run.find("columns", shard, column=twice[0], expected="this column once", found="twice")
        return None
    for name, value in wanted.items():
        if metadata.get(f"hacpo.{name}") != value:
            run.find("metadata", shard, column=f"hacpo.{name}", expected=value, found=metadata.get(f"hacpo.{name}"))
    _check_settings(run, shard, metadata.get("hacpo.settings", ""), settings)
    usable = True
    for field in table.schema:
        if field.name not in types:
            if field.name in table.added:
                continue
            run.find("columns", shard, column=field.name, expected=field.type, found="no such column")
            usable = False
        elif types[field.name] != field.type:
            run.find("columns", shard, column=field.name, expected=field.type, found=types[field.name])
            usable = False
        elif content[field.name].null_count and not field.nullable:
            missing = content[field.name].null_count
            run.find("columns", shard, column=field.name, expected="a value", found="null", count=missing)
            usable = False
    if not usable:
        return None
    return parquet.with_added(content, table, table.schema.names).replace_schema_metadata(None).cast(table.schema)


def _check_settings(run: AuditRun, shard: Path, text: str, wanted: Mapping[str, Any]) -> None:
    if text == json.dumps(wanted, sort_keys=True, ensure_ascii=False):
        return
    try:
        found = parse_json(text)
    except (ValueError, RecursionError):
        run.find("metadata", shard, column="hacpo.settings", expected="JSON", found=text[:80])
        return
    for key, expected, value in differences(wanted, found):
        run.find("metadata", shard, column=f"hacpo.settings {key}", expected=expected, found=value)


ABSENT = "not there"
"""Stands for a value that is on one side only."""


def differences(wanted: Any, found: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Dotted keys at which two trees of settings differ, with both values."""
    if not isinstance(wanted, Mapping) or not isinstance(found, Mapping):
        return [] if wanted == found and type(wanted) is type(found) else [(prefix, wanted, found)]
    return [
        item
        for key in dict.fromkeys((*wanted, *found))
        for item in differences(wanted.get(key, ABSENT), found.get(key, ABSENT), f"{prefix}.{key}" if prefix else key)
    ]


def _check_sizes(run: AuditRun, shards: Sequence[Path], sizes: Sequence[int]) -> None:
    """Every file but the last is full."""
    full = run.settings.storage.rows_per_shard
    single = len(shards) == 1 and shards[0].parent.parent.name == "prompts"  # written in one piece, whatever its size
    for number, (shard, size) in enumerate(zip(shards, sizes, strict=True)):
        last = number == len(shards) - 1
        if not single and (size > full or (size < full and not last) or (size == 0 and number > 0)):
            run.find("files", shard, expected=f"{'at most ' if last else ''}{full} rows", found=f"{size} rows")


def _check_keys(run: AuditRun, content: Content) -> None:
    keys = list(content.table.key)
    groups = content.arrow.group_by(keys).aggregate([([], "count_all")])
    if len(groups) == len(content.arrow):
        return
    twice = groups.filter(pc.greater(groups["count_all"], 1)).slice(0, 1).to_pylist()[0]
    rows = content.arrow.select(keys).to_pylist()
    index = [number for number, row in enumerate(rows) if all(row[key] == twice[key] for key in keys)][1]
    named = " ".join(str(twice[key]) for key in keys)
    surplus = len(content.arrow) - len(groups)
    run.find("keys", content.file_of(index), named, expected="this row once", found="twice", count=surplus)
