"""The parts of the attack, in the order in which they run."""

from __future__ import annotations

from . import faults, kills, powercut
from .frame import Part

PARTS: dict[str, Part] = {part.name: part for part in (kills.PART, faults.PART, powercut.PART)}
