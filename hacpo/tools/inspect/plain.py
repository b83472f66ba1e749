"""What models wrote, made safe for a terminal, and numbers short enough to read."""

from __future__ import annotations

import json
import math
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from hacpo.algorithm.trace import is_unclipped
from hacpo.phrases import number

_SUSPECT = re.compile(r"[^\n\x20-\x7e]")
_STEERING = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that steer instead of show: controls, formatting (bidirectional overrides, zero width), private
use, unassigned, line and paragraph separators."""

_NO_WIDTH = 100_000
"""Columns of what is no terminal."""


def harmless(text: str, style: str = "") -> Text:
    """`text` to print: no markup is read, and characters that could steer a terminal are spelled out (`\\x1b`).

    Line breaks stay; a tab becomes four spaces.
    """
    shown = Text(style=style)
    start = 0
    for match in _SUSPECT.finditer(text):
        character = match.group()
        if character != "\t" and unicodedata.category(character) not in _STEERING:
            continue
        shown.append(text[start : match.start()])
        if character == "\t":
            shown.append("    ")
        else:
            shown.append(character.encode("unicode_escape").decode("ascii"), style="reverse")
        start = match.end()
    return shown.append(text[start:])


def excerpt(text: str, most: int) -> str:
    """The text's beginning on one line, at most `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def open_console() -> Console:
    """Standard output; characters that it cannot encode are spelled out instead of failing.

    A pipe or file has no width to fit into: no row of a table is wrapped or cut there.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _NO_WIDTH
    return console


def print_json(value: object) -> None:
    """Print JSON in ASCII, so that a terminal sees no control character; what JSON cannot say (NaN) becomes null."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def interval(lower: float, upper: float) -> str:
    """`in [0.8000, 1.0000]`; `unclipped` where the bounds hold every ratio."""
    return "unclipped" if is_unclipped(upper) else f"in [{number(lower, 4)}, {number(upper, 4)}]"


def packed(pieces: Sequence[Text], width: int | None, *, indent: int = 2) -> list[Text]:
    """Pieces joined by two spaces, in lines of at most `width` (one line if None); later lines are indented.

    A piece is only cut by whoever prints it, if it alone is longer than a line.
    """
    lines: list[Text] = []
    for piece in pieces:
        if lines and (width is None or lines[-1].cell_len + 2 + piece.cell_len <= width):
            lines[-1].append("  ").append_text(piece)
        else:
            lines.append(Text(" " * indent if lines else "").append_text(piece))
    return lines
