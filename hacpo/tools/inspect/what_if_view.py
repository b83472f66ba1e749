"""What other settings would have changed, as a page to read: settings, signs, shares, quantiles, the most changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hacpo.evaluation.measure import measure
from hacpo.phrases import number, signed
from hacpo.tools.inspect.comparison import QUANTILES, Change, Comparison, Spread, Values, capability_differences
from hacpo.tools.inspect.plain import excerpt, harmless, packed
from hacpo.tools.inspect.recompute import WhatIf
from hacpo.tools.inspect.side_by_side_view import print_missing

DRIFT = (
    "Log-probabilities are the run's own: those of updates after the first are of a model that had learned under the "
    "run's settings. Under the asked ones it would have drifted differently, and with it ratios, clipping and weights."
)

_SPREADS = {
    "effective_advantage": "effective advantage",
    "ratio": "ratio",
    "is_weight": "weight",
    "row_weight": "counts for",
}
_WIDTH_OF_ALL_QUANTILES = 96
_LEFT_OUT = (0.05, 0.95)
"""Quantiles that a narrower terminal does not show."""

_SHARES = {"live": "live", "guarded": "guarded", "punished_correct": "punished correct", "clipped": "clipped"}
_GRADED_SHARES = _SHARES | {"punished_correct": "punished best"}
"""With a reward function no response is correct; some are the best."""


def print_what_if(
    console: Console,
    result: WhatIf,
    comparisons: Mapping[str, Sequence[Comparison]],
    changed: Mapping[str, Sequence[Change]],
    texts: Mapping[str, str],
) -> None:
    """Everything that differs.

    Args:
        comparisons, changed: per learner.
        texts: rollout_id -> text of the changed responses.
    """
    question = result.question
    console.print(Text(f"{question.pipeline.run}, step {result.reader.step}: what if", style="bold"))
    for key, (was, asked) in question.changed.items():
        console.print(Text(f"  {key}  {was} → ").append(str(asked), style="bold"), soft_wrap=True)
    if not question.changed:
        console.print("  no other setting is asked about: the run's own, recomputed", soft_wrap=True)
    if question.kept:
        kept = f"  as in the run, for no file can tell: {', '.join(question.kept)}"
        console.print(Text(kept, style="yellow"), soft_wrap=not console.is_terminal)
    _print_capability(console, result)
    for learner, parts in comparisons.items():
        console.print()
        console.print(harmless(f"{learner} learns", "bold cyan"))
        for part in parts:
            _print_summary(console, part)
        if any(part.differing for part in parts):
            is_binary = question.as_run.verification.is_binary
            _print_shares(console, parts, _SHARES if is_binary else _GRADED_SHARES)
            _print_spreads(console, parts)
        _print_changes(console, changed[learner], texts)
    console.print()
    if question.changed and _later_updates(result):
        console.print(Text(DRIFT, style="dim"), soft_wrap=not console.is_terminal)
    if not question.changed and not any(part.differing for parts in comparisons.values() for part in parts):
        console.print(Text("Nothing changes: every number recomputed equals the files.", style="green"))
    print_missing(console, result.reader.missing)


def _later_updates(result: WhatIf) -> bool:
    """Whether any trace has an update after the first."""
    traces = [before.updates for before, _ in result.learners.values()]
    return any(bool((trace.update_u > 0).any()) for trace in traces if trace is not None)


def _print_capability(console: Console, result: WhatIf) -> None:
    for agent, (was, now) in capability_differences(*result.capability).items():
        line = Text("  capability of ").append_text(harmless(agent))
        settings = result.question.as_run
        positive = settings.algorithm.capability.metric == "positive_rate"
        word = "positive rate" if positive else measure(settings.verification)
        for key, name in (("accuracy", word), ("capability", "capability")):
            old, new = getattr(was, key), getattr(now, key)
            if old != new:
                line.append(f"  {name} {number(old)} → {number(new)}")
        if was.window != now.window:
            line.append(f"  window of {len(was.window)} steps → {len(now.window)}")
        console.print(line, soft_wrap=True)


def _print_summary(console: Console, part: Comparison) -> None:
    pieces = [Text(f"  {part.kind}", style="bold"), Text(f"{part.responses} responses")]
    if part.dropped:
        pieces.append(Text(f"{part.dropped} not used any more", style="yellow"))
    if part.differing:
        pieces.append(Text("differ:"))
        pieces += [Text(f"{name} {count}") for name, count in part.differing.items()]
    elif part.responses:
        pieces.append(Text("nothing differs", style="green"))
    for line in packed(pieces, console.width if console.is_terminal else None, indent=4):
        console.print(line, soft_wrap=not console.is_terminal)
    if part.flips:
        line = Text("    effective advantage changes its sign: ")
        line.append(
            ", ".join(f"{count} from {name.replace('-', '−')}" for name, count in part.flips.items()), "magenta"
        )
        console.print(line, soft_wrap=True)
    if part.unknown:
        unknown = f"    {part.unknown} with token-level ratios and another sign: clipping and objective not known"
        console.print(Text(unknown, style="yellow"), soft_wrap=True)


def _table(console: Console) -> Table:
    box_or_none, gap = (box.SIMPLE_HEAD, 1) if console.is_terminal else (None, 2)
    return Table(box=box_or_none, padding=(0, 0, 0, gap), pad_edge=False, show_edge=False)


def _print_shares(console: Console, parts: Sequence[Comparison], names: Mapping[str, str]) -> None:
    table = _table(console)
    table.add_column("  share of responses", no_wrap=True)
    for part in parts:
        table.add_column(part.kind, justify="right", no_wrap=True)
    for key, name in names.items():
        pairs = [part.shares.get(key, (None, None)) for part in parts]
        if any(pair != (None, None) for pair in pairs):
            table.add_row(f"  {name}", *[_pair(pair) for pair in pairs])
    console.print()
    console.print(table)


def _pair(pair: tuple[float | None, float | None]) -> Text:
    was, now = ("-" if value is None else f"{100 * value:.1f} %" for value in pair)
    return Text(was, style="dim") if pair[0] == pair[1] else Text(f"{was} → {now}", style="bold")


def _print_spreads(console: Console, parts: Sequence[Comparison]) -> None:
    table = _table(console)
    for name in ("  quantiles", "", ""):
        table.add_column(name, no_wrap=True)
    wide = not console.is_terminal or console.width >= _WIDTH_OF_ALL_QUANTILES
    chosen = [place for place, share in enumerate(QUANTILES) if wide or share not in _LEFT_OUT]
    for place in chosen:
        table.add_column(f"{100 * QUANTILES[place]:g} %", justify="right", no_wrap=True)
    for key, name in _SPREADS.items():
        for part in parts:
            spread = part.spreads.get(key)
            # Own responses have no weight, and what a response counts for is worth a line only where it changes.
            idle = (key == "is_weight" and part.kind == "own") or (key == "row_weight" and key not in part.differing)
            if spread is None or idle:
                continue
            for side, every in _spread_rows(spread, key, key in part.differing):
                cells = [every[place] for place in chosen]
                table.add_row(
                    f"  {name}" if side != "after" else "", part.kind if side != "after" else "", side, *cells
                )
    console.print()
    console.print(table)


def _spread_rows(spread: Spread, key: str, differs: bool) -> list[tuple[str, list[Text]]]:
    show = signed if key == "effective_advantage" else number
    if not differs:
        return [("same", [Text(show(value), style="dim") for value in spread.before])]
    pairs = list(zip(spread.before, spread.after, strict=True))
    return [
        ("before", [Text(show(was)) for was, _ in pairs]),
        ("after", [Text(show(now), style="bold" if show(was) != show(now) else "dim") for was, now in pairs]),
    ]


def _print_changes(console: Console, changes: Sequence[Change], texts: Mapping[str, str]) -> None:
    width = console.width if console.is_terminal else None
    if changes:
        console.print()
        console.print(Text("  most changed", style="bold"))
    for rank, change in enumerate(changes, start=1):
        head = [Text(f"{rank:>4}  ").append_text(harmless(change.rollout_id, "cyan"))]
        head.append(Text("own" if change.is_self else "cross", style="dim"))
        head.append(Text(f"reward {change.reward:g}"))
        if change.update is not None:
            head.append(Text(f"update {change.update}", style="dim"))
        for line in packed(head, width, indent=6):
            console.print(line, soft_wrap=width is None)
        for line in packed(_moves(change.before, change.after), None if width is None else width - 6, indent=0):
            console.print(Text("      ").append_text(line), soft_wrap=width is None)
        console.print(
            Text("      ").append_text(harmless(excerpt(texts.get(change.rollout_id, ""), (width or 126) - 6), "dim")),
            soft_wrap=True,
        )


def _moves(before: Values, after: Values) -> list[Text]:
    """What differs, as `effective −0.613 → +0.204`; the effective advantage also where it does not."""
    pieces = [_move("effective", before.effective_advantage, after.effective_advantage, signed)]
    for name, key in (("baseline", "baseline"), ("omega", "omega"), ("ratio", "ratio"), ("weight", "is_weight")):
        was, now = getattr(before, key), getattr(after, key)
        if was is not None and now is not None and number(was, 4) != number(now, 4):
            pieces.append(_move(name, was, now))
    if before.clipped is not None or after.clipped is not None:
        words = {True: "clipped", False: "not clipped", None: "not known"}
        if before.clipped != after.clipped:
            pieces.append(Text(f"{words[before.clipped]} → {words[after.clipped]}", style="magenta"))
        elif before.clipped:
            pieces.append(Text("clipped", style="dim"))
    if before.gradient_weight is not None and after.gradient_weight is not None:
        pieces.append(_move("gradient weight", before.gradient_weight, after.gradient_weight, signed))
    return pieces


def _move(name: str, was: float, now: float, show: Callable[[float], str] = number) -> Text:
    if show(was) == show(now):
        return Text(f"{name} {show(was)}", style="dim")
    style = "magenta" if was * now < 0 or (was == 0) != (now == 0) else "bold"
    return Text(f"{name} {show(was)} → ").append(show(now), style=style)
