"""Which update of a step sees which responses."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hacpo.algorithm.dealing import equal_parts
from hacpo.algorithm.updates import group_numbers, plan_updates, step_slots, update_slots
from hacpo.errors import DataError


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


def slots_of(
    problems: int, own: int, cross: int, updates: int, order: str, *, seed: int | None = None, ranks: int = 1
) -> list[int]:
    """Slots of a pool with so many own and cross responses per problem, by problem, own first."""
    problem = np.repeat(np.arange(problems), own + cross)
    source = np.tile(np.repeat([0, 1], [own, cross]), problems)
    slots = update_slots(
        problem, source, np.ones_like(problem), learner=0, updates=updates, order=order, ranks=ranks, seed=seed
    )
    return slots.tolist()  # type: ignore[no-any-return]


def test_slots_by_hand() -> None:
    # Five problems in three updates, unshuffled: cut at 5*1//3 = 1 and 5*2//3 = 3.
    assert slots_of(5, 1, 1, 3, "mixed") == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    # Four updates for as many own as cross responses: two each, own first.
    assert slots_of(4, 1, 1, 4, "self_first") == [0, 2, 0, 2, 1, 3, 1, 3]
    # One third of the responses is own: round(3 / 3) = 1 update, the other two for cross ones.
    assert slots_of(2, 1, 2, 3, "self_first") == [0, 1, 1, 0, 2, 2]
    # Nobody else's: all updates are for own ones.
    assert slots_of(2, 2, 0, 2, "self_first") == [0, 0, 1, 1]
    # A single update is for own responses; no update sees the others.
    assert slots_of(2, 1, 1, 1, "self_first") == [0, -1, 0, -1]


def test_a_shuffle_moves_problems_and_nothing_else() -> None:
    plain, shuffled = (slots_of(8, 1, 1, 4, "mixed", seed=seed) for seed in (None, 7))
    assert shuffled != plain
    assert sorted(shuffled) == sorted(plain)
    assert slots_of(8, 1, 1, 4, "mixed", seed=7) == shuffled


def test_dealt_to_ranks_by_hand() -> None:
    # Four problems, own a and cross b: the batch is a0 a1 a2 a3 b0 b1 b2 b3. Two ranks hold a0-a3 and b0-b3 and cut
    # them into two updates: a0 a1 b0 b1, then a2 a3 b2 b3. Four ranks hold a0 a1, a2 a3, b0 b1, b2 b3: one of each.
    assert slots_of(4, 1, 1, 2, "self_first", ranks=2) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert slots_of(4, 1, 1, 2, "self_first", ranks=4) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert slots_of(4, 1, 1, 4, "self_first", ranks=2) == [0, 0, 1, 1, 2, 2, 3, 3]
    # Eight responses are not 3 ranks times 2 updates.
    with pytest.raises(DataError, match=r"cannot be dealt evenly.*3 ranks times 2 updates.*8 responses"):
        slots_of(4, 1, 1, 2, "self_first", ranks=3)


@pytest.mark.parametrize(("ranks", "shares"), [(1, [1, 1, 0, 0]), *((ranks, [0.5] * 4) for ranks in (2, 4, 8))])
def test_own_first_is_true_for_one_rank_only(ranks: int, shares: list[float]) -> None:
    """The authors' batch: 128 prompts, 8 responses of each of two agents, 4 updates."""
    slots = np.array(slots_of(128, 8, 8, 4, "self_first", ranks=ranks))
    own = np.tile(np.repeat([True, False], 8), 128)
    assert np.bincount(slots).tolist() == [512] * 4
    assert [own[slots == update].mean() for update in range(4)] == shares


def test_three_agents_dealt_to_two_ranks() -> None:
    # Learner 1 of three, one response each to two problems, in table order a0 b0 c0 a1 b1 c1; the batch is b0 b1 a0 |
    # a1 c0 c1, cut into three updates of one: b0 with a1, b1 with c0, a0 with c1.
    problem, source = np.repeat([0, 1], 3), np.tile([0, 1, 2], 2)
    slots = update_slots(problem, source, np.ones(6, int), learner=1, updates=3, order="self_first", ranks=2, seed=None)
    assert slots.tolist() == [2, 0, 1, 0, 1, 2]


def test_parts_of_equal_number_and_nearly_equal_length_by_hand() -> None:
    # Lengths 1 2 5 7 10 12, two parts: (1, 2), (5, 7), (10, 12) have the spreads 1, 2, 2. The two with 2 are joined:
    # 12 with 5, 10 with 7, sums 17 and 17, spread 0. Then (1, 2), spread 1, with these: 2 with one of the equal sums, 1
    # with the other; equal sums and numbers are told apart by their first row: 12 (row 4) is the larger, and gets 1.
    parts = equal_parts([7, 1, 10, 2, 12, 5], 2)
    assert [sorted(part) for part in parts] == [[0, 2, 3], [1, 4, 5]]  # 7 + 10 + 2 = 19, 1 + 12 + 5 = 18


