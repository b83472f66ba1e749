"""What an audit says: one finding for each thing that is not as it must be, and what was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finding:
    """One disagreement between a file and what follows from the others.

    Attributes:
        check: name of the invariant, for example `advantage` (docs/audit.md lists them).
        file: the file that disagrees, relative to the project's root.
        row: key of the row (`rollout_id`, agent, ...); empty where the whole file is meant.
        column: the column, or the key of a JSON file; empty where the whole row or file is meant.
        expected: what follows from the other files.
        found: what the file says.
        count: how many rows of this file and column disagree in the same way; `row` is the first.
        note: anything that helps, in a few words.
    """

    check: str
    file: Path
    row: str = ""
    column: str = ""
    expected: object = None
    found: object = None
    count: int = 1
    note: str = ""
