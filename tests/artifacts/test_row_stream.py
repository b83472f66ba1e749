"""A table's rows taken a few at a time, and written so, are those of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from hacpo.artifacts.parquet import write_table
from hacpo.artifacts.row_stream import Pieces, RowStream
from hacpo.artifacts.tables import VERDICTS


class Shards:
    """Three shards of 4, 4 and 2 rows, 0 to 9; counts those that were asked for."""

    asked = 0

    def __iter__(self) -> Iterator[pa.Table]:
        for start, end in ((0, 4), (4, 8), (8, 10)):
            self.asked += 1
            yield pa.table({"row": list(range(start, end))})


def taken(stream: RowStream, count: int) -> list[int]:
    return list(stream.take(count)["row"].to_pylist())


def test_a_shard_is_read_when_its_turn_comes() -> None:
    shards = Shards()
    stream = RowStream(shards, np.arange(10))
    assert (taken(stream, 3), shards.asked) == ([0, 1, 2], 1)
    assert (taken(stream, 1), shards.asked) == ([3], 1)
    assert (taken(stream, 5), shards.asked) == ([4, 5, 6, 7, 8], 3)
    assert taken(stream, 1) == [9]


def test_rows_are_left_out_and_taken_in_any_order() -> None:
    assert taken(RowStream(Shards(), np.array([1, 3, 8])), 3) == [1, 3, 8]
    stream = RowStream(Shards(), np.array([9, 0, 5]))
    assert (taken(stream, 1), taken(stream, 2)) == ([9], [0, 5])


@pytest.mark.parametrize("size", [1, 3, 4, 100])
@pytest.mark.parametrize("rows_per_shard", [1, 4, 7, None])
def test_a_table_that_is_written_while_it_is_made_has_the_same_bytes(
    size: int, rows_per_shard: int | None, tmp_path: Path
) -> None:
    ids = [f"r{number:03d}" for number in range(11)]
    columns = {
        **{name: pa.array(ids, pa.string()) for name in ("rollout_id", "verdict", "answer", "problem_id")},
        "reward": pa.array(np.linspace(0, 1, 11), pa.float32()),
        "sample": pa.array(range(11), pa.int16()),
        **{name: pa.array([None, *ids[1:]], pa.string()) for name in ("extracted", "message")},
    }
    whole = pa.table({name: columns[name] for name in VERDICTS.schema.names}, schema=VERDICTS.schema)
    pieces = Pieces(11, (whole.slice(start, size) for start in range(0, 11, size)))
    for name, content in (("whole", whole), ("pieces", pieces)):
        write_table(tmp_path / name, VERDICTS, content, run="r", rows_per_shard=rows_per_shard)
    files = [sorted((tmp_path / name).iterdir()) for name in ("whole", "pieces")]
    assert [file.name for file in files[0]] == [file.name for file in files[1]]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]


def test_a_table_without_rows_is_one_shard(tmp_path: Path) -> None:
    write_table(tmp_path / "none", VERDICTS, Pieces(0, [VERDICTS.schema.empty_table()]), run="r", rows_per_shard=4)
    assert [file.name for file in (tmp_path / "none").iterdir()] == ["part-00000.parquet"]
