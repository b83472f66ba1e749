"""Line and bar charts: inline SVG that stretches with the page, labels in HTML, and a table of the same numbers.

The SVG holds shapes only and is stretched to the width there is (`preserveAspectRatio="none"`, strokes do not scale);
labels are HTML placed in percent, so that text stays readable at every width. The table below each chart is what
assistive technology reads and what the tooltip shows. Colours are CSS classes: `c-agent-0`, `c-muted`, ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hacpo.tools.report.markup import parts
from hacpo.tools.report.scales import (
    PERCENT,
    Format,
    Scale,
    count,
    linear_scale,
    share_scale,
    short_count,
    spread,
    step_ticks,
)

HEIGHT = 180
"""Of the plot, in CSS pixels; all vertical coordinates are pixels."""

_FEW = 1000
"""Of what is counted in whole numbers, up to which these are written in full."""

STEP = "step"
"""What the horizontal axis counts, if nothing else is said."""

_WIDTH = 1000
_MOST_POINTS = 300
_LABEL_GAP = 15


@dataclass(frozen=True)
class Line:
    """One line, with an optional band around it.

    Attributes:
        values: step -> value.
        band: step -> (low, high).
        label: whether its name stands at its end.
    """

    name: str
    color: str
    values: Mapping[int, float]
    band: Mapping[int, tuple[float, float]] | None = None
    inner_band: Mapping[int, tuple[float, float]] | None = None
    dashed: bool = False
    dots: bool = False
    label: bool = True


@dataclass(frozen=True)
class Rule:
    """A horizontal line of reference; its label stands above it, or `under` it."""

    value: float
    label: str
    color: str = "c-muted"
    under: bool = False


@dataclass(frozen=True)
class Bars:
    """One part of stacked bars."""

    name: str
    color: str
    values: Mapping[int, float]


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    last_step: int,
    form: Format,
    scale: Scale | None = None,
    rules: Sequence[Rule] = (),
    axis: str = STEP,
) -> Markup:
    """Lines over steps 0..`last_step`.

    Args:
        title: what the chart shows, for those who cannot see it.
        axis: what is counted on the horizontal axis; all that is said of steps here is then said of that.
        scale: the vertical axis; by default a linear one that holds all values, for shares within 0 and 1.
    """
    lines = [line for line in lines if line.values]
    steps = thinned(sorted({step for line in lines for step in line.values}))
    reached = [value for line in lines for value in extent(line)]
    scale = scale or (share_scale(reached) if form is PERCENT else linear_scale(reached))
    width = max(last_step, 1)
    shapes = _grid(scale)
    for line in lines:
        for band, name in ((line.band, "band"), (line.inner_band, "band inner")):
            if band:
                shapes.append((f"{name} {line.color}", _band_path(band, steps, scale, width)))
    labels = []
    for rule in rules:
        y = _y(rule.value, scale)
        if 0 <= y <= HEIGHT:
            shapes.append((f"rule {rule.color}", f"M0 {y:.1f}H{_WIDTH}"))
            if rule.label:
                labels.append(parts().rule_label(rule.label, f"{y:.1f}", rule.under))
    for line in lines:
        points = [(_WIDTH * step / width, _y(line.values[step], scale)) for step in steps if step in line.values]
        dashed = " dashed" if line.dashed else ""
        shapes.append((f"line{dashed} {line.color}", _path(points)))
        if line.dots or len(points) == 1:
            shapes.append((f"dots {line.color}", "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)))
    labels += _end_labels([line for line in lines if line.label], scale, form)
    header = [(line.name, line.color) for line in lines]
    named = str if axis == STEP else count
    rows = [(named(step), step / width, [_cell(line, step, form) for line in lines]) for step in steps]
    gutter = max((len(line.name) for line in lines if line.label), default=0)
    drawn = _frame(title, shapes, labels, _ticks(width, axis), scale, form, gutter, axis)
    return Markup(drawn + parts().numbers(title, header, rows, axis))


def _ticks(width: int, axis: str) -> list[tuple[str, float]]:
    """Labels of the horizontal axis, and where."""
    if axis == STEP or width <= _FEW:
        return [(str(step), step / width) for step in step_ticks(0, width)]
    return [(short_count(tick), tick / width) for tick in linear_scale([], low=0.0, high=width).ticks]


def bar_chart(
    bars: Sequence[Bars],
    *,
    title: str,
    last_step: int,
    form: Format,
    first_step: int = 1,
    shares: bool = False,
    total: bool = True,
) -> Markup:
    """Stacked bars over steps; the first part is at the bottom.

    Args:
        shares: draw each bar as shares of its sum; the table keeps the values.
        total: give the table a column with the sum.
    """
    bars = [part for part in bars if part.values]
    every = sorted({step for part in bars for step in part.values})
    steps = thinned(every)
    sums = {step: sum(part.values.get(step, 0.0) for part in bars) for step in steps}
    scale = linear_scale([0.0, *sums.values()], low=0.0) if not shares else linear_scale([], low=0.0, high=1.0)
    slots = max(last_step, first_step) - first_step + 1
    slot = _WIDTH / slots * max(1, len(every) / max(len(steps), 1))
    shapes = _grid(scale)
    heights = dict.fromkeys(steps, 0.0)
    for part in bars:
        path = ""
        for step in steps:
            size = part.values.get(step, 0.0) / (sums[step] if shares and sums[step] else 1.0)
            if size <= 0:
                continue
            left = _WIDTH * (step - first_step + 0.5) / slots - slot * 0.4
            bottom, top = _y(heights[step], scale), _y(heights[step] + size, scale)
            path += f"M{left:.1f} {bottom:.1f}V{top:.1f}h{slot * 0.8:.1f}V{bottom:.1f}z"
            heights[step] += size
        shapes.append((f"bar {part.color}", path))
    header = [(part.name, part.color) for part in bars]
    rows = []
    for step in steps:
        cells = [form.value(part.values[step]) if step in part.values else "" for part in bars]
        if total and len(bars) > 1:
            cells.append(form.value(sums[step]))
        rows.append((step, (step - first_step + 0.5) / slots, cells))
    if total and len(bars) > 1:
        header.append(("total", "c-ink"))
    ticks = [(step, (step - first_step + 0.5) / slots) for step in step_ticks(first_step, first_step + slots - 1)]
    axis = form if not shares else SHARE_AXIS
    drawn = _frame(title, shapes, [], ticks, scale, axis, 0)
    return Markup(
        parts().legend([(part.name, part.color) for part in bars]) + drawn + parts().numbers(title, header, rows)
    )


SHARE_AXIS = Format(lambda value: f"{100 * value:.1f} %", lambda value, _: f"{100 * value:.0f}%")


def extent(line: Line) -> list[float]:
    """Every value that a line and its bands reach."""
    edges = [edge for band in (line.band, line.inner_band) if band for pair in band.values() for edge in pair]
    return [*line.values.values(), *edges]


def thinned(steps: Sequence[int], most: int = _MOST_POINTS) -> list[int]:
    """At most about `most` of the steps, evenly, always with the first and the last."""
    if len(steps) <= most:
        return list(steps)
    picked = {steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)}
    return sorted(picked)


def _y(value: float, scale: Scale) -> float:
    """Pixels from the top; far outside values stay near, so that no path grows without bound."""
    return HEIGHT * (1 - min(max(scale.place(value), -1.0), 2.0))


def _grid(scale: Scale) -> list[tuple[str, str]]:
    path = "".join(f"M0 {_y(tick, scale):.1f}H{_WIDTH}" for tick in scale.ticks)
    return [("grid", path)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _band_path(band: Mapping[int, tuple[float, float]], steps: Sequence[int], scale: Scale, width: int) -> str:
    within = [step for step in steps if step in band]
    upper = [(_WIDTH * step / width, _y(band[step][1], scale)) for step in within]
    lower = [(_WIDTH * step / width, _y(band[step][0], scale)) for step in reversed(within)]
    return _path(upper + lower) + "Z" if within else ""


def _cell(line: Line, step: int, form: Format) -> str:
    if step not in line.values:
        return ""
    text = form.value(line.values[step])
    if line.band and step in line.band:
        low, high = line.band[step]
        text += f" ({form.value(low)} to {form.value(high)})"
    return text


def _end_labels(lines: Sequence[Line], scale: Scale, form: Format) -> list[Markup]:
    ends = [line.values[max(line.values)] for line in lines]
    places = spread([_y(end, scale) for end in ends], _LABEL_GAP, 0, HEIGHT)
    return [
        parts().end_label(line.name, line.color, f"{place:.1f}", form.value(end))
        for line, end, place in zip(lines, ends, places, strict=True)
    ]


def _frame(
    title: str,
    shapes: Sequence[tuple[str, str]],
    labels: Sequence[Markup],
    step_labels: Sequence[tuple[object, float]],
    scale: Scale,
    form: Format,
    gutter: int,
    axis: str = STEP,
) -> Markup:
    """The drawing with its axes; `shapes` are (class, path)."""
    ticks = [(f"{_y(tick, scale):.1f}", form.axis(tick, scale.distance)) for tick in scale.ticks]
    right = f"{min(gutter, 14) * 0.58 + 1.1:.1f}em" if gutter else "0.8em"
    return Markup(parts().chart(title, shapes, labels, ticks, step_labels, right, _WIDTH, HEIGHT, axis))
