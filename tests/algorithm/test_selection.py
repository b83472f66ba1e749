"""Which of the shared responses a learner trains on: gates and draws by hand."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hacpo.algorithm.selection import selection
from hacpo.settings.algorithm import RolloutUse
from hacpo.settings.base import merged
from hacpo.settings.recipes import RECIPES

REWARDS = {
    # problem: rewards of ada (the learner), bo and cy
    "a": ([0, 0], [1, 0], [1, 1]),  # ada fails, three right answers of others: one is drawn
    "b": ([0, 1], [1, 1], [1, 0]),  # ada solves it: the gate is shut
    "c": ([0, 0], [0, 0], [0, 0]),  # nobody solves it
    "d": ([0, 0], [0, 0.5], [0, 0]),  # graded: the only answer above 0
}
AGENTS = ("ada", "bo", "cy")


def columns(agents: tuple[str, ...] = AGENTS, worth: dict[tuple[str, str], float] | None = None) -> dict[str, Any]:
    """Of ada's advantages; `worth`: (problem, source) -> the effective advantage of its first response (else 1)."""
    rows = [
        (problem, agent, sample, REWARDS[problem][AGENTS.index(agent)][sample])
        for problem in REWARDS
        for agent in agents
        for sample in range(2)
    ]
    return {
        "rollout_id": pa.array([f"0007/{agent}/{problem}/{sample:03d}" for problem, agent, sample, _ in rows]),
        "problem_id": pa.array([problem for problem, *_ in rows]),
        "source": pa.array([agent for _, agent, *_ in rows]),
        "is_self": np.array([agent == "ada" for _, agent, *_ in rows]),
        "reward": pa.array([reward for *_, reward in rows], pa.float32()),
        "effective_advantage": np.array(
            [(worth or {}).get((problem, agent), 1.0) if sample == 0 else 0.0 for problem, agent, sample, _ in rows]
        ),
    }


def rollouts(recipe: str, **changes: Any) -> RolloutUse:
    return RolloutUse.model_validate(merged(RECIPES[recipe]["rollouts"], {"draw_seed": 3, **changes}))


def chosen(table: dict[str, Any], settings: RolloutUse, step: int = 7) -> set[str]:
    selected = selection(table, settings, step=step, learner="ada")["selected"]
    return {identity for identity, is_in in zip(table["rollout_id"].to_pylist(), selected, strict=True) if is_in}


def key(*names: str, seed: int = 3, step: int = 7) -> int:
    """The first eight bytes of SHA-256 over the names with their types, without the lowest bit."""
    parts = [f"int:{seed}", "str:select", f"int:{step}", "str:ada", *(f"str:{name}" for name in names)]
    return int.from_bytes(hashlib.sha256("\x1f".join(parts).encode()).digest()[:8], "big") >> 1


def test_recipes_that_take_everything_have_no_such_column() -> None:
    for recipe in ("hacpo", "gspo", "naive", "xgrpo"):
        assert selection(columns(), rollouts(recipe), step=7, learner="ada") == {}


def test_a_rescue_is_one_right_answer_to_a_problem_that_the_learner_fails() -> None:
    own = {f"0007/ada/{problem}/{sample:03d}" for problem in REWARDS for sample in range(2)}
    right = ["0007/bo/a/000", "0007/cy/a/000", "0007/cy/a/001"]
    assert chosen(columns(), rollouts("sgt")) == own | {min(right, key=key), "0007/bo/d/001"}


def test_any_right_answer_of_any_agent_may_be_the_rescue() -> None:
    """600 steps, three candidates: 200 each, give or take 4 standard deviations of sqrt(600 * 1/3 * 2/3) = 11.5."""
    drawn = Counter[str]()
    for step in range(600):
        drawn.update(
            identity
            for identity in chosen(columns(), rollouts("sgt"), step)
            if "/a/" in identity and "ada" not in identity
        )
    assert sum(drawn.values()) == 600
    assert len(drawn) == 3
    assert all(154 < count < 246 for count in drawn.values())


@pytest.mark.parametrize("recipe", ["sgt", "sapo"])
def test_the_order_of_agents_has_no_part_in_it_and_seed_step_and_learner_have(recipe: str) -> None:
    settings = rollouts(recipe)
    assert chosen(columns(), settings) == chosen(columns(AGENTS[::-1]), settings)
    assert len({frozenset(chosen(columns(), settings, step)) for step in range(20)}) > 1
    assert len({frozenset(chosen(columns(), rollouts(recipe, draw_seed=seed))) for seed in range(20)}) > 1


def groups_of(identities: set[str]) -> set[tuple[str, str]]:
    """Problem and source; both responses of a group are there, or neither."""
    groups = Counter((identity.split("/")[2], identity.split("/")[1]) for identity in identities)
    assert set(groups.values()) == {2}
    return set(groups)


def test_groups_are_drawn_whole_and_those_of_others_that_teach_nothing_are_left_out() -> None:
    """Four problems, a half each: I = 2 of four own groups, J = 2 of the six others' that have an advantage."""
    worth = {("c", "bo"): 0.0, ("c", "cy"): 0.0, ("c", "ada"): 0.0}
    drawn = groups_of(chosen(columns(worth=worth), rollouts("sapo")))
    own = sorted(((problem, "ada") for problem in REWARDS), key=lambda group: key(*group))
    others = sorted(((p, s) for p in "abd" for s in ("bo", "cy")), key=lambda group: key(*group))
    assert drawn == {*own[:2], *others[:2]}


def test_there_may_be_fewer_groups_of_others_than_wanted() -> None:
    worth = {(problem, agent): 0.0 for problem in REWARDS for agent in ("bo", "cy")} | {("b", "cy"): -0.1}
    drawn = groups_of(chosen(columns(worth=worth), rollouts("sapo")))
    assert {group for group in drawn if group[1] != "ada"} == {("b", "cy")}
    assert len(drawn) == 3
    alone = groups_of(chosen(columns(("ada",)), rollouts("sapo")))
    assert len(alone) == 2  # nobody else: its own half


def test_how_many_groups_are_drawn() -> None:
    # Halves up: .5 * 5 = 2.5 -> 3; .1 * 4 = .4 -> 0, but at least one own group; 1.5 * 5 = 7.5 -> 8.
    assert rollouts("sapo").groups_drawn(5) == (3, 3)
    assert rollouts("sapo", own_fraction=0.1, external_fraction=0.1).groups_drawn(4) == (1, 0)
    assert rollouts("sapo", own_fraction=1.0, external_fraction=1.5).groups_drawn(5) == (5, 8)
