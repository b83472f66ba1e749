"""Rows of a Parquet file, counted before they are read; what a file says of itself is believed (see `trial`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hacpo.errors import DataError, first_line

MOST_BYTES = 1 << 31
"""Of a file's rows in memory: a dictionary makes gigabytes of a file of a few kilobytes."""

_BYTES_PER_VALUE = 32
"""Of a number as an object of Python's, with its place in a list; as few bytes of a file make millions of them."""


class TooLargeError(DataError):
    """A file takes more memory than is spent on one."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"is more than {MOST_BYTES >> 30} GiB unpacked",
            where=path,
            remedy="import it in parts, with the columns needed",
        )


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
            if sum(chunks) > MOST_BYTES:
                raise TooLargeError(path)
            # A value outside lists is no larger than its chunk, so that no batch is much larger than what is allowed.
            for batch in file.iter_batches(max(1, min(1024, MOST_BYTES // max([1, *chunks])))):
                size += batch.nbytes
                if size > MOST_BYTES:
                    raise TooLargeError(path)
                rows += batch.to_pylist()
    except MemoryError:  # Arrow's is one of its own errors, too
        raise
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"not readable as Parquet: {first_line(error)}", where=path) from None
    return rows


def _chunk_sizes(metadata: pq.FileMetaData) -> list[int]:
    """Bytes that each column of each row group takes at least, the values within its lists counted one by one."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [group.column(at) for group in groups for at in range(group.num_columns)]
    return [max(chunk.total_uncompressed_size, chunk.num_values * _BYTES_PER_VALUE) for chunk in chunks]
