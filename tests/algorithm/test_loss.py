"""Objectives, stop-gradients, aggregation and KL: hand numbers, published formulas recomputed, and gradients."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hacpo.algorithm.loss import (
    ResponseBatch,
    ResponseTerms,
    clipped_term,
    kl_to_initial,
    response_terms,
    row_weights,
    update_loss,
)
from hacpo.errors import DataError
from hacpo.settings.algorithm import AlgorithmSettings, ClipSettings, ImportanceSettings, LossSettings
from hacpo.settings.recipes import RECIPES

TIGHT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}


def importance(**changes: Any) -> ImportanceSettings:
    return ImportanceSettings.model_validate({**RECIPES["hacpo"]["importance"], **changes})


def clip(**changes: Any) -> ClipSettings:
    return ClipSettings.model_validate({**RECIPES["hacpo"]["clip"], **changes})


def penalty(**changes: Any) -> LossSettings:
    """Loss settings: no KL penalty and no sampler correction unless asked for."""
    return LossSettings.model_validate({**RECIPES["hacpo"]["loss"], **changes})


def loss_of(
    batch: ResponseBatch, *, update_index: int, importance: ImportanceSettings, clip: ClipSettings, loss: LossSettings
) -> tuple[Tensor, ResponseTerms]:
    """`update_loss` under these three blocks of settings; it reads no other."""
    whole = AlgorithmSettings.model_validate({**RECIPES["hacpo"], "recipe": "hacpo"})
    blocks = {"importance": importance, "clip": clip, "loss": loss}
    return update_loss(batch, update_index, whole.model_copy(update=blocks))


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch_of_ratios(ratios: list[float], advantages: list[float], is_self: list[bool]) -> ResponseBatch:
    """One-token responses whose ratio is exactly what is asked for: log pi = log s, the source's is 0."""
    size = len(ratios)
    return ResponseBatch(
        learner_logprobs_bt=f64(*ratios).log()[:, None].requires_grad_(),
        mask_bt=torch.ones(size, 1, dtype=torch.bool),
        source_logprob_b=torch.zeros(size, dtype=torch.float64),
        source_tokens_b=torch.ones(size, dtype=torch.int64),
        text_bytes_b=torch.ones(size, dtype=torch.int64),
        is_self_b=torch.tensor(is_self),
        effective_advantage_b=f64(*advantages),
        row_weight_b=torch.ones(size, dtype=torch.float64),
        sampler_weight_b=torch.ones(size, dtype=torch.float64),
        old_logprobs_bt=torch.zeros(size, 1, dtype=torch.float64),
    )


