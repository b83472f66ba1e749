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


def amount(value: float) -> str:
    """`1,234`, `12.3 M`, `4.0 G`: counts of anything."""
    for size, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.{1 if value / size < 100 else 0}f} {unit}"
    return f"{value:,.0f}"


def size(value: float) -> str:
    """`12.3 GiB`."""
    for unit, least in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if value >= least:
            return f"{value / least:.{1 if value / least < 100 else 0}f} {unit}"
    return f"{value / 2**10:.0f} KiB"


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`, `2.1 days`."""
    if seconds < 120:
        return f"{seconds:.{1 if seconds < 10 else 0}f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def signed(value: float) -> str:
    """`+0.707`, or `0` for exactly nothing."""
    return "0" if value == 0 else f"{value:+.3f}" if 1e-3 <= abs(value) < 1e4 else f"{value:+.2g}"


def number(value: float, digits: int = 3) -> str:
    """`0.354`; very large or small ones as `2.2e+04`."""
    return "0" if value == 0 else f"{value:.{digits}f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.2g}"
