"""Which update of a step sees which responses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hacpo.updates import plan_updates, update_slots


def pool(problems: int, own: int, cross: int) -> list[dict[str, Any]]:
    """A pool of so many own and cross responses per problem, every fifth of them unusable."""
    rows = [
        {"problem_id": f"p{problem}", "source": source, "is_self": source == "me", "sample": sample}
        for problem in range(problems)
        for source, count in (("me", own), ("you", cross))
        for sample in range(count)
    ]
    return [
        {**row, "status": "empty" if number % 5 == 4 else "kept", "prompt_token_ids": [1], "token_ids": [1] * number}
        for number, row in enumerate(rows)
    ]


def test_slots_by_hand() -> None:
    # Five problems in three updates, unshuffled: cut at 5*1//3 = 1 and 5*2//3 = 3.
    slots = update_slots(5, own=10, cross=10, updates=3, order="mixed", seed=None)
    assert slots.own == slots.cross == [0, 1, 1, 2, 2]
    # Four updates for as many own as cross responses: two each, own first.
    slots = update_slots(4, own=8, cross=8, updates=4, order="self_first", seed=None)
    assert (slots.own, slots.cross) == ([0, 0, 1, 1], [2, 2, 3, 3])
    # One third of the responses is own: round(3 / 3) = 1 update, the other two for cross ones.
    slots = update_slots(2, own=2, cross=4, updates=3, order="self_first", seed=None)
    assert (slots.own, slots.cross) == ([0, 0], [1, 2])
    # Nobody else's: all updates are for own ones.
    assert update_slots(2, own=4, cross=0, updates=2, order="self_first", seed=None).own == [0, 1]
    # A single update is for own responses; no update sees the others.
    assert update_slots(2, own=2, cross=2, updates=1, order="self_first", seed=None).cross == [-1, -1]


def test_a_shuffle_moves_problems_and_nothing_else() -> None:
    plain = update_slots(8, own=8, cross=8, updates=4, order="mixed", seed=None)
    shuffled = update_slots(8, own=8, cross=8, updates=4, order="mixed", seed=7)
    assert shuffled.own != plain.own
    assert sorted(shuffled.own) == sorted(plain.own)
    assert update_slots(8, own=8, cross=8, updates=4, order="mixed", seed=7) == shuffled


@pytest.mark.parametrize(
    ("order", "seed", "updates", "cross"),
    list(itertools.product(("mixed", "self_first"), (None, 3), (1, 2, 5), (0, 3))),
)
def test_the_plan_puts_every_row_where_the_slots_say(order: str, seed: int | None, updates: int, cross: int) -> None:
    rows = pool(7, 2, cross)
    plan = plan_updates(rows, updates=updates, order=order, seed=seed)
    slots = update_slots(7, own=14, cross=7 * cross, updates=updates, order=order, seed=seed)
    place = {id(row): (slots.own if row["is_self"] else slots.cross)[int(row["problem_id"][1:])] for row in rows}
    assert len(plan.rows) == len(plan.counts) == updates
    for update, (part, counts) in enumerate(zip(plan.rows, plan.counts, strict=True)):
        here = [row for row in rows if place[id(row)] == update]
        wanted = [row for row in here if row["status"] == "kept"]
        assert sorted(map(id, part)) == sorted(map(id, wanted))
        sources = {row["source"] for row in here}
        assert counts == {source: sum(row["source"] == source for row in here) for source in sources}
