"""Problems as Python objects, where one of them is asked, answered or scheduled: rows of the tables that hold them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import pyarrow as pa


@dataclass(frozen=True)
class Asked:
    """What every table of problems says of one.

    Attributes:
        problem: the text that an agent is asked.
        answer: the right answer, LaTeX as inside a box.
    """

    problem_id: str
    problem: str
    answer: str

    @classmethod
    def of(cls, table: pa.Table) -> list[Self]:
        """Every row of a table that has these columns."""
        columns = [table[name].to_pylist() for name in cls.__dataclass_fields__]
        return [cls(*values) for values in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Problem(Asked):
    """A row of the problems table, `data/<set>/<split>.parquet`.

    Attributes:
        scorer: where the problem is one of reasoning-gym's, what its scorer is given beside the answers (JSON: `task`,
            `options`, `metadata`).
    """

    solution: str | None
    subject: str | None
    level: int | None
    source: str
    scorer: str | None = None


@dataclass(frozen=True)
class ScheduledProblem(Asked):
    """A row of the schedule, and of its step's prompts.

    Attributes:
        position: the problem's place in the step's batch, from 0.
    """

    step: int
    position: int
