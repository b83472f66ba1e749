"""What the authors' two code bases do where they differ from the paper, in numbers that their functions give by hand.

Branch `verl-v1` (`compute_hacpo_advantages`, `compute_hacpo_loss`, `CapabilityTracker`): recipe `reference_code`.
Branch `main` (`mapo`, `mapo_clip`): recipe `reference_code_main`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from conftest import Cli, train
from hacpo.algorithm.advantage_table import CapabilityRow, capability_rows
from hacpo.algorithm.capability import omega_matrix
from hacpo.algorithm.group_advantage import StepAdvantages, step_advantages
from hacpo.algorithm.loss import ResponseBatch, kl_to_initial, row_weights, update_loss
from hacpo.algorithm.pooling import NO_LIMIT, Limits, TextRoute, build_pool
from hacpo.artifacts.problem_rows import Asked
from hacpo.pipeline.catalogue import POOL_STAGE
from hacpo.settings.agents import PromptSettings
from hacpo.settings.algorithm import AlgorithmSettings
from hacpo.settings.params import load, reads
from hacpo.settings.recipes import RECIPES
from hacpo.tokens.terminals import Terminals
from tests.tampering import Sandbox

# --- the pool without EOS --------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of single letters; the learner's EOS is 9, the source's is 1."""

    unk_token_id = None

    def __init__(self, eos_token_id: int) -> None:
        self.terminals = Terminals.of(eos_token_id, {eos_token_id: "<eos>"}, eos_token_id)

    def holds_control(self, token_ids: Sequence[int]) -> bool:
        return 2 in token_ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [[ord(letter) for letter in text] for text in texts]

    def decode_all(self, token_ids: Sequence[list[int]]) -> list[str]:
        return ["".join(map(chr, ids)) for ids in token_ids]

    def render(self, problem_id: str, messages: list[dict[str, str]], thinking: bool | None = None) -> list[int]:
        return [50, 51]


def response(sample: int, text: str, token_ids: list[int], finish_reason: str = "stop") -> dict[str, Any]:
    return {
        "rollout_id": f"{text}/{sample}",
        "problem_id": "p",
        "sample": sample,
        "prompt_token_ids": [50, 51],
        "token_ids": token_ids,
        "text": text,
        "finish_reason": finish_reason,
        "stop_string": None,
        # -1, -2, -4, ...: every sum of the first tokens is another number
        "logprobs": [-(2.0**place) for place in range(len(token_ids))],
        "reward": 1.0,
    }


SOURCE = [
    response(0, "ab", [70, 71, 1]),  # two tokens and EOS
    response(1, "ab", [70, 71], "length"),  # cut off: no EOS
    response(2, "", [1]),  # nothing but EOS
    response(3, "", [2, 1]),  # a control token and EOS: no text
]


def pool_of(source: list[dict[str, Any]], *, score_eos: bool, max_tokens: int | None = None) -> list[dict[str, Any]]:
    own = [response(sample, "cc", [99, 99, 9]) for sample in range(len(source) - 1)]
    own.append(response(len(source) - 1, "", [9]))
    table = build_pool(
        [Asked("p", "?", "2")],
        {"learner": pa.Table.from_pylist(own), "source": pa.Table.from_pylist(source)},
        learner="learner",
        group_size=len(source),
        routes={"source": TextRoute(Letters(1), Letters(9))},
        prompt_settings=PromptSettings(),
        limits=Limits(NO_LIMIT if max_tokens is None else max_tokens),
        score_eos=score_eos,
    )
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def told(rows: list[dict[str, Any]], is_self: bool) -> list[tuple[Any, ...]]:
    names = ("token_ids", "source_logprob", "source_tokens", "learner_tokens", "status")
    return [tuple(row[name] for name in names) for row in rows if row["is_self"] == is_self]


def test_a_scored_eos_is_part_of_both_sides() -> None:
    rows = pool_of(SOURCE, score_eos=True)
    assert told(rows, is_self=True) == [*[([99, 99, 9], -7.0, 3, 3, "kept")] * 3, ([9], -1.0, 1, 1, "kept")]
    assert told(rows, is_self=False) == [
        ([97, 98, 9], -7.0, 3, 3, "kept"),
        ([97, 98], -3.0, 2, 2, "kept"),
        ([], -1.0, 1, 0, "empty"),
        ([], -3.0, 2, 0, "empty"),
    ]


