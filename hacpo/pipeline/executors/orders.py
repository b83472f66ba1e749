"""What `hacpo run` asks of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hacpo.settings.executor import StageResources


@dataclass(frozen=True)
class Order:
    """One command line that is to be carried out somewhere, once or more often.

    Attributes:
        number: which; repeated orders have another.
        arguments: hacpo's.
        root: the project's folder, the same on every machine.
        report: the file in which the process says where it is and how far (`far_process.Report`).
        resources: what it needs.
        keep: a name for what the process may keep for the next order of that name, a model; empty: nothing.
    """

    number: int
    arguments: tuple[str, ...]
    root: Path
    report: Path
    resources: StageResources
    keep: str = ""


@dataclass(frozen=True)
class Outcome:
    """How an order ended.

    Attributes:
        number: the order's.
        failure: a stage's own error, or a bug, which nobody repeats.
        lost: why there is no outcome: the process or its machine is gone, and the order may be repeated.
    """

    number: int
    failure: Exception | None = None
    lost: str = ""


class Executor(Protocol):
    """A cluster, or what stands for one."""

    def submit(self, orders: Sequence[Order]) -> None:
        """Have orders carried out, as soon as there is room.

        Raises:
            HacpoError: the cluster takes none.
        """

    def outcomes(self, seconds: float) -> list[Outcome]:
        """The orders that have ended since; waits so long for one.

        Raises:
            HacpoError: the cluster is gone.
        """

    def close(self) -> None:
        """End what is still at work, and what was kept."""
