"""Every recipe on one example: one prompt, two agents, from rewards to the loss of the weaker one.

Agent 0 (the learner) gets 1 of 4 right, agent 1 gets 3 of 4; Phat 0.3 and 0.6: omega^(0,1) = 0.5, omega^(1,0) = 2.
mu^(0) = (1 + 0.5 * 3) / 8 = 0.3125, mu^(1) = (2 * 1 + 3) / 8 = 0.625, joint mean 0.5; sigma_joint = sqrt(8 * 0.25 / 7).
It is the third update of the step (m = 2): the cross interval is [1 - 0.2 + 2 * 0.025, 1] = [0.85, 1].
The ratios of agent 1's responses lie inside (0.9), between the first and the third lower bound (0.82), above 1 (1.2),
and far below (0.5, the wrong answer).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hacpo.algorithm.group_advantage import StepAdvantages, step_advantages
from hacpo.algorithm.loss import ResponseBatch, ResponseTerms, kl_to_initial, row_weights, update_loss
from hacpo.settings.algorithm import AlgorithmSettings
from hacpo.settings.recipes import RECIPES

UPDATE_INDEX = 2
REWARDS = np.array([[[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]])
CAPABILITY = np.array([0.3, 0.6])
SCALE = math.sqrt(2 / 7) + 1e-6
# Two tokens a response. Own token log-ratios; their mean is the log of the sequence ratio.
OWN_LOG_RATIOS = [[0.5, -0.1], [0.0, 0.0], [0.0002, 0.0], [-0.5, 0.1]]
CROSS_RATIOS = [0.9, 0.82, 1.2, 0.5]
# The initial policy is one nat below on the first token, where the learner is now and as far above on the second:
# d = -1 and 1, k3 = (e^-1 + 1 - 1 + e - 1 - 1) / 2 for every response.
K3 = (math.exp(-1) + math.exp(1) - 2) / 2


def algorithm(recipe: str) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate({"recipe": recipe, **RECIPES[recipe]})


def run(recipe: str) -> tuple[StepAdvantages, ResponseTerms, torch.Tensor, torch.Tensor]:
    """Advantages, terms, loss and its gradient per response token for learner 0."""
    settings = algorithm(recipe)
    multiplier = settings.rollouts.group_multiplier
    agents = 2 if settings.rollouts.coupled else 1
    rewards = np.tile(REWARDS[:, :agents], (1, 1, multiplier))
    advantages = step_advantages(
        rewards,
        learner=0,
        capability_n=CAPABILITY[:agents],
        settings=settings.advantage,
        capability_settings=settings.capability,
    )
    shared = 2 if settings.rollouts.share else 1
    cross = [[math.log(ratio)] * 2 for ratio in CROSS_RATIOS] if settings.rollouts.share else []
    log_ratios = torch.tensor(OWN_LOG_RATIOS * multiplier + cross, dtype=torch.float64)
    source = torch.tensor([0] * 4 * multiplier + [1] * len(cross))
    rows, weights = len(log_ratios), row_weights(source, torch.bincount(source), settings.loss.aggregation)
    batch = ResponseBatch(
        learner_logprobs_bt=(log_ratios - 1.0).requires_grad_(),
        mask_bt=torch.ones(rows, 2, dtype=torch.bool),
        source_logprob_b=torch.full((rows,), -2.0, dtype=torch.float64),
        source_tokens_b=torch.full((rows,), 2),
        text_bytes_b=torch.full((rows,), 5),
        is_self_b=source == 0,
        effective_advantage_b=torch.from_numpy(advantages.effective_advantage[:, :shared].ravel()),
        row_weight_b=torch.where(source == 0, weights, weights * settings.loss.cross_weight),
        sampler_weight_b=torch.ones(rows, dtype=torch.float64),
        old_logprobs_bt=torch.full((rows, 2), -1.0),
        initial_logprobs_bt=log_ratios - 1.0 + torch.tensor([-1.0, 1.0], dtype=torch.float64),
    )
    torch.testing.assert_close(kl_to_initial(batch), torch.full((rows,), K3, dtype=torch.float64), rtol=1e-14, atol=0)
    loss, terms = update_loss(batch, UPDATE_INDEX, settings)
    (gradient,) = torch.autograd.grad(loss, batch.learner_logprobs_bt)
    return advantages, terms, loss, gradient


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_every_recipe_is_finite_and_adds_up(recipe: str) -> None:
    advantages, terms, loss, gradient = run(recipe)
    assert all(np.isfinite(value).all() for value in vars(advantages).values())
    assert all(value.isfinite().all() for value in vars(terms).values())
    assert gradient.isfinite().all()
    objectives = terms.objective_b.detach()
    own = len(objectives) if not algorithm(recipe).rollouts.share else 4
    if algorithm(recipe).loss.aggregation == "mean":
        # One mean over all eight, and for the reference code .001 KL on the four own ones.
        expected = -objectives.mean().item() + algorithm(recipe).loss.kl_coef * 4 * K3 / 8
    else:
        # Own responses: their mean; cross responses: theirs, of sgt a tenth.
        weight = 0.1 if recipe == "sgt" else 1.0
        cross = weight * objectives[own:].mean() if len(objectives) > own else 0.0
        expected = -(objectives[:own].mean() + cross).item()
    assert loss.item() == pytest.approx(expected, rel=1e-13)
    # A clipped response has no gradient but that of its KL; any other with an advantage has one.
    learned = advantages.effective_advantage[:, : 2 if algorithm(recipe).rollouts.share else 1].ravel()
    alive = ~terms.clipped_b & torch.from_numpy(learned != 0)
    if recipe.startswith("reference_code"):
        alive[:own] = True
    if recipe == "sgt":
        alive[own:] = True  # whatever their advantage
    assert torch.equal((gradient != 0).any(dim=1), alive)


# recipe: effective advantage (times sigma + eps) of a right cross answer, then for the ratios 0.9, 0.82 and 1.2 the
# factor before it (c * min(c, 1)^alpha; naive: min(s, 1.0004)) and whether it is clipped.
CROSS = {
    "hacpo": (2 * 0.375, [0.9**2, 0.85**2, 1.0], [False, True, True]),
    "no_capability_baseline": (2 * 0.5, [0.9**2, 0.85**2, 1.0], [False, True, True]),
    "no_discrepancy": (0.375, [0.9**2, 0.85**2, 1.0], [False, True, True]),
    "no_clip": (2 * 0.375, [0.9**2, 0.82**2, 1.2], [False, False, False]),
    "no_stepwise": (2 * 0.375, [0.9**2, 0.82**2, 1.0], [False, False, True]),
    "naive": (0.5, [0.9, 0.82, 1.0004], [False, False, True]),
    # The partner's own group: 1 - 0.75 over its own sigma of 0.5.
    "sapo": (0.25 / 0.500001 * SCALE, [0.9, 0.82, 1.0004], [False, False, True]),
    # The learner's baseline for the partner's answers too: 1 - 0.3125. Token counts are equal: own_tokens is too.
    "reference_code": (2 * 0.6875, [0.9**2, 0.85**2, 1.0], [False, True, True]),
    "reference_code_main": (2 * 0.6875, [0.9**2, 0.85**2, 1.0], [False, True, True]),
}


@pytest.mark.parametrize("recipe", list(CROSS))
def test_what_a_partners_right_answers_are_worth(recipe: str) -> None:
    worth, factors, clipped = CROSS[recipe]
    advantages, terms, _, _ = run(recipe)
    np.testing.assert_allclose(advantages.effective_advantage[0, 1, :3], worth / SCALE, rtol=1e-14)
    np.testing.assert_allclose(terms.objective_b[4:7].detach(), np.array(factors) * worth / SCALE, rtol=1e-13)
    assert terms.clipped_b[4:7].tolist() == clipped


def test_the_table_covers_every_recipe_that_shares() -> None:
    assert {*CROSS, "sgt"} == {name for name in RECIPES if algorithm(name).rollouts.share}


def test_sgt_adds_a_tenth_of_a_supervised_loss_to_gspo() -> None:
    """Mean log-probability per token of a cross answer with ratio s: log s - 1, whatever its advantage and clip."""
    advantages, terms, _, gradient = run("sgt")
    alone, own, _, own_gradient = run("gspo")
    np.testing.assert_array_equal(advantages.effective_advantage[0, 0], alone.effective_advantage[0, 0])
    assert torch.equal(terms.objective_b[:4], own.objective_b)
    assert torch.equal(gradient[:4], own_gradient)
    np.testing.assert_allclose(terms.objective_b[4:].detach(), np.log(CROSS_RATIOS) - 1, rtol=1e-14)
    assert not terms.clipped_b[4:].any()
    assert terms.is_weight_b[4:].tolist() == [1.0] * 4
    # -0.1 * (mean of four) of the mean of two tokens: -0.1 / 8 each.
    torch.testing.assert_close(gradient[4:], torch.full((4, 2), -0.0125, dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("recipe", "wrong", "clipped"),
    [
        ("hacpo", 0.85**2 * 2 * -0.625, True),  # too far away: dropped, although its A is negative
        ("no_clip", 0.5**2 * 2 * -0.625, False),
        ("naive", (1 - 3e-4) * -0.5, True),  # min(0.5 * -0.5, 0.9997 * -0.5)
    ],
)
def test_what_a_partners_wrong_answer_is_worth(recipe: str, wrong: float, clipped: bool) -> None:
    _, terms, _, _ = run(recipe)
    assert terms.objective_b[7].item() == pytest.approx(wrong / SCALE, rel=1e-13)
    assert terms.clipped_b[7].item() is clipped


def test_own_terms_of_gspo_and_grpo() -> None:
    # Own group: mean 0.25, sigma 0.5 (ddof 1): A = 0.75 / 0.500001 for the right answer; its token ratios: e^.5, e^-.1.
    right = 0.75 / 0.500001
    _, gspo, _, _ = run("gspo")
    assert gspo.ratio_b[0].item() == pytest.approx(math.exp(0.2), rel=1e-14)
    assert gspo.objective_b[0].item() == pytest.approx(1.0004 * right, rel=1e-14)
    assert (gspo.lower_b[0].item(), gspo.upper_b[0].item()) == (1 - 3e-4, 1 + 4e-4)
    assert gspo.clipped_b.tolist() == [True, False, False, True]
    _, grpo, _, _ = run("grpo")
    assert grpo.ratio_b[0].item() == pytest.approx((math.exp(0.5) + math.exp(-0.1)) / 2, rel=1e-14)
    assert grpo.objective_b[0].item() == pytest.approx((1.28 + math.exp(-0.1)) / 2 * right, rel=1e-14)
    assert (grpo.lower_b[0].item(), grpo.upper_b[0].item()) == (0.8, 1.28)
    assert not grpo.clipped_b.any()


def test_sharing_leaves_the_own_interval_alone() -> None:
    _, gspo, _, _ = run("gspo")
    for recipe in CROSS:
        _, terms, _, _ = run(recipe)
        for name in ("ratio_b", "lower_b", "upper_b", "clipped_b", "is_weight_b"):
            assert torch.equal(getattr(terms, name)[:4], getattr(gspo, name)), (recipe, name)


def test_gspo_x2_is_gspo_on_twice_the_group() -> None:
    one, two = run("gspo")[0], run("gspo_x2")[0]
    assert two.advantage.shape == (1, 1, 8)
    np.testing.assert_array_equal(one.baseline[0, 0], two.baseline[0, 0, :4])
    # The same spread over seven degrees of freedom instead of three: 8 * 0.1875 / 7 against 4 * 0.1875 / 3.
    np.testing.assert_allclose(two.sigma, math.sqrt(1.5 / 7), rtol=1e-14)


def test_xgrpo_is_gspo_with_everybodys_rewards_in_baseline_and_scale() -> None:
    # Joint mean 4 / 8 = 0.5, sigma_joint: A = 0.5 and -0.5 over it, on the learner's own four answers. gspo: 0.25.
    joint, alone = run("xgrpo"), run("gspo")
    np.testing.assert_allclose(joint[0].advantage[0, 0], np.array([0.5, -0.5, -0.5, -0.5]) / SCALE, rtol=1e-14)
    assert len(joint[1].objective_b) == 4  # no foreign response
    for name in ("ratio_b", "lower_b", "upper_b", "clipped_b", "is_weight_b"):
        assert torch.equal(getattr(joint[1], name), getattr(alone[1], name))
    # 1.0004 is the clipped ratio of e^.2: the right answer's term.
    assert joint[1].objective_b[0].item() == pytest.approx(1.0004 * 0.5 / SCALE, rel=1e-14)


def test_what_the_reference_code_presets_change() -> None:
    both = {
        "advantage.cross_baseline": "learner",
        "importance.ratio_norm": "own_tokens",
        "loss.aggregation": "mean",
        "loss.ranks": 8,
        "loss.shuffle": False,
        "loss.kl_coef": 0.001,
        "loss.kl_cap": 10.0,
        "loss.kl_responses": "own",
    }
    v1 = {
        "capability.metric": "positive_rate",
        "importance.score_eos": False,
        "loss.minibatch_order": "self_first",
    }
    for name, changes in (("reference_code", v1), ("reference_code_main", {"loss.minibatch_order": "balanced"})):
        changed = {
            f"{block}.{key}": value
            for block, values in RECIPES[name].items()
            for key, value in values.items()
            if value != RECIPES["hacpo"][block][key]
        }
        assert changed == both | changes


def test_three_agents_by_hand() -> None:
    """Learner 1 of three with Phat 0.2, 0.4, 0.8 and G = 2; rewards 1 0 | 1 0 | 1 1.

    omega^(1,0) = 2, omega^(1,2) = 0.5: mu^(1) = (2 * 1 + 1 + 0.5 * 2) / 6 = 4/6;
    mu^(0) = (1 + 0.5 * 1 + 0.25 * 2) / 6 = 2/6; mu^(2) = (4 * 1 + 2 * 1 + 2) / 6 = 8/6 > 1: guarded, own mean 1.
    Four of six are right: squared deviations 4 * (1/3)^2 + 2 * (2/3)^2 = 12/9, over 5: sigma^2 = 4/15.
    """
    settings = algorithm("hacpo")
    result = step_advantages(
        np.array([[[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]]]),
        learner=1,
        capability_n=[0.2, 0.4, 0.8],
        settings=settings.advantage,
        capability_settings=settings.capability,
    )
    np.testing.assert_allclose(result.baseline[0, :, 0], [1 / 3, 2 / 3, 1.0], rtol=1e-15)
    assert result.guarded[0, :, 0].tolist() == [False, False, True]
    scale = math.sqrt(4 / 15) + 1e-6
    np.testing.assert_allclose(result.sigma, math.sqrt(4 / 15), rtol=1e-15)
    # Sources relative to learner 1: omega^(0,1) = 0.5, own 1, omega^(2,1) = 2.
    expected = [[0.5 * (2 / 3), 0.5 * -(1 / 3)], [1 / 3, -2 / 3], [0.0, 0.0]]
    np.testing.assert_allclose(result.effective_advantage[0], np.array(expected) / scale, rtol=1e-14, atol=1e-16)

    # All ratios 0.9 at the first update (m = 0, [0.8, 1]), alpha 1: cross terms 0.81 A. Own interval [0.9997, 1.0004]:
    # min(0.9 A, c A): 0.9 * 1/3 where A > 0, and 0.9997 * -2/3 where A < 0. The third agent's terms are 0.
    # J = mean(own) + mean(agent 0's) + mean(agent 2's) = ((0.3 - 0.9997 * 2/3) + 0.81 * (1/3 - 1/6)) / 2 / scale
    source = torch.tensor([0, 0, 1, 1, 2, 2])
    batch = ResponseBatch(
        learner_logprobs_bt=torch.full((6, 1), math.log(0.9), dtype=torch.float64),
        mask_bt=torch.ones(6, 1, dtype=torch.bool),
        source_logprob_b=torch.zeros(6, dtype=torch.float64),
        source_tokens_b=torch.ones(6, dtype=torch.int64),
        text_bytes_b=torch.ones(6, dtype=torch.int64),
        is_self_b=source == 1,
        effective_advantage_b=torch.from_numpy(result.effective_advantage.ravel()),
        row_weight_b=row_weights(source, torch.tensor([2, 2, 2]), "sum"),
        sampler_weight_b=torch.ones(6, dtype=torch.float64),
    )
    loss, _ = update_loss(batch, 0, settings)
    expected_objective = ((0.3 - 0.9997 * 2 / 3) + 0.81 * (1 / 3 - 1 / 6)) / 2 / scale
    assert loss.item() == pytest.approx(-expected_objective, rel=1e-13)
