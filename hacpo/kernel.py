"""What a process asks the kernel about itself: the memory that it takes, a bound on it, its end with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys

PARENT_DEATH_SIGNAL, CHILD_SUBREAPER = 1, 36
"""PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of prctl(2)."""


def control(option: int, value: int) -> None:
    """Set an option of prctl(2); elsewhere than on Linux nothing is done."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(option, value)


def end_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have this process sent a signal when its parent dies; of one that has died already the kernel says nothing."""
    control(PARENT_DEATH_SIGNAL, by)


def memory(pid: int | None = None) -> tuple[int, int] | None:
    """Bytes of address space and of memory that a process holds; None where there is no /proc, or no process any more.

    Args:
        pid: this process if None.
    """
    try:
        with open(f"/proc/{pid or os.getpid()}/statm", encoding="ascii") as statm:
            pages = [int(word) * resource.getpagesize() for word in statm.read().split()[:2]]
    except (OSError, ValueError):
        return None
    return (pages[0], pages[1]) if len(pages) == 2 else None


def bound_memory(more: int, *, taken: int | None = None, for_good: bool = False) -> None:
    """Bound this process's address space at what it takes and more, or at what a cluster allows if that is less.

    Args:
        more: bytes.
        taken: bytes that it is held to take where the kernel does not say; None: there is no bound then.
        for_good: it cannot be raised again.
    """
    known = memory()
    taken = taken if known is None else known[0]
    if taken is None:
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = taken + more if most == resource.RLIM_INFINITY else min(taken + more, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit if for_good else most))
