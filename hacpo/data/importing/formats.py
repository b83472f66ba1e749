"""Rows of a local file: Parquet, JSON lines, JSON (a list of objects), CSV or TSV with a header."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hacpo.artifacts.text_files import DEEPEST, is_deeper, parse_json
from hacpo.data.importing.parquet_rows import read_parquet, try_parquet
from hacpo.errors import DataError, MissingInputError

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a character beyond the first 65,536, as JSON may spell it; two of them make one."""
Rows = list[dict[str, Any]]


def read_rows(path: Path) -> Rows:
    """All rows, as the file has them; the ending of its name says what it is.

    Raises:
        MissingInputError: there is no such file.
        DataError: it is not what its name says, or no table.
    """
    if not path.is_file():
        raise MissingInputError("there is no such file", where=path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError("not a kind of file that can be imported", where=path, expected=", ".join(_READERS))
    try:
        rows = reader(path)
    except UnicodeDecodeError:
        raise DataError("is not UTF-8 text", where=path) from None
    if not rows:
        raise DataError("holds no rows", where=path)
    return rows


def _parquet(path: Path) -> Rows:
    try_parquet(path)
    return read_parquet(path)


def _json_lines(path: Path) -> Rows:
    rows = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                rows.append(_object(_parsed(line, f"{path}:{number}"), f"{path}:{number}"))
    return rows


def _json(path: Path) -> Rows:
    content = _parsed(path.read_text(encoding="utf-8-sig"), path)
    if isinstance(content, dict):  # {"data": [...]} and the like
        lists = [value for value in content.values() if isinstance(value, list)]
        content = lists[0] if len(lists) == 1 else content
    if not isinstance(content, list):
        raise DataError("is no list of problems", where=path, expected="[{...}, ...]", found=type(content).__name__)
    return [_object(item, f"{path} item {number}") for number, item in enumerate(content)]


def _parsed(text: str, where: object) -> Any:
    try:
        value = parse_json(text, deepest=None)
        if is_deeper(value, DEEPEST):  # Arrow reads no Parquet file that is
            raise DataError(f"nested more than {DEEPEST} levels deep", where=where)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DataError("holds half a character (a lone surrogate such as \\ud800)", where=where) from None
    except ValueError as error:
        raise DataError(f"not valid JSON: {error}", where=where) from None
    return value


def _object(value: Any, where: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError("is no JSON object", where=where, found=type(value).__name__)
    return value


def _separated(separator: str) -> Callable[[Path], Rows]:
    def read(path: Path) -> Rows:
        csv.field_size_limit(1 << 27)  # the default, 128 KiB, is less than some solutions
        with path.open(encoding="utf-8-sig", newline="") as stream:
            try:
                reader = csv.DictReader(stream, delimiter=separator, strict=True)
                rows: Rows = []
                for row in reader:
                    if None in row or None in row.values():
                        columns = len(reader.fieldnames or ())
                        raise DataError(
                            "another number of cells than the header",
                            where=f"{path}:{reader.line_num}",
                            expected=columns,
                        )
                    rows.append(row)
            except csv.Error as error:
                raise DataError(f"not readable as CSV: {error}", where=f"{path}:{reader.line_num}") from None
        return rows

    return read


_READERS: dict[str, Callable[[Path], Rows]] = {
    ".parquet": _parquet,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _separated(","),
    ".tsv": _separated("\t"),
}
