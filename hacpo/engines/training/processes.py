"""Which of several processes started together this one is, as the environment says."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hacpo.errors import SettingsError

LAUNCHED = "HACPO_LAUNCHED"
"""Set by a stage for the processes that it starts: the number of the process that starts them (accelerate
launch), 0 under a command of the user's."""


@dataclass(frozen=True)
class Place:
    """This process among those started together."""

    rank: int
    size: int


def place() -> Place | None:
    """What whoever started this process says; None for a process started alone.

    Raises:
        SettingsError: it is no number.
    """
    variables = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    if variables["RANK"] is None or variables["WORLD_SIZE"] is None:
        return None
    try:
        rank, _, size = (int(text or 0) for text in variables.values())
        return Place(rank, size)
    except ValueError:
        raise SettingsError("RANK, LOCAL_RANK and WORLD_SIZE must be numbers", found=variables) from None


def leads() -> bool:
    """Whether this process locks and writes: the only one, or the first."""
    here = place()
    return here is None or here.rank == 0


def launched() -> bool:
    """Whether a stage started this process: that one holds the lock."""
    return LAUNCHED in os.environ


def orphaned() -> bool:
    """Whether what started this process has gone already."""
    launcher = os.environ.get(LAUNCHED, "0")
    return place() is not None and launcher.isdigit() and int(launcher) not in (0, os.getppid())
