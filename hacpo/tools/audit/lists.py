"""Columns compared without a Python loop, however nested (`hacpo.artifacts.list_columns`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hacpo.artifacts.list_columns import Flags, Floats, Ints, ListColumn


@dataclass(frozen=True)
class Taken:
    """Lists of another column, looked up only for the row that is shown."""

    lists: ListColumn
    index: Ints

    def row(self, index: int) -> list[Any]:
        """One list."""
        return self.lists.row(int(self.index[index]))


def same_values(left: Any, right: Any, most: float | Floats | None = None) -> Flags:
    """Whether each value of an Arrow array equals that of another of its type: lists, however nested, value by value, a
    null a null, and NaN nothing.

    Args:
        most: largest difference that counts as equal, of numbers; for each row another where the rows are no lists.
    """
    if pa.types.is_list(left.type):
        lengths = [pc.fill_null(pc.list_value_length(side), -1) for side in (left, right)]
        same = np.asarray(pc.equal(*lengths))
        inner = [side.filter(pa.array(same)).flatten() for side in (left, right)]
        sizes = np.maximum(np.asarray(lengths[0], np.int64)[same], 0)
        same[same] = ListColumn(sizes, same_values(inner[0], inner[1], most)).all_true()
        return same
    if most is None:
        equal = pc.fill_null(pc.equal(left, right), False)
    else:
        numbers = (np.asarray(pc.cast(side, pa.float64()).to_numpy(zero_copy_only=False)) for side in (left, right))
        equal = pa.array(np.abs(np.subtract(*numbers)) <= most)
    return np.asarray(pc.or_(equal, pc.and_(pc.is_null(left), pc.is_null(right))))
