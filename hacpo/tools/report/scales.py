"""Axes: which range a chart shows, where its ticks are, and how numbers are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MINUS = "\N{MINUS SIGN}"

_LARGEST = 1e300
"""Of what an axis shows: the next power of ten, and the distance of two such numbers, are floats still."""


@dataclass(frozen=True)
class Format:
    """How a quantity is written.

    Attributes:
        value: a value in a table, a label or a tooltip.
        axis: a tick, given the distance to the next one.
    """

    value: Callable[[float], str]
    axis: Callable[[float, float], str]


def _decimals(distance: float) -> int:
    return min(max(0, math.ceil(-math.log10(distance) - 1e-9)), 12) if distance > 0 else 0


def _signed(text: str) -> str:
    return text.replace("-", _MINUS)


def _away(value: float) -> float:
    """A nudge, so that exact halves round away from zero however they were computed."""
    return value + math.copysign(1e-9, value)


def percent(value: float) -> str:
    """`62.5 %`."""
    return _signed(f"{_away(100 * value):.1f}\N{NO-BREAK SPACE}%") if value else "0\N{NO-BREAK SPACE}%"


def points(value: float) -> str:
    """A difference of shares in percentage points, `+21.9`."""
    return _signed(f"{_away(100 * value):+.1f}")


def number(value: float) -> str:
    """Four significant digits; very small and very large numbers as a power of ten; `inf` and `nan`, which a file that
    was handed over may hold."""
    if not math.isfinite(value):
        return _signed(str(value))
    if value == 0 or 1e-4 <= abs(value) < 1e7:
        digits = 4 if abs(value) < 1e4 else len(str(int(abs(value))))
        return _signed(f"{float(f'{value:.{digits}g}'):,.{_places(value, digits)}f}")
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{_signed(mantissa)}×10{str(int(exponent)).translate(_SUPERSCRIPT)}"


def _places(value: float, digits: int) -> int:
    return 0 if value == 0 else max(0, digits - 1 - math.floor(math.log10(abs(value))))


def count(value: float) -> str:
    """`12,345`."""
    return _signed(f"{value:,.0f}")


def short_count(value: float, full_below: float = 1e4) -> str:
    """`12.3 k`, `1.2 M`; below `full_below` in full."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(size, full_below):
            return f"{value / size:.3g}\N{NO-BREAK SPACE}{letter}"
    return count(value)


def seconds(value: float) -> str:
    """`3 h 20 min`, `4 min 05 s`, `12.3 s`."""
    if not math.isfinite(value):
        return f"{value}\N{NO-BREAK SPACE}s"
    if value >= 3600:
        return f"{int(value // 3600)} h {int(value % 3600 // 60):02d} min".replace(" ", "\N{NO-BREAK SPACE}")
    if value >= 60:
        return f"{int(value // 60)} min {int(value % 60):02d} s".replace(" ", "\N{NO-BREAK SPACE}")
    return f"{value:.1f}\N{NO-BREAK SPACE}s" if value >= 1 else f"{value:.3g}\N{NO-BREAK SPACE}s"


def _power(value: float) -> str:
    exponent = round(math.log10(value))
    return f"10{str(exponent).translate(_SUPERSCRIPT)}" if 10.0**exponent == value else f"{value:g}"


PERCENT = Format(percent, lambda value, distance: _signed(f"{100 * value:.{_decimals(100 * distance)}f}%"))
NUMBER = Format(number, lambda value, distance: _signed(f"{value:,.{_decimals(distance)}f}"))
COUNT = Format(count, lambda value, distance: short_count(value, 1e3 if distance >= 1e3 else 1e4))
SECONDS = Format(seconds, lambda value, distance: f"{value:,.{_decimals(distance)}f} s")
POWER = Format(number, lambda value, _: _power(value))


@dataclass(frozen=True)
class Scale:
    """A vertical axis.

    Attributes:
        low, high: the range shown.
        ticks: values with a grid line.
        log: whether equal distances are equal ratios.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the bottom of the range, 1 at its top; values outside lie outside."""
        if not self.log:
            return (value - self.low) / (self.high - self.low)
        bottom = math.log10(self.low)
        return (math.log10(max(value, 1e-300)) - bottom) / (math.log10(self.high) - bottom)

    @property
    def distance(self) -> float:
        """Between two ticks."""
        return self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else self.high - self.low


