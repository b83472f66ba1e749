"""Locks between processes, held by the kernel (flock), so that a killed process leaves none behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hacpo.errors import BusyError
from hacpo.layout import Layout


@contextlib.contextmanager
def _flock(path: Path, kind: int, wait_seconds: float, busy: str) -> Iterator[IO[str]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    file.seek(0)
                    holder = file.read(200).strip() or "another process"
                    raise BusyError(
                        busy, where=path.parent.parent, found=holder, remedy="wait for it to end, or stop it"
                    ) from None
                time.sleep(0.05)
        yield file


@contextlib.contextmanager
def driver_lock(layout: Layout, wait_seconds: float = 5.0) -> Iterator[None]:
    """Held by `hacpo run` for its whole life: one run at a time on one pipeline, and no single stage beside it.

    Raises:
        BusyError: another run or stage holds the pipeline. A stage that outlived a killed parent is given
            `wait_seconds`.
    """
    with _flock(
        layout.root / ".locks" / "run.lock", fcntl.LOCK_EX, wait_seconds, "another run or stage works on this pipeline"
    ) as file:
        file.truncate(0)
        file.write(f"hacpo run, process {os.getpid()}")
        file.flush()
        yield
        file.truncate(0)


@contextlib.contextmanager
def stage_lock(layout: Layout, name: str, wait_seconds: float = 600.0) -> Iterator[None]:
    """Held while one stage writes its outputs.

    Different stages may run side by side; the same stage twice waits, for instance for a process that outlived its
    killed parent, so that two never write one output.

    Raises:
        BusyError: `hacpo run` works on this pipeline, or the same stage does not end.
    """
    with (
        _flock(layout.root / ".locks" / "run.lock", fcntl.LOCK_SH, 0.5, "`hacpo run` works on this pipeline"),
        _flock(layout.root / ".locks" / f"{name}.lock", fcntl.LOCK_EX, wait_seconds, f"{name} is already running"),
    ):
        yield
