"""No stage outlives what started it: one that did would write where somebody else has begun to."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from hacpo.kernel import end_with_parent

_LOOK_SECONDS = 0.5


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere the stage locks alone guard).

    Args:
        parent: its number, where it is known: the kernel says nothing of a parent that has gone already, so this
            process ends here then.
    """
    end_with_parent()
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def left_by_dvc() -> bool:
    """Whether the DVC that started this stage has gone; while it is there, it is watched.

    DVC names no process to its stages, and the parent may be a shell. But it holds an entry in its list of who writes
    what while a stage's command runs: that process must be an ancestor of this one. Where there is no list, or no
    readable one, nothing is known, and nothing is done.
    """
    import psutil

    from hacpo.pipeline.records import rwlock

    folder = rwlock.temporary_folder(Path.cwd())
    if folder is None or not (path := folder / rwlock.NAME).is_file():
        return False
    for _ in range(5):
        entries, _written = rwlock.read(path)
        if entries is not None:
            break
        time.sleep(0.05)  # DVC is writing it
    else:
        return False
    writers = {entry["pid"] for entry in entries.get("write", {}).values()}
    with suppress(psutil.Error):
        above = [process for process in psutil.Process().parents() if process.pid in writers]
        if above and above[0].pid != os.getppid():
            threading.Thread(target=_end_with, args=(above[0],), daemon=True).start()
        return not above
    return False


def _end_with(process: object) -> None:
    """Kill this process once another has gone: a shell between them lives on."""
    while process.is_running():  # type: ignore[attr-defined]
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