def test_without_it_the_pool_holds_neither_its_id_nor_its_log_probability() -> None:
    rows = pool_of(SOURCE, score_eos=False)
    # -1 - 2 without the EOS's -4. A response that is nothing but EOS keeps it, own and cross.
    assert told(rows, is_self=True) == [*[([99, 99], -3.0, 2, 2, "kept")] * 3, ([9], -1.0, 1, 1, "kept")]
    assert told(rows, is_self=False) == [
        ([97, 98], -3.0, 2, 2, "kept"),
        ([97, 98], -3.0, 2, 2, "kept"),  # cut off: nothing to leave out
        ([9], -1.0, 1, 1, "kept"),  # the learner's EOS for the source's
        ([], -1.0, 1, 0, "empty"),
    ]
    assert [row["text_bytes"] for row in rows if not row["is_self"]] == [2, 2, 0, 0]


def test_an_eos_that_is_not_scored_needs_no_room() -> None:
    # The prompt has two tokens, the response two and its EOS.
    status = {
        (score, limit): told(pool_of(SOURCE, score_eos=score, max_tokens=limit), is_self=False)[0][-1]
        for score in (True, False)
        for limit in (4, 5)
    }
    assert status == {(True, 4): "too_long", (True, 5): "kept", (False, 4): "kept", (False, 5): "kept"}
    # A learner without any room cannot take even a lone EOS.
    assert told(pool_of(SOURCE, score_eos=False, max_tokens=2), is_self=False)[2][-1] == "too_long"


def test_the_pool_reads_nothing_else_of_the_importance_block(project: Path, cli: Cli, tmp_path: Path) -> None:
    path = project / "pipelines" / "small" / "params.yaml"
    one = reads(load(path, ["algorithm.importance.alpha=1.0"]), POOL_STAGE.settings, "ada")
    assert one["algorithm"]["importance"] == {"score_eos": True}
    assert reads(load(path, ["algorithm.importance.alpha=3.0"]), POOL_STAGE.settings, "ada") == one
    assert reads(load(path, ["algorithm.importance.score_eos=false"]), POOL_STAGE.settings, "ada") != one
    refused = cli(
        "pool", "pipelines/small", "--step", 1, "--learner", "ada", "--out", tmp_path / "out",
        "--set", "algorithm.importance.alpha=3.0",
    )  # fmt: skip
    assert "pool does not read this setting" in refused.error


# --- both code bases by hand -----------------------------------------------------------------------------------------


BOTH = ["reference_code", "reference_code_main"]
SCALE = 0.5 / 0.500001


def algorithm(recipe: str) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate({"recipe": recipe, **RECIPES[recipe]})


def advantages_of(recipe: str, rewards: list[list[float]], capability: list[float], learner: int = 0) -> StepAdvantages:
    """Of one prompt; rewards by agent."""
    settings = algorithm(recipe)
    return step_advantages(
        np.array([rewards]),
        learner=learner,
        capability_n=np.array(capability),
        settings=settings.advantage,
        capability_settings=settings.capability,
    )


