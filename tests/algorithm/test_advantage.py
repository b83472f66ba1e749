"""Baselines, advantages and the discrepancy coefficient: hand-computed numbers, reductions and properties."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from hacpo.algorithm.group_advantage import StepAdvantages, step_advantages
from hacpo.errors import DataError
from hacpo.settings.algorithm import AdvantageSettings, CapabilitySettings
from hacpo.settings.recipes import RECIPES

EPSILON = 1e-6
BASELINES = ("capability", "joint", "own", "shrunk")

# Agent 0 gets 1 of 4 right, agent 1 gets 3 of 4; as able as 0.3 and 0.6, so omega^(0,1) = 0.5 and omega^(1,0) = 2.
REWARDS = np.array([[[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]])
CAPABILITY = (0.3, 0.6)
# Four of eight are right: squared deviations 8 * 0.25 = 2, over 8 - 1.
SIGMA = math.sqrt(2 / 7)


def advantages(rewards: Any, learner: int, capability: Any = CAPABILITY, **changes: Any) -> StepAdvantages:
    settings = AdvantageSettings.model_validate({**RECIPES["hacpo"]["advantage"], **changes})
    bounds = CapabilitySettings.model_validate(RECIPES["hacpo"]["capability"])
    return step_advantages(
        rewards, learner=learner, capability_n=capability, settings=settings, capability_settings=bounds
    )


def assert_same(one: StepAdvantages, other: StepAdvantages, rtol: float = 0.0, atol: float = 0.0) -> None:
    for field in fields(StepAdvantages):
        left, right = getattr(one, field.name), getattr(other, field.name)
        np.testing.assert_allclose(left, right, rtol=rtol, atol=atol, err_msg=field.name)


def reordered(result: StepAdvantages, index: Any) -> StepAdvantages:
    return StepAdvantages(**{field.name: getattr(result, field.name)[index] for field in fields(StepAdvantages)})


# --- numbers by hand -------------------------------------------------------------------------------------------------


def test_capability_baseline_by_hand() -> None:
    # mu^(0) = (1 * 1 + 0.5 * 3) / 8 = 0.3125; mu^(1) = (2 * 1 + 1 * 3) / 8 = 0.625 (eq. 7)
    result = advantages(REWARDS, learner=0)
    np.testing.assert_array_equal(result.baseline[0], [[0.3125] * 4, [0.625] * 4])
    np.testing.assert_allclose(result.sigma, SIGMA, rtol=1e-15)
    right, wrong = (1 - 0.3125) / (SIGMA + EPSILON), -0.3125 / (SIGMA + EPSILON)
    cross_right, cross_wrong = 0.375 / (SIGMA + EPSILON), -0.625 / (SIGMA + EPSILON)
    expected = [[right, wrong, wrong, wrong], [cross_right, cross_right, cross_right, cross_wrong]]
    np.testing.assert_allclose(result.advantage[0], expected, rtol=1e-14)
    # Source 1 relative to learner 0: omega^(1,0) = 0.6 / 0.3 = 2 (eq. 10)
    np.testing.assert_array_equal(result.omega[0], [[1.0] * 4, [2.0] * 4])
    np.testing.assert_allclose(result.effective_advantage[0], [expected[0], [2 * a for a in expected[1]]], rtol=1e-14)
    assert not result.uniform.any()
    assert not result.guarded.any()


def test_the_strong_learner_discounts_the_weak_source() -> None:
    result = advantages(REWARDS, learner=1)
    # omega^(0,1) = 0.5 on agent 0's rows, which are measured against mu^(0) = 0.3125
    np.testing.assert_array_equal(result.omega[0], [[0.5] * 4, [1.0] * 4])
    np.testing.assert_array_equal(result.baseline[0], [[0.3125] * 4, [0.625] * 4])
    assert result.effective_advantage[0, 0, 0] == pytest.approx(0.5 * 0.6875 / (SIGMA + EPSILON), rel=1e-14)


@pytest.mark.parametrize(
    ("changes", "mu_own", "mu_cross"),
    [
        ({"cross_baseline": "learner"}, 0.3125, 0.3125),  # eq. 50: the learner's mu for every row
        ({"baseline": "joint"}, 0.5, 0.5),  # (1 + 3) / 8
        ({"baseline": "own"}, 0.25, 0.25),  # 1 / 4, for cross too
        # (4 * 0.25 + 4 * mean(1 * 0.25, 0.5 * 0.75)) / (4 + 4) = (1 + 4 * 0.3125) / 8
        ({"baseline": "shrunk"}, 0.28125, 0.28125),
        ({"baseline": "shrunk", "kappa": 0.0}, 0.25, 0.25),
    ],
)
@pytest.mark.parametrize("cross", ["source", "learner"])
def test_baselines_by_hand(changes: dict[str, Any], mu_own: float, mu_cross: float, cross: str) -> None:
    result = advantages(REWARDS, learner=0, **{"cross_baseline": cross, **changes})
    np.testing.assert_array_equal(result.baseline[0], [[mu_own] * 4, [mu_cross] * 4])
    np.testing.assert_allclose(result.advantage, (REWARDS - result.baseline) / (SIGMA + EPSILON), rtol=1e-14)


def test_shrunk_never_trusts_a_partner_above_one() -> None:
    # Learner 1, omega^(1,0) = 2: (4 * 0.75 + 4 * mean(min(1, 2 * 0.25), 0.75)) / 8 = (3 + 4 * 0.625) / 8
    result = advantages(REWARDS, learner=1, baseline="shrunk")
    np.testing.assert_array_equal(result.baseline, np.full((1, 2, 4), 0.6875))
    # Partner all right: min(1, 2 * 1) = 1, so (3 + 4 * mean(1, 0.75)) / 8
    better = np.array(REWARDS)
    better[0, 0] = 1.0
    result = advantages(better, learner=1, baseline="shrunk")
    np.testing.assert_array_equal(result.baseline, np.full((1, 2, 4), (3 + 3.5) / 8))


def test_without_discrepancy_only_the_factor_goes() -> None:
    with_it, without = advantages(REWARDS, learner=0), advantages(REWARDS, learner=0, discrepancy=False)
    assert (without.omega == 1.0).all()
    np.testing.assert_array_equal(without.effective_advantage, without.advantage)
    np.testing.assert_array_equal(without.advantage, with_it.advantage)
    assert (with_it.effective_advantage[:, 1] == 2 * without.effective_advantage[:, 1]).all()


def test_own_baseline_learns_from_a_partner_when_all_own_answers_are_wrong() -> None:
    rewards = [[[0.0, 0.0], [1.0, 0.0]]]
    result = advantages(rewards, learner=0, baseline="own")
    # mu = 0: own answers get 0, the partner's correct one is positive and its wrong one gets 0.
    np.testing.assert_array_equal(np.sign(result.advantage[0]), [[0, 0], [1, 0]])


# --- guard -----------------------------------------------------------------------------------------------------------

# Learner 0 is three times as able (0.9 against 0.3), yet both got 3 of 4: mu^(0) = (3 + 3 * 3) / 8 = 1.5.
OVER = np.array([[[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0]]])


def test_without_the_guard_a_baseline_above_one_punishes_a_correct_answer() -> None:
    result = advantages(OVER, 0, (0.9, 0.3), baseline_guard=False)
    assert (result.baseline[0, 0] == 1.5).all()
    assert result.advantage[0, 0, 0] < 0
    assert not result.guarded.any()


def test_guard_falls_back_to_the_own_group_mean() -> None:
    result = advantages(OVER, 0, (0.9, 0.3))
    # mu^(1) = (3 / 3 + 3) / 8 = 0.5 is fine and stays.
    np.testing.assert_array_equal(result.guarded[0], [[True] * 4, [False] * 4])
    np.testing.assert_allclose(result.baseline[0], [[0.75] * 4, [0.5] * 4], rtol=1e-15)
    assert result.advantage[0, 0, 0] > 0


def test_guard_of_a_source_uses_the_sources_own_group_mean() -> None:
    rewards = np.array([[[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]])
    # Seen by the weak agent 1: source 0 has mu^(0) = (2 + 3 * 3) / 8 = 1.375 -> its group mean 0.5, not agent 1's 0.75.
    result = advantages(rewards, 1, (0.9, 0.3))
    np.testing.assert_array_equal(result.baseline[0, 0], [0.5] * 4)
    np.testing.assert_array_equal(result.guarded[0], [[True] * 4, [False] * 4])
    # With the learner's baseline, mu^(1) = (2 / 3 + 3) / 8 for every row: nothing to guard.
    assert not advantages(rewards, 1, (0.9, 0.3), cross_baseline="learner").guarded.any()
    # Learner 0's mu is guarded for own and cross rows alike.
    assert advantages(rewards, 0, (0.9, 0.3), cross_baseline="learner").guarded.all()


def test_guard_acts_prompt_by_prompt_and_only_on_zero_one_rewards() -> None:
    graded = OVER.copy()
    graded[0, 0, 3] = 0.5
    rewards = np.concatenate([OVER, graded, REWARDS])
    result = advantages(rewards, 0, (0.9, 0.3))
    assert result.guarded[0, 0].all()
    # (3.5 + 3 * 3) / 8 = 1.5625 stays: 0.5 is not 0/1.
    assert not result.guarded[1].any()
    assert result.baseline[1, 0, 0] == pytest.approx(1.5625, rel=1e-15)
    # (1 + 3 * 3) / 8 = 1.25 in the third prompt
    assert result.guarded[2, 0].all()


def test_a_baseline_of_exactly_one_is_not_guarded() -> None:
    # (2 + 2 * 3) / 8 = 1
    result = advantages([[[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]], 0, (0.5, 0.25))
    assert not result.guarded[0, 0].any()
    assert (result.baseline[0, 0] == 1.0).all()


# --- uniform groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 1.0, 0.7, -3.0])
@pytest.mark.parametrize("baseline", BASELINES)
def test_equal_rewards_carry_no_signal(value: float, baseline: str) -> None:
    # omega = 5 would leave 0.7 - mu far from 0, over sigma + eps = 1e-6.
    result = advantages(np.full((2, 2, 3), value), 0, (0.9, 0.18), baseline=baseline)
    assert result.uniform.all()
    assert (result.advantage == 0.0).all()
    assert (result.effective_advantage == 0.0).all()
    assert (result.sigma == 0.0).all()


def test_near_equal_float_rewards_count_as_equal() -> None:
    low, high = np.float32(0.7), np.float32(0.7000001)
    assert low != high
    result = advantages([[[low, high, low], [high, low, low]]], 0, (0.9, 0.18))
    assert result.uniform.all()
    assert (result.advantage == 0.0).all()
    # A real difference, one part in a thousand, is none of the kind.
    assert not advantages([[[0.7, 0.7007, 0.7], [0.7, 0.7, 0.7]]], 0).uniform.any()
    # Nor is a small absolute one between small rewards.
    assert not advantages([[[0.0, 1e-9], [0.0, 0.0]]], 0).uniform.any()


def test_uniform_is_decided_over_all_agents_and_per_prompt() -> None:
    rewards = np.array([[[1.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]])
    result = advantages(rewards, 0)
    assert not result.uniform[0].any()
    assert result.uniform[1].all()
    assert (result.advantage[0] != 0).all()


# --- reductions ------------------------------------------------------------------------------------------------------


def test_group_leaves_every_group_on_its_own() -> None:
    """1 0 0 0 | 1 1 1 0: means .25 and .75, both sigma sqrt(4 * .1875 / 3) = .5; and 0 0 0 0 | 1 1 0 0 beside it.

    The learner's second group is equal: no signal there, while the partner's has mean .5 and sigma sqrt(4 * .25 / 3).
    """
    rewards = [[[1.0, 0, 0, 0], [1, 1, 1, 0]], [[0, 0, 0, 0], [1, 1, 0, 0]]]
    result = advantages(rewards, 0, (0.3, 0.6), baseline="group", discrepancy=False)
    np.testing.assert_allclose(result.baseline[:, :, 0], [[0.25, 0.75], [0.0, 0.5]], rtol=1e-15)
    np.testing.assert_allclose(result.sigma[:, :, 0], [[0.5, 0.5], [0.0, math.sqrt(1 / 3)]], rtol=1e-15)
    right, wrong = 0.75 / 0.500001, -0.25 / 0.500001
    np.testing.assert_allclose(result.advantage[0], [[right, wrong, wrong, wrong], [-wrong, -wrong, -wrong, -right]])
    half = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    np.testing.assert_allclose(result.advantage[1], [[0.0] * 4, [half, half, -half, -half]])
    assert result.uniform[:, :, 0].tolist() == [[False, False], [True, False]]
    # Each group as if it were alone.
    for agent in (0, 1):
        alone = advantages(np.array(rewards)[:, [agent]], 0, (0.5,), baseline="joint", discrepancy=False)
        np.testing.assert_array_equal(result.advantage[:, [agent]], alone.advantage)


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("baseline", BASELINES)
def test_one_agent_is_the_group_relative_advantage(recipe: str, baseline: str) -> None:
    rng = np.random.default_rng(3)
    rewards = rng.normal(size=(5, 1, 8))
    result = advantages(rewards, 0, (0.37,), **{**RECIPES[recipe]["advantage"], "baseline": baseline})
    mean = rewards.mean(axis=2, keepdims=True)
    expected = (rewards - mean) / (rewards.std(axis=2, ddof=1, keepdims=True) + EPSILON)
    np.testing.assert_allclose(result.effective_advantage, expected, rtol=1e-12, atol=1e-14)
    assert (result.omega == 1.0).all()


def test_one_agent_by_hand() -> None:
    # mean 0.25, squared deviations 0.5625 + 3 * 0.0625 = 0.75, over 3: sigma = 0.5
    result = advantages([[[1.0, 0.0, 0.0, 0.0]]], 0, (0.01,))
    np.testing.assert_allclose(result.advantage[0, 0], np.array([0.75, -0.25, -0.25, -0.25]) / 0.500001, rtol=1e-15)


def test_equal_capabilities_make_the_capability_baseline_the_joint_mean() -> None:
    rewards = np.random.default_rng(5).normal(size=(7, 3, 4))
    same = (0.4, 0.4, 0.4)
    for learner in range(3):
        assert_same(
            advantages(rewards, learner, same), advantages(rewards, learner, same, baseline="joint", discrepancy=False)
        )
    np.testing.assert_allclose(
        advantages(rewards, 0, same).baseline[:, 0, 0], rewards.mean(axis=(1, 2)), rtol=1e-12, atol=1e-15
    )


# --- bounds of omega -------------------------------------------------------------------------------------------------


def test_a_partner_that_is_never_right_stays_bounded() -> None:
    rewards = np.array([[[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]])
    floor = 1e-8  # capability.floor: Phat of an agent with no correct answer in the window
    strong = advantages(rewards, 0, (0.5, floor))
    # omega^(0,1) -> 10, times rewards of 0: mu^(0) = 2 / 8; source 1: omega^(1,0) -> 0.1, mu^(1) = (0.1 * 2) / 8
    np.testing.assert_allclose(strong.baseline[0], [[0.25] * 4, [0.025] * 4], rtol=1e-15)
    assert (strong.omega[0, 1] == 0.1).all()
    weak = advantages(rewards, 1, (0.5, floor))
    assert (weak.omega[0, 0] == 10.0).all()
    assert weak.effective_advantage[0, 0, 0] == pytest.approx(10 * weak.advantage[0, 0, 0], rel=1e-15)
    assert np.isfinite(weak.effective_advantage).all()


# --- properties ------------------------------------------------------------------------------------------------------

REWARD_ARRAYS = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(2, 5)),
    elements=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-4, 4, width=16)),
)


def capabilities(agents: int) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(1e-3, 1.0), min_size=agents, max_size=agents)


@given(REWARD_ARRAYS, st.data(), st.sampled_from(BASELINES), st.sampled_from(["source", "learner"]))
def test_permuting_agents_rollouts_and_prompts_permutes_results(
    rewards: NDArray[np.float64], data: st.DataObject, baseline: str, cross: str
) -> None:
    prompts, agents, group = rewards.shape
    capability = np.array(data.draw(capabilities(agents)))
    learner = data.draw(st.integers(0, agents - 1))
    order_p, order_n, order_g = (data.draw(st.permutations(range(size))) for size in (prompts, agents, group))
    # The guard is a threshold: a baseline within rounding of 1 may fall on either side of it.
    changes = {"baseline": baseline, "cross_baseline": cross, "baseline_guard": False}
    index = np.ix_(order_p, order_n, order_g)
    straight = reordered(advantages(rewards, learner, capability, **changes), index)
    permuted = advantages(rewards[index], order_n.index(learner), capability[order_n], **changes)
    # Other summation order: roundings of mu of about 1e-15, over sigma + eps of at least 1e-6.
    assert_same(straight, permuted, rtol=1e-9, atol=1e-8)


@given(REWARD_ARRAYS, st.data(), st.sampled_from(BASELINES), st.booleans())
def test_always_finite_and_consistent(
    rewards: NDArray[np.float64], data: st.DataObject, baseline: str, guard: bool
) -> None:
    agents = rewards.shape[1]
    capability = data.draw(st.lists(st.floats(1e-8, 1e8), min_size=agents, max_size=agents))
    learner = data.draw(st.integers(0, agents - 1))
    result = advantages(rewards, learner, capability, baseline=baseline, baseline_guard=guard, epsilon=0.0)
    for field in fields(StepAdvantages):
        value = getattr(result, field.name)
        assert value.shape == rewards.shape, field.name
        assert np.isfinite(value).all(), field.name
    np.testing.assert_array_equal(result.effective_advantage, result.omega * result.advantage)
    np.testing.assert_array_equal(result.uniform.all(axis=(1, 2)), result.uniform.any(axis=(1, 2)))
    assert (result.advantage[result.uniform] == 0.0).all()
    assert (result.omega[:, learner] == 1.0).all()
    binary = np.isin(rewards, (0.0, 1.0)).all(axis=(1, 2))
    assert not result.guarded[~binary].any()
    if guard:
        assert (result.baseline[binary] <= 1.0 + 1e-12).all()


@given(REWARD_ARRAYS)
def test_sigma_is_the_sample_standard_deviation(rewards: NDArray[np.float64]) -> None:
    result = advantages(rewards, 0, np.full(rewards.shape[1], 0.5))
    expected = rewards.reshape(rewards.shape[0], -1).std(axis=1, ddof=1)
    np.testing.assert_allclose(result.sigma[:, 0, 0], expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("scale", [1e-45, 1e-20, 1e20, 3e38])
def test_extreme_but_finite_rewards(scale: float) -> None:
    result = advantages(REWARDS * np.float64(scale), 0, (0.5, 1e-8), epsilon=0.0)
    expected = advantages(REWARDS, 0, (0.5, 1e-8), epsilon=0.0, baseline_guard=False)
    np.testing.assert_allclose(result.advantage, expected.advantage, rtol=1e-9)


def test_a_prompts_numbers_do_not_depend_on_layout_or_batch() -> None:
    rewards = np.random.default_rng(1).normal(size=(40, 3, 9))
    capability = (0.2, 0.5, 0.7)
    whole = advantages(rewards, 1, capability)
    assert_same(whole, advantages(np.asfortranarray(rewards), 1, capability))
    assert_same(whole, advantages(np.moveaxis(np.ascontiguousarray(np.moveaxis(rewards, 0, 2)), 2, 0), 1, capability))
    alone = advantages(rewards[17:18], 1, capability)
    assert_same(reordered(whole, slice(17, 18)), alone)


def test_no_prompts_give_no_rows() -> None:
    assert advantages(np.zeros((0, 2, 4)), 0).advantage.shape == (0, 2, 4)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "learner", "capability", "message"),
    [
        (np.zeros((2, 4)), 0, (0.5,), "rewards must be"),
        (np.zeros((1, 1, 1)), 0, (0.5,), "at least 2"),
        (np.zeros((1, 0, 4)), 0, (), "at least 2"),
        ([[[0.0, float("nan")]]], 0, (0.5,), "finite float32"),
        ([[[0.0, float("-inf")]]], 0, (0.5,), "finite float32"),
        ([[[0.0, 1e39]]], 0, (0.5,), "finite float32"),
        (REWARDS, 0, (0.5,), "one per agent"),
        (REWARDS, 2, CAPABILITY, "one of the agents"),
        (REWARDS, -1, CAPABILITY, "one of the agents"),
        (REWARDS, 0, (0.5, 0.0), "finite and positive"),
        (REWARDS, 0, (0.5, float("nan")), "finite and positive"),
    ],
)
def test_refuses_what_has_no_advantage(rewards: Any, learner: int, capability: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        advantages(rewards, learner, capability)
