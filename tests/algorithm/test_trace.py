"""The trace's numbers without torch: by hand, and against the loss that training minimises."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from hacpo.algorithm import importance, trace
from hacpo.algorithm.loss import ResponseBatch, response_terms
from hacpo.algorithm.trace import TraceColumns, trace_columns
from hacpo.settings.algorithm import AlgorithmSettings, ClipSettings, ImportanceSettings
from hacpo.settings.base import merged
from hacpo.settings.recipes import RECIPES
from hacpo.settings.root import Settings
from hacpo.tools.inspect.plain import interval
from hacpo.tools.report.collect import Measurements, Ratios
from hacpo.tools.report.ratio_figures import own_ratio


def algorithm(recipe: str, **changes: object) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate({"recipe": recipe, **merged(RECIPES[recipe], changes)})


def columns(
    settings: AlgorithmSettings, *, own: list[bool], learner: list[float], advantage: list[float], update: int
) -> TraceColumns:
    """Responses of 4 tokens for the learner, 2 for the source and 8 bytes; the source's mean is -1 per token."""
    rows = len(own)
    return trace_columns(
        learner_logprob=learner,
        source_logprob=[-1.0] * rows,
        learner_tokens=[4] * rows,
        source_tokens=[4 if flag else 2 for flag in own],
        text_bytes=[8] * rows,
        is_self=own,
        effective_advantage=advantage,
        update=[update] * rows,
        importance=settings.importance,
        clip=settings.clip,
    )


def test_cross_by_hand() -> None:
    # m = 2: interval [1 - 0.2 + 2 * 0.025, 1] = [0.85, 1]. Sums: learner 4 * mean, source 2 * -1 = -2.
    # mean -0.525: (-2.1 + 2) / 4 = -0.025, s = e^-0.025 inside; weight s (alpha 1), objective s * s * 0.5
    # mean -0.45: (-1.8 + 2) / 4 = 0.05, s = e^0.05 above 1: c = 1, weight 1, objective 0.5, clipped
    # mean -1.0: (-4 + 2) / 4 = -0.5, s = e^-0.5 = 0.607 below: c = 0.85, weight 0.85, objective 0.85^2 * 0.5, clipped
    found = columns(algorithm("hacpo"), own=[False] * 3, learner=[-0.525, -0.45, -1.0], advantage=[0.5] * 3, update=2)
    assert found.ratio == pytest.approx([math.exp(-0.025), math.exp(0.05), math.exp(-0.5)], rel=1e-14)
    assert found.lower == pytest.approx([0.85] * 3, rel=1e-14)
    assert found.upper.tolist() == [1.0] * 3
    assert found.clipped.tolist() == [False, True, True]
    assert found.is_weight == pytest.approx([math.exp(-0.025), 1.0, 0.85], rel=1e-14)
    assert found.objective == pytest.approx([math.exp(-0.05) * 0.5, 0.5, 0.85**2 * 0.5], rel=1e-13)
    assert found.known.all()


def test_without_a_clip_the_weight_ends_at_one() -> None:
    # Eq. 12 weighs where s < 1. Sums as above, mean -0.45: s = e^0.05, weight 1, objective s * 0.5;
    # mean -1.0: s = e^-0.5, weight s^2 (alpha 2), objective s^3 * 0.5 = e^-1.5 * 0.5.
    settings = algorithm("no_clip", importance={"alpha": 2.0})
    found = columns(settings, own=[False] * 2, learner=[-0.45, -1.0], advantage=[0.5] * 2, update=2)
    assert found.is_weight == pytest.approx([1.0, math.exp(-1.0)], rel=1e-14)
    assert found.objective == pytest.approx([math.exp(0.05) * 0.5, math.exp(-1.5) * 0.5], rel=1e-13)


