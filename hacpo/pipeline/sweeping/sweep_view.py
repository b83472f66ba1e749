"""What `hacpo sweep` shows while it works: a live view on a terminal, one line a run elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hacpo.artifacts.tables import TRACE
from hacpo.errors import harmless
from hacpo.phrases import duration
from hacpo.pipeline.sweeping.planned_cells import PlannedCell


class SweepView:
    """Progress of a sweep, on standard error.

    Args:
        name: the sweep's.
        total: its cells; `done`: those that are done already.
    """

    def __init__(self, name: str, total: int, done: int) -> None:
        self._name, self._total, self._done, self._begun_with = name, total, done, done
        self._failed = 0
        self._console = Console(stderr=True)
        self._since = time.monotonic()
        self._running: Sequence[PlannedCell] = ()
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._render, transient=True)

    def __enter__(self) -> SweepView:
        if self._console.is_terminal:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.__exit__(kind, error, trace)

    def begins(self, strays: int, jobs: int) -> None:
        """Before the first run."""
        if strays:
            self._say(f"{strays} runs below {self._name} are none of sweep.yaml's any more; they are left alone")
        if self._done < self._total:
            at_once = f", {jobs} at a time" if jobs > 1 else ""
            self._say(f"{self._name}: {self._total} runs, {self._done} done, {self._total - self._done} to do{at_once}")

    def closes(self, left: int) -> None:
        """After the last; so many runs could not be removed."""
        failed = f", {self._failed} failed" if self._failed else ""
        still_there = f", {left} not removed" if left else ""
        self._say(f"{self._name}: {self._done} of {self._total} runs done{failed}{still_there}")

    def show(self, running: Sequence[PlannedCell], _waiting: int) -> None:
        """What is at work."""
        self._running = running
        if self._console.is_terminal:  # not by a thread of rich's: processes are forked from here
            self._live.refresh()

    def ended(self, cell: PlannedCell, seconds: float, running: int, waiting: int) -> None:
        """A cell is done."""
        self._done += 1
        left = f", {duration(self._left(running + waiting))} to go" if running + waiting else ""
        self._say(f"{self._done} of {self._total}: {cell.cell.name} ({duration(seconds)}{left})")

    def failed(self, cell: PlannedCell, why: str) -> None:
        """A cell will not be done."""
        self._failed += 1
        self._say(f"failed: {cell.cell.name}: {why}")

    def left(self, cell: PlannedCell, why: str) -> None:
        """A cell is done, and its run could not be removed."""
        self._say(f"done, but not removed: {cell.cell.name}: {why}")

    def _say(self, line: str) -> None:
        self._console.print(harmless(line), highlight=False, soft_wrap=True, markup=False)

    def _left(self, cells: int) -> float:
        """Seconds that so many cells will take, as those did that have ended."""
        ended = self._done - self._begun_with + self._failed
        return (time.monotonic() - self._since) / ended * cells if ended else 0.0

    def _render(self) -> RenderableType:
        head = Table.grid(padding=(0, 1))
        failed = f", {self._failed} failed" if self._failed else ""
        elapsed = duration(time.monotonic() - self._since)
        head.add_row(
            Text(self._name, style="bold"),
            ProgressBar(total=self._total, completed=self._done, width=30),
            Text(f"{self._done} of {self._total} runs{failed}, {elapsed}"),
        )
        rows = Table.grid(padding=(0, 2))
        for cell in self._running:
            steps = cell.pipeline.settings.steps
            done = _steps_trained(cell)
            rows.add_row(
                Text(f"  {cell.cell.name}"),
                ProgressBar(total=steps, completed=done, width=20),
                Text(f"step {done} of {steps}"),
            )
        return Group(head, rows)


def _steps_trained(cell: PlannedCell) -> int:
    """How many steps somebody has learned from."""
    folder = cell.pipeline.layout.root / TRACE.folder
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0
