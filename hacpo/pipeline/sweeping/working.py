"""The runs of a sweep, several at a time, each a `hacpo run` in a process of its own.

A run that fails is said at the end, and the others go on. The processes end with this one, however it ends; what they
had finished is kept, as with any run.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hacpo.artifacts.text_files import read_text
from hacpo.errors import HacpoError
from hacpo.pipeline.execution.orphans import die_with_parent
from hacpo.pipeline.sweeping.planned_cells import PlannedCell
from hacpo.pipeline.sweeping.starting import Starts
from hacpo.pipeline.sweeping.sweep_view import SweepView

_LOOK_SECONDS = 0.2
_END_SECONDS = 10.0
_ERROR = "hacpo: error: "


@dataclass
class _Work:
    """A cell at work: its process, the command that this runs, and since when the cell is (`time.monotonic`)."""

    cell: PlannedCell
    command: str
    process: subprocess.Popen[bytes]
    since: float


class SweepWork:
    """The cells of a sweep that are not done, and those at work.

    Args:
        waiting: to be run, the first first.
        every: all cells of the sweep, which may have starts to share.
        jobs: runs at a time.
        remake: train finished steps again where their settings have changed.
        audit: audit each run that has ended.
        collect: is called with a cell whose run has ended (and is found right); raises what keeps it from being done.
    """

    def __init__(
        self,
        waiting: Sequence[PlannedCell],
        every: Sequence[PlannedCell],
        *,
        jobs: int,
        remake: bool,
        audit: bool,
        collect: Callable[[PlannedCell], None],
        view: SweepView,
    ) -> None:
        self.waiting = list(waiting)
        self.starts = Starts(every)
        self.failed: dict[str, str] = {}
        """Name of a cell -> one line."""
        self._jobs, self._remake, self._audit, self._collect, self._view = jobs, remake, audit, collect, view
        self._at_work: list[_Work] = []

    def run(self) -> None:
        """Run every cell that waits; `failed` says which have not come to their end."""
        try:
            while self.waiting or self._at_work:
                self._begin()
                self._hear()
                self._view.show([work.cell for work in self._at_work], len(self.waiting))
                time.sleep(_LOOK_SECONDS)
        finally:
            self._end()

    def _begin(self) -> None:
        for cell in [*self.waiting]:
            if len(self._at_work) >= self._jobs:
                return
            running = [work.cell for work in self._at_work]
            try:
                may_begin = self.starts.give(cell, running)
            except HacpoError as error:
                self.waiting.remove(cell)
                self._fail(cell, str(error))
                continue
            if may_begin:
                self.waiting.remove(cell)
                options = ["--jobs", "1", *(["--yes"] if self._remake else [])]
                self._start(cell, "run", options)

    def _start(self, cell: PlannedCell, command: str, options: Sequence[str] = (), since: float | None = None) -> None:
        cell.log.parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-P", "-m", f"hacpo.commands.{command}", str(cell.pipeline.folder), *options]
        with cell.log.open("ab") as log:
            log.write(f"$ hacpo {command} {cell.pipeline.folder}\n".encode())
            log.flush()
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),  # noqa: PLW1509  # this process has one thread
            )
        self._at_work.append(_Work(cell, command, process, since or time.monotonic()))

    def _hear(self) -> None:
        for work in [*self._at_work]:
            code = work.process.poll()
            if code is None:
                continue
            self._at_work.remove(work)
            if code != 0:
                self._fail(work.cell, _why(work, code))
            elif work.command == "run" and self._audit:
                self._start(work.cell, "audit", since=work.since)
            else:
                try:
                    self._collect(work.cell)
                except HacpoError as error:
                    self._fail(work.cell, str(error))
                else:
                    self._view.ended(work.cell, time.monotonic() - work.since, len(self._at_work), len(self.waiting))

    def _fail(self, cell: PlannedCell, why: str) -> None:
        self.failed[cell.cell.name] = why
        self._view.failed(cell, why)

    def _end(self) -> None:
        """Stop what is at work: Ctrl-C has reached it too, and it ends by itself."""
        deadline = time.monotonic() + _END_SECONDS
        for work in self._at_work:
            work.process.terminate()
        for work in self._at_work:
            try:
                work.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                work.process.kill()
                work.process.wait()


def _why(work: _Work, code: int) -> str:
    """Why a process has failed: its own line, or what an audit has found."""
    try:
        lines = read_text(work.cell.log).splitlines()
    except (OSError, ValueError):
        lines = []
    begun = max((number for number, line in enumerate(lines) if line.startswith("$ hacpo ")), default=0)
    errors = [line.removeprefix(_ERROR) for line in lines[begun:] if line.startswith(_ERROR)]
    if errors:
        return errors[-1]
    if work.command == "audit" and code == 1:
        return f"the audit has findings; `hacpo audit {work.cell.pipeline.folder}` names them"
    if code < 0:
        return f"`hacpo {work.command}` was ended by signal {-code}; was the machine out of memory?"
    return f"`hacpo {work.command}` ended with exit code {code}; see {work.cell.log}"
