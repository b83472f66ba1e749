"""Nothing that the attack starts outlives it, however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator

import psutil

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent does not live any more (Linux; prctl(2)). To be called in a
    fork, before anything else is.

    Args:
        parent: who forked it.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


@contextlib.contextmanager
def killing() -> Iterator[None]:
    """Kill whatever this process has started when the block is left by an error, an interrupt or a SIGTERM."""

    def stop(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        kill_started()


def kill_started() -> None:
    """Kill all processes below this one."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()
