"""An auditor with Polars and the artifact contract alone recomputes every number that training used.

Nothing of hacpo is imported: only the formulas of the paper and the columns of the tables.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from pathlib import Path
from typing import Any

import polars as pl
import pytest

AGENTS = ("ada", "bo")


@pytest.fixture(scope="module", params=[1, 2])
def step(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def base(finished: Path) -> Path:
    return finished / "artifacts" / "small"


@pytest.fixture(scope="module")
def settings(base: Path) -> dict[str, Any]:
    return json.loads((base / "settings.json").read_text())


def read(base: Path, table: str, step: int, **partition: str) -> pl.DataFrame:
    folder = base / table / f"step={step:04d}"
    for key, value in partition.items():
        folder /= f"{key}={value}"
    return pl.read_parquet(folder / "*.parquet", hive_partitioning=False)


def test_counts_and_joins(base: Path, step: int, settings: dict[str, Any]) -> None:
    scheduled = pl.read_parquet(base / "schedule.parquet").filter(pl.col("step") == step)
    assert scheduled["position"].to_list() == list(range(settings["batch"]["prompts"]))
    ids: set[str] = set()
    for agent in AGENTS:
        rollouts = read(base, "rollouts", step, agent=agent)
        wanted = [
            f"{step:04d}/{agent}/{problem}/{sample:03d}"
            for problem in scheduled["problem_id"]
            for sample in range(settings["sampling"]["group_size"])
        ]
        assert rollouts["rollout_id"].to_list() == wanted
        assert read(base, "verdicts", step, agent=agent)["rollout_id"].to_list() == wanted
        assert (rollouts["token_ids"].list.len() == rollouts["logprobs"].list.len()).all()
        assert (rollouts["token_ids"].list.len() == rollouts["sampler_logprobs"].list.len()).all()
        ids |= set(wanted)
    for learner in AGENTS:
        pool = read(base, "pool", step, learner=learner)
        advantages = read(base, "advantages", step, learner=learner)
        assert set(pool["rollout_id"]) == ids
        assert pool["rollout_id"].to_list() == advantages["rollout_id"].to_list()
        trace = pl.read_parquet(base / "updates" / f"step={step:04d}" / f"agent={learner}" / "trace.parquet")
        assert set(trace["rollout_id"]) == set(pool.filter(pl.col("status") == "kept")["rollout_id"])


def test_policy_is_the_hash_of_the_previous_checkpoint(base: Path, step: int) -> None:
    for agent in AGENTS:
        weights = base / "checkpoints" / f"step={step - 1:04d}" / f"agent={agent}" / "model.safetensors"
        wanted = hashlib.sha256(weights.read_bytes()).hexdigest()
        assert set(read(base, "rollouts", step, agent=agent)["policy"]) == {wanted}


def test_capability(base: Path, step: int, settings: dict[str, Any]) -> None:
    table = {
        row["agent"]: row for row in pl.read_parquet(base / "capability" / f"step={step:04d}" / "*.parquet").to_dicts()
    }
    for agent in AGENTS:
        history = [
            statistics.fmean(read(base, "verdicts", earlier, agent=agent)["reward"]) for earlier in range(1, step + 1)
        ]
        window = history[-settings["algorithm"]["capability"]["window"] :]
        assert table[agent]["accuracy"] == pytest.approx(history[-1], abs=1e-12)
        assert table[agent]["window"] == pytest.approx(window, abs=1e-12)
        assert table[agent]["capability"] == pytest.approx(max(statistics.fmean(window), 1e-8), abs=1e-12)


def omega(base: Path, step: int, of: str, relative_to: str) -> float:
    table = pl.read_parquet(base / "capability" / f"step={step:04d}" / "*.parquet")
    capability = dict(zip(table["agent"], table["capability"], strict=True))
    return 1.0 if of == relative_to else min(max(capability[of] / capability[relative_to], 0.1), 10.0)


def test_every_advantage(base: Path, step: int) -> None:
    """Eq. 6, 7 and 10 with the guard, row by row."""
    rewards: dict[str, dict[str, list[float]]] = {}
    for agent in AGENTS:
        verdicts = read(base, "verdicts", step, agent=agent)
        for problem, reward in zip(verdicts["problem_id"], verdicts["reward"], strict=True):
            rewards.setdefault(problem, {}).setdefault(agent, []).append(reward)

    def baseline(problem: str, agent: str) -> tuple[float, bool]:
        group = rewards[problem]
        count = sum(len(values) for values in group.values())
        mu = sum(omega(base, step, agent, other) * reward for other in AGENTS for reward in group[other]) / count
        return (statistics.fmean(group[agent]), True) if mu > 1 + 1e-12 else (mu, False)

    informative = 0
    for learner in AGENTS:
        for row in read(base, "advantages", step, learner=learner).to_dicts():
            everything = [reward for values in rewards[row["problem_id"]].values() for reward in values]
            mu, guarded = baseline(row["problem_id"], row["source"])
            uniform = len(set(everything)) == 1
            advantage = 0.0 if uniform else (row["reward"] - mu) / (statistics.stdev(everything) + 1e-6)
            factor = 1.0 if row["is_self"] else omega(base, step, row["source"], learner)
            assert row["uniform"] == uniform
            assert row["guarded"] == guarded
            assert row["baseline"] == pytest.approx(mu, abs=1e-9)
            assert row["sigma"] == pytest.approx(statistics.stdev(everything), abs=1e-9)
            assert row["advantage"] == pytest.approx(advantage, abs=1e-9)
            assert row["omega"] == pytest.approx(factor, abs=1e-9)
            assert row["effective_advantage"] == pytest.approx(factor * advantage, abs=1e-9)
            informative += not uniform
    assert informative > 0


def test_every_source_logprob(base: Path, step: int) -> None:
    sums = {
        row["rollout_id"]: (math.fsum(row["logprobs"]), len(row["token_ids"]), len(row["text"].encode()))
        for agent in AGENTS
        for row in read(base, "rollouts", step, agent=agent).to_dicts()
    }
    for learner in AGENTS:
        for row in read(base, "pool", step, learner=learner).to_dicts():
            total, tokens, size = sums[row["rollout_id"]]
            assert row["source_logprob"] == pytest.approx(total, abs=1e-9)
            assert (row["source_tokens"], row["text_bytes"]) == (tokens, size)
            assert row["learner_tokens"] == len(row["token_ids"])


def test_every_ratio_bound_weight_and_objective(base: Path, step: int, settings: dict[str, Any]) -> None:
    """Eq. 11-14: ratio from log-probabilities and the pool's counts; clip, weight and objective from the ratio."""
    clip, alpha = settings["algorithm"]["clip"], settings["algorithm"]["importance"]["alpha"]
    kinds = set()
    for learner in AGENTS:
        pool = {row["rollout_id"]: row for row in read(base, "pool", step, learner=learner).to_dicts()}
        worth = {
            row["rollout_id"]: row["effective_advantage"]
            for row in read(base, "advantages", step, learner=learner).to_dicts()
        }
        trace = pl.read_parquet(base / "updates" / f"step={step:04d}" / f"agent={learner}" / "trace.parquet")
        assert sorted(set(trace["update"])) == [0, 1, 2, 3]
        for row in trace.to_dicts():
            entry, value = pool[row["rollout_id"]], worth[row["rollout_id"]]
            learner_sum = row["learner_logprob"] * entry["learner_tokens"]
            source_sum = row["source_logprob"] * entry["source_tokens"]
            assert source_sum == pytest.approx(entry["source_logprob"], abs=1e-9)
            s = math.exp(max(-10.0, min(10.0, (learner_sum - source_sum) / entry["learner_tokens"])))
            assert row["ratio"] == pytest.approx(s, rel=1e-9)
            if row["is_self"]:
                lower, upper = 1 - clip["own_low"], 1 + clip["own_high"]
                c = min(max(s, lower), upper)
                objective, weight = min(s * value, c * value), 1.0
                clipped = (value > 0 and s > upper) or (value < 0 and s < lower)
            else:
                lower, upper = min(1.0, 1 - clip["cross_delta"] + row["update"] * clip["cross_step"]), 1.0
                c = min(max(s, lower), upper)
                weight = c**alpha
                objective, clipped = c * weight * value, s < lower or s > upper
            assert (row["lower"], row["upper"]) == pytest.approx((lower, upper), abs=1e-12)
            assert row["is_weight"] == pytest.approx(weight, rel=1e-9)
            assert row["objective"] == pytest.approx(objective, rel=1e-9, abs=1e-12)
            assert row["clipped"] == clipped
            kinds.add((row["is_self"], clipped))
    assert len(kinds) >= 3, "the run is too tame to check clipping"