@pytest.mark.parametrize("recipe", BOTH)
def test_one_prompt_from_rewards_to_the_gradient(recipe: str) -> None:
    """The third update (m = 2) of the first of two agents.

    Rewards 1 0 | 1 1, Phat .3 and .6: omega(0,1) = .5, omega(1,0) = 2. mu = (1 + 0 + .5 + .5) / 4 = .5 for all four, as
    in eq. 50. Rewards deviate from .75 by .25 .75 .25 .25: sigma = sqrt(.75 / 3) = .5, so A = S, -S | S, S with
    S = .5 / .500001, and 2 S, 2 S of the other agent's after omega.

    Two tokens of -1 at the source. The learner: own, two tokens of log 1.1 - 1 and log .9 - 1; cross, four tokens of
    log .9 - 1 and log .8 - 1. Each side by its own tokens: ratios 1.1 .9 | .9 .8. (One length for both:
    exp((4 log .9 - 4 + 2) / 4) = .55.) Own: min(1.1 S, 1.0004 S) = 1.0004 S, min(-.9 S, -.9997 S) = -.9997 S. Cross, in
    [.85, 1]: .9^2 and .85^2. Loss: -(1.0004 - .9997 + 2 (.81 + .7225)) S / 4 = -.7664234671530656, as `mapo_clip` says.

    KL, own only: d = 1 and 3 on the first row, 0 and -1 on the second. k3 = e - 2, 10 (e^3 - 4 = 16.1, capped), 0 and
    e^-1. Mean over a row's tokens, sum over own rows, over all four rows: .001 (e - 2 + 10 + e^-1) / 2 / 4.
    """
    settings = algorithm(recipe)
    worth = advantages_of(recipe, [[1.0, 0.0], [1.0, 1.0]], [0.3, 0.6])
    np.testing.assert_allclose(worth.baseline, 0.5, rtol=1e-15)
    np.testing.assert_allclose(worth.effective_advantage.ravel(), [SCALE, -SCALE, 2 * SCALE, 2 * SCALE], rtol=1e-14)

    logs = torch.tensor([1.1, 0.9, 0.9, 0.8], dtype=torch.float64).log()[:, None] - 1.0
    d = torch.tensor([[1.0, 3.0], [0.0, -1.0]], dtype=torch.float64)
    learner = logs.repeat(1, 4).requires_grad_()
    own = torch.tensor([True, True, False, False])
    batch = ResponseBatch(
        learner_logprobs_bt=learner,
        mask_bt=torch.tensor([[True, True, False, False]] * 2 + [[True] * 4] * 2),
        source_logprob_b=torch.full((4,), -2.0, dtype=torch.float64),
        source_tokens_b=torch.full((4,), 2),
        text_bytes_b=torch.full((4,), 9),
        is_self_b=own,
        effective_advantage_b=torch.from_numpy(worth.effective_advantage.ravel()),
        row_weight_b=row_weights((~own).long(), torch.tensor([2, 2]), settings.loss.aggregation),
        sampler_weight_b=torch.ones(4, dtype=torch.float64),
        initial_logprobs_bt=torch.nn.functional.pad(logs[:2] + d, (0, 2, 0, 2)),
    )
    loss, terms = update_loss(batch, 2, settings)
    assert terms.ratio_b.tolist() == pytest.approx([1.1, 0.9, 0.9, 0.8], rel=1e-14)
    penalty = 0.001 * (math.e - 2 + 10 + math.exp(-1)) / 2 / 4
    assert loss.item() == pytest.approx(-0.7664234671530656 + penalty, rel=1e-14)
    # Policy: only the third row lies within its interval: -.9 * .9 * 2 S / 4 rows, a quarter for each of four tokens.
    # Penalty: d k3 / d log pi = 1 - e^d, 0 where the cap acts, half of it for each token, over four rows.
    (gradient,) = torch.autograd.grad(loss, learner)
    kl = [[1 - math.e, 0.0], [0.0, 1 - math.exp(-1)]]
    expected = torch.zeros(4, 4, dtype=torch.float64)
    expected[:2, :2] = 0.001 * torch.tensor(kl, dtype=torch.float64) / 2 / 4
    expected[2] = -0.81 * 2 * SCALE / 4 / 4
    torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=1e-17)


@pytest.mark.parametrize("recipe", BOTH)
def test_a_baseline_above_one_and_a_uniform_group(recipe: str) -> None:
    # Phat .6 and .3: omega(0,1) = 2; mu = (1 + 0 + 2 + 2) / 4 = 1.25 > 1: the learner's own mean .5 instead.
    guarded = advantages_of(recipe, [[1.0, 0.0], [1.0, 1.0]], [0.6, 0.3])
    np.testing.assert_allclose(guarded.advantage.ravel(), [SCALE, -SCALE, SCALE, SCALE], rtol=1e-14)
    assert guarded.guarded.all()
    uniform = advantages_of(recipe, [[1.0, 1.0], [1.0, 1.0]], [0.6, 0.3])
    assert uniform.effective_advantage.ravel().tolist() == [0.0] * 4
    # The second agent has the inverse omega, .5: mu = (.5 * 1 + 0 + 1 + 1) / 4 = .625; omega(0,1) = 2 for agent 0's.
    other = advantages_of(recipe, [[1.0, 0.0], [1.0, 1.0]], [0.6, 0.3], learner=1)
    expected = np.array([2 * 0.375, 2 * -0.625, 0.375, 0.375]) / 0.500001
    np.testing.assert_allclose(other.effective_advantage.ravel(), expected, rtol=1e-14)


