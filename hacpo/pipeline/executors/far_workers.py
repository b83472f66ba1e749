"""`hacpo run` on other machines: what it asks of its workers (`execution.workers.Crew`), by an executor.

A stage whose table has several files is divided into slices (`hacpo.artifacts.slices`), each an order of its own; when
all have ended the stage's own command puts their files in place. An order whose process or machine is lost is repeated,
and that is said; a stage's own error ends the run as on one machine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from hacpo.artifacts import storage
from hacpo.artifacts.text_files import load_json
from hacpo.errors import HacpoError, SettingsError
from hacpo.pipeline.catalogue import EVALUATE, GENERATE, STAGES, UPDATE
from hacpo.pipeline.execution.session import ProgressSink
from hacpo.pipeline.execution.workers import Crew, Workers
from hacpo.pipeline.executors.orders import Executor, Order, Outcome
from hacpo.pipeline.executors.slice_count import files_made_by
from hacpo.pipeline.project import Pipeline
from hacpo.settings.executor import ExecutorSettings

_REPORTS = "orders"
_LOOK_SECONDS, _SOON_SECONDS = 1.0, 0.05
"""How long an end is waited for before it is looked again how far orders are; while this machine is at one, too."""
_WITH_A_MODEL = {spec.command for spec in (GENERATE, EVALUATE, UPDATE)}
"""Stages whose process keeps its agent's model for the next."""


class OrderLostError(HacpoError):
    """An order was lost as often as it may be."""


class View(ProgressSink, Protocol):
    """What shows how far orders are."""

    def note(self, text: str) -> None:
        """A line that stays."""


def open_executor(settings: ExecutorSettings, folder: Path) -> Executor:
    """The executor of a kind.

    Args:
        folder: where it may keep scripts and logs.

    Raises:
        SettingsError: what it needs is not here, or the settings name a stage that there is none of.
    """
    known = list(dict.fromkeys(spec.command for spec in STAGES.values()))
    for name in settings.stages:
        if name not in (*known, "default"):
            expected = f"one of {', '.join(known)}, default"
            raise SettingsError("no such stage", where=f"executor.stages.{name}", expected=expected)
    if settings.kind == "ray":
        from hacpo.pipeline.executors.on_ray import RayExecutor

        return RayExecutor(settings)
    if settings.kind == "slurm":
        from hacpo.pipeline.executors.on_slurm import SlurmExecutor

        # For trying it out without a cluster: submitit's own processes.
        return SlurmExecutor(settings, folder, os.environ.get("HACPO_SUBMITIT_CLUSTER", "slurm"))
    raise SettingsError(f"executor {settings.kind} needs no cluster")


@dataclass
class _Command:
    """A stage's command on its way.

    Attributes:
        after_slices: the command, which this machine runs when all its slices have ended: it has little left to do.
        at_work: orders that have not ended.
    """

    after_slices: tuple[str, ...] | None
    at_work: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Wanted:
    """An order that is not given yet, or is to be repeated."""

    arguments: tuple[str, ...]
    keep: str
    lost: int = 0

    @property
    def title(self) -> str:
        """In words: `generate --step 3 --agent ada --shard 1/4`."""
        return " ".join((self.arguments[0], *self.arguments[2:]))


