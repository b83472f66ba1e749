"""HACPO's neighbours through the command line: one small run of each, its tables recomputed by hand, its audit clean.

8 prompts, minibatches of 4 prompts, G = 4 responses of two agents: U = 2 updates in a pass over one's own responses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from conftest import Cli
from hacpo.pipeline.project import Pipeline
from hacpo.tools.audit.findings import Finding
from hacpo.tools.audit.walk import audit
from tests.small_project import PARAMS, changed, make_finished
from tests.tampering import Sandbox

TRACE = "updates/step=0001/agent=ada/trace.parquet"
ADVANTAGES = "advantages/step=0001/learner=ada"
AGENTS = ("ada", "bo")
WHAT_IF = "algorithm.advantage.baseline=own"

Made = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Made:
    """The root of a finished run of one step of a recipe, made where it is first asked for."""
    roots: dict[str, Path] = {}

    def run_of(recipe: str) -> Path:
        if recipe not in roots:
            algorithm = {"recipe": recipe, "importance": None, "clip": {"own_low": 0.03, "own_high": 0.03}}
            params = changed(PARAMS, f"{{steps: 1, evaluation: {{every: 1}}, algorithm: {_yaml(algorithm)}}}")
            roots[recipe] = make_finished(tmp_path_factory.mktemp(recipe), models, params)
        return roots[recipe]

    return run_of


def _yaml(tree: Any) -> str:
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key}: {_yaml(value)}" for key, value in tree.items()) + "}"
    return "null" if tree is None else str(tree)


@pytest.fixture
def copy_of(made: Made, sandbox_of: Callable[[Path], Sandbox]) -> Callable[[str], Sandbox]:
    return lambda recipe: sandbox_of(made(recipe))


def table(base: Path, name: str, agent: str, key: str = "agent") -> pl.DataFrame:
    return pl.read_parquet(base / name / "step=0001" / f"{key}={agent}" / "*.parquet", hive_partitioning=False)


def findings() -> list[Finding]:
    return audit(Pipeline.open(Path("pipelines/small"))).findings


def named(found: list[Finding], check: str, column: str = "") -> list[Finding]:
    return [each for each in found if each.check == check and (not column or each.column == column)]


@pytest.mark.parametrize("recipe", ["gspo_two_passes", "xgrpo", "sgt", "sapo"])
def test_its_run_is_repeated_bit_by_bit(copy_of: Callable[[str], Sandbox], cli: Cli, recipe: str) -> None:
    copy_of(recipe)
    done = cli("audit", "pipelines/small", "--deep")
    assert done.code == 0, done.out + done.err
    # `plan --check` and `estimate` know it, and so do looks into a step.
    for words in (["plan", "--check"], ["estimate"], ["show", "--step", 1], ["what-if", "--step", 1, "--set", WHAT_IF]):
        assert cli(words[0], "pipelines/small", *words[1:]).code == 0, words


# --- gspo_two_passes -------------------------------------------------------------------------------------------------


def test_two_passes_see_every_response_twice_in_other_orders(copy_of: Callable[[str], Sandbox]) -> None:
    base = copy_of("gspo_two_passes").artifacts
    pool, trace = table(base, "pool", "ada", "learner"), table(base, "updates", "ada")
    first, second = (trace.filter(pl.col("update") // 2 == number) for number in (0, 1))
    for part in (first, second):
        assert part["rollout_id"].to_list() == pool["rollout_id"].to_list()
    both = first.join(second, on="rollout_id", suffix="_second")
    # Both passes divide by the policy before the step; its first update has not moved it.
    assert both["source_logprob"].equals(both["source_logprob_second"])
    assert (first.filter(pl.col("update") == 0)["ratio"] - 1).abs().max() < 1e-5
    assert (second["ratio"] - 1).abs().max() > 1e-4
    assert (both["update"] != both["update_second"] - 2).any()  # another order of prompts


def test_a_row_of_the_second_pass_that_is_gone_or_moved_is_found(copy_of: Callable[[str], Sandbox]) -> None:
    sandbox = copy_of("gspo_two_passes")
    shard = sandbox.artifacts / TRACE
    sandbox.rewrite(shard, lambda rows: [row for number, row in enumerate(rows) if number != 1])
    (gone,) = named(findings(), "rows")
    assert gone.row.endswith("/000 in pass 1")
    assert (gone.expected, gone.found) == ("a row", "no such row")
    sandbox.restore()
    moved = sandbox.edit(TRACE, "update", lambda update: 5 - update, lambda row: row["update"] >= 2)
    (wrong,) = named(findings(), "trace", "update")
    assert (wrong.row, wrong.found) == (f"{moved['rollout_id']} in pass 1", moved["new"])
    sandbox.restore()
    sandbox.edit(TRACE, "update", lambda update: update + 2, lambda row: row["update"] < 2)
    assert named(findings(), "rows")  # twice in the second pass, never in the first


# --- xgrpo -----------------------------------------------------------------------------------------------------------


def test_xgrpo_measures_own_responses_against_everybodys_rewards(copy_of: Callable[[str], Sandbox]) -> None:
    base = copy_of("xgrpo").artifacts
    rewards = pl.concat([table(base, "verdicts", agent) for agent in AGENTS]).with_columns(
        problem_id=pl.col("rollout_id")
        .str.split("/")
        .list.slice(2, pl.col("rollout_id").str.split("/").list.len() - 3)
        .list.join("/")
    )
    joint = rewards.group_by("problem_id").agg(
        mean=pl.col("reward").cast(pl.Float64).mean(), deviation=pl.col("reward").cast(pl.Float64).std()
    )
    lone = 0
    for agent in AGENTS:
        pool, worth = table(base, "pool", agent, "learner"), table(base, "advantages", agent, "learner")
        assert set(pool["source"]) == {agent}  # nothing of the others' text is here
        assert worth["rollout_id"].to_list() == pool["rollout_id"].to_list()
        both = worth.join(joint, on="problem_id", maintain_order="left")
        assert (both["baseline"] - both["mean"]).abs().max() < 1e-12
        assert (both["sigma"] - both["deviation"]).abs().max() < 1e-12
        scaled = (both["reward"] - both["mean"]) / (both["deviation"] + 1e-6)
        assert (both["advantage"] - scaled).abs().max() < 1e-9
        assert both["omega"].to_list() == [1.0] * 32
        # A group that is all wrong (or all right) alone, and yet teaches: the peer's rewards differ from it.
        alone = worth.group_by("problem_id").agg(
            spread=pl.col("reward").max() - pl.col("reward").min(), live=(~pl.col("uniform")).all()
        )
        lone += len(alone.filter(pl.col("live") & (pl.col("spread") == 0)))
        assert set(table(base, "updates", agent)["update"]) == {0, 1}
    assert lone > 0


def test_a_baseline_of_own_rewards_alone_is_found(copy_of: Callable[[str], Sandbox]) -> None:
    sandbox = copy_of("xgrpo")
    old = sandbox.edit(ADVANTAGES, "baseline", lambda value: value + 0.125)
    (found,) = named(findings(), "advantages", "baseline")
    assert (found.row, found.expected) == (old["rollout_id"], old["baseline"])
    # The peer's rewards are what it follows from.
    sandbox.restore()
    sandbox.edit("verdicts/step=0001/agent=bo", "reward", lambda value: 1.0 - value)
    assert named(findings(), "advantages", "baseline")


# --- sgt -------------------------------------------------------------------------------------------------------------


def chosen(base: Path, agent: str) -> pl.DataFrame:
    """The advantages of an agent with its pool, those that are trained on."""
    pool, worth = table(base, "pool", agent, "learner"), table(base, "advantages", agent, "learner")
    assert worth["selected"].null_count() == 0
    return worth.with_columns(pool.select("status", "learner_tokens")).filter(pl.col("selected"))


def check_trace(base: Path, agent: str, updates: int) -> pl.DataFrame:
    """The trace has what was selected, each once."""
    trace, wanted = table(base, "updates", agent), chosen(base, agent)
    assert trace["rollout_id"].to_list() == wanted.filter(pl.col("status") == "kept")["rollout_id"].to_list()
    assert set(trace["update"]) == set(range(updates))
    return trace


def test_sgt_raises_one_right_answer_of_another_to_each_problem_that_it_fails(
    copy_of: Callable[[str], Sandbox],
) -> None:
    base = copy_of("sgt").artifacts
    rescues = 0
    for agent in AGENTS:
        worth, taken = table(base, "advantages", agent, "learner"), chosen(base, agent)
        assert (
            taken.filter(pl.col("is_self"))["rollout_id"].to_list()
            == worth.filter(pl.col("is_self"))["rollout_id"].to_list()
        )
        best = (
            worth.group_by("problem_id", "is_self")
            .agg(pl.col("reward").max())
            .pivot("is_self", index="problem_id", values="reward")
        )
        gated = set(best.filter((pl.col("true") <= 0) & (pl.col("false") > 0))["problem_id"])
        cross = taken.filter(~pl.col("is_self"))
        assert sorted(cross["problem_id"]) == sorted(gated)
        assert (cross["reward"] > 0).all()
        rescues += len(cross)
        # Own responses are GRPO's: the own group's mean and standard deviation.
        own = worth.filter(pl.col("is_self")).with_columns(pl.col("reward").cast(pl.Float64))
        over = own.with_columns(
            mean=pl.col("reward").mean().over("problem_id"), sd=pl.col("reward").std().over("problem_id")
        )
        assert (over["advantage"] - (over["reward"] - over["mean"]) / (over["sd"] + 1e-6)).abs().max() < 1e-9
        trace = check_trace(base, agent, 2)
        raised = trace.filter(~pl.col("is_self"))
        assert raised["objective"].to_list() == raised["learner_logprob"].to_list()
        assert set(zip(raised["lower"], raised["upper"], raised["clipped"], raised["is_weight"], strict=True)) <= {
            (0.0, 1e5, False, 1.0)
        }
        # Mean over own plus .1 times the mean over rescues, of each of two updates.
        parts = trace.group_by("update", "is_self").agg(pl.col("objective").mean())
        total = sum(value * (1.0 if own else 0.1) for _, own, value in parts.iter_rows())
        metrics = json.loads((base / f"metrics/update/step=0001/{agent}.json").read_text())
        assert metrics["loss"] == pytest.approx(-total / 2, rel=1e-9)
    assert rescues > 0


def test_an_opened_gate_or_another_rescue_is_found(copy_of: Callable[[str], Sandbox]) -> None:
    sandbox = copy_of("sgt")
    opened = sandbox.edit(ADVANTAGES, "selected", lambda value: True, lambda row: not row["selected"])
    found = findings()
    (odd,) = named(found, "advantages", "selected")
    assert (odd.row, odd.expected, odd.found) == (opened["rollout_id"], False, True)
    assert named(found, "rows")  # the trace has no such row
    sandbox.restore()
    sandbox.edit(TRACE, "objective", lambda value: value - 0.5, lambda row: not row["is_self"])
    assert named(findings(), "trace", "objective")


# --- sapo ------------------------------------------------------------------------------------------------------------


def test_sapo_trains_on_half_its_groups_and_as_many_of_others_that_teach(copy_of: Callable[[str], Sandbox]) -> None:
    base = copy_of("sapo").artifacts
    for agent in AGENTS:
        worth, taken = table(base, "advantages", agent, "learner"), chosen(base, agent)
        size = taken.group_by("problem_id", "source").len()
        assert set(size["len"]) == {4}  # whole groups
        live = worth.filter(~pl.col("is_self") & ~pl.col("uniform"))["problem_id"].n_unique()
        assert len(size.filter(pl.col("source") == agent)) == 4  # I = .5 * 8
        assert len(size.filter(pl.col("source") != agent)) == min(4, live)  # J
        assert not taken.filter(~pl.col("is_self"))["uniform"].any()
        # U = 2 updates of as many groups, or one more.
        trace = check_trace(base, agent, 2)
        groups = (
            trace.join(taken.select("rollout_id", "problem_id"), on="rollout_id")
            .group_by("update")
            .agg(pl.struct("problem_id", "source").n_unique())
        )
        assert max(groups["problem_id"]) - min(groups["problem_id"]) <= 1
        # Cross ratios are to the learner's own old policy: 1 before its first update.
        first = trace.filter(~pl.col("is_self") & (pl.col("update") == 0))
        assert (first["ratio"] - 1).abs().max() < 1e-5 if len(first) else True
        assert set(trace["lower"]) == {0.97}


def test_a_group_that_was_not_drawn_is_found(copy_of: Callable[[str], Sandbox]) -> None:
    sandbox = copy_of("sapo")

    def swapped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**row, "selected": not row["selected"]} if row["is_self"] else row for row in rows]

    # 20 rows a shard: two problems of 4 own and 4 cross responses, and the own ones to a third.
    sandbox.rewrite(sandbox.shards(ADVANTAGES)[0], swapped)
    found = named(findings(), "advantages", "selected")
    assert [each.count for each in found] == [12]
