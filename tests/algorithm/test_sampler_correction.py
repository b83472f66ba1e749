"""Sampler against training stack: statistics, the truncated weight, and that files alone give it back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import Cli, train
from hacpo.algorithm.sampler_correction import (
    effective_sample_size,
    sampler_metrics,
    sequence_log_weight,
    truncated_weight,
)
from hacpo.algorithm.training_pool import training_pool
from hacpo.errors import ArtifactError, DataError

# --- numbers by hand -------------------------------------------------------------------------------------------------


def test_log_weight_by_hand() -> None:
    # (-1 + 1.5) + (-2 + 1.75) = 0.25
    assert sequence_log_weight([-1.0, -2.0], [-1.5, -1.75]) == 0.25
    with pytest.raises(DataError, match="differ in length"):
        sequence_log_weight([-1.0, -2.0], [-1.5])


def test_truncated_weight_by_hand() -> None:
    assert truncated_weight(math.log(1.5), 2.0) == pytest.approx(1.5, rel=1e-15)
    assert truncated_weight(-0.7, 2.0) == math.exp(-0.7)  # small weights stay
    assert truncated_weight(0.7, 2.0) == 2.0  # e^0.7 = 2.01 is cut
    assert truncated_weight(1e6, 2.0) == 2.0
    assert truncated_weight(-1e6, 2.0) == 0.0


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=8), st.floats(0.1, 5.0))
def test_weights_equal_the_published_form(differences: list[float], cap: float) -> None:
    """TRL 1.16, `GRPOTrainer` with `vllm_importance_sampling_mode="sequence_truncate"`: clamp(exp(sum of the masked
    differences), max=C_max); verl, `compute_rollout_correction_weights(rollout_is="sequence")`: the same."""
    published = torch.tensor(differences, dtype=torch.float64).sum().exp().clamp(max=cap).item()
    weight = truncated_weight(sequence_log_weight(differences, [0.0] * len(differences)), cap)
    assert weight == pytest.approx(published, rel=1e-12)


def test_effective_sample_size_by_hand() -> None:
    # Weights 1, 1, 2: 4^2 / (3 * 6)
    assert effective_sample_size([0.0, 0.0, math.log(2)]) == pytest.approx(16 / 18, rel=1e-14)
    assert effective_sample_size([-700.0] * 5) == 1.0  # equal weights, however small
    assert effective_sample_size([800.0, 0.0, 0.0, 0.0]) == 0.25  # one has it all, without overflow
    for bad in ([], [0.0, math.nan], [math.inf]):
        with pytest.raises(DataError, match="finite and at least one"):
            effective_sample_size(bad)


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=20), st.floats(-500, 500))
def test_effective_sample_size_is_a_share_and_knows_no_scale(log_weights: list[float], shift: float) -> None:
    size = effective_sample_size(log_weights)
    assert 1 / len(log_weights) - 1e-12 <= size <= 1 + 1e-12
    assert effective_sample_size([value + shift for value in log_weights]) == pytest.approx(size, rel=1e-6)


def test_metrics_by_hand() -> None:
    # Differences 0, -0.1 | 0.3: mean 0.4 / 3, largest 0.3; 99th of three: rank 0.99 * 2 = 1.98 between 0.1 and 0.3.
    metrics = sampler_metrics([[-1.0, -2.1], [-0.5]], [[-1.0, -2.0], [-0.8]])
    assert metrics["sampler_difference_mean"] == pytest.approx(0.4 / 3, rel=1e-12)
    assert metrics["sampler_difference_p99"] == pytest.approx(0.1 + 0.98 * 0.2, rel=1e-12)
    assert metrics["sampler_difference_max"] == pytest.approx(0.3, rel=1e-12)
    # Weights e^-0.1 and e^0.3: (sum)^2 / (2 * sum of squares)
    one, other = math.exp(-0.1), math.exp(0.3)
    assert metrics["sampler_ess"] == pytest.approx((one + other) ** 2 / (2 * (one**2 + other**2)), rel=1e-12)
    agreed = {
        "sampler_difference_mean": 0.0,
        "sampler_difference_p99": 0.0,
        "sampler_difference_max": 0.0,
        "sampler_ess": 1.0,
    }
    for same in ([np.float32([-1.5, -0.25])], [[], []], [[-2.0], []]):
        assert sampler_metrics(same, same) == agreed


# --- rows to train on ------------------------------------------------------------------------------------------------


REST = {"source": "ada", "prompt_token_ids": [3], "source_logprob": -1.0, "source_tokens": 1, "text_bytes": 1}
KEPT = pa.list_(pa.list_(pa.int32()))


def pooled(token_ids: list[int], support: list[list[int]] | None = None, cross: tuple[int, ...] = (7,)) -> pa.Table:
    rows = [
        {"rollout_id": "a", "is_self": True, "token_ids": token_ids, **REST},
        {"rollout_id": "b", "is_self": False, "token_ids": list(cross), **REST},
    ]
    return pa.Table.from_pylist(rows).append_column("support", pa.array([None, support], KEPT))


def own_table(support: list[list[int]] | None = None) -> pa.Table:
    row = {"rollout_id": "a", "logprobs": [-1.0, -2.0, -3.0], "sampler_logprobs": [-1.25, -2.0, -9.0]}
    return pa.Table.from_pylist([row]).append_column("support", pa.array([support], KEPT))


WORTH = pa.table({"rollout_id": ["b", "a"], "effective_advantage": [2.0, 1.0], "selected": pa.nulls(2, pa.bool_())})


@pytest.mark.parametrize(
    ("token_ids", "cap", "weight"),
    [
        ([4, 5, 1], None, 1.0),  # off
        ([4, 5, 1], 2.0, 2.0),  # 0.25 + 0 + 6: cut
        ([4, 5], 2.0, math.exp(0.25)),  # the EOS is not scored, so it does not count
        ([4, 5], 1.1, 1.1),
    ],
)
def test_rows_carry_the_weight_of_their_scored_tokens(token_ids: list[int], cap: float | None, weight: float) -> None:
    own, cross = training_pool(pooled(token_ids), WORTH, own_table(), sampler_cap=cap, where="here").rows([0, 1])
    assert (own.sampler_weight, own.effective_advantage) == (weight, 1.0)
    assert own.old_logprobs == [-1.0, -2.0, -3.0][: len(token_ids)]
    assert (cross.sampler_weight, cross.old_logprobs, cross.effective_advantage) == (1.0, None, 2.0)


@pytest.mark.parametrize("token_ids", [[4], [4, 5, 1, 1]])
def test_rows_of_other_tokens_are_refused(token_ids: list[int]) -> None:
    said = rf"do not hold the same tokens \(expected 3 tokens of 'a', or one less, found {len(token_ids)}\)"
    with pytest.raises(ArtifactError, match=said):
        training_pool(pooled(token_ids), WORTH, own_table(), sampler_cap=None, where="here")


@pytest.mark.parametrize(("table", "odd"), [("pool", "b"), ("advantages", "a"), ("own", "a")])
def test_rows_that_are_in_one_table_only_are_refused(table: str, odd: str) -> None:
    tables = {"pool": pooled([4, 5]), "advantages": WORTH, "own": own_table()}
    tables[table] = tables[table].filter(pc.not_equal(tables[table]["rollout_id"], odd))
    with pytest.raises(ArtifactError, match=f"do not belong together .found '{odd}' in only one of them"):
        training_pool(**tables, sampler_cap=None, where="here")


def test_rows_carry_what_was_kept_at_their_scored_tokens() -> None:
    """A response that is not learned from has no tokens; its source kept some all the same."""
    pool = pooled([4, 5], [[7]], cross=())
    fits = own_table([[4, 6], [5], [1]])
    own, _ = training_pool(pool, WORTH, fits, sampler_cap=None, where="here").rows([0, 1])
    assert own.support is not None
    assert own.support.lists() == [[4, 6], [5]]


@pytest.mark.parametrize(("own", "cross"), [([[4]], [[7]]), ([[4, 6], [5]], [[7], [8]])])
def test_sets_of_kept_ids_that_do_not_fit_the_tokens_are_refused(own: list[list[int]], cross: list[list[int]]) -> None:
    """In a batch they would be taken for its next response's."""
    with pytest.raises(ArtifactError, match="support does not fit the tokens"):
        training_pool(pooled([4, 5], cross), WORTH, own_table(own), sampler_cap=None, where="here")


