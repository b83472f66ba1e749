"""What the attack shows: a line while it works, a table at the end, and a file of everything."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .frame import KINDS, Finding, Tally


class Watch(AbstractContextManager["Watch"]):
    """Shows how far the part at work is: a bar on a terminal, elsewhere a line now and then; and findings at once.

    Args:
        save: is called as often, and after every finding: what was done so far is not lost.
    """

    def __init__(self, console: Console, save: Callable[[Tally], None], every_seconds: float = 60.0) -> None:
        self._console, self._save, self._every, self._said = console, save, every_seconds, time.monotonic()
        self._shown: Counter[str] = Counter()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[facts]}"),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._tasks: dict[str, object] = {}

    def __enter__(self) -> Watch:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def told(self, tally: Tally) -> None:
        """Something was counted."""
        if tally.name not in self._tasks:
            self._tasks[tally.name] = self._bar.add_task(tally.name, total=tally.planned or None, facts="")
        facts = f"{tally.trials} trials, {len(tally.findings)} findings"
        done = tally.counts["kills"] or tally.trials
        self._bar.update(self._tasks[tally.name], completed=done, total=tally.planned or None, facts=facts)  # type: ignore[arg-type]
        for finding in tally.findings[self._shown[tally.name] :]:
            tell(self._console, finding)
        is_new = len(tally.findings) > self._shown[tally.name]
        self._shown[tally.name] = len(tally.findings)
        if not is_new and time.monotonic() - self._said < self._every:
            return
        self._said = time.monotonic()
        self._save(tally)
        if not self._console.is_terminal:
            of = f" of {tally.planned}" if tally.planned else ""
            self._console.print(f"{tally.name}: {done}{of} done, {facts}", highlight=False)


def tell(console: Console, finding: Finding) -> None:
    """One finding, with what repeats it."""
    console.rule(f"{finding.part} {finding.trial}: {finding.kind}", style="red")
    console.print(f"{finding.what}\n{finding.again()}\nkept: {finding.sandbox}", markup=False, highlight=False)


def table(tallies: Sequence[Tally]) -> Table:
    """A row for each part."""
    shown = Table("part", "trials", *KINDS, "seconds", "note")
    for tally in tallies:
        counts = [f"[red]{tally.of(kind)}[/red]" if tally.of(kind) else "0" for kind in KINDS]
        note = (
            f"skipped: {tally.skipped}"
            if tally.skipped
            else "; ".join(f"{what} {number}" for what, number in sorted(tally.counts.items()) if ":" not in what)
        )
        shown.add_row(tally.name, str(tally.trials), *counts, f"{tally.seconds:.0f}", note)
    return shown


def machine() -> str:
    """Where this ran, without names."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{system}, {os.cpu_count()} cores, {memory:.0f} GiB"


def write(path: Path, tallies: Sequence[Tally], seed: int, begun: float) -> None:
    """All of it as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(begun)),
        "machine": machine(),
        "seed": seed,
        "seconds": round(time.time() - begun),
        "parts": [
            {
                **{field.name: getattr(tally, field.name) for field in fields(tally)},
                "findings": [{**asdict(finding), "again": finding.again()} for finding in tally.findings],
                "found": {kind: tally.of(kind) for kind in KINDS},
            }
            for tally in tallies
        ],
    }
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