@pytest.mark.parametrize(
    ("norm", "exponent"),
    [
        ("learner_tokens", (-2.4 + 2.0) / 4),  # sums -0.6 * 4 and -1 * 2, over the learner's 4 tokens
        ("own_tokens", -0.6 + 1.0),  # mean minus mean
        ("bytes", (-2.4 + 2.0) / 8),  # over 8 bytes
    ],
)
def test_norms_by_hand(norm: str, exponent: float) -> None:
    settings = algorithm("hacpo", importance={"ratio_norm": norm})
    found = columns(settings, own=[False, True], learner=[-0.6, -1.0001], advantage=[1.0, 1.0], update=0)
    # An own response: mean -1.0001 against -1, over the learner's tokens under every norm.
    assert found.ratio == pytest.approx([math.exp(exponent), math.exp(-0.0001)], rel=1e-13)


def test_own_by_hand() -> None:
    # Own interval [0.9997, 1.0004]. s = e^0.001 = 1.0010: with A = 1 min(s, 1.0004) and no gradient; with A = -1
    # min(-s, -1.0004) = -s. s = e^-0.001 = 0.9990: A = -1 gives min(-s, -0.9997) = -0.9997, clipped; A = 1 gives s.
    found = columns(
        algorithm("hacpo"),
        own=[True] * 4,
        learner=[-0.999, -0.999, -1.001, -1.001],
        advantage=[1.0, -1.0, -1.0, 1.0],
        update=1,
    )
    high, low = math.exp(0.001), math.exp(-0.001)
    assert found.objective == pytest.approx([1.0004, -high, -0.9997, low], rel=1e-13)
    assert found.clipped.tolist() == [True, False, True, False]
    assert found.is_weight.tolist() == [1.0] * 4


def test_bounds_of_the_log_ratio_and_of_an_empty_text() -> None:
    settings = algorithm("hacpo", importance={"ratio_norm": "bytes"}, clip={"cross": "none"})
    found = trace_columns(
        learner_logprob=[-60.0, -0.5],
        source_logprob=[-1.0, -0.25],
        learner_tokens=[4, 1],
        source_tokens=[4, 1],
        text_bytes=[1, 0],
        is_self=[False, False],
        effective_advantage=[1.0, 1.0],
        update=[0, 0],
        importance=settings.importance,
        clip=settings.clip,
    )
    # -240 + 4 nats over one byte is held at -10; no bytes count as one: -0.5 + 0.25.
    assert found.ratio == pytest.approx([math.exp(-10), math.exp(-0.25)], rel=1e-14)
    assert (found.lower.tolist(), found.upper.tolist()) == ([0.0, 0.0], [1e5, 1e5])


def test_token_level_says_what_it_cannot_know() -> None:
    found = columns(algorithm("grpo"), own=[True, False], learner=[-0.9, -0.525], advantage=[1.0, 1.0], update=0)
    assert found.known.tolist() == [False, True]
    assert np.isnan(found.ratio).tolist() == np.isnan(found.objective).tolist() == [True, False]
    assert not found.clipped[0]
    assert (found.lower[0], found.upper[0], found.is_weight[0]) == pytest.approx((0.8, 1.28, 1.0))


CASES = [
    (recipe, norm, reference, alpha, cross)
    for recipe, norm, reference in itertools.product(
        RECIPES, ("learner_tokens", "own_tokens", "bytes"), ("source", "self")
    )
    for alpha, cross in ((0.0, None), (1.0, None), (2.5, "own"), (3.0, "none"))
]


