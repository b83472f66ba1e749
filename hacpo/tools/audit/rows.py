"""A table's rows beside what they should be, compared column by column without a Python loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from hacpo.artifacts.list_columns import Flags, Ints, ListColumn
from hacpo.tools.audit.audit_run import AuditRun
from hacpo.tools.audit.lists import Taken, same_values
from hacpo.tools.audit.table_checks import Content


class Rows:
    """A table's rows in the order in which they should be, for comparison column by column.

    Rows that are missing, or there without being expected, or in another order are findings (check `rows`).

    Args:
        name: the column that identifies a row.
        expected: the identities, in order; Arrow strings.

    Attributes:
        present: which of the expected rows are there; values of others mean nothing.
    """

    def __init__(self, run: AuditRun, content: Content, name: str, expected: Any) -> None:
        self.run = run
        self.content = content
        self.ids = expected
        found = content.arrow[name].combine_chunks()
        self._index: Ints | None = None
        self.present: Flags = np.ones(len(expected), dtype=np.bool_)
        if not found.equals(expected):
            self._align(name, found)

    def _align(self, name: str, names: Any) -> None:
        index = pc.index_in(self.ids, value_set=names)
        self.present = np.asarray(pc.is_valid(index))
        self._index = np.asarray(pc.fill_null(index, 0), dtype=np.int64)
        missing = np.flatnonzero(~self.present)
        if len(missing):
            first = self.ids[int(missing[0])].as_py()
            self.run.find("rows", self.content.path, first, expected="a row", found="no such row", count=len(missing))
        unknown = np.flatnonzero(np.asarray(pc.is_null(pc.index_in(names, value_set=self.ids))))
        if len(unknown):
            row = int(unknown[0])
            self.run.find(
                "rows",
                self.content.file_of(row),
                names[row].as_py(),
                name,
                expected="no such row",
                found="a row",
                count=len(unknown),
            )
        order = self._index[self.present]
        wrong = np.flatnonzero(order[1:] < order[:-1])
        if len(wrong):
            row = int(order[1:][wrong[0]])
            self.run.find(
                "rows",
                self.content.file_of(row),
                names[row].as_py(),
                name,
                expected="rows by problem, agent and sample",
                found="another order",
                count=len(wrong),
            )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def complete(self) -> bool:
        """Whether every expected row is there."""
        return bool(self.present.all())

    def arrow(self, column: str) -> Any:
        """A column as one Arrow array, in the expected order."""
        values = self.content.arrow[column]
        if self._index is not None:
            if not len(values):
                return _blank(values.type, len(self))
            values = values.take(pa.array(self._index))
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        return values

    def floats(self, column: str) -> NDArray[np.float64]:
        """A column of numbers as float64."""
        return np.asarray(self.arrow(column).to_numpy(zero_copy_only=False), dtype=np.float64)

    def ints(self, column: str) -> Ints:
        """A column of whole numbers."""
        return np.asarray(self.arrow(column).to_numpy(zero_copy_only=False), dtype=np.int64)

    def flags(self, column: str) -> Flags:
        """A column of booleans."""
        return np.asarray(self.arrow(column).to_numpy(zero_copy_only=False), dtype=np.bool_)

    def flags_or_false(self, column: str) -> Flags:
        """A column of booleans that may be null, which counts as false."""
        return np.asarray(pc.fill_null(self.arrow(column), False).to_numpy(zero_copy_only=False), dtype=np.bool_)

    def lists(self, column: str) -> ListColumn:
        """A column of lists."""
        return ListColumn.of(self.arrow(column))

    # --- comparing ---------------------------------------------------------------------------------------------------

    def equal(self, check: str, column: str, expected: Any, *, where: Flags | None = None, note: str = "") -> None:
        """A column of texts, whole numbers or booleans against expected values (an Arrow array, or one value); a null
        equals a null."""
        values = self.arrow(column)
        if not isinstance(expected, (pa.Array, pa.Scalar)):
            expected = pa.scalar(expected, values.type) if np.isscalar(expected) else pa.array(expected, values.type)
        self.require(check, column, same_values(values, expected), expected, where=where, note=note, shown=values)

    def close(
        self,
        check: str,
        column: str,
        expected: ArrayLike,
        *,
        relative: float = 0.0,
        absolute: float = 0.0,
        where: Flags | None = None,
        note: str = "",
    ) -> None:
        """A column of numbers against expected ones; where NaN is expected nothing is known and all is well."""
        values, wanted = self.floats(column), np.broadcast_to(np.asarray(expected, dtype=np.float64), (len(self),))
        with np.errstate(invalid="ignore"):
            same = (values == wanted) | (np.abs(values - wanted) <= absolute + relative * np.abs(wanted))
        self.require(check, column, same | np.isnan(wanted), wanted, where=where, note=note, shown=values)

    def require(
        self,
        check: str,
        column: str,
        good: Flags,
        expected: Any,
        *,
        shown: Any = None,
        where: Flags | None = None,
        note: str = "",
    ) -> None:
        """One finding for all rows that are not good; the first is named.

        Args:
            expected, shown: one value for all rows, or a value for each (an array); `shown` None: the column's.
        """
        bad = self.present & ~good if where is None else self.present & ~good & where
        if not bad.any():
            return
        first = int(np.argmax(bad))
        shown = self.arrow(column) if shown is None else shown
        row = first if self._index is None else int(self._index[first])
        self.run.find(
            check,
            self.content.file_of(row),
            self.ids[first].as_py(),
            column,
            expected=_value(expected, first),
            found=_value(shown, first),
            count=int(bad.sum()),
            note=note,
        )


def _blank(kind: Any, count: int) -> Any:
    """Values for rows of which none is there; nobody looks at them."""
    value: Any = [] if pa.types.is_list(kind) else "" if pa.types.is_string(kind) else 0
    return pa.array([value] * count).cast(kind)


def _value(values: Any, row: int) -> Any:
    """A value that can be shown: of an array the row's, of anything else itself."""
    if isinstance(values, (ListColumn, Taken)):
        values = values.row(row)
    elif isinstance(values, (pa.Array, np.ndarray)):
        values = values[row]
    if isinstance(values, pa.Scalar):
        values = values.as_py()
    return values.item() if isinstance(values, np.generic) else values
