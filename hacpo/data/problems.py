"""Problem sets, checked on the way in, and the schedule of training steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from hacpo.artifacts.parquet import read_given
from hacpo.artifacts.problem_rows import Problem, ScheduledProblem
from hacpo.artifacts.tables import PROBLEMS
from hacpo.data import gym, tasks
from hacpo.errors import DataError, MissingInputError, NotParquetError
from hacpo.seeds import derive_seed
from hacpo.settings.root import DataSet

TASKS: Mapping[str, Callable[[tasks.Split, int, int], list[Problem]]] = {"arithmetic": tasks.problems}
"""`DataSet.task` -> what makes its problems, of a split, a count and a seed; `reasoning_gym` also takes a mixture."""


def load(name: str, source: DataSet, root: Path) -> list[Problem]:
    """The problems of one `<set>/<split>`.

    Args:
        name: `<set>/<split>`, for messages.
        source: a Parquet file (relative to `root`), or a task to make problems of.

    Raises:
        MissingInputError: the file is not there.
        DataError: not a Parquet file, a column missing, no rows, a problem or answer without text, or an id twice.
    """
    rows = _made(source) if source.path is None else _read(root / source.path)
    where = f"data set {name}" if source.path is None else source.path
    if not rows:
        raise DataError("holds no problems", where=where)
    seen: set[str] = set()
    for number, row in enumerate(rows):
        for column in ("problem_id", "problem", "answer"):
            if not (getattr(row, column) or "").strip():  # a file may hold nulls where a problem has none
                raise DataError(f"{column} is empty", where=f"{where} row {number}", found=f"id {row.problem_id!r}")
        if row.problem_id in seen:
            raise DataError("the same problem_id twice", where=f"{where} row {number}", found=repr(row.problem_id))
        seen.add(row.problem_id)
    return rows


def _made(source: DataSet) -> list[Problem]:
    assert source.task is not None
    assert source.split is not None
    assert source.problems is not None
    if source.mixture:
        return gym.problems(source.mixture, source.split, source.problems, source.seed)
    assert source.split != "final"
    return TASKS[source.task](source.split, source.problems, source.seed)


def _read(path: Path) -> list[Problem]:
    if not path.is_file():
        raise MissingInputError("the problem file is missing", where=path, remedy="correct data.sets in params.yaml")
    try:
        table = read_given(path, PROBLEMS.schema.names, optional=True)
    except NotParquetError as error:
        remedy = "data.sets takes Parquet; `hacpo import NAME --from FILE` makes it of CSV, JSON and JSONL"
        raise DataError(f"not readable as Parquet: {error.reason}", where=path, remedy=remedy) from None
    for field in PROBLEMS.schema:
        if field.name in table.column_names:
            continue
        if field.name == "source":
            table = table.append_column("source", pa.array([path.name] * len(table), pa.string()))
        elif field.nullable:
            table = table.append_column(field.name, pa.nulls(len(table), field.type))
        else:
            raise DataError(
                f"column {field.name!r} is missing", where=path, expected=", ".join(("problem_id", "problem", "answer"))
            )
    for at, name in enumerate(table.column_names):
        wanted = PROBLEMS.schema.field(name).type if name in PROBLEMS.schema.names else None
        if wanted is None or table.schema.field(name).type == wanted:
            continue
        try:
            table = table.set_column(at, name, table[name].cast(wanted))
        except pa.ArrowException:
            raise DataError(
                f"column {name!r} has the wrong type", where=path, expected=wanted, found=table.schema.field(name).type
            ) from None
    return Problem.of(table)


def schedule(problems: Sequence[Problem], *, steps: int, prompts: int, seed: int) -> list[ScheduledProblem]:
    """Which problems each step trains on: every epoch is a fresh shuffle, cut into steps without a gap.

    A step's problems do not depend on how many steps follow, so a run can be made longer without repeating what is
    done. A step that spans two epochs takes no problem twice as long as there are enough.

    Raises:
        DataError: fewer problems than one step needs.
    """
    if len(problems) < prompts:
        raise DataError("too few problems for one step", expected=f"at least {prompts}", found=len(problems))
    stream = _epochs(len(problems), seed)
    rows: list[ScheduledProblem] = []
    waiting: list[int] = []
    for step in range(1, steps + 1):
        chosen: list[int] = []
        passed: list[int] = []
        while len(chosen) < prompts:
            index = waiting.pop(0) if waiting else next(stream)
            (passed if index in chosen else chosen).append(index)
        waiting = passed + waiting
        rows += [
            ScheduledProblem(asked.problem_id, asked.problem, asked.answer, step, position)
            for position, asked in enumerate(problems[index] for index in chosen)
        ]
    return rows


def _epochs(count: int, seed: int) -> Iterator[int]:
    epoch = 0
    while True:
        order = list(range(count))
        random.Random(derive_seed(seed, "schedule", epoch)).shuffle(order)
        yield from order
        epoch += 1
