"""Processes that stay warm between stages, so that agents work side by side in `hacpo run`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

from hacpo.errors import HacpoError
from hacpo.pipeline.execution import worker_process
from hacpo.pipeline.execution.crashes import FaultElsewhereError
from hacpo.pipeline.execution.session import ProgressSink, Session, quiet_threads

_END_SECONDS = 5.0
"""How long a process may take to end once its connection is closed."""


class StageFailedError(HacpoError):
    """A stage ended with an error of its own; the line is the stage's."""

    def __init__(self, line: str, exit_code: int) -> None:
        super().__init__(line)
        self.exit_code = exit_code


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


def _told(on_done: Callable[[int], None] | None, index: int) -> Exception | None:
    """Say that a command ended well; returns what came of it."""
    try:
        if on_done is not None:
            on_done(index)
    except Exception as error:
        return error
    return None


class Workers:
    """A fixed number of warm processes (`worker_process`); with none, commands run in this process.

    Args:
        count: processes; 0 runs everything here.
    """

    def __init__(self, count: int, progress: ProgressSink) -> None:
        self._progress = progress
        quiet_threads()
        self._execute = worker_process.command_executor()
        self._session = Session(progress=progress, driver=True)
        self._workers = [_started() for _ in range(count)]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self._workers:
            connection.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.5)
            process.kill()
            process.wait()

    def run(
        self, commands: Sequence[tuple[int, Sequence[str]]], on_done: Callable[[int], None] | None = None
    ) -> tuple[list[int], Exception | None]:
        """Run commands, each on its worker (slot, arguments), until all have ended or one fails.

        Args:
            on_done: is told the index of each command that ended well as soon as it did, while others work on; what it
                raises counts as that command's failure.

        Returns:
            Indices of the commands that ended well, and the first failure: `HacpoError` for a stage's own,
                `crashes.FaultElsewhereError` for a bug.
        """
        if not self._workers:
            return self._run_here(commands, on_done)
        queues: dict[Connection, list[int]] = {}
        for index, (slot, _) in enumerate(commands):
            queues.setdefault(self._workers[slot % len(self._workers)][1], []).append(index)
        for connection, queue in queues.items():
            _send(connection, commands[queue[0]][1])
        done: list[int] = []
        failure: Exception | None = None
        while busy := [connection for connection, queue in queues.items() if queue]:
            for ready in wait(busy):
                assert isinstance(ready, Connection)
                outcome = self._receive(ready)
                if outcome == "working":
                    continue
                index = queues[ready].pop(0)
                problem = outcome if isinstance(outcome, Exception) else _told(on_done, index)
                if problem is None:
                    done.append(index)
                failure = failure or problem
                if failure is not None:
                    queues[ready].clear()
                elif queues[ready]:
                    _send(ready, commands[queues[ready][0]][1])
        return done, failure

    def _run_here(
        self, commands: Sequence[tuple[int, Sequence[str]]], on_done: Callable[[int], None] | None
    ) -> tuple[list[int], Exception | None]:
        done: list[int] = []
        for index, (_, arguments) in enumerate(commands):
            try:
                self._execute(arguments, self._session)
            except Exception as error:
                return done, error
            if (problem := _told(on_done, index)) is not None:
                return done, problem
            done.append(index)
        return done, None

    def _lost(self, connection: Connection) -> StageFailedError:
        """What to say of a worker that is gone."""
        process = next(process for process, own in self._workers if own is connection)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_SECONDS)
        if process.returncode is not None and process.returncode >= 0:
            return StageFailedError(
                f"a worker process ended by itself, with exit code {process.returncode}; its own messages are above", 1
            )
        return StageFailedError("a worker process was killed; was the machine out of memory?", 1)

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
