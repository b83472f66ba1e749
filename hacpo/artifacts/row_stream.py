"""Tables of which a few rows at a time are in memory: taken in a given order from shards, or made piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from hacpo.artifacts.list_columns import Ints


@dataclass(frozen=True)
class Pieces:
    """A table that is written while it is made.

    Attributes:
        rows: how many it has in all.
        tables: they, in order; none of these is held on to.
    """

    rows: int
    tables: Iterable[pa.Table]

    def __len__(self) -> int:
        return self.rows


class RowStream:
    """Some rows of a table.

    Args:
        shards: the table, one part after another.
        rows: which rows, in which order. Ascending, as tables are written, each part is read when its turn comes; in
            another order the whole table is read at once.
    """

    def __init__(self, shards: Iterable[pa.Table], rows: Ints) -> None:
        self._pieces = _ascending(shards, rows) if (np.diff(rows) > 0).all() else _any_order(shards, rows)
        self._held: list[pa.Table] = []

    def take(self, count: int) -> pa.Table:
        """The next so many rows, in one piece.

        Raises:
            StopIteration: there are not so many.
        """
        while sum(map(len, self._held)) < count:
            self._held.append(next(self._pieces))
        whole = pa.concat_tables(self._held)
        self._held = [whole.slice(count)]
        return whole.slice(0, count).combine_chunks()


def _ascending(shards: Iterable[pa.Table], rows: Ints) -> Iterator[pa.Table]:
    start = 0
    for shard in shards:
        end = start + len(shard)
        here = rows[np.searchsorted(rows, start) : np.searchsorted(rows, end)] - start
        # All of them, mostly, and nothing needs to be copied.
        yield shard if len(here) == len(shard) else shard.take(pa.array(here))
        start = end


def _any_order(shards: Iterable[pa.Table], rows: Ints) -> Iterator[pa.Table]:
    yield pa.concat_tables(shards).combine_chunks().take(pa.array(rows))
