"""HACPO's neighbours through the command line: one small run of each, its tables recomputed by hand, its audit clean.

8 prompts, minibatches of 4 prompts, G = 4 responses of two agents: U = 2 updates in a pass over one's own responses.
"""

from __future__ import annotations

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


@pytest.mark.parametrize("recipe", ["gspo_two_passes", "xgrpo"])
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
