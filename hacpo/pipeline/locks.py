"""Locks between processes, held by the kernel (flock), so that a killed process leaves none behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hacpo.errors import BusyError
from hacpo.layout import Layout


@contextlib.contextmanager
def _flock(path: Path, kind: int, wait_seconds: float, busy: str, waiting: str = "") -> Iterator[IO[str]]:
    """Hold a lock on a file. Its text names the last holder that gave a name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        deadline = time.monotonic() + wait_seconds
        told = not waiting
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BusyError(busy, where=path.parent.parent, remedy="wait for it to end, or stop it") from None
                if not told and time.monotonic() >= deadline - wait_seconds + 1:
                    print(f"{path.parent.parent}: {waiting}", file=sys.stderr)
                    told = True
                time.sleep(0.05)
        yield file


def _holder(layout: Layout) -> str:
    try:
        return (layout.root / ".locks" / "driver.lock").read_text(encoding="utf-8").strip() or "another process"
    except OSError:
        return "another process"


@contextlib.contextmanager
def driver_lock(layout: Layout, wait_seconds: float = 600.0, command: str = "hacpo run") -> Iterator[None]:
    """Held by `hacpo run` for its whole life: one run at a time on one pipeline, and no single stage beside it. Other
    commands that change checkpoints hold it too.

    A stage that outlived a killed parent is waited for, up to `wait_seconds`.

    Raises:
        BusyError: another `hacpo run` works on the pipeline, or a single stage does not end.
    """
    folder = layout.root / ".locks"
    busy = f"another run works on this pipeline ({_holder(layout)})"
    with _flock(folder / "driver.lock", fcntl.LOCK_EX, 0.5, busy) as file:
        file.truncate(0)
        file.write(f"{command}, process {os.getpid()}")
        file.flush()
        with _flock(
            folder / "stages.lock",
            fcntl.LOCK_EX,
            wait_seconds,
            "a stage works on this pipeline and does not end",
            "waiting for a stage that still runs",
        ):
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
    folder = layout.root / ".locks"
    with (
        _flock(folder / "stages.lock", fcntl.LOCK_SH, 0.5, f"another run works on this pipeline ({_holder(layout)})"),
        _flock(
            folder / f"{name}.lock", fcntl.LOCK_EX, wait_seconds, f"{name} is already running", f"waiting for {name}"
        ),
    ):
        yield
