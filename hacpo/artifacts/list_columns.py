"""Columns of lists as flat numpy arrays, so that a million of them are worked with without a Python loop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ListColumn:
    """A column of lists.

    Attributes:
        lengths: of each row's list.
        values: all lists one after another.
    """

    lengths: Ints
    values: NDArray[Any]

    @classmethod
    def of(cls, column: Any) -> Self:
        """From an Arrow list column; a null counts as an empty list."""
        pieces = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        lengths = [np.asarray(pc.fill_null(pc.list_value_length(piece), 0), dtype=np.int64) for piece in pieces]
        values = [piece.flatten().to_numpy(zero_copy_only=False) for piece in pieces]
        if len(pieces) == 1:
            return cls(lengths[0], values[0])
        empty = pa.array([], column.type.value_type).to_numpy(zero_copy_only=False)
        return cls(np.concatenate([np.empty(0, np.int64), *lengths]), np.concatenate([empty, *values]))

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def starts(self) -> Ints:
        """Where each row's list begins in `values`."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)[:-1]]) if len(self) else self.lengths

    def row(self, index: int) -> list[Any]:
        """One list."""
        start = int(self.starts[index])
        return list(self.values[start : start + int(self.lengths[index])].tolist())

    def positions(self) -> Ints:
        """Place of each value in its list."""
        return np.arange(len(self.values)) - np.repeat(self.starts, self.lengths)

    def heads(self, lengths: Ints) -> ListColumn:
        """The first so many values of each list (no more than it has)."""
        if (lengths == self.lengths).all():
            return self
        return ListColumn(lengths, self.values[self.positions() < np.repeat(lengths, self.lengths)])

    def last(self, where: Flags) -> Any:
        """The last value of each list as an Arrow array; null outside `where` and for an empty list."""
        some = where & (self.lengths > 0)
        values = np.zeros(len(self), self.values.dtype)
        values[some] = self.values[(self.starts + self.lengths - 1)[some]]
        return pa.array(values, mask=~some)

    def lists(self) -> list[list[Any]]:
        """All lists."""
        values, ends = self.values.tolist(), [0, *np.cumsum(self.lengths).tolist()]
        return [values[start:end] for start, end in pairwise(ends)]

    def arrays(self) -> list[NDArray[Any]]:
        """All lists, as views of `values`."""
        return np.split(self.values, np.cumsum(self.lengths)[:-1]) if len(self) else []

    def column(self, kind: Any) -> Any:
        """As an Arrow array of this list type, no row of it null."""
        ends = pa.array(np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)]), pa.int32())
        return pa.ListArray.from_arrays(ends, pa.array(self.values, kind.value_type), type=kind)

    def any_true(self, flags: Flags) -> Flags:
        """Whether one of each list's values is flagged; `flags` has one for each value."""
        return np.asarray(ListColumn(self.lengths, flags)._reduced(np.maximum, 0.0) > 0)

    def sums(self) -> NDArray[np.float64]:
        """Sum of each list in float64; 0.0 for an empty one."""
        return self._reduced(np.add, 0.0)

    def all_true(self) -> Flags:
        """Whether each list's values (booleans) are all true."""
        return np.asarray(self._reduced(np.minimum, 1.0) > 0)

    def _reduced(self, operation: np.ufunc, of_empty: float) -> NDArray[np.float64]:
        result = np.full(len(self), of_empty)
        filled = self.lengths > 0
        if filled.any():
            result[filled] = operation.reduceat(self.values.astype(np.float64), self.starts[filled])
        return result

    def same_as(self, other: ListColumn, rows: Ints) -> Flags:
        """Whether each list equals the list of `other` in the given row, value by value.

        Args:
            rows: for each row, the row of `other` to compare with.
        """
        same: Flags = np.asarray(self.lengths == other.lengths[rows])
        if same.all():
            comparable, lengths = self.values, self.lengths
        else:
            lengths = np.where(same, self.lengths, 0)
            comparable = self.heads(lengths).values
        if not len(comparable):
            return same
        offsets = np.repeat(other.starts[rows] - np.cumsum(lengths) + lengths, lengths)
        equal = comparable == other.values[offsets + np.arange(len(comparable))]
        if not equal.all():
            same = np.asarray(same & ListColumn(lengths, equal).all_true())
        return same
