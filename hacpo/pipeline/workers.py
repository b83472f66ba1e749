"""Processes that stay warm between stages, so that agents work side by side in `hacpo run`."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from hacpo.artifacts.storage import made_plain
from hacpo.errors import HacpoError
from hacpo.pipeline.orphans import die_with_parent
from hacpo.pipeline.session import ProgressSink, Session, quiet_threads

Execute = Callable[[Sequence[str], Session], None]

_END_SECONDS = 5.0
"""How long a process may take to end once its connection is closed."""


class StageFailedError(HacpoError):
    """A stage ended with an error of its own; the line is the stage's."""

    def __init__(self, line: str, exit_code: int) -> None:
        super().__init__(line)
        self.exit_code = exit_code


class _Sender:
    """Progress from a worker to the driver."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def report(self, stage: str, done: int, total: int, facts: dict[str, float]) -> None:
        self._connection.send(("report", (stage, done, total, facts)))

    def finished(self, stage: str, summary: str) -> None:
        self._connection.send(("finished", (stage, summary)))

    def remark(self, text: str) -> None:
        self._connection.send(("remark", (text,)))


def _serve(connection: Connection, entry: str) -> None:
    parent = multiprocessing.parent_process()
    die_with_parent(None if parent is None else parent.pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver gets Ctrl-C and decides
    quiet_threads()
    module, _, name = entry.partition(":")
    execute: Execute = getattr(importlib.import_module(module), name)
    session = Session(progress=_Sender(connection), driver=True)
    with contextlib.suppress(EOFError, OSError):  # the driver has ended, and so do we
        while True:
            connection.send(_outcome(execute, connection.recv(), session))


def _outcome(execute: Execute, arguments: Sequence[str], session: Session) -> tuple[str, tuple[object, ...]]:
    try:
        execute(arguments, session)
    except BaseException as error:
        plain = made_plain(error) if isinstance(error, Exception) else None
        if plain is not None:
            return "failed", (str(plain), plain.exit_code)
        import traceback

        return "crashed", ("".join(traceback.format_exception(error)),)
    return "done", ()


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
    """A fixed number of warm processes; with none, commands run in this process.

    Args:
        entry: `module:function` that executes a command, importable in a fresh process.
        count: processes; 0 runs everything here.
    """

    def __init__(self, entry: str, count: int, progress: ProgressSink) -> None:
        self._progress = progress
        self._entry = entry
        module, _, name = entry.partition(":")
        self._execute: Execute = getattr(importlib.import_module(module), name)
        self._session = Session(progress=progress, driver=True)
        self._workers: list[tuple[Any, Connection]] = []
        context = multiprocessing.get_context("spawn")
        for _ in range(count):
            driver_end, worker_end = context.Pipe()
            process = context.Process(target=_serve, args=(worker_end, entry))
            process.start()
            worker_end.close()
            self._workers.append((process, driver_end))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self._workers:
            connection.close()
            process.join(timeout=0.5)
            if process.is_alive():
                process.kill()
                process.join()

    def run(
        self, commands: Sequence[tuple[int, Sequence[str]]], on_done: Callable[[int], None] | None = None
    ) -> tuple[list[int], Exception | None]:
        """Run commands, each on its worker (slot, arguments), until all have ended or one fails.

        Args:
            on_done: is told the index of each command that ended well as soon as it did, while others work on; what it
                raises counts as that command's failure.

        Returns:
            Indices of the commands that ended well, and the first failure: `HacpoError` for a stage's own,
                `RuntimeError` with the traceback for a bug.
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
        process.join(timeout=_END_SECONDS)
        if process.exitcode is not None and process.exitcode >= 0:
            return StageFailedError(
                f"a worker process ended by itself, with exit code {process.exitcode}; its own messages are above", 1
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
            return RuntimeError(*content)
        if kind == "report":
            self._progress.report(*content)
        elif kind == "finished":
            self._progress.finished(*content)
        elif kind == "remark":
            self._progress.remark(*content)
        return "done" if kind == "done" else "working"
