"""Sequence ratio under each norm, its bound, and the clip intervals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hacpo.algorithm.importance import UNCLIPPED, bounded_ratio, clip_bounds, log_ratio, response_bounds, sum_logprobs
from hacpo.settings.algorithm import ClipSettings
from hacpo.settings.recipes import RECIPES

NORMS = ("learner_tokens", "own_tokens", "bytes")


def clip_settings(**changes: Any) -> ClipSettings:
    return ClipSettings.model_validate({**RECIPES["hacpo"]["clip"], **changes})


def ratios(
    learner: list[float],
    source: list[float],
    *,
    norm: str,
    learner_tokens: list[int],
    source_tokens: list[int],
    text_bytes: list[int],
    is_self: list[bool],
) -> Tensor:
    return log_ratio(
        learner_logprob_b=torch.tensor(learner, dtype=torch.float64),
        source_logprob_b=torch.tensor(source, dtype=torch.float64),
        learner_tokens_b=torch.tensor(learner_tokens),
        source_tokens_b=torch.tensor(source_tokens),
        text_bytes_b=torch.tensor(text_bytes),
        is_self_b=torch.tensor(is_self),
        ratio_norm=norm,
    )


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        ("learner_tokens", -0.5),  # (-6 + 4) / 4
        ("own_tokens", 0.5),  # -6/4 - (-4/2): the long source tokens put it on the other side of 1
        ("bytes", -0.2),  # (-6 + 4) / 10
    ],
)
def test_cross_log_ratio_by_hand(norm: str, expected: float) -> None:
    got = ratios([-6.0], [-4.0], norm=norm, learner_tokens=[4], source_tokens=[2], text_bytes=[10], is_self=[False])
    assert got.dtype == torch.float64
    assert got.item() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("norm", NORMS)
def test_own_responses_use_the_mean_over_the_learners_tokens_under_every_norm(norm: str) -> None:
    # (-6 + 4) / 4 for the own row, whatever its bytes; the cross row beside it keeps its norm.
    got = ratios(
        [-6.0, -6.0],
        [-4.0, -4.0],
        norm=norm,
        learner_tokens=[4, 4],
        source_tokens=[4, 2],
        text_bytes=[10, 10],
        is_self=[True, False],
    )
    assert got[0].item() == -0.5
    assert (got[1].item() == -0.5) == (norm == "learner_tokens")


@given(st.floats(-500, -0.01), st.integers(1, 300), st.integers(1, 300), st.integers(0, 900), st.sampled_from(NORMS))
def test_equal_sequence_probabilities_give_ratio_one_under_any_single_length(
    logprob: float, learner_tokens: int, source_tokens: int, text_bytes: int, norm: str
) -> None:
    got = ratios(
        [logprob],
        [logprob],
        norm=norm,
        learner_tokens=[learner_tokens],
        source_tokens=[source_tokens],
        text_bytes=[text_bytes],
        is_self=[False],
    ).item()
    if norm != "own_tokens" or learner_tokens == source_tokens:
        assert got == 0.0
    else:
        assert got == pytest.approx(logprob / learner_tokens - logprob / source_tokens, rel=1e-9, abs=1e-12)
        assert got != 0.0


@given(st.floats(-200, 0), st.floats(-200, 0), st.integers(1, 50))
def test_with_equal_token_counts_the_token_norms_agree(learner: float, source: float, tokens: int) -> None:
    one, other = (
        ratios(
            [learner],
            [source],
            norm=norm,
            learner_tokens=[tokens],
            source_tokens=[tokens],
            text_bytes=[7],
            is_self=[False],
        ).item()
        for norm in ("learner_tokens", "own_tokens")
    )
    assert one == other


def test_empty_text_is_finite() -> None:
    # Only EOS: no bytes, one token on each side; 0 bytes count as 1.
    got = ratios([-3.0], [-1.0], norm="bytes", learner_tokens=[1], source_tokens=[1], text_bytes=[0], is_self=[False])
    assert got.item() == -2.0


def test_log_ratio_gradient_is_one_over_the_learners_length() -> None:
    learner = torch.tensor([-6.0, -6.0], dtype=torch.float64, requires_grad=True)
    for norm, length in (("learner_tokens", 4), ("own_tokens", 4), ("bytes", 10)):
        value = log_ratio(
            learner_logprob_b=learner,
            source_logprob_b=torch.tensor([-4.0, -4.0], dtype=torch.float64),
            learner_tokens_b=torch.tensor([4, 4]),
            source_tokens_b=torch.tensor([2, 4]),
            text_bytes_b=torch.tensor([10, 10]),
            is_self_b=torch.tensor([False, True]),
            ratio_norm=norm,
        )
        (gradient,) = torch.autograd.grad(value.sum(), learner)
        torch.testing.assert_close(gradient, torch.tensor([1 / length, 1 / 4], dtype=torch.float64), rtol=0, atol=1e-16)


def test_the_ratio_is_bounded_before_exp() -> None:
    values = torch.tensor([-math.inf, -1e6, -10.5, 0.5, 10.5, math.inf], dtype=torch.float64, requires_grad=True)
    got = bounded_ratio(values)
    low, high = math.exp(-10), math.exp(10)
    torch.testing.assert_close(
        got, torch.tensor([low, low, low, math.exp(0.5), high, high], dtype=torch.float64), rtol=1e-14, atol=0
    )
    (gradient,) = torch.autograd.grad(got.sum(), values)
    # d exp(x) / dx = exp(x) inside, 0 where bounded
    torch.testing.assert_close(
        gradient, torch.tensor([0, 0, 0, math.exp(0.5), 0, 0], dtype=torch.float64), rtol=1e-14, atol=0
    )


def test_sums_are_float64_and_ignore_padding() -> None:
    token_logprobs = torch.tensor([[-1.5, -0.25, math.nan], [-0.5, -math.inf, 3.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    got = sum_logprobs(token_logprobs, mask)
    assert got.dtype == torch.float64
    assert got.tolist() == [-1.75, -0.5]
    (gradient,) = torch.autograd.grad(got.sum(), token_logprobs)
    assert gradient.tolist() == mask.double().tolist()
    # 1e8 and 1 do not add up in float32.
    big = torch.tensor([[1e8, 1.0]], dtype=torch.float32)
    assert sum_logprobs(big, torch.ones(1, 2, dtype=torch.bool)).item() == 100000001.0


@pytest.mark.parametrize(("update_index", "lower"), [(0, 0.8), (1, 0.825), (4, 0.9), (8, 1.0), (9, 1.0), (100, 1.0)])
def test_stepwise_lower_bound_rises_to_one(update_index: int, lower: float) -> None:
    # min(1, 1 - 0.2 + 0.025 m)
    assert clip_bounds(update_index, clip_settings(), is_self=False) == pytest.approx((lower, 1.0), abs=1e-15)


def test_other_intervals() -> None:
    own = (1 - 3e-4, 1 + 4e-4)
    for update_index in (0, 7):
        assert clip_bounds(update_index, clip_settings(), is_self=True) == own
        assert clip_bounds(update_index, clip_settings(cross="own"), is_self=False) == own
        assert clip_bounds(update_index, clip_settings(cross="none"), is_self=False) == UNCLIPPED
        assert clip_bounds(update_index, clip_settings(cross_step=0.0), is_self=False) == (0.8, 1.0)
    # The unclipped interval holds whatever the bounded ratio can be, and is finite.
    extremes = bounded_ratio(torch.tensor([-1e9, 1e9], dtype=torch.float64))
    assert UNCLIPPED[0] < extremes[0].item() < extremes[1].item() < UNCLIPPED[1] < math.inf


def test_each_response_gets_its_interval() -> None:
    lower, upper = response_bounds(torch.tensor([True, False, True]), 2, clip_settings(own_low=0.2, own_high=0.28))
    assert lower.dtype == upper.dtype == torch.float64
    assert lower.tolist() == pytest.approx([0.8, 0.85, 0.8], abs=1e-15)
    assert upper.tolist() == pytest.approx([1.28, 1.0, 1.28], abs=1e-15)