@pytest.mark.parametrize(("recipe", "norm", "reference", "alpha", "cross"), CASES)
def test_agrees_with_the_loss(recipe: str, norm: str, reference: str, alpha: float, cross: str | None) -> None:
    changes: dict[str, object] = {"importance": {"ratio_norm": norm, "reference": reference, "alpha": alpha}}
    if cross:
        changes["clip"] = {"cross": cross}
    settings = algorithm(recipe, **changes)
    rng = np.random.default_rng([len(recipe), len(norm), int(10 * alpha)])
    rows, width = 200, 12
    lengths = rng.integers(1, width + 1, rows)
    mask = torch.from_numpy(np.arange(width) < lengths[:, None])
    own = rng.random(rows) < 0.5
    source_tokens = np.where(own | (reference == "self"), lengths, rng.integers(1, 30, rows))
    logprobs = torch.from_numpy(-rng.exponential(1.0, (rows, width)))
    # Most ratios near 1, some far outside every interval.
    shift = rng.normal(0, 1, rows) * rng.choice([1e-4, 0.05, 0.5, 30.0], rows)
    sums = (logprobs * mask).sum(dim=1).numpy()
    source_sum = sums - shift * lengths
    advantage = rng.normal(0, 1, rows) * (rng.random(rows) < 0.9)
    for update in (0, 3, 20):
        terms = response_terms(
            ResponseBatch(
                learner_logprobs_bt=logprobs,
                mask_bt=mask,
                source_logprob_b=torch.from_numpy(source_sum),
                source_tokens_b=torch.from_numpy(source_tokens),
                text_bytes_b=torch.from_numpy(lengths * 2 - 1),
                is_self_b=torch.from_numpy(own),
                effective_advantage_b=torch.from_numpy(advantage),
                row_weight_b=torch.ones(rows, dtype=torch.float64),
                sampler_weight_b=torch.ones(rows, dtype=torch.float64),
                old_logprobs_bt=logprobs,
            ),
            update_index=update,
            importance=settings.importance,
            clip=settings.clip,
        )
        found = trace_columns(
            learner_logprob=terms.learner_logprob_b.numpy(),
            source_logprob=terms.source_logprob_b.numpy(),
            learner_tokens=lengths,
            source_tokens=source_tokens,
            text_bytes=lengths * 2 - 1,
            is_self=own,
            effective_advantage=advantage,
            update=np.full(rows, update),
            importance=settings.importance,
            clip=settings.clip,
        )
        known = found.known
        for name in ("ratio", "lower", "upper", "is_weight", "objective"):
            wanted = getattr(terms, f"{name}_b").numpy()
            where = known if name in ("ratio", "objective") else np.ones(rows, bool)
            # Rounding only: a mean times its count is the sum to a few of the last bits.
            np.testing.assert_allclose(getattr(found, name)[where], wanted[where], rtol=1e-11, atol=1e-13, err_msg=name)
        assert (found.clipped[known] == terms.clipped_b.numpy()[known]).all()
        assert 0 < found.clipped.sum() < rows or settings.importance.level == "token" or cross == "none"


def test_constants_are_those_of_training() -> None:
    assert trace.LOG_RATIO_BOUND == importance.LOG_RATIO_BOUND
    assert trace.UNCLIPPED == importance.UNCLIPPED


@pytest.mark.parametrize(("upper", "unclipped"), [(1.0, False), (1.2, False), (20_000.0, False), (25_000.0, True)])
def test_a_bound_that_no_ratio_can_reach_clips_nothing(upper: float, unclipped: bool) -> None:
    # A log-ratio is at most 10, and e^10 = 22026.5.
    assert trace.is_unclipped(upper) is unclipped
    assert (interval(0.0, upper) == "unclipped") is unclipped
    ratios = Ratios(1, 1.0, (1.0,) * 5, (0.0, 0.0), upper, 0.0, 0.0, 1.0, (1.0, 1.0), {})
    measured = SimpleNamespace(
        agents=["ada"], ratios={("ada", "own"): {1: ratios}}, color_of=lambda _: "c0", last_step=1
    )
    drawn = str(own_ratio(cast(Measurements, measured), cast(Settings, None)))
    assert ("upper bound" not in drawn) is unclipped


def test_no_torch() -> None:
    code = "import sys, hacpo.algorithm.trace; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_settings_types() -> None:
    """What the functions ask for is what the settings tree holds."""
    assert isinstance(algorithm("hacpo").importance, ImportanceSettings)
    assert isinstance(algorithm("hacpo").clip, ClipSettings)
