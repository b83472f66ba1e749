"""Where things lie is spelled in one place, and read from names there too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pyarrow as pa
import pytest

from conftest import ROOT
from hacpo.algorithm.rollouts import problem_of, rollout_id, rollout_ids
from hacpo.artifacts.layout import BESIDE, LOCKS, MERGED, SAVED
from hacpo.artifacts.tables import CHECKPOINT, owner_dir, owner_of, step_dir, step_of

SPELLED_IN = {
    "hacpo/artifacts/tables.py": r"\b(step|agent|learner)=",
    "hacpo/artifacts/layout.py": r"\.(locks|saved|merged)\b",
}
"""File -> what it alone spells, of the names of folders."""


def texts(source: str) -> Iterator[str]:
    """String constants of a source, in f-strings too, but for docstrings and those after a variable."""
    tree = ast.parse(source)
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    yield from (
        n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and n not in words and isinstance(n.value, str)
    )


@pytest.mark.parametrize("place", SPELLED_IN)
def test_names_of_folders_are_spelled_in_one_place(place: str) -> None:
    files = [path.relative_to(ROOT).as_posix() for top in ("hacpo", "stages") for path in (ROOT / top).rglob("*.py")]
    wanted = re.compile(SPELLED_IN[place])
    spelled = {file for file in files for text in texts((ROOT / file).read_text("utf-8")) if wanted.match(text)}
    assert spelled == {place}


def test_a_folder_says_whose_it_is_and_of_which_step() -> None:
    assert [step_of(name) for name in (step_dir(7), "step=7", "step=0007.tmp", "agent=0007")] == [7, None, None, None]
    assert [owner_of(name) for name in (owner_dir("learner", "bo"), "agent=a-b", "step=0007", "bo")] == [
        "bo",
        "a-b",
        "",
        "",
    ]


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("checkpoints/step=0007/agent=ada", (7, "ada")),
        ("artifacts/a/b/checkpoints/step=0007/agent=ada", (7, "ada")),
        ("/here\n/checkpoints/step=0000/agent=a-b", (0, "a-b")),
        ("artifacts/small/checkpoints/step=0007", (7, "")),
        ("artifacts/small/checkpoints/step=0007/agent=ada/model.safetensors", None),
        ("artifacts/small/checkpoints/step=0007/learner=ada", None),
        ("artifacts/small/checkpoints/step=٠٠٠٧/agent=ada", None),
        ("artifacts/small/checkpoints/step=7/agent=ada", None),
        ("artifacts/small/my_checkpoints/step=0007/agent=ada", None),
        ("artifacts/small/rollouts/step=0007/agent=ada", None),
    ],
)
def test_a_path_says_whose_checkpoint_of_which_step_it_is(path: str, place: tuple[int, str] | None) -> None:
    assert CHECKPOINT.place_of(path) == place


def test_what_lies_beside_artifacts_is_listed() -> None:
    assert {LOCKS, SAVED, MERGED} < {*BESIDE}


def test_ids_of_responses_are_made_and_read_in_one_way() -> None:
    problems = ["p1", "set/7"]
    for side in (False, True):
        one_by_one = [rollout_id(3, "ada", problem, n, side=side) for problem in problems for n in range(2)]
        assert rollout_ids(3, "ada", pa.array(problems), 2, side=side).to_pylist() == one_by_one
        assert [problem_of(identity) for identity in one_by_one] == ["p1", "p1", "set/7", "set/7"]
    assert rollout_id(3, "ada", "set/7", 1, side=True) == "0003/ada/set/7/side-001"
