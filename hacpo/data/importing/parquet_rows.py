"""Rows of a Parquet file, counted before they are read, which believes what a file says of itself; `try_parquet` does
not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hacpo.artifacts.trial import try_reading
from hacpo.errors import DataError, first_line

MOST_BYTES = 1 << 31
"""Of a file's rows in memory: a dictionary makes gigabytes of a file of a few kilobytes."""

_BYTES_PER_VALUE = 32
"""Of a number as an object of Python's, with its place in a list; as few bytes of a file make millions of them."""

_BYTES_OF_NOTHING = 8
"""Of a value that is missing, in a list of Python's; Arrow needs none for a column of these alone."""

_LISTS = (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray, pa.ListViewArray, pa.LargeListViewArray)


class TooLargeError(DataError):
    """A file takes more memory than is spent on one."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"is more than {MOST_BYTES >> 30} GiB unpacked",
            where=path,
            remedy="import it in parts, with the columns needed",
        )


def try_parquet(path: Path) -> None:
    """Read a file in a process whose memory and time are bounded, and forget what is in it.

    Raises:
        TooLargeError: it takes more memory than the process may (`trial.MEMORY`: Python's texts take up to four bytes a
            character).
        DataError: it cannot be read, or not in time.
    """
    try_reading(path, read_parquet, DataError, TooLargeError(path), parts="import it in parts")


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """All rows, as the file has them.

    Raises:
        TooLargeError: they are more than `MOST_BYTES`.
        DataError: it cannot be read.
        MemoryError: the process may not take as much as it needs.
    """
    rows: list[dict[str, Any]] = []
    size = 0
    try:
        with pq.ParquetFile(path) as file:
            chunks = _chunk_sizes(file.metadata)
            if max(sum(chunks), file.metadata.num_rows * _BYTES_PER_VALUE) > MOST_BYTES:
                raise TooLargeError(path)
            # A value outside lists is no larger than its chunk, so that no batch is much larger than what is allowed.
            at_once = max(1, min(1024, MOST_BYTES // max([1, *chunks])))
            for batch in file.iter_batches(at_once):
                size += batch.num_rows * _BYTES_PER_VALUE + sum(map(_unpacked_size, batch.columns))
                if size > MOST_BYTES:
                    raise TooLargeError(path)
            for batch in file.iter_batches(at_once):
                rows += batch.to_pylist()
    except MemoryError:  # Arrow's is one of its own errors, too
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"not readable as Parquet: {first_line(error)}", where=path) from None
    return rows


def _unpacked_size(array: pa.Array) -> int:
    """Bytes of an array whose every value stands on its own: a dictionary's are counted each time one is meant."""
    if isinstance(array, pa.ExtensionArray):
        return _unpacked_size(array.storage)
    if isinstance(array, pa.DictionaryArray):
        lengths = pc.binary_length(array.dictionary)  # Parquet has dictionaries of texts and bytes alone
        return int(array.indices.nbytes) + (pc.sum(lengths.take(array.indices)).as_py() or 0)
    if isinstance(array, pa.StructArray):
        return sum(map(_unpacked_size, array.flatten()))
    if isinstance(array, pa.MapArray):
        array = array.cast(pa.list_(pa.struct([array.type.key_field, array.type.item_field])))
    if isinstance(array, _LISTS):
        return len(array) * _BYTES_PER_VALUE + _unpacked_size(array.flatten())
    return max(int(array.nbytes), len(array) * _BYTES_OF_NOTHING)


def _chunk_sizes(metadata: pq.FileMetaData) -> list[int]:
    """Bytes that each column of each row group takes at least, the values within its lists counted one by one."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [group.column(at) for group in groups for at in range(group.num_columns)]
    return [max(chunk.total_uncompressed_size, chunk.num_values * _BYTES_PER_VALUE) for chunk in chunks]