def test_another_policy_to_divide_by_changes_nothing_in_place() -> None:
    pool = training_pool(pooled([4, 5]), WORTH, own_table(), sampler_cap=None, where="here")
    pool = replace(pool, table=pool.table.append_column("learner_tokens", pa.array([2, 1], pa.int32())))
    own, cross = pool.divided_by({1: -4.5}).rows([0, 1])
    assert (cross.source_logprob, cross.source_tokens) == (-4.5, 1)
    assert (own.source_logprob, own.source_tokens) == (-1.0, 1)
    assert pool.rows([1])[0].source_logprob == -1.0


# --- through the command line ----------------------------------------------------------------------------------------


def table(base: Path, name: str, agent: str, key: str = "agent") -> pl.DataFrame:
    return pl.read_parquet(base / name / "step=0001" / f"{key}={agent}" / "*.parquet", hive_partitioning=False)


@pytest.mark.parametrize("score_eos", [True, False])
def test_bfloat16_is_corrected_and_every_weight_recomputes(project: Path, cli: Cli, score_eos: bool) -> None:
    """In bfloat16 token by token sampling with a cache and scoring whole responses round differently: weights on both
    sides of 1. The cap of 1 cuts those above.
    """
    params = project / "pipelines" / "small" / "params.yaml"
    correction = "  loss: {sampler_correction: truncated, sampler_correction_cap: 1.0}\n"
    text = params.read_text().replace("{alpha: 1.0}", f"{{alpha: 1.0, score_eos: {str(score_eos).lower()}}}")
    text = text.replace("{device: cpu,", "{device: cpu, dtype: bfloat16,")
    params.write_text(text.replace("data:\n", f"{correction}data:\n", 1))
    base = train(cli, "small", ("ada", "bo"))
    for agent in ("ada", "bo"):
        pool = {row["rollout_id"]: row for row in table(base, "pool", agent, "learner").to_dicts()}
        rollouts = {row["rollout_id"]: row for row in table(base, "rollouts", agent).to_dicts()}
        trace = table(base, "updates", agent)
        capped = 0
        for row in trace.to_dicts():
            expected = 1.0
            if row["is_self"]:
                rollout, count = rollouts[row["rollout_id"]], len(pool[row["rollout_id"]]["token_ids"])
                pairs = zip(rollout["logprobs"][:count], rollout["sampler_logprobs"][:count], strict=True)
                expected = min(1.0, math.exp(math.fsum(p - q for p, q in pairs)))
                capped += expected == 1.0
                # The objective is what it is without the correction.
                worth = table(base, "advantages", agent, "learner").filter(pl.col("rollout_id") == row["rollout_id"])
                value, ratio = worth["effective_advantage"][0], row["ratio"]
                clipped = min(max(ratio, row["lower"]), row["upper"])
                assert row["objective"] == pytest.approx(min(ratio * value, clipped * value), rel=1e-12, abs=1e-15)
            assert row["sampler_weight"] == pytest.approx(expected, rel=1e-14)
        own = trace.filter("is_self")["sampler_weight"]
        assert 0 < capped < len(own)
        metrics = json.loads((base / "metrics" / "update" / "step=0001" / f"{agent}.json").read_text())
        assert metrics["own.sampler_weight_mean"] == pytest.approx(own.mean(), rel=1e-12)


