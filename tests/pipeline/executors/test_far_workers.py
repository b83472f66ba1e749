"""What becomes of orders that end in each of the ways that they can, and how many there are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from conftest import Cli
from hacpo.pipeline.execution.workers import StageFailedError
from hacpo.pipeline.executors.far_workers import FarWorkers, OrderLostError
from hacpo.pipeline.executors.orders import Order, Outcome
from hacpo.pipeline.executors.slice_count import files_made_by
from hacpo.pipeline.project import Pipeline
from tests.small_project import PARAMS, changed


class Scripted:
    """An executor whose orders end as they are told to."""

    def __init__(self, *ends: tuple[Exception | None, str]) -> None:
        self.ends, self.orders, self.waiting = list(ends), [], []

    def submit(self, orders: Sequence[Order]) -> None:
        self.orders += orders
        self.waiting += orders

    def outcomes(self, seconds: float) -> list[Outcome]:
        assert seconds >= 0
        if not self.waiting:
            return []
        failure, lost = self.ends.pop(0)
        return [Outcome(self.waiting.pop(0).number, failure, lost)]

    def close(self) -> None:
        self.waiting.clear()


class Silent:
    """A view that keeps what stays."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def report(self, stage: str, done: int, total: int, facts: dict[str, float]) -> None: ...

    def finished(self, stage: str, summary: str) -> None: ...

    def remark(self, text: str) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


def ended(project: Path, *ends: tuple[Exception | None, str]) -> tuple[Exception | None, Scripted, Silent]:
    pipeline, executor, view = Pipeline.open(project / "pipelines/small"), Scripted(*ends), Silent()
    settings = pipeline.settings.executor.model_copy(update={"retries": 1})
    with FarWorkers(executor, settings, pipeline, view) as far:
        _, failure = far.run([(0, ["advantage", "pipelines/small", "--step", "1"])])
    return failure, executor, view


def test_what_is_lost_is_repeated_and_said(project: Path) -> None:
    failure, executor, view = ended(project, (None, "node 7 is gone"), (None, ""))
    assert failure is None
    assert [order.arguments for order in executor.orders] == [("advantage", "pipelines/small", "--step", "1")] * 2
    assert len({order.number for order in executor.orders}) == 2
    assert view.notes == ["advantage --step 1: lost before it began (node 7 is gone); it is repeated"]


def test_what_is_lost_too_often_is_an_error(project: Path) -> None:
    failure, executor, _ = ended(project, (None, "a"), (None, "b"))
    assert isinstance(failure, OrderLostError)
    assert str(failure) == "advantage --step 1: lost 2 times, the last before it began: b"
    assert len(executor.orders) == 2


def test_a_stages_own_error_is_not_repeated(project: Path) -> None:
    own = StageFailedError("the rollouts table is missing [on node7]", 3)
    failure, executor, view = ended(project, (own, ""))
    assert failure is own
    assert (len(executor.orders), view.notes) == (1, [])


@pytest.mark.parametrize(
    ("command", "files"),
    [
        ("generate --step 1 --agent ada", 2),  # 8 problems x 4 responses, 20 rows in a file
        ("verify --step 1 --agent ada", 2),
        ("generate --step 1 --agent ada --side", 3),  # 6 each
        ("verify --step 1 --agent ada --side", 3),
        ("pool --step 1 --learner ada", 4),  # of two agents
        ("evaluate --step 0 --agent ada", 2),  # 16 problems x 2
        ("advantage --step 1", 1),
        ("update --step 1 --agent ada", 1),
        ("generate --step 9 --agent ada", 1),  # which there is none of
    ],
)
def test_there_are_as_many_slices_as_files(project: Path, cli: Cli, command: str, files: int) -> None:
    params = changed(PARAMS, "{algorithm: {capability: {oracle_samples: 6}}}")
    Path("pipelines/small/params.yaml").write_text(params)
    for before in ("resolve", "prepare"):
        assert cli(before, "pipelines/small").code == 0
    name, *options = command.split()
    assert files_made_by(Pipeline.open(Path("pipelines/small")), [name, "pipelines/small", *options]) == files