def test_capability_over_its_window() -> None:
    # Rewards 1 .5 0 0: `verl-v1` counts the positive ones, 2 / 4; `main` averages the rewards, 1.5 / 4.
    for recipe, now in (("reference_code", 0.5), ("reference_code_main", 0.375)):
        settings = algorithm(recipe).capability
        window = [0.9, 0.1, 0.1, 0.2, 0.3]
        before = CapabilityRow("ada", 0.3, window, 0.32, 0.3, window, [], None, None)
        [row] = capability_rows({"ada": [[1.0, 0.5], [0.0, 0.0]]}, {"ada": before}, settings)
        assert row.window == [0.1, 0.1, 0.2, 0.3, now]
        assert row.capability == pytest.approx((0.7 + now) / 5, rel=1e-14)
    # Their omega is held in [.1, 10] too.
    assert omega_matrix([1e-8, 0.5], settings).tolist() == [[1.0, 0.1], [10.0, 1.0]]


def test_the_cap_and_what_lies_beyond_it_below() -> None:
    """d = -10.5: e^-10.5 + 10.5 - 1 = 9.50003, below the cap, with a gradient; d = -12: 11, capped. Uncapped, d ends at
    -10."""
    d = torch.tensor([[-10.5], [-12.0]], dtype=torch.float64)
    learner = (-d).requires_grad_()
    batch = ResponseBatch(
        learner_logprobs_bt=learner,
        mask_bt=torch.ones(2, 1, dtype=torch.bool),
        source_logprob_b=torch.zeros(2, dtype=torch.float64),
        source_tokens_b=torch.ones(2, dtype=torch.int64),
        text_bytes_b=torch.ones(2, dtype=torch.int64),
        is_self_b=torch.ones(2, dtype=torch.bool),
        effective_advantage_b=torch.zeros(2, dtype=torch.float64),
        row_weight_b=torch.ones(2, dtype=torch.float64),
        sampler_weight_b=torch.ones(2, dtype=torch.float64),
        initial_logprobs_bt=torch.zeros(2, 1, dtype=torch.float64),
    )
    capped = kl_to_initial(batch, 10.0)
    assert capped.tolist() == pytest.approx([math.exp(-10.5) + 9.5, 10.0], rel=1e-14)
    (gradient,) = torch.autograd.grad(capped.sum(), learner)
    assert gradient.ravel().tolist() == pytest.approx([1 - math.exp(-10.5), 0.0], rel=1e-14)
    assert kl_to_initial(batch).tolist() == pytest.approx([math.exp(-10) + 9] * 2, rel=1e-14)


# --- the preset, recomputed from files -------------------------------------------------------------------------------


def table(base: Path, name: str, agent: str, key: str = "agent") -> dict[str, dict[str, Any]]:
    rows = pl.read_parquet(base / name / "step=0001" / f"{key}={agent}" / "*.parquet", hive_partitioning=False)
    return {row["rollout_id"]: row for row in rows.to_dicts()}


def trained(project: Path, cli: Cli, recipe: str) -> Path:
    params = project / "pipelines" / "small" / "params.yaml"
    text = params.read_text().replace("recipe: hacpo", f"recipe: {recipe}").replace("steps: 2", "steps: 1")
    params.write_text(text.replace("storage:", "verification: {truncated: boxed}\nstorage:"))
    assert cli("plan", "pipelines/small").code == 0
    return train(cli, "small", ("ada", "bo"))