def test_balanced_order_with_the_authors_batch() -> None:
    """The first agent sees its own responses first, the second cross ones first."""
    random = np.random.default_rng(0)
    problem = np.repeat(np.arange(128), 16)
    source = np.tile(np.repeat([0, 1], 8), 128)
    length = 100 + random.integers(50, 1000, len(problem)) + np.where(source == 0, 0, 300)
    shares = []
    for learner in (0, 1):
        slots = update_slots(problem, source, length, learner=learner, updates=4, order="balanced", ranks=8, seed=None)
        assert np.bincount(slots).tolist() == [512] * 4
        shares.append([float((source == learner)[slots == update].mean()) for update in range(4)])
    first, second = shares
    assert second == [1 - share for share in first]
    assert (first[0], first[3]) == (1.0, 0.0)
    assert 0.9 < first[1] < 1.0
    assert first[2] == pytest.approx(1 - first[1])


@pytest.mark.parametrize(
    ("order", "seed", "updates", "cross"),
    list(itertools.product(("mixed", "self_first"), (None, 3), (1, 2, 5), (0, 3))),
)
def test_the_plan_puts_every_row_where_the_slots_say(order: str, seed: int | None, updates: int, cross: int) -> None:
    rows = pool(7, 2, cross)
    plan = plan_updates(pa.Table.from_pylist(rows), updates=updates, order=order, seeds=[seed])
    slots = slots_of(7, 2, cross, updates, order, seed=seed)
    assert len(plan.rows) == len(plan.counts) == updates
    for update, (part, counts) in enumerate(zip(plan.rows, plan.counts, strict=True)):
        numbers = [number for number, slot in enumerate(slots) if slot == update]
        wanted = [number for number in numbers if rows[number]["status"] == "kept"]
        assert part == wanted  # longer ones last: a row has as many tokens as its number says
        here = [rows[number] for number in numbers]
        sources = {row["source"] for row in here}
        assert counts == {source: sum(row["source"] == source for row in here) for source in sources}


def test_passes_count_their_updates_on_and_have_orders_of_their_own() -> None:
    """Four problems of one response in two updates: the second pass has updates 2 and 3."""
    problem = np.arange(4)
    one = {"learner": 0, "updates": 2, "order": "mixed"}
    slots = step_slots(problem, problem * 0, problem, **one, seeds=[None, None])
    assert slots.tolist() == [[0, 0, 1, 1], [2, 2, 3, 3]]
    first, second = step_slots(problem, problem * 0, problem, **one, seeds=[1, 2])
    assert first.tolist() == update_slots(problem, problem * 0, problem, **one, seed=1).tolist()
    assert second.tolist() == [2 + slot for slot in update_slots(problem, problem * 0, problem, **one, seed=2)]


def test_rows_that_are_not_selected_are_in_no_update_and_in_no_denominator() -> None:
    rows = [{**row, "status": "kept"} for row in pool(4, 2, 2)]
    selected = np.array([row["is_self"] or (row["problem_id"] == "p2" and row["sample"] == 1) for row in rows])
    plan = plan_updates(pa.Table.from_pylist(rows), updates=2, order="mixed", seeds=[None], selected_b=selected)
    assert [sorted(part) for part in plan.rows] == [[0, 1, 4, 5], [8, 9, 11, 12, 13]]
    assert plan.counts == [{"me": 4}, {"me": 4, "you": 1}]


def test_drawn_groups_are_cut_evenly_whatever_the_order_of_agents() -> None:
    """Groups p0/me, p0/you, p2/me, p2/you of two responses each are selected: two of them in each update.

    By problem, three updates' worth of p0 and p1 would be in the first and none of p1 at all.
    """
    rows = [{**row, "status": "kept"} for row in pool(3, 2, 2)]
    selected = np.array([row["problem_id"] != "p1" for row in rows])
    plans = [
        plan_updates(
            pa.Table.from_pylist([rows[number] for number in order]),
            updates=2,
            order="mixed",
            seeds=[5],
            selected_b=selected[order],
            by_group=True,
        )
        for order in (list(range(12)), [2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9])
    ]
    assert [len(part) for part in plans[0].rows] == [4, 4]
    straight = [{(rows[row]["problem_id"], rows[row]["source"]) for row in part} for part in plans[0].rows]
    turned_rows = [rows[number] for number in [2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9]]
    turned = [{(turned_rows[row]["problem_id"], turned_rows[row]["source"]) for row in part} for part in plans[1].rows]
    assert straight == turned
    # By problem, then by name: "me" before "you", whatever their numbers are.
    numbers = group_numbers(
        np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]), ["you", "me"], np.array([True, True, False, True])
    )
    assert numbers.tolist() == [1, 0, 0, 2]
