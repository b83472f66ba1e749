"""Responses of several agents in one order, whatever order their tables have, and what does not fit named."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

from hacpo.algorithm.rollouts import in_order, ordered_responses
from hacpo.errors import ArtifactError

Row = tuple[str, int]

ADA: list[Row] = [("p2", 1), ("p1", 0), ("p2", 0), ("p1", 1)]
BO: list[Row] = [("p1", 0), ("p1", 1), ("p2", 0), ("p2", 1)]


def table(agent: str, rows: Sequence[Row]) -> pa.Table:
    """Responses to problems, `<agent>/<problem>/<sample>`."""
    return pa.table(
        {
            "rollout_id": pa.array([f"{agent}/{problem}/{sample}" for problem, sample in rows], pa.string()),
            "problem_id": pa.array([problem for problem, _ in rows], pa.string()),
            "sample": pa.array([sample for _, sample in rows], pa.int16()),
        }
    )


def test_by_problem_agent_and_sample() -> None:
    """The batch has p2 first."""
    tables = {"bo": table("bo", BO), "ada": table("ada", ADA)}
    order = in_order(["p2", "p1"], tables, 2, where="here")
    assert {agent: rows.tolist() for agent, rows in order.items()} == {"bo": [2, 3, 0, 1], "ada": [2, 0, 1, 3]}
    made = ordered_responses(["p2", "p1"], tables, 2, where="here")
    assert made["rollout_id"].to_pylist() == [
        *("bo/p2/0", "bo/p2/1", "ada/p2/0", "ada/p2/1"),
        *("bo/p1/0", "bo/p1/1", "ada/p1/0", "ada/p1/1"),
    ]
    assert made["source"].to_pylist() == ["bo", "bo", "ada", "ada"] * 2


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (BO[:3], "here: no response 1 of bo to problem 'p2' (expected 8 responses, found 7)"),
        ([*BO, ("p9", 0)], "unexpected or repeated response 0 of bo to problem 'p9' (expected 8 responses, found 9)"),
        ([*BO[:3], ("p2", 2)], "no response 1 of bo to problem 'p2' (expected 8 responses, found 8)"),
        ([*BO[:3], ("p2", -1)], "unexpected or repeated response -1 of bo to problem 'p2'"),
        ([*BO, ("p2", 0)], "unexpected or repeated response 0 of bo to problem 'p2' (expected 8 responses, found 9)"),
    ],
)
def test_what_does_not_fit_is_named(rows: Sequence[Row], says: str) -> None:
    with pytest.raises(ArtifactError) as refused:
        in_order(["p1", "p2"], {"ada": table("ada", ADA), "bo": table("bo", rows)}, 2, where="here")
    assert says in str(refused.value)


def test_a_problem_that_is_asked_twice_is_refused() -> None:
    with pytest.raises(ArtifactError, match="unexpected or repeated response 0 of bo to problem 'p1'"):
        in_order(["p1", "p1"], {"bo": table("bo", BO[:2])}, 2, where="here")
