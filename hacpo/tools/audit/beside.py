"""Rows of a run beside those of its repetition, each found by its key."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hacpo.artifacts import tables
from hacpo.artifacts.list_columns import Flags, Floats, Ints
from hacpo.artifacts.run_files import RunFiles
from hacpo.errors import HacpoError
from hacpo.tools.audit.lists import same_values

NAME = "#name"
"""Column added to what is read: what a row is called in findings."""

_ROWS_AT_ONCE = 4096
"""Rows that are compared at once."""


class Beside:
    """Rows of a run beside their repetition, those that both have.

    Attributes:
        recorded, fresh: the rows of each, in the order of the run's.
        only_fresh: names of rows that only the repetition has.
    """

    def __init__(self, recorded: pa.Table, fresh: pa.Table) -> None:
        place = pc.index_in(recorded[NAME], value_set=fresh[NAME])
        ordered = np.array_equal(place.to_numpy(), np.arange(len(fresh)))  # as always, and then nothing is copied
        self.recorded = recorded if ordered else recorded.filter(pc.is_valid(place))
        self.fresh = fresh if ordered else fresh.take(place.drop_null())
        self.only_fresh = fresh[NAME].filter(pc.is_null(pc.index_in(fresh[NAME], value_set=recorded[NAME])))

    def same(self, column: str, most: float | Floats | None = None) -> Flags:
        """Which rows have the same value in a column; see `same_values`."""
        flags = [np.empty(0, np.bool_)]
        for start in range(0, len(self.recorded), _ROWS_AT_ONCE):
            block = slice(start, start + _ROWS_AT_ONCE)
            left, right = (table[column][block].combine_chunks() for table in (self.recorded, self.fresh))
            flags.append(same_values(left, right, most[block] if isinstance(most, np.ndarray) else most))
        return np.concatenate(flags)


def named(files: RunFiles, table: tables.Table, step: int, agent: str) -> pa.Table:
    """Rows with one more column, their key; none where the table cannot be read (the audit of the tables says so)."""
    try:
        content = files.read(table, step, agent)
    except HacpoError:
        content = table.schema.empty_table()
    # A pass of a step's updates sees each response once; which update that is may be what is wrong.
    keys = [pc.cast(content[name], pa.string()) for name in table.key if name != "update"]
    names = pc.binary_join_element_wise(*keys, "/")
    if len(pc.unique(names)) < len(names):
        times = [f" in pass {number}" for number in _times_before(names)]
        names = pc.binary_join_element_wise(names, pa.array(times, pa.string()), "")
    return content.append_column(NAME, names)


def _times_before(names: pa.ChunkedArray) -> Ints:
    """How often each name was there before."""
    codes = np.asarray(pc.index_in(names, value_set=pc.unique(names)), dtype=np.int64)
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], codes[order])
    before = np.empty(len(codes), dtype=np.int64)
    before[order] = np.arange(len(codes)) - starts
    return before
