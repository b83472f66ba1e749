"""The parts of the attack, in the order in which they run."""

from __future__ import annotations

from . import disks, faults, flips, inputs, kills, powercut, writers
from .frame import Part

_ALL = (
    kills.PART,
    writers.PART,
    faults.PART,
    disks.PART,
    flips.PART,
    inputs.PART,
    powercut.PART,
)
PARTS: dict[str, Part] = {part.name: part for part in _ALL}
