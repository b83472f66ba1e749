"""How the columns of a table are encoded in its files: lossless, and readable by every reader of Parquet.

Without dictionaries: a response's log-probabilities hardly repeat themselves, and of token ids a dictionary leaves
numbers of so many bits that zstd no longer sees which sequences come again. docs/performance.md has what was measured.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from hacpo.artifacts.tables import Table

_LEVEL = 5
"""zstd's: further ones take twice as long for a twentieth less."""

_PAGE = 8 << 20
"""Bytes: a page is compressed by itself, and what comes again in another is not seen. A file is rarely more."""


def layout(table: Table) -> dict[str, Any]:
    """How files of a table are written: arguments of `pyarrow.parquet.ParquetWriter`."""
    return {
        "compression": "zstd",
        "compression_level": _LEVEL,
        "data_page_size": _PAGE,
        "write_page_checksum": True,
        # Types follow from Parquet's own schema; Arrow's, beside it, repeats the metadata in base64.
        "store_schema": False,
        # The smallest and the largest value of every column help whoever looks for rows in many files: here paths do.
        "write_statistics": False,
        "use_dictionary": False,
        "column_encoding": dict(_encoded(field, keyed=field.name in table.key) for field in table.schema),
    }


def _encoded(field: pa.Field, *, keyed: bool) -> tuple[str, str]:
    """The path of a column's values in the file, and their encoding."""
    path, kind = field.name, field.type
    while pa.types.is_list(kind):
        path, kind = f"{path}.list.element", kind.value_type
    if pa.types.is_float32(kind) and path != field.name:
        # Signs, exponents and first bits of log-probabilities are alike; the others are noise.
        return path, "BYTE_STREAM_SPLIT"
    if pa.types.is_string(kind) and keyed:
        return path, "DELTA_BYTE_ARRAY"  # what differs from the id before
    return path, "PLAIN"
