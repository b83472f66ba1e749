"""Reading a table as an audit must: whatever is odd about a file is a finding, and the rest of it is looked at."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from hacpo.artifacts.shards import Oddity, Wanted, read_shards
from hacpo.artifacts.tables import PROMPTS, Table
from hacpo.pipeline.catalogue import maker_of
from hacpo.tools.audit.audit_run import AuditRun


@dataclass(frozen=True)
class Content:
    """A table that could be read.

    Attributes:
        shards: its files, and the row at which each begins.
    """

    path: Path
    table: Table
    arrow: pa.Table
    shards: list[tuple[int, Path]]

    def file_of(self, row: int) -> Path:
        """The file that holds a row."""
        return next(path for start, path in reversed(self.shards) if start <= row)


def read(run: AuditRun, table: Table, step: int | None = None, whose: str = "") -> Content | None:
    """Read a table of the run (`RunFiles` says which part) with every check that needs nothing but the table itself:
    those of `shards.read_shards`, made with this run's settings, and files of the right size.

    Returns:
        None if nothing can be read; a finding says why.
    """
    wanted = Wanted(
        run=run.pipeline.run,
        partition=table.partition(step, whose),
        settings=stage_settings(run, table, whose),
        # Prompts are written in one piece, whatever their number.
        rows_per_shard=None if table == PROMPTS else run.settings.storage.rows_per_shard,
    )
    path = run.run_files.path(table, step, whose)
    pieces: list[pa.Table] = []
    shards: list[tuple[int, Path]] = []
    usable = True
    for item in read_shards(path, table, wanted):
        if isinstance(item, Oddity):
            usable &= not item.unusable
            note_oddity(run, item)
        else:
            shards.append((sum(map(len, pieces)), item.path))
            pieces.append(item.content)
    if not usable:
        return None
    content = pa.concat_tables(pieces)
    run.looked_at(table.title, len(content), len(shards))
    return Content(path, table, content, shards)


def note_oddity(run: AuditRun, odd: Oddity) -> None:
    """An oddity of a table's files as a finding."""
    facts = {"expected": odd.expected, "found": odd.found, "count": odd.count, "note": odd.note}
    run.find(odd.check, odd.where, odd.row, odd.column, **facts)


def stage_settings(run: AuditRun, table: Table, whose: str = "") -> Mapping[str, Any]:
    """What the files of a table (of an agent's, if each has its own) must say that their stage read."""
    agent = whose if table.per in ("agent", "learner") else None
    key = (table.name, agent or "")
    if key not in run.stage_settings:
        settings = maker_of(table).recorded(table, run.settings, agent)
        run.stage_settings[key] = json.loads(json.dumps(settings))
    return run.stage_settings[key]