def linear_scale(values: Iterable[float], *, low: float | None = None, high: float | None = None) -> Scale:
    """A range that holds all finite values (up to `_LARGEST`), widened to half a tick; `low` and `high` fix an end.
    From 0 to 1 where every value is 0."""
    finite = [min(max(value, -_LARGEST), _LARGEST) for value in values if math.isfinite(value)]
    bottom = low if low is not None else min(finite, default=0.0)
    top = high if high is not None else max(finite, default=1.0)
    if top - bottom <= 1e-12 * max(abs(top), abs(bottom), 1e-9):
        spare = max(abs(top) * 0.1, 1e-6) if top else 1.0
        below = spare if top and low is None else 0.0
        bottom, top = bottom - below, (top + spare if high is None else bottom + spare)
    if top <= bottom:  # shares below 0, which a file that was handed over may hold
        top = bottom + 1.0
    step = nice_step(top - bottom, 4)
    half = step / 2
    if low is None:
        bottom = math.floor(bottom / half + 1e-9) * half
    if high is None:
        top = math.ceil(top / half - 1e-9) * half
    start = math.ceil(bottom / step - 1e-9)
    ticks = [index * step for index in range(start, math.floor(top / step + 1e-9) + 1)]
    return Scale(bottom, top, tuple(0.0 if abs(tick) < step * 1e-6 else tick for tick in ticks))


def share_scale(values: Iterable[float]) -> Scale:
    """A linear range for shares: within 0 and 1, however far the error bands reach."""
    inside = [min(max(value, 0.0), 1.0) for value in values if math.isfinite(value)]
    if inside and max(inside) == min(inside) > 0:
        inside += [0.9 * inside[0], min(1.1 * inside[0], 1.0)]
    return linear_scale(inside)


def log_scale(values: Iterable[float], *, decades: bool = False) -> Scale:
    """A logarithmic range that holds all positive values; with `decades` it begins and ends at powers of ten."""
    inside = [min(max(value, 1 / _LARGEST), _LARGEST) for value in values if math.isfinite(value) and value > 0]
    finite = inside or [1.0]
    low, high = min(finite), max(finite)
    if decades or high / low > 30:
        first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
        last = max(last, first + 1)
        every = max(1, math.ceil((last - first) / 5))
        return Scale(
            10.0**first, 10.0**last, tuple(10.0**exponent for exponent in range(first, last + 1, every)), log=True
        )
    candidates = [factor * 10.0**power for power in range(-12, 12) for factor in (1, 1.5, 2, 3, 5, 7)]
    below = [value for value in candidates if value <= low * 1.0001]
    above = [value for value in candidates if value >= high * 0.9999]
    bottom, top = (below or [low])[-1], (above or [high])[0]
    if bottom == top:
        bottom, top = bottom / 1.5, top * 1.5
    return Scale(bottom, top, tuple(value for value in candidates if bottom * 0.999 <= value <= top * 1.001), log=True)


def nice_step(span: float, pieces: int) -> float:
    """1, 2 or 5 times a power of ten, so that `span` has about `pieces` of them."""
    rough = span / pieces
    magnitude = 10.0 ** math.floor(math.log10(rough))
    return next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough * 0.999)


def step_ticks(first: int, last: int, most: int = 6) -> list[int]:
    """Whole numbers to label on the axis of steps."""
    every = max(1, round(nice_step(max(last - first, 1), most - 1)))
    return [*range(-(-first // every) * every, last + 1, every)] or [first]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions as near as possible to `wanted` (any order) that keep `gap` between neighbours and stay in range."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed: list[float] = []
    for index in order:
        at = min(max(wanted[index], low), high)
        placed.append(max(at, placed[-1] + gap) if placed else at)
    limit = high
    for position in range(len(placed) - 1, -1, -1):
        placed[position] = min(placed[position], limit)
        limit = placed[position] - gap
    result = [0.0] * len(wanted)
    for position, index in enumerate(order):
        result[index] = placed[position]
    return result
