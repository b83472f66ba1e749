"""Problem sets are checked on the way in; the schedule covers every problem once an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import SHARED
from hacpo.artifacts.problem_rows import Problem, ScheduledProblem
from hacpo.data.problems import load, schedule
from hacpo.errors import DataError, MissingInputError
from hacpo.settings.root import DataSet


def file_of(folder: Path, **columns: list[Any]) -> DataSet:
    pq.write_table(pa.table(columns), folder / "set.parquet")
    return DataSet(path="set.parquet")


def test_a_file_needs_only_three_columns(tmp_path: Path) -> None:
    source = file_of(tmp_path, problem_id=["a", "b"], problem=["1+1", "2+2"], answer=["2", "4"])
    rows = load("s/train", source, tmp_path)
    assert rows[1] == Problem("b", "2+2", "4", solution=None, subject=None, level=None, source="set.parquet")


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"problem_id": ["a", "a"], "problem": ["x", "y"], "answer": ["1", "2"]}, "the same problem_id twice"),
        ({"problem_id": ["a", "b"], "problem": ["x", " "], "answer": ["1", "2"]}, "row 1: problem is empty"),
        ({"problem_id": ["a", "b"], "problem": ["x", "y"], "answer": ["1", None]}, "row 1: answer is empty"),
        ({"problem_id": ["a"], "problem": ["x"]}, "column 'answer' is missing"),
        (
            {"problem_id": ["a"], "problem": ["x"], "answer": ["1"], "level": ["Level 5"]},
            "column 'level' has the wrong type \\(expected int32, found string\\)",
        ),
        (
            {
                "problem_id": pa.array([], pa.string()),
                "problem": pa.array([], pa.string()),
                "answer": pa.array([], pa.string()),
            },
            "holds no problems",
        ),
    ],
)
def test_unusable_problems_are_named(tmp_path: Path, columns: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        load("s/train", file_of(tmp_path, **columns), tmp_path)


def test_a_missing_or_foreign_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="the problem file is missing"):
        load("s/train", DataSet(path="none.parquet"), tmp_path)
    (tmp_path / "text.parquet").write_text("not parquet")
    with pytest.raises(DataError, match="not readable as Parquet.*`hacpo import NAME --from FILE` makes it"):
        load("s/train", DataSet(path="text.parquet"), tmp_path)


def test_numbers_become_text(tmp_path: Path) -> None:
    rows = load("s/train", file_of(tmp_path, problem_id=[7], problem=["x"], answer=[12]), tmp_path)
    assert (rows[0].problem_id, rows[0].answer) == ("7", "12")


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="needs ../shared/data (real problems)")
@pytest.mark.parametrize("name", ["math/train", "gsm8k/train", "aime2025/test"])
def test_real_problem_files_load(name: str) -> None:
    rows = load(name, DataSet(path=f"data/{name}.parquet"), SHARED)
    assert len(rows) >= 30
    assert all(row.answer for row in rows)


PROBLEMS = [Problem(f"p{n}", f"{n}", f"{n}", None, None, None, "made") for n in range(10)]


def ids(rows: list[ScheduledProblem], step: int) -> list[str]:
    return [row.problem_id for row in rows if row.step == step]


def test_every_epoch_sees_every_problem_once() -> None:
    rows = schedule(PROBLEMS, steps=5, prompts=4, seed=1)  # 20 prompts: two epochs of ten
    seen = [row.problem_id for row in rows]
    assert sorted(seen) == sorted([row.problem_id for row in PROBLEMS] * 2)
    assert all(len(set(ids(rows, step))) == 4 for step in range(1, 6))
    assert [row.position for row in rows[:4]] == [0, 1, 2, 3]


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    short, long = (schedule(PROBLEMS, steps=steps, prompts=4, seed=1) for steps in (3, 9))
    assert long[: len(short)] == short
    assert schedule(PROBLEMS, steps=3, prompts=4, seed=2) != short


def test_a_step_larger_than_the_set_is_refused() -> None:
    with pytest.raises(DataError, match=r"too few problems for one step \(expected at least 11, found 10\)"):
        schedule(PROBLEMS, steps=1, prompts=11, seed=1)