class FarWorkers(Crew):
    """A worker for each agent, on whichever machine has room.

    Args:
        executor: the cluster, and `settings` what it was opened with.
        pipeline: the run.
        view: told what runs where.
    """

    def __init__(self, executor: Executor, settings: ExecutorSettings, pipeline: Pipeline, view: View) -> None:
        self._executor, self._settings, self._pipeline, self._view = executor, settings, pipeline, view
        self._reports = pipeline.layout.locks.absolute() / _REPORTS
        self._numbers = count()
        self._commands: dict[int, _Command] = {}
        """Worker -> what it is at."""
        self._orders: dict[int, tuple[int, _Wanted]] = {}
        """Number of an order -> its worker, and what it is."""
        self._closing: list[int] = []
        """Workers whose slices have ended; this machine is at the first one's command."""
        self._here = Workers(1, view)
        self._told: dict[int, str] = {}
        """Number of an order -> what it is called where its progress is shown."""
        storage.remove(self._reports)

    def __enter__(self) -> FarWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.close()
        self._here.__exit__(None, None, None)
        storage.remove(self._reports)

    def __len__(self) -> int:
        return len(self._pipeline.settings.agents)

    @property
    def idle(self) -> list[int]:
        """See `Crew.idle`."""
        return [worker for worker in range(len(self)) if worker not in self._commands]

    def give(self, worker: int, arguments: Sequence[str]) -> None:
        """See `Crew.give`."""
        assert worker not in self._commands
        words = tuple(arguments)
        keep = self._named(words) if words[0] in _WITH_A_MODEL else ""
        parts = min(files_made_by(self._pipeline, words), self._settings.slices or 10**6)
        if parts < 2:
            self._commands[worker] = _Command(None)
            self._submit(worker, [_Wanted(words, keep and f"{keep}/0")])
            return
        slices = [_Wanted((*words, "--shard", f"{part}/{parts}"), keep and f"{keep}/{part}") for part in range(parts)]
        self._commands[worker] = _Command(words)
        self._submit(worker, slices)

    def _named(self, words: Sequence[str]) -> str:
        """The agent of a command."""
        return words[words.index("--agent") + 1] if "--agent" in words else ""

    def _submit(self, worker: int, wanted: Sequence[_Wanted]) -> None:
        orders = []
        for one in wanted:
            number = next(self._numbers)
            self._orders[number] = (worker, one)
            self._commands[worker].at_work.add(number)
            resources = self._settings.resources(one.arguments[0])
            report = self._reports / f"{number}.json"
            orders.append(Order(number, one.arguments, self._pipeline.root.resolve(), report, resources, one.keep))
        self._executor.submit(orders)

    def outcomes(self, *, wait_for_one: bool = True) -> list[tuple[int, Exception | None]]:
        """See `Crew.outcomes`."""
        ended: list[tuple[int, Exception | None]] = []
        while self._commands and not ended:
            seconds = (_LOOK_SECONDS if self._here.idle else _SOON_SECONDS) if wait_for_one else 0.0
            for outcome in self._executor.outcomes(seconds):
                ended += self._take_in(outcome)
            ended += self._close(wait_for_one=wait_for_one and not ended and not self._orders)
            self._show()
            if not wait_for_one:
                break
        return ended

    def _take_in(self, outcome: Outcome) -> list[tuple[int, Exception | None]]:
        """What an order's end means for its worker: nothing yet, or that its command has ended."""
        worker, wanted = self._orders.pop(outcome.number)
        self._closing_line(outcome.number)
        command = self._commands.get(worker)
        if command is None:  # it has failed already
            return []
        command.at_work.discard(outcome.number)
        failure = outcome.failure
        if outcome.lost:
            where = self._where(outcome.number)
            if wanted.lost < self._settings.retries:
                self._view.note(f"{wanted.title}: lost{where} ({outcome.lost}); it is repeated")
                self._submit(worker, [_Wanted(wanted.arguments, wanted.keep, wanted.lost + 1)])
                return []
            failure = OrderLostError(f"{wanted.title}: lost {wanted.lost + 1} times, the last{where}: {outcome.lost}")
        if failure is not None:
            del self._commands[worker]
            return [(worker, failure)]
        if command.at_work:
            return []
        if command.after_slices is not None:
            self._closing.append(worker)
            return []
        del self._commands[worker]
        return [(worker, None)]

    def _close(self, *, wait_for_one: bool) -> list[tuple[int, Exception | None]]:
        """Put in place what slices have made, one after another; returns what has ended."""
        ended = []
        for _, failure in self._here.outcomes(wait_for_one=wait_for_one):
            worker = self._closing.pop(0)
            del self._commands[worker]
            ended.append((worker, failure))
        if self._closing and self._here.idle:
            words = self._commands[self._closing[0]].after_slices
            assert words is not None
            self._here.give(0, words)
        return ended

    # --- what runs where ---------------------------------------------------------------------------------------------

    def _report(self, number: int) -> dict[str, Any]:
        """What an order's process has said; nothing where it has not begun."""
        try:
            content = load_json(self._reports / f"{number}.json")
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def _where(self, number: int) -> str:
        host = self._report(number).get("host")
        return f" on {host}" if host else " before it began"

    def _show(self) -> None:
        for number in self._orders:
            said = self._report(number)
            if "total" in said:
                self._told[number] = f"{said['stage']} @ {said['host']}"
                self._view.report(self._told[number], said["done"], said["total"], said.get("facts", {}))

    def _closing_line(self, number: int) -> None:
        said = self._report(number)
        shown = self._told.pop(number, None)
        if shown is not None:
            self._view.finished(shown, "")
        if "summary" in said:
            self._view.finished(said["stage"], said["summary"])
        for line in said.get("lines", []):
            self._view.note(line)
