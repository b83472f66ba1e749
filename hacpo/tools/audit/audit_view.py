"""What an audit says, for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hacpo.tools.audit.walk import Audit
from hacpo.tools.inspect.plain import harmless

if TYPE_CHECKING:
    from rich.console import Console

_STALE = ("lock", "metadata", "settings")
"""Checks that also speak where files are merely older than the settings."""

_LONGEST = 60
"""Characters of a value that are shown."""


def as_json(audit: Audit) -> dict[str, Any]:
    """Everything, as plain JSON values."""
    return {
        "run": audit.run,
        "steps": {"from": audit.first, "until": audit.last, "reached": audit.reached, "audited": audit.steps},
        "clean": not audit.findings,
        "coverage": {
            "rows": dict(sorted(audit.rows.items())),
            "files": dict(sorted(audit.files.items())),
            "texts": audit.texts,
            "seed": audit.seed if audit.texts == "sample" else None,
            "not_checked": [
                {"what": what, "why": why, "times": times} for (what, why), times in sorted(audit.skipped.items())
            ],
            **{name: _plain(vars(report)) for name, report in _reports(audit)},
        },
        "findings": [_plain(vars(finding)) for finding in audit.findings],
    }


def _reports(audit: Audit) -> Iterator[tuple[str, Any]]:
    for name, report in (("text", audit.text_report), ("deep", audit.deep_report)):
        if report is not None:
            yield name, report


def _plain(value: Any) -> Any:
    """A value that JSON can hold; numbers that it cannot are texts."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items() if key != "findings"}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def print_audit(console: Console, audit: Audit) -> None:
    """A table of findings, and what was covered."""
    if audit.findings:
        _print_findings(console, audit)
    for line in coverage_lines(audit):
        console.print(line, markup=False, highlight=False)
    if any(finding.check in _STALE for finding in audit.findings):
        console.print(
            f"If params.yaml was changed or a run cut off: `hacpo run pipelines/{audit.run}` remakes what is out of "
            "date. What is still found after that is an error, or was restored from a damaged object of DVC's cache: "
            "remove the files that are named and run once more.",
            markup=False,
            highlight=False,
        )
    count = len(audit.findings)
    verdict = "no finding" if not count else f"{count} finding{'s' if count > 1 else ''}"
    style = "green" if not count else "red"
    console.print(f"{audit.run}: {verdict}", style=style, markup=False, highlight=False)


def _print_findings(console: Console, audit: Audit) -> None:
    from rich.table import Table

    table = Table(show_lines=True)
    for name in ("check", "file and row", "column", "expected", "found", "rows"):
        # Names are folded and never cut: a finding must be found again from a narrow terminal too.
        table.add_column(name, overflow="fold")
    for finding in audit.findings:
        place = harmless(finding.file.as_posix())
        if finding.row:
            place.append("\n").append_text(harmless(finding.row, style="bold"))
        if finding.note:
            place.append("\n").append_text(harmless(finding.note, style="dim"))
        values = [harmless(_shown(value)) for value in (finding.expected, finding.found)]
        table.add_row(finding.check, place, harmless(finding.column), *values, str(finding.count))
    console.print(table)


def _shown(value: Any) -> str:
    text = "" if value is None else repr(value) if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def coverage_lines(audit: Audit) -> Iterator[str]:
    """What was looked at, and what was not."""
    wanted = f"{audit.first} to {audit.last}"
    steps = f"steps {wanted} asked for, {len(audit.steps)} with tables" + (
        f"; the run has come to step {audit.reached}" if audit.reached < audit.last else ""
    )
    rows = ", ".join(f"{count:,} {table}" for table, count in sorted(audit.rows.items()))
    yield f"checked: {steps}; rows: {rows or 'none'}"
    texts = audit.text_report
    if texts is None:
        yield "texts: none (--texts none)"
    else:
        which = f"sample, --seed {audit.seed}" if audit.texts == "sample" else audit.texts
        yield (
            f"texts ({which}): {texts.verified:,} of {texts.verified_of:,} answers verified again, "
            f"{texts.decoded:,} of {texts.decoded_of:,} rollouts decoded, "
            f"{texts.retokenised:,} of {texts.retokenised_of:,} retokenised"
        )
        if texts.undecided:
            yield f"not checked: {texts.undecided} verdicts `timeout`, which prove nothing"
    deep = audit.deep_report
    if deep is not None:
        yield f"repeated: {deep.replayed} stages, {deep.exact} of them bit for bit"
    for (what, why), times in sorted(audit.skipped.items()):
        yield f"not checked: {what} ({why})" + (f", {times} times" if times > 1 else "")
