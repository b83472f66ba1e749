"""The process that runs stages for `hacpo run`, one command line after the other (see `workers`)."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from hacpo.artifacts.storage import made_plain
from hacpo.pipeline.execution.crashes import named
from hacpo.pipeline.execution.orphans import die_with_parent
from hacpo.pipeline.execution.session import Session, quiet_threads

Execute = Callable[[Sequence[str], Session], None]

_ENTRY = ("hacpo.cli", "execute")
"""What turns a command line into its work. By name: it stands on the floors above."""


def command_executor() -> Execute:
    """What executes a `hacpo` command line inside this process, with a session of one's own; errors are raised."""
    module, name = _ENTRY
    execute: Execute = getattr(importlib.import_module(module), name)
    return execute


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


def _serve(connection: Connection, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver gets Ctrl-C and decides
    die_with_parent(parent)
    quiet_threads()
    execute = command_executor()
    session = Session(progress=_Sender(connection), driver=True)
    with contextlib.suppress(EOFError, OSError):  # the driver has ended, and so do we
        while True:
            connection.send(_outcome(execute, connection.recv(), session))
    session.close()
    sys.stdout.flush()
    os._exit(0)  # everything is on the disk: an interpreter full of libraries takes half a second to take itself apart


def _outcome(execute: Execute, arguments: Sequence[str], session: Session) -> tuple[str, tuple[object, ...]]:
    try:
        execute(arguments, session)
    except BaseException as error:
        plain = made_plain(error) if isinstance(error, Exception) else None
        if plain is not None:
            return "failed", (str(plain), plain.exit_code)
        return "crashed", (named(error), "".join(traceback.format_exception(error)))
    return "done", ()


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