def test_generate_says_how_well_sampler_and_trainer_agree(finished: Path) -> None:
    base = finished / "artifacts" / "small"
    for agent in ("ada", "bo"):
        metrics = json.loads((base / "metrics" / "generate" / "step=0001" / f"{agent}.json").read_text())
        rollouts = table(base, "rollouts", agent)
        gaps = [
            np.array(p) - np.array(q)
            for p, q in zip(rollouts["logprobs"].to_list(), rollouts["sampler_logprobs"].to_list(), strict=True)
        ]
        sizes = np.abs(np.concatenate(gaps))
        weights = np.exp([gap.sum() for gap in gaps])
        assert metrics["sampler_difference_mean"] == pytest.approx(sizes.mean(), rel=1e-9)
        assert metrics["sampler_difference_p99"] == pytest.approx(np.quantile(sizes, 0.99), rel=1e-9)
        assert metrics["sampler_difference_max"] == sizes.max() > 0
        assert metrics["sampler_ess"] == pytest.approx(weights.sum() ** 2 / (len(gaps) * (weights**2).sum()), rel=1e-9)
        # The same weights and precision, another code path: rounding only.
        assert sizes.max() < 1e-4
        assert 1 - 1e-6 < metrics["sampler_ess"] <= 1
        trace = pl.read_parquet(base / "updates/step=0001" / f"agent={agent}" / "trace.parquet")
        assert (trace["sampler_weight"] == 1.0).all()  # off by default
