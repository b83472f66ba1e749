"""Processes that stay warm between stages, so that agents work side by side in `hacpo run`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait

from hacpo.errors import HacpoError
from hacpo.pipeline.execution import worker_process
from hacpo.pipeline.execution.crashes import FaultElsewhereError
from hacpo.pipeline.execution.session import ProgressSink, Session, quiet_threads

_END_SECONDS = 5.0
"""How long a process that is gone may take to be seen as ended."""
_CLOSE_SECONDS = 2.0
"""How long idle workers may take to end what they have started themselves."""


class StageFailedError(HacpoError):
    """A stage ended with an error of its own; the line is the stage's."""

    def __init__(self, line: str, exit_code: int) -> None:
        super().__init__(line)
        self.exit_code = exit_code


class WorkerLostError(StageFailedError):
    """The process that was at a stage is gone; the stage has said nothing."""


def _started() -> tuple[subprocess.Popen[bytes], Connection]:
    """A worker, and what it is talked to through. By `subprocess`: `multiprocessing` would have it run the user's own
    program once more, up to the line that started this one."""
    driver_end, worker_end = multiprocessing.Pipe()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", worker_process.__name__, str(worker_end.fileno()), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        pass_fds=[worker_end.fileno()],
    )
    worker_end.close()
    return process, driver_end


def _send(connection: Connection, arguments: Sequence[str]) -> None:
    with contextlib.suppress(OSError):  # the process is gone, which receiving from it says
        connection.send(list(arguments))


class Crew(ABC):
    """Who carries out commands, each worker one at a time."""

    @abstractmethod
    def __len__(self) -> int:
        """How many workers there are."""

    @property
    @abstractmethod
    def idle(self) -> list[int]:
        """The workers that may be given a command."""

    @abstractmethod
    def give(self, worker: int, arguments: Sequence[str]) -> None:
        """Have an idle worker run a command; `outcomes` says what came of it."""

    @abstractmethod
    def outcomes(self, *, wait_for_one: bool = True) -> list[tuple[int, Exception | None]]:
        """The workers whose command has ended, each with its failure: `HacpoError` for a stage's own,
        `crashes.FaultElsewhereError` for a bug.

        Args:
            wait_for_one: return only when there is one, if any worker has a command. In this process, a command runs
                only then.
        """

    def run(self, commands: Sequence[tuple[int, Sequence[str]]]) -> tuple[list[int], Exception | None]:
        """Run commands, each on its worker (slot, arguments), until all have ended or one fails.

        Returns:
            Indices of the commands that ended well, and the first failure (see `outcomes`).
        """
        queues: dict[int, list[int]] = {}
        for index, (slot, _) in enumerate(commands):
            queues.setdefault(slot % len(self), []).append(index)
        done: list[int] = []
        failure: Exception | None = None
        while True:
            for worker in self.idle:
                if failure is None and queues.get(worker):
                    self.give(worker, commands[queues[worker][0]][1])
            ended = self.outcomes()
            if not ended:
                return done, failure
            for worker, problem in ended:
                index = queues[worker].pop(0)
                done += [index] if problem is None else []
                failure = failure or problem


class Workers(Crew):
    """A fixed number of warm processes (`worker_process`), each started for its first command; with none, commands run
    in this process.

    Args:
        count: processes; 0 runs everything here.
    """

    def __init__(self, count: int, progress: ProgressSink) -> None:
        self._progress = progress
        self._here = count == 0
        if self._here:
            quiet_threads()  # workers do it in their own process
        self._execute = worker_process.command_executor()
        self._session = Session(progress=progress, driver=True)
        self._processes: list[tuple[subprocess.Popen[bytes], Connection] | None] = [None] * max(count, 1)
        self._given: dict[int, Sequence[str]] = {}
        """Worker -> the command that it is at."""

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()
        started = {worker: own for worker, own in enumerate(self._processes) if own is not None}
        for own in started.values():
            own[1].close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for worker, own in started.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                own[0].wait(timeout=0 if worker in self._given else max(0.0, deadline - time.monotonic()))
            own[0].kill()
            own[0].wait()

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def idle(self) -> list[int]:
        """See `Crew.idle`."""
        return [worker for worker in range(len(self)) if worker not in self._given]

    def give(self, worker: int, arguments: Sequence[str]) -> None:
        """See `Crew.give`."""
        assert worker not in self._given
        self._given[worker] = arguments
        if self._here:
            return
        own = self._processes[worker] = self._processes[worker] or _started()
        _send(own[1], arguments)

    def outcomes(self, *, wait_for_one: bool = True) -> list[tuple[int, Exception | None]]:
        """See `Crew.outcomes`."""
        if self._here:
            return [self._run_here()] if wait_for_one and self._given else []
        ended: list[tuple[int, Exception | None]] = []
        while not ended and self._given:
            connections = {own[1]: worker for worker in self._given if (own := self._processes[worker]) is not None}
            ready = wait(list(connections), None if wait_for_one else 0)
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                if (outcome := self._receive(connection)) != "working":
                    worker = connections[connection]
                    del self._given[worker]
                    ended.append((worker, outcome if isinstance(outcome, Exception) else None))
        return ended

    def _run_here(self) -> tuple[int, Exception | None]:
        worker, arguments = self._given.popitem()
        try:
            self._execute(arguments, self._session)
        except Exception as error:
            return worker, error
        return worker, None

    def _lost(self, connection: Connection) -> WorkerLostError:
        """What to say of a worker that is gone."""
        process = next(own[0] for own in self._processes if own is not None and own[1] is connection)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_SECONDS)
        if process.returncode is not None and process.returncode >= 0:
            return WorkerLostError(
                f"a worker process ended by itself, with exit code {process.returncode}; its own messages are above", 1
            )
        return WorkerLostError("a worker process was killed; was the machine out of memory?", 1)

    def _receive(self, connection: Connection) -> str | Exception:
        """Take one message: `working`, `done`, or what went wrong."""
        try:
            kind, content = connection.recv()
        except (EOFError, OSError):  # OSError: it was gone before it read its command
            return self._lost(connection)
        if kind == "failed":
            return StageFailedError(*content)
        if kind == "crashed":
            return FaultElsewhereError(*content)
        if kind == "report":
            self._progress.report(*content)
        elif kind == "finished":
            self._progress.finished(*content)
        elif kind == "remark":
            self._progress.remark(*content)
        return "done" if kind == "done" else "working"
