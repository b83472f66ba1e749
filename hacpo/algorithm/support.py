"""Which tokens truncated sampling (`top_k`, `top_p`) kept at each position of a response: its support.

The policy that samples is the model renormalised over the support S_t, and so is the policy that ratios compare:

    log pi(y_t | S_t) = log pi(y_t) - log sum over v in S_t of pi(v)

A response of T tokens may keep T times as many ids as it has tokens, so they are held flat, never as Python lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hacpo.artifacts.tables import SUPPORT, arrow_type

_IDS_AT_ONCE = 1 << 28
"""Most ids in one Arrow chunk of a column: its offsets are 32-bit."""

_COLUMN = arrow_type(SUPPORT)


@dataclass(frozen=True, eq=False)
class Support:
    """The kept token ids of one response's positions.

    Attributes:
        token_ids: int32 [M], of all positions one after another, ascending within each.
        counts: int64 [T], how many each position kept.
    """

    token_ids: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]

    @classmethod
    def of(cls, positions: Sequence[Sequence[int]]) -> Self:
        """From one list of ids per position."""
        counts = np.array([len(ids) for ids in positions], dtype=np.int64)
        return cls(np.array([token for ids in positions for token in sorted(ids)], dtype=np.int32), counts)

    def __len__(self) -> int:
        """Positions."""
        return len(self.counts)

    def __eq__(self, other: object) -> bool:
        """Whether the same ids were kept at the same positions."""
        return (
            isinstance(other, Support)
            and np.array_equal(self.token_ids, other.token_ids)
            and np.array_equal(self.counts, other.counts)
        )

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """Where each position's ids begin and end in `token_ids`, [T + 1]."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts)])

    def head(self, positions: int) -> Support:
        """The first so many positions."""
        if positions >= len(self):
            return self
        return Support(self.token_ids[: self.ends[positions]], self.counts[:positions])

    def lists(self) -> list[list[int]]:
        """One list of ids per position."""
        return [self.token_ids[start:end].tolist() for start, end in pairwise(self.ends)]


def to_column(supports: Sequence[Support | None]) -> pa.ChunkedArray:
    """A column list<list<int32>>, one row per response; null where nothing was cut."""
    chunks, start, held = [], 0, 0
    for number, support in enumerate(supports):
        size = 0 if support is None else len(support.token_ids)
        if held and held + size > _IDS_AT_ONCE:
            chunks.append(_chunk(supports[start:number]))
            start, held = number, 0
        held += size
    chunks.append(_chunk(supports[start:]))
    return pa.chunked_array(chunks, _COLUMN)


def _chunk(supports: Sequence[Support | None]) -> pa.Array:
    present = [support for support in supports if support is not None]
    ids = np.concatenate([np.empty(0, np.int32), *(support.token_ids for support in present)])
    counts = np.concatenate([np.empty(0, np.int64), *(support.counts for support in present)])
    positions = np.array([0 if support is None else len(support) for support in supports], dtype=np.int64)
    inner = pa.ListArray.from_arrays(_offsets(counts), pa.array(ids), type=_COLUMN.value_type)
    nulls = pa.array([support is None for support in supports], pa.bool_())
    return pa.ListArray.from_arrays(_offsets(positions), inner, type=_COLUMN, mask=nulls)


def _offsets(counts: npt.NDArray[np.int64]) -> pa.Array:
    return pa.array(np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]).astype(np.int32))


def from_column(column: Any) -> list[Support | None]:
    """Each row's support, as views of the column's own memory."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return [support for chunk in chunks for support in _rows(chunk)]


def _rows(chunk: Any) -> list[Support | None]:
    positions = np.asarray(pa.compute.fill_null(pa.compute.list_value_length(chunk), 0), dtype=np.int64)
    inner = chunk.flatten()
    counts = np.asarray(pa.compute.list_value_length(inner), dtype=np.int64)
    ids = np.asarray(inner.flatten(), dtype=np.int32)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(positions)])
    id_ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])[ends]
    present = np.asarray(pa.compute.is_valid(chunk))
    return [
        Support(ids[id_ends[row] : id_ends[row + 1]], counts[ends[row] : ends[row + 1]]) if present[row] else None
        for row in range(len(chunk))
    ]
