"""What processes use, seen from outside."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Usage:
    """What processes have used until a moment."""

    seconds: float
    """Of processors."""
    memory: int
    """Resident bytes, what several processes share counted as often."""
    descriptors: int


def used(pid: int) -> Usage | None:
    """Of a process, all that live below it and their children that have ended; None of a process that has ended."""
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return None
    seconds, memory, descriptors = 0.0, 0, 0
    for process in processes:
        try:
            times, held, opened = process.cpu_times(), process.memory_info().rss, process.num_fds()
        except psutil.NoSuchProcess:
            continue
        seconds += sum(times[:4])
        memory += held
        descriptors += opened
    return Usage(seconds, memory, descriptors)