def test_own_tokens_are_the_sampled_ones_and_cross_texts_are_the_same_text(base: Path, step: int) -> None:
    from transformers import AutoTokenizer

    texts = {row["rollout_id"]: row for agent in AGENTS for row in read(base, "rollouts", step, agent=agent).to_dicts()}
    for learner in AGENTS:
        tokenizer = AutoTokenizer.from_pretrained(base / "checkpoints" / "step=0000" / f"agent={learner}")
        for row in read(base, "pool", step, learner=learner).to_dicts():
            original = texts[row["rollout_id"]]
            if row["is_self"]:
                assert row["token_ids"] == original["token_ids"]
            elif row["status"] == "kept":
                assert tokenizer.decode(row["token_ids"], skip_special_tokens=True) == original["text"]
                ended = row["token_ids"][-1] == tokenizer.eos_token_id
                assert ended == (original["finish_reason"] == "stop")


def test_checkpoints_load_anywhere(base: Path, step: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for agent in AGENTS:
        folder = base / "checkpoints" / f"step={step:04d}" / f"agent={agent}"
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "7+3-2=?"}], tokenize=False, add_generation_prompt=True
        )
        assert "7+3-2=?" in text
        assert model.num_parameters() > 1000
        assert {path.name for path in (folder / "trainer").iterdir()} == {"optimizer.safetensors", "state.json"}