def test_the_preset_from_rollouts_to_the_trace(project: Path, cli: Cli) -> None:
    base = trained(project, cli, "reference_code")
    ends = {}
    for learner, partner in (("ada", "bo"), ("bo", "ada")):
        texts = table(base, "rollouts", learner) | table(base, "rollouts", partner)
        pool = table(base, "pool", learner, "learner")
        advantages = table(base, "advantages", learner, "learner")
        eos = {
            row["token_ids"][-1] for row in table(base, "rollouts", learner).values() if row["finish_reason"] == "stop"
        }
        assert len(eos) == 1
        ends[learner] = eos.pop()
        # One mu per prompt, whoever wrote the answer.
        baselines: dict[str, set[float]] = {}
        for row in advantages.values():
            baselines.setdefault(row["problem_id"], set()).add(row["baseline"])
        assert {len(values) for values in baselines.values()} == {1}
        stopped = 0
        for name, row in pool.items():
            rollout = texts[name]
            scored = len(rollout["token_ids"]) - (rollout["finish_reason"] == "stop" and len(rollout["token_ids"]) > 1)
            assert row["source_tokens"] == scored
            assert row["source_logprob"] == math.fsum(rollout["logprobs"][:scored])
            assert row["learner_tokens"] == len(row["token_ids"])
            if row["is_self"]:
                assert row["token_ids"] == rollout["token_ids"][:scored]
            if row["status"] == "kept" and len(row["token_ids"]) > 1:
                assert ends[learner] not in row["token_ids"]
            stopped += scored < len(rollout["token_ids"])
        assert stopped > len(pool) / 2
        for name, row in table(base, "updates", learner).items():
            entry = pool[name]
            # Each side by its own tokens.
            assert row["source_logprob"] == pytest.approx(entry["source_logprob"] / entry["source_tokens"], rel=1e-12)
            log_ratio = row["learner_logprob"] - row["source_logprob"]
            assert row["ratio"] == pytest.approx(math.exp(max(-10.0, min(10.0, log_ratio))), rel=1e-9)
        # Half of what each of four updates is scheduled to see is own: eight ranks, half of which hold own responses.
        usable = {name for name, row in pool.items() if row["status"] == "kept"}
        for update in range(4):
            seen = [row for row in table(base, "updates", learner).values() if row["update"] == update]
            assert sum(row["is_self"] for row in seen) == len(pool) / 8
            assert len(seen) <= len(pool) / 4
        assert usable == table(base, "updates", learner).keys()
        updates = table(base, "updates", learner).values()
        first = [row for row in updates if row["update"] == 0 and row["is_self"]]
        # The EOS is left out of the old log-probabilities too: before the first step every own ratio is 1.
        assert max(abs(row["ratio"] - 1) for row in first) < 1e-5


def test_verdicts_of_cut_off_responses_are_audited(project: Path, cli: Cli) -> None:
    base = trained(project, cli, "reference_code")
    result = cli("audit", "pipelines/small", "--texts", "all")
    assert result.code == 0, result.out
    cut = {row["rollout_id"] for row in table(base, "rollouts", "bo").values() if row["finish_reason"] == "length"}
    box = Sandbox(project)
    for verdict, is_cut in (("no_answer", True), ("truncated", False)):
        row = box.edit(
            "verdicts/step=0001/agent=bo",
            "verdict",
            lambda _, verdict=verdict: verdict,
            lambda row, is_cut=is_cut: (row["rollout_id"] in cut) == is_cut,
        )
        found = json.loads(cli("audit", "pipelines/small", "--texts", "none", "--json").out)["findings"]
        assert row["rollout_id"] in [item["row"] for item in found if item["column"] == "verdict"]
        box.restore()


def test_the_second_agent_of_main_sees_cross_responses_first(project: Path, cli: Cli) -> None:
    """64 responses of two agents, eight ranks with eight each, four updates: what a rank sees in an update follows from
    the order that its part keeps. An edited `update` contradicts it, and what-if knows the counts."""
    base = trained(project, cli, "reference_code_main")
    shares = {}
    for learner in ("ada", "bo"):
        seen = pl.read_parquet(base / "updates/step=0001" / f"agent={learner}" / "trace.parquet")
        own = seen.group_by("update").agg(pl.col("is_self").mean()).sort("update")
        shares[learner] = own["is_self"].to_list()
    assert shares["ada"][0] > 0.9 > 0.1 > shares["ada"][3]
    assert shares["bo"][0] < 0.1 < 0.9 < shares["bo"][3]
    assert cli("what-if", "pipelines/small", "--step", 1, "--set", "algorithm.importance.alpha=2.0").code == 0

    path = base / "updates/step=0001/agent=bo/trace.parquet"
    whole = pq.read_table(path)
    column = whole["update"].to_pylist()
    column[0] = (column[0] + 1) % 4
    edited = whole.set_column(whole.schema.get_field_index("update"), "update", pa.array(column, pa.int32()))
    pq.write_table(edited.replace_schema_metadata(whole.schema.metadata), path)
    result = cli("audit", "pipelines/small", "--json")
    found = [item for item in json.loads(result.out)["findings"] if item["column"] == "update"]
    assert [item["row"] for item in found] == [whole["rollout_id"][0].as_py()]