def random_batch(size: int = 12, length: int = 6, seed: int = 0, spread: float = 0.1) -> ResponseBatch:
    """Responses of 1 to `length` tokens, half of them own, float32 token log-probabilities, NaN in the padding."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    lengths = torch.randint(1, length + 1, (size,), generator=generator)
    mask = torch.arange(length)[None, :] < lengths[:, None]
    learner = (-2 * rand(size, length)).masked_fill(~mask, math.nan)
    old = learner + spread * (rand(size, length) - 0.5)
    is_self = torch.arange(size) % 2 == 0
    own_sum = torch.where(mask, old.double(), 0.0).sum(-1)
    return ResponseBatch(
        learner_logprobs_bt=learner.requires_grad_(),
        mask_bt=mask,
        source_logprob_b=torch.where(is_self, own_sum, own_sum + 0.3 * rand(size).double()),
        source_tokens_b=torch.where(is_self, lengths, lengths + 1),
        text_bytes_b=3 * lengths,
        is_self_b=is_self,
        effective_advantage_b=(2 * rand(size) - 1).double(),
        row_weight_b=row_weights((~is_self).long(), torch.tensor([size, size]), "sum"),
        sampler_weight_b=torch.ones(size, dtype=torch.float64),
        old_logprobs_bt=old,
        initial_logprobs_bt=learner.detach() + rand(size, length) - 0.5,
    )


def gradient(loss: Tensor, batch: ResponseBatch) -> Tensor:
    (result,) = torch.autograd.grad(loss, batch.learner_logprobs_bt)
    return result


# --- own term --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope", "clipped"),
    [
        (1.1, 2.0, 2.2, 2.0, False),  # inside: s A, slope A
        (1.5, 2.0, 2.56, 0.0, True),  # min(3.0, 1.28 * 2)
        (1.5, -2.0, -3.0, -2.0, False),  # min(-3.0, -2.56): too likely and wrong is still pushed down
        (0.5, -2.0, -1.6, 0.0, True),  # min(-1.0, 0.8 * -2)
        (0.5, 2.0, 1.0, 2.0, False),  # min(1.0, 1.6): unlikely and right is still pushed up
        (1.5, 0.0, 0.0, 0.0, False),  # no advantage: no gradient, but not because of the clip
    ],
)
def test_own_term_by_hand(ratio: float, advantage: float, objective: float, slope: float, clipped: bool) -> None:
    batch = batch_of_ratios([ratio], [advantage], [True])
    terms = response_terms(
        batch, update_index=3, importance=importance(alpha=3.0), clip=clip(own_low=0.2, own_high=0.28)
    )
    assert terms.ratio_b.item() == pytest.approx(ratio, rel=1e-14)
    assert terms.objective_b.item() == pytest.approx(objective, abs=1e-14)
    assert terms.clipped_b.item() is clipped
    assert terms.is_weight_b.item() == 1.0  # alpha concerns cross responses only
    assert (terms.lower_b.item(), terms.upper_b.item()) == (0.8, 1.28)
    # d objective / d log s = slope * s
    assert gradient(terms.objective_b.sum(), batch).item() == pytest.approx(slope * ratio, abs=1e-13)


# --- cross term ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(
    ("ratio", "c", "clipped"), [(0.9, 0.9, False), (0.5, 0.8, True), (1.2, 1.0, True), (0.8000001, 0.8000001, False)]
)
def test_cross_term_by_hand(ratio: float, c: float, clipped: bool, advantage: float, alpha: float) -> None:
    batch = batch_of_ratios([ratio], [advantage], [False])
    terms = response_terms(batch, update_index=0, importance=importance(alpha=alpha), clip=clip())
    assert (terms.lower_b.item(), terms.upper_b.item()) == (0.8, 1.0)
    assert terms.is_weight_b.item() == pytest.approx(c**alpha, rel=1e-14)
    assert terms.objective_b.item() == pytest.approx(c * c**alpha * advantage, rel=1e-14)
    assert terms.clipped_b.item() is clipped
    # Stop-gradient: d/ds of c sg[c]^alpha A is c^alpha A inside, not (1 + alpha) c^alpha A; outside 0, for either sign.
    slope = 0.0 if clipped else c**alpha * advantage
    assert gradient(terms.objective_b.sum(), batch).item() == pytest.approx(slope * ratio, rel=1e-13, abs=0)


def test_without_the_stop_gradient_the_slope_would_be_one_plus_alpha_times_as_steep() -> None:
    alpha, ratio, advantage, h = 3.0, 0.9, 2.0, 1e-6

    def objective(value: float) -> float:
        batch = batch_of_ratios([value], [advantage], [False])
        return response_terms(batch, update_index=0, importance=importance(alpha=alpha), clip=clip()).objective_b.item()

    numeric = (objective(ratio + h) - objective(ratio - h)) / (2 * h)
    batch = batch_of_ratios([ratio], [advantage], [False])
    terms = response_terms(batch, update_index=0, importance=importance(alpha=alpha), clip=clip())
    autograd = gradient(terms.objective_b.sum(), batch).item() / ratio
    # Central difference: error of the order h^2 = 1e-12, rounding 1e-16 / h = 1e-10.
    assert numeric == pytest.approx((1 + alpha) * autograd, rel=1e-8)


def test_a_ratio_on_the_bound_keeps_its_gradient() -> None:
    batch = batch_of_ratios([1.0, 1.0], [2.0, -2.0], [False, False])
    terms = response_terms(batch, update_index=8, importance=importance(), clip=clip())  # [1, 1]
    assert not terms.clipped_b.any()
    assert gradient(terms.objective_b.sum(), batch).flatten().tolist() == [2.0, -2.0]


@pytest.mark.parametrize("ratio", [0.3, 0.7, 1.0, 1.9])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_clip_none_is_the_plain_weighted_ratio(ratio: float, advantage: float) -> None:
    batch = batch_of_ratios([ratio], [advantage], [False])
    terms = response_terms(batch, update_index=0, importance=importance(alpha=2.0), clip=clip(cross="none"))
    assert not terms.clipped_b.any()
    # Eq. 12 weighs where s < 1 only: s * (s^2 A) there, s A above; the weight has no gradient.
    wanted = ratio * min(ratio, 1.0) ** 2 * advantage
    assert terms.objective_b.item() == pytest.approx(wanted, rel=1e-13)
    assert gradient(terms.objective_b.sum(), batch).item() == pytest.approx(wanted, rel=1e-13)
    assert math.isfinite(terms.lower_b.item() + terms.upper_b.item())


def test_above_one_an_unclipped_ratio_has_weight_one() -> None:
    batch = batch_of_ratios([3.0], [1.0], [False])
    loss, terms = loss_of(
        batch, update_index=0, importance=importance(alpha=1.0), clip=clip(cross="none"), loss=penalty(kl_coef=0.0)
    )
    assert (terms.is_weight_b.item(), terms.objective_b.item()) == (1.0, pytest.approx(3.0, rel=1e-14))
    # loss = -s A, d loss / d log s = -s A = -3; weighed by sg[s] it would be -s sg[s] A = -9.
    assert gradient(loss, batch).item() == pytest.approx(-3.0, rel=1e-14)


@given(st.floats(0.1, 3.0), st.floats(-3, 3), st.integers(0, 12))
def test_cross_own_at_alpha_zero_is_the_own_loss(ratio: float, advantage: float, update_index: int) -> None:
    own, cross = (
        response_terms(
            batch_of_ratios([ratio], [advantage], [is_self]),
            update_index=update_index,
            importance=importance(alpha=0.0),
            clip=clip(cross="own", own_low=0.2, own_high=0.28),
        )
        for is_self in (True, False)
    )
    for name in ("ratio_b", "lower_b", "upper_b", "clipped_b", "is_weight_b", "objective_b"):
        assert torch.equal(getattr(own, name), getattr(cross, name)), name


def test_cross_own_with_alpha_weighs_by_the_own_interval() -> None:
    batch = batch_of_ratios([1.5, 1.5, 0.5, 0.5], [2.0, -2.0, 2.0, -2.0], [False] * 4)
    terms = response_terms(
        batch,
        update_index=0,
        importance=importance(alpha=1.0),
        clip=clip(cross="own", own_low=0.2, own_high=0.28),
    )
    # c = 1.28 and 0.8; min(3, 2.56) and min(-3, -2.56) by weight 1; min(1, 1.6) and min(-1, -1.6) by weight 0.8
    torch.testing.assert_close(terms.objective_b, f64(2.56, -3.0, 1.0 * 0.8, -1.6 * 0.8), **TIGHT)
    assert terms.clipped_b.tolist() == [True, False, False, True]


@given(st.floats(0.1, 3.0), st.floats(-3, 3), st.integers(0, 12))
def test_alpha_zero_is_the_plain_clipped_ratio(ratio: float, advantage: float, update_index: int) -> None:
    batch = batch_of_ratios([ratio], [advantage], [False])
    terms = response_terms(batch, update_index=update_index, importance=importance(alpha=0.0), clip=clip())
    lower = min(1.0, 0.8 + 0.025 * update_index)
    assert terms.is_weight_b.item() == 1.0
    assert terms.objective_b.item() == pytest.approx(min(max(ratio, lower), 1.0) * advantage, rel=1e-13, abs=1e-15)


# --- published formulas, recomputed ----------------------------------------------------------------------------------


def published_clip(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def test_own_responses_equal_gspo_as_published() -> None:
    """GSPO (arXiv 2507.18071, eq. 5-7): J = 1/G sum_i min(s_i A_i, clip(s_i, 1 - e_l, 1 + e_h) A_i) with
    s_i = exp(1/|y| sum_t log(pi/pi_old)). The same as TRL's GRPOTrainer._compute_loss (huggingface/trl,
    trl/trainer/grpo_trainer.py) with importance_sampling_level="sequence", loss_type="grpo", beta = 0."""
    batch = random_batch(seed=4, spread=0.004)
    batch = replace(
        batch, is_self_b=torch.ones(12, dtype=torch.bool), row_weight_b=torch.full((12,), 1 / 12, dtype=torch.float64)
    )
    old = batch.old_logprobs_bt
    assert old is not None
    summed = torch.where(batch.mask_bt, old.double(), 0.0).sum(-1)
    loss, terms = loss_of(
        replace(batch, source_logprob_b=summed), update_index=1, importance=importance(), clip=clip(), loss=penalty()
    )
    objectives = []
    for row in range(12):
        tokens = [t for t in range(6) if batch.mask_bt[row, t]]
        gaps = [batch.learner_logprobs_bt[row, t].item() - old[row, t].item() for t in tokens]
        ratio = math.exp(math.fsum(gaps) / len(gaps))
        objectives.append(published_clip(ratio, batch.effective_advantage_b[row].item(), 3e-4, 4e-4))
    np.testing.assert_allclose(terms.objective_b.detach(), objectives, rtol=1e-12)
    assert loss.item() == pytest.approx(-math.fsum(objectives) / 12, rel=1e-12, abs=1e-14)
    assert 0 < terms.clipped_b.sum() < 12  # both branches were met


TRL_SETTINGS = {
    "loss_type": "grpo",
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "aux_loss_enabled": False,
    "_entropy_bonus_enabled": False,
    "current_gradient_accumulation_steps": 1,
}


@pytest.mark.parametrize("level", ["sequence", "token"])
@pytest.mark.parametrize(("kl_coef", "correction"), [(0.0, False), (0.04, False), (0.04, True)])
def test_own_responses_equal_trl_itself(level: str, kl_coef: float, correction: bool) -> None:
    """`GRPOTrainer._compute_loss` of TRL on the same log-probabilities: loss and gradient. Runs where TRL is installed
    (`pip install trl`; the formulas alone are recomputed above and below)."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="needs TRL, which is no dependency").GRPOTrainer
    batch = random_batch(seed=4, spread=0.004 if level == "sequence" else 1.0)
    old, initial, mask = batch.old_logprobs_bt, batch.initial_logprobs_bt, batch.mask_bt
    assert old is not None
    assert initial is not None

    def dense(value: Tensor) -> Tensor:
        return torch.where(mask, value.detach().double(), 0.0)

    sampler_weight = torch.linspace(0.5, 2.0, 12, dtype=torch.float64) if correction else torch.ones(12).double()
    own = replace(
        batch,
        learner_logprobs_bt=dense(batch.learner_logprobs_bt).requires_grad_(),
        is_self_b=torch.ones(12, dtype=torch.bool),
        source_logprob_b=dense(old).sum(-1),
        row_weight_b=torch.full((12,), 1 / 12, dtype=torch.float64),
        sampler_weight_b=sampler_weight,
        old_logprobs_bt=dense(old),
        initial_logprobs_bt=dense(initial),
    )
    own_clip = clip() if level == "sequence" else clip(own_low=0.2, own_high=0.28)
    loss, _ = loss_of(
        own, update_index=0, importance=importance(level=level), clip=own_clip, loss=penalty(kl_coef=kl_coef)
    )

    theirs = dense(batch.learner_logprobs_bt).requires_grad_()
    accelerator = SimpleNamespace(
        gather=lambda value: value, reduce=lambda value, reduction: value, sync_gradients=True, num_processes=1
    )
    double = SimpleNamespace(
        **TRL_SETTINGS,
        importance_sampling_level=level,
        epsilon_low=own_clip.own_low,
        epsilon_high=own_clip.own_high,
        beta=kl_coef,
        use_vllm=correction,
        vllm_importance_sampling_correction=correction,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False),
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (theirs, torch.zeros_like(theirs), None),
    )
    nothing = torch.zeros(12, 0, dtype=torch.int64)
    expected = trainer._compute_loss(
        double,
        None,
        {
            "prompt_ids": nothing,
            "prompt_mask": nothing,
            "completion_ids": mask.long(),
            "completion_mask": mask.long(),
            "advantages": batch.effective_advantage_b,
            "old_per_token_logps": dense(old),
            "ref_per_token_logps": dense(initial),
            "importance_sampling_ratio": sampler_weight[:, None],
        },
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    (slope,) = torch.autograd.grad(expected, theirs)
    torch.testing.assert_close(gradient(loss, own), slope, rtol=1e-10, atol=1e-15)


def test_token_level_equals_grpo_as_published() -> None:
    """GRPO (arXiv 2402.03300, eq. 3): 1/|o| sum_t min(r_t A, clip(r_t, 1 - e, 1 + e) A), r_t = pi(o_t) / pi_old(o_t);
    the same as TRL's importance_sampling_level="token", loss_type="grpo"."""
    batch = random_batch(seed=5, spread=1.0)
    terms = response_terms(
        batch, update_index=0, importance=importance(level="token"), clip=clip(own_low=0.2, own_high=0.28)
    )
    sequence = response_terms(batch, update_index=0, importance=importance(), clip=clip(own_low=0.2, own_high=0.28))
    old = batch.old_logprobs_bt
    assert old is not None
    clipped_tokens = 0
    for row in range(12):
        if not batch.is_self_b[row]:  # a cross response keeps its sequence ratio
            assert terms.objective_b[row] == sequence.objective_b[row]
            assert terms.ratio_b[row] == sequence.ratio_b[row]
            continue
        advantage = batch.effective_advantage_b[row].item()
        tokens = [t for t in range(6) if batch.mask_bt[row, t]]
        ratios = [math.exp(batch.learner_logprobs_bt[row, t].item() - old[row, t].item()) for t in tokens]
        objective = math.fsum(published_clip(r, advantage, 0.2, 0.28) for r in ratios) / len(ratios)
        assert terms.objective_b[row].item() == pytest.approx(objective, rel=1e-12)
        assert terms.ratio_b[row].item() == pytest.approx(math.fsum(ratios) / len(ratios), rel=1e-12)
        outside = [r > 1.28 if advantage > 0 else r < 0.8 for r in ratios]
        assert terms.clipped_b[row].item() is all(outside)
        clipped_tokens += sum(outside)
    assert clipped_tokens > 0


def test_token_level_is_clipped_when_every_token_is() -> None:
    batch = replace(
        batch_of_ratios([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [True, True, True]),
        learner_logprobs_bt=f64(0.5, 0.5, 0.5, 0.0, 0.5, 0.0).reshape(3, 2).requires_grad_(),
        mask_bt=torch.tensor([[True, True], [True, True], [True, False]]),
        old_logprobs_bt=torch.zeros(3, 2),
    )
    terms = response_terms(
        batch, update_index=0, importance=importance(level="token"), clip=clip(own_low=0.2, own_high=0.28)
    )
    assert terms.clipped_b.tolist() == [True, False, True]
    # Row 2: (1.28 + 1) / 2; its second token alone has a gradient, 1 / 2. Row 3 has one token; padding has no say.
    torch.testing.assert_close(terms.objective_b, f64(1.28, 1.14, 1.28), **TIGHT)
    torch.testing.assert_close(
        gradient(terms.objective_b.sum(), batch), f64(0, 0, 0, 0.5, 0, 0).reshape(3, 2), rtol=0.0, atol=1e-15
    )


def test_differences_of_float32_log_probabilities_are_taken_in_float64() -> None:
    learner, old = torch.tensor([[-1e-9]]), torch.tensor([[-1.0]])
    batch = replace(
        batch_of_ratios([1.0], [-1.0], [True]), learner_logprobs_bt=learner.requires_grad_(), old_logprobs_bt=old
    )
    terms = response_terms(batch, update_index=0, importance=importance(level="token"), clip=clip())
    # In float32 the difference would be 1.0 and the ratio e, 2.7e-9 too large.
    assert terms.ratio_b.item() == pytest.approx(math.exp(1 - 1e-9), rel=1e-15)


@pytest.mark.parametrize("update_index", [0, 5])
def test_without_partners_hacpo_is_gspo_exactly(update_index: int) -> None:
    def run(recipe: str) -> tuple[Tensor, Tensor]:
        whole = random_batch(seed=6, spread=0.002)
        own = replace(
            whole,
            is_self_b=torch.ones_like(whole.is_self_b),
            row_weight_b=row_weights(torch.zeros(12, dtype=torch.int64), torch.tensor([12]), "sum"),
        )
        loss, _ = loss_of(
            own,
            update_index=update_index,
            importance=ImportanceSettings.model_validate(RECIPES[recipe]["importance"]),
            clip=ClipSettings.model_validate(RECIPES[recipe]["clip"]),
            loss=penalty(),
        )
        return loss, gradient(loss, own)

    (hacpo, hacpo_gradient), (gspo, gspo_gradient) = run("hacpo"), run("gspo")
    assert torch.equal(hacpo, gspo)
    assert torch.equal(hacpo_gradient, gspo_gradient)
    assert hacpo_gradient.abs().sum() > 0


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["learner_tokens", "own_tokens", "bytes"])
@pytest.mark.parametrize(("alpha", "kl_coef"), [(0.0, 0.0), (0.0, 0.3)])
def test_gradcheck_of_the_whole_loss(norm: str, alpha: float, kl_coef: float) -> None:
    batch = random_batch(size=6, length=4, seed=7)
    mask, initial = batch.mask_bt, batch.initial_logprobs_bt
    assert initial is not None
    start = torch.where(mask, batch.learner_logprobs_bt.detach().double(), 0.0).requires_grad_()

    def loss(learner_logprobs: Tensor) -> Tensor:
        moved = replace(batch, learner_logprobs_bt=learner_logprobs)
        value, _ = loss_of(
            moved,
            update_index=1,
            importance=importance(alpha=alpha, ratio_norm=norm),
            clip=clip(own_low=0.02, own_high=0.03),
            loss=penalty(kl_coef=kl_coef),
        )
        return value

    assert torch.autograd.gradcheck(loss, (start,))


def test_end_to_end_gradient_by_hand() -> None:
    # s = exp((sum log pi - source) / T) = 0.9, T = 2: d loss / d log pi_t = -w c^alpha A s / T for each scored token.
    log_pi = f64(-1.0, -2.0, -7.0).reshape(1, 3).requires_grad_()
    batch = replace(
        batch_of_ratios([1.0], [2.0], [False]),
        learner_logprobs_bt=log_pi,
        mask_bt=torch.tensor([[True, True, False]]),
        source_logprob_b=f64(-3.0 - 2 * math.log(0.9)),
        row_weight_b=f64(0.25),
        old_logprobs_bt=None,
    )
    loss, terms = loss_of(batch, update_index=0, importance=importance(alpha=2.0), clip=clip(), loss=penalty())
    assert terms.ratio_b.item() == pytest.approx(0.9, rel=1e-14)
    assert terms.learner_logprob_b.item() == -1.5
    each = -0.25 * 0.9**2 * 2.0 * 0.9 / 2
    torch.testing.assert_close(gradient(loss, batch), f64(each, each, 0.0).reshape(1, 3), **TIGHT)


def test_only_the_objective_carries_a_gradient() -> None:
    terms = response_terms(random_batch(), update_index=0, importance=importance(), clip=clip())
    assert {name for name, value in vars(terms).items() if value.requires_grad} == {"objective_b"}
    assert {value.dtype for value in vars(terms).values()} == {torch.float64, torch.bool}


def test_padding_does_not_matter() -> None:
    batch = random_batch(seed=9)
    initial, old = batch.initial_logprobs_bt, batch.old_logprobs_bt
    assert initial is not None
    assert old is not None

    def padded(value: Tensor) -> Tensor:
        return torch.nn.functional.pad(value, (0, 3), value=math.inf)

    wider = replace(
        batch,
        learner_logprobs_bt=padded(batch.learner_logprobs_bt.detach()).requires_grad_(),
        mask_bt=torch.nn.functional.pad(batch.mask_bt, (0, 3), value=False),
        initial_logprobs_bt=padded(initial),
        old_logprobs_bt=padded(old),
    )
    for level in ("sequence", "token"):
        losses = [
            loss_of(one, update_index=0, importance=importance(level=level), clip=clip(), loss=penalty(kl_coef=0.1))[0]
            for one in (batch, wider)
        ]
        torch.testing.assert_close(*losses, **TIGHT)
        narrow, wide = gradient(losses[0], batch), gradient(losses[1], wider)
        assert narrow.isfinite().all()
        torch.testing.assert_close(wide[:, :6], narrow, rtol=0.0, atol=1e-7)  # float32 leaves
        assert (wide[:, 6:] == 0).all()


# --- aggregation -----------------------------------------------------------------------------------------------------


def test_row_weights_by_hand() -> None:
    source, counts = torch.tensor([0, 0, 1, 2]), torch.tensor([4, 2, 8])
    torch.testing.assert_close(row_weights(source, counts, "sum"), f64(0.25, 0.25, 0.5, 0.125), **TIGHT)
    # 14 scheduled in all, though only 4 rows are here
    torch.testing.assert_close(row_weights(source, counts, "mean"), f64(*[1 / 14] * 4), **TIGHT)
    with pytest.raises(DataError, match="no scheduled responses"):
        row_weights(torch.tensor([1]), torch.tensor([4, 0]), "sum")


def test_sum_is_the_mean_over_own_plus_the_mean_over_each_other_agent() -> None:
    batch = batch_of_ratios([1.0] * 6, [1.0, 3.0, 5.0, -1.0, 4.0, 6.0], [True, True, False, False, False, False])
    source = torch.tensor([0, 0, 1, 1, 2, 2])
    for aggregation, expected in (("sum", 2.0 + 2.0 + 5.0), ("mean", 18 / 6)):
        weighted = replace(batch, row_weight_b=row_weights(source, torch.tensor([2, 2, 2]), aggregation))
        loss, _ = loss_of(weighted, update_index=0, importance=importance(), clip=clip(), loss=penalty())
        assert loss.item() == pytest.approx(-expected, rel=1e-14)
    # One of agent 2's two responses is unusable: it stays in the denominator, 4 / 2 instead of (4 + 6) / 2.
    usable = torch.arange(5)
    weighted = replace(
        batch_of_ratios([1.0] * 5, [1.0, 3.0, 5.0, -1.0, 4.0], [True, True, False, False, False]),
        row_weight_b=row_weights(source[usable], torch.tensor([2, 2, 2]), "sum"),
    )
    loss, _ = loss_of(weighted, update_index=0, importance=importance(), clip=clip(), loss=penalty())
    assert loss.item() == pytest.approx(-(2.0 + 2.0 + 2.0), rel=1e-14)


def rows(batch: ResponseBatch, index: Tensor) -> ResponseBatch:
    return ResponseBatch(**{name: value[index] for name, value in vars(batch).items()})


@given(st.integers(1, 12), st.randoms(use_true_random=False), st.sampled_from(["sequence", "token"]))
@settings(max_examples=25, deadline=None)
def test_micro_batches_in_any_order_give_the_loss_and_gradient_of_one_batch(
    micro_batch_size: int, random: Any, level: str
) -> None:
    batch = random_batch(seed=11)
    batch = replace(batch, learner_logprobs_bt=batch.learner_logprobs_bt.detach().double().requires_grad_())
    arguments: dict[str, Any] = {
        "update_index": 2,
        "importance": importance(level=level),
        "clip": clip(own_low=0.02, own_high=0.02),
        "loss": penalty(kl_coef=0.2),
    }
    whole, _ = loss_of(batch, **arguments)
    order = list(range(12))
    random.shuffle(order)
    parts = [
        loss_of(rows(batch, torch.tensor(order[i : i + micro_batch_size])), **arguments)[0]
        for i in range(0, 12, micro_batch_size)
    ]
    together = torch.stack(parts).sum()
    assert together.item() == pytest.approx(whole.item(), rel=0, abs=1e-12)
    torch.testing.assert_close(gradient(together, batch), gradient(whole, batch), **TIGHT)


def test_a_row_of_weight_zero_fills_a_batch_and_does_nothing() -> None:
    batch = batch_of_ratios([0.9, 0.9], [2.0, 100.0], [False, True])
    loss, _ = loss_of(
        replace(batch, row_weight_b=f64(1.0, 0.0)), update_index=0, importance=importance(), clip=clip(), loss=penalty()
    )
    assert loss.item() == pytest.approx(-0.9 * 0.9 * 2.0, rel=1e-14)
    assert gradient(loss, batch)[1].item() == 0.0


# --- sampler correction ----------------------------------------------------------------------------------------------


def test_the_samplers_weight_scales_the_term_and_not_the_penalty() -> None:
    batch = replace(
        batch_of_ratios([1.1, 0.9], [2.0, 4.0], [True, False]),
        sampler_weight_b=f64(0.5, 1.0),
        row_weight_b=f64(0.5, 1.0),
        initial_logprobs_bt=f64(1.1, 0.9).log()[:, None] + 1.0,
    )
    settings = penalty(kl_coef=0.01)
    wide = clip(own_low=0.2, own_high=0.28)
    loss, terms = loss_of(batch, update_index=0, importance=importance(), clip=wide, loss=settings)
    # Objectives as ever: 1.1 * 2 = 2.2 and 0.9 * 0.9 * 4 = 3.24. Loss: -(0.5 * 0.5 * 2.2 + 3.24), plus the penalty with
    # the rows' own weights: 0.01 * (0.5 + 1) * (e - 2).
    torch.testing.assert_close(terms.objective_b, f64(2.2, 3.24), **TIGHT)
    assert loss.item() == pytest.approx(-(0.55 + 3.24) + 0.015 * (math.exp(1) - 2), rel=1e-13)
    plain, _ = loss_of(
        replace(batch, sampler_weight_b=f64(1.0, 1.0)),
        update_index=0,
        importance=importance(),
        clip=wide,
        loss=penalty(),
    )
    halved, _ = loss_of(batch, update_index=0, importance=importance(), clip=wide, loss=penalty())
    whole, half = gradient(plain, batch), gradient(halved, batch)
    torch.testing.assert_close(half, whole * f64(0.5, 1.0)[:, None], **TIGHT)


# --- KL --------------------------------------------------------------------------------------------------------------


def test_kl_by_hand() -> None:
    batch = replace(
        batch_of_ratios([1.0], [0.0], [True]),
        learner_logprobs_bt=f64(-1.0, -2.0).reshape(1, 2).requires_grad_(),
        initial_logprobs_bt=f64(-1.5, -1.0).reshape(1, 2),
        mask_bt=torch.ones(1, 2, dtype=torch.bool),
        old_logprobs_bt=None,
        row_weight_b=f64(0.5),
    )
    # d = -0.5 and 1: (e^-0.5 + 0.5 - 1 + e - 1 - 1) / 2
    k3 = (math.exp(-0.5) + 0.5 - 1 + math.exp(1) - 1 - 1) / 2
    assert kl_to_initial(batch).item() == pytest.approx(k3, rel=1e-14)
    loss, _ = loss_of(batch, update_index=0, importance=importance(), clip=clip(), loss=penalty(kl_coef=0.1))
    assert loss.item() == pytest.approx(0.1 * 0.5 * k3, rel=1e-14)
    # d k3 / d log pi = 1 - e^d, half of it for each of two tokens
    expected = f64((1 - math.exp(-0.5)) / 2, (1 - math.exp(1)) / 2).reshape(1, 2) * 0.05
    torch.testing.assert_close(gradient(loss, batch), expected, **TIGHT)


def test_the_penalty_on_own_responses_only() -> None:
    # Three rows of weight 1/3 with d = 1 for each: k3 = e - 2. Own rows: the first and the last.
    batch = replace(
        batch_of_ratios([1.0] * 3, [0.0] * 3, [True, False, True]),
        initial_logprobs_bt=torch.ones(3, 1, dtype=torch.float64),
        row_weight_b=f64(1 / 3, 1 / 3, 1 / 3),
    )
    k3 = math.exp(1) - 2
    for responses, rows_of_three in (("all", 3), ("own", 2)):
        settings = penalty(kl_coef=0.1, kl_responses=responses)
        loss, _ = loss_of(batch, update_index=0, importance=importance(), clip=clip(), loss=settings)
        assert loss.item() == pytest.approx(0.1 * k3 * rows_of_three / 3, rel=1e-14)
        # d k3 / d log pi = 1 - e^d
        slope = 0.1 * (1 - math.exp(1)) / 3
        expected = f64(slope, slope if responses == "all" else 0.0, slope)[:, None]
        torch.testing.assert_close(gradient(loss, batch), expected, **TIGHT)
    # A batch of cross responses alone needs nothing of the initial policy then.
    cross = replace(batch_of_ratios([0.9], [1.0], [False]), initial_logprobs_bt=None)
    loss, _ = loss_of(
        cross, update_index=0, importance=importance(), clip=clip(), loss=penalty(kl_coef=0.1, kl_responses="own")
    )
    assert loss.item() == pytest.approx(-0.81, rel=1e-14)


def test_kl_is_bounded() -> None:
    batch = replace(batch_of_ratios([1.0], [0.0], [True]), initial_logprobs_bt=f64(5000.0).reshape(1, 1))
    assert kl_to_initial(batch).item() == pytest.approx(math.exp(10) - 11, rel=1e-14)


# --- inputs ----------------------------------------------------------------------------------------------------------


def test_the_ratio_may_refer_to_the_learners_own_old_policy() -> None:
    """`reference: self`: the caller passes the learner's old sums and token counts for cross rows as well."""
    batch = random_batch(seed=13)
    old = batch.old_logprobs_bt
    assert old is not None
    own_old = replace(
        batch,
        source_logprob_b=torch.where(batch.mask_bt, old.double(), 0.0).sum(-1),
        source_tokens_b=batch.mask_bt.sum(-1),
    )
    terms = response_terms(own_old, update_index=0, importance=importance(), clip=clip())
    # The trace shows means over the tokens behind each sum.
    torch.testing.assert_close(terms.source_logprob_b * own_old.source_tokens_b, own_old.source_logprob_b, **TIGHT)
    gap = torch.where(batch.mask_bt, batch.learner_logprobs_bt.double() - old.double(), 0.0).sum(-1)
    torch.testing.assert_close(terms.ratio_b, (gap / batch.mask_bt.sum(-1)).exp().detach(), **TIGHT)


@given(
    st.lists(st.floats(-1e5, 1e5), min_size=4, max_size=4),
    st.floats(-1e4, 1e4),
    st.sampled_from(["stepwise", "own", "none"]),
    st.sampled_from(["sequence", "token"]),
    st.floats(0, 4),
)
def test_loss_and_gradient_are_always_finite(
    logs: list[float], advantage: float, cross: str, level: str, alpha: float
) -> None:
    batch = replace(
        batch_of_ratios([1.0] * 4, [advantage] * 4, [True, False, True, False]),
        learner_logprobs_bt=f64(*logs)[:, None].requires_grad_(),
        initial_logprobs_bt=torch.zeros(4, 1),
        text_bytes_b=torch.zeros(4, dtype=torch.int64),
    )
    loss, terms = loss_of(
        batch,
        update_index=0,
        importance=importance(level=level, alpha=alpha, ratio_norm="bytes"),
        clip=clip(cross=cross, cross_delta=1.0),
        loss=penalty(kl_coef=0.1),
    )
    assert all(value.isfinite().all() for value in vars(terms).values())
    assert loss.isfinite()
    assert gradient(loss, batch).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learner_logprobs_bt": torch.zeros(2)}, "must be"),
        ({"mask_bt": torch.ones(2, 3, dtype=torch.bool)}, "mask_bt has the wrong shape"),
        ({"mask_bt": torch.ones(2, 1)}, "mask_bt has the wrong dtype"),
        ({"mask_bt": torch.tensor([[True], [False]])}, "without scored tokens"),
        ({"row_weight_b": torch.ones(3, dtype=torch.float64)}, "row_weight_b has the wrong shape"),
        ({"source_logprob_b": torch.zeros(2)}, "source_logprob_b has the wrong dtype"),
        ({"effective_advantage_b": torch.zeros(2)}, "effective_advantage_b has the wrong dtype"),
        ({"initial_logprobs_bt": torch.zeros(2, 2)}, "initial_logprobs_bt has the wrong shape"),
    ],
)
def test_a_batch_refuses_what_does_not_fit(changes: dict[str, Tensor], message: str) -> None:
    with pytest.raises(DataError, match=message):
        replace(batch_of_ratios([1.0, 1.0], [1.0, 1.0], [True, False]), **changes)


def test_settings_that_need_log_probabilities_say_so() -> None:
    batch = replace(batch_of_ratios([1.0], [1.0], [True]), old_logprobs_bt=None)
    with pytest.raises(DataError, match="old_logprobs_bt"):
        response_terms(batch, update_index=0, importance=importance(level="token"), clip=clip())
    with pytest.raises(DataError, match="initial_logprobs_bt"):
        loss_of(batch, update_index=0, importance=importance(), clip=clip(), loss=penalty(kl_coef=0.1))


def test_clipped_term_broadcasts() -> None:
    term, clipped = clipped_term(f64(0.5, 0.9, 1.5), f64(2.0), f64(0.8), f64(1.0), torch.tensor([False]).expand(3))
    torch.testing.assert_close(term, f64(1.6, 1.8, 2.0), **TIGHT)
    assert clipped.tolist() == [True, False, True]
