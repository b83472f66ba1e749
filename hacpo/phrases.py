"""Numbers and lists in words, the same wherever they are said."""

from __future__ import annotations

from collections.abc import Sequence


def ranges(steps: Sequence[int]) -> str:
    """`1-3, 5` for 1, 2, 3, 5."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def mebibytes(size: int) -> str:
    """`12.3 MiB`, or GiB from there on."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
