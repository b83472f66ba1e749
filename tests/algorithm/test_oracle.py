"""`advantage.baseline: oracle`: omega from a given table, or from a side sample, in place of the window's estimate."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import PARAMS, Cli, contents, make_finished
from hacpo.algorithm.advantage_table import (
    capabilities_used,
    capability_rows,
    capability_summary,
    side_sample_capability,
)
from hacpo.algorithm.group_advantage import step_advantages
from hacpo.settings.algorithm import AdvantageSettings, CapabilitySettings
from hacpo.settings.recipes import RECIPES
from tests.tampering import Sandbox

RUN = "pipelines/small"
SIDE = 6
BLOCK = "  recipe: hacpo\n  advantage: {{baseline: oracle}}\n  capability: {{{}}}"


def with_oracle(setting: str) -> str:
    return PARAMS.replace("  recipe: hacpo", BLOCK.format(setting))


# --- by hand ---------------------------------------------------------------------------------------------------------


def bounds(**changes: Any) -> CapabilitySettings:
    return CapabilitySettings.model_validate({**RECIPES["hacpo"]["capability"], **changes})


def advantage_settings(**changes: Any) -> AdvantageSettings:
    return AdvantageSettings.model_validate({**RECIPES["hacpo"]["advantage"], **changes})


def test_the_oracle_takes_the_estimates_place_in_baseline_and_discrepancy() -> None:
    """One problem, two samples each; the estimate says omega = 1, the oracle .8 / .2 = 4."""
    rewards = {"ada": np.array([[1.0, 0.0]]), "bo": np.array([[1.0, 0.0]])}
    rows = capability_rows(rewards, {}, bounds(), {"ada": 0.8, "bo": 0.2})
    assert capabilities_used(rows, advantage_settings()) == {"ada": 0.5, "bo": 0.5}
    used = capabilities_used(rows, advantage_settings(baseline="oracle"))
    assert used == {"ada": 0.8, "bo": 0.2}
    made = step_advantages(
        [[[1.0, 0.0], [1.0, 0.0]]],
        learner=0,
        capability_n=list(used.values()),
        settings=advantage_settings(baseline="oracle", baseline_guard=False),
        capability_settings=bounds(),
    )
    # mu^(ada) = (1 + 4 * 1) / 4 = 1.25 on its own rows; mu^(bo) = (.25 * 1 + 1) / 4 = .3125 on the source's;
    # the factor on bo's rows for ada is omega^(bo, ada) = 1/4.
    assert made.baseline.tolist() == [[[1.25, 1.25], [0.3125, 0.3125]]]
    assert made.omega.tolist() == [[[1.0, 1.0], [0.25, 0.25]]]
    summary = capability_summary(rows, bounds(), coupled=True)
    assert summary["ada.oracle_error"] == pytest.approx(0.5 - 0.8)
    assert (summary["ada.bo.omega"], summary["ada.bo.omega_oracle"]) == (1.0, 4.0)


def test_a_side_samples_capability_is_that_steps_mean() -> None:
    # 1 of 4, and the share above zero of (-1, .5, 2, 0): 2 of 4; never below the floor.
    assert side_sample_capability([1.0, 0.0, 0.0, 0.0], bounds()) == 0.25
    assert side_sample_capability([-1.0, 0.5, 2.0, 0.0], bounds(metric="positive_rate")) == 0.5
    assert side_sample_capability([0.0, 0.0], bounds()) == 1e-8


# --- a side sample ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """The root of a finished run whose oracle is a side sample."""
    params = with_oracle(f"oracle_samples: {SIDE}")
    return make_finished(tmp_path_factory.mktemp("sampled"), models, params)


@pytest.fixture(scope="module")
def damaged(sampled: Path) -> Path:
    """What `sandbox` is a copy of."""
    return sampled


def read(root: Path, table: str, step: int, **place: str) -> pl.DataFrame:
    ((key, name),) = place.items()
    path = root / f"artifacts/small/{table}/step={step:04d}/{key}={name}/*.parquet"
    return pl.read_parquet(path, hive_partitioning=False)


def capability(root: Path, step: int) -> dict[str, dict[str, Any]]:
    path = root / f"artifacts/small/capability/step={step:04d}/capability.parquet"
    return {row["agent"]: row for row in pl.read_parquet(path).to_dicts()}


def test_a_side_sample_is_apart_and_omega_follows_from_it(sampled: Path) -> None:
    oracle = {}
    for agent in ("ada", "bo"):
        side, own = (read(sampled, table, 1, agent=agent) for table in ("side_rollouts", "rollouts"))
        assert (
            side["problem_id"].unique(maintain_order=True).to_list()
            == own["problem_id"].unique(maintain_order=True).to_list()
        )
        assert len(side) == 8 * SIDE
        assert side["rollout_id"][1] == f"0001/{agent}/{side['problem_id'][0]}/side-001"
        assert side["policy"].unique().to_list() == own["policy"].unique().to_list()
        # Drawn with seeds of its own: not the same responses again.
        first = side.filter(pl.col("sample") < 4)
        assert first["token_ids"].to_list() != own["token_ids"].to_list()
        verdicts = read(sampled, "side_verdicts", 1, agent=agent)
        assert verdicts["rollout_id"].to_list() == side["rollout_id"].to_list()
        oracle[agent] = verdicts["reward"].mean()
        assert len(read(sampled, "pool", 1, learner=agent)) == 8 * 4 * 2
    rows = capability(sampled, 1)
    assert {name: row["oracle"] for name, row in rows.items()} == pytest.approx(oracle)
    assert any(row["oracle"] != row["capability"] for row in rows.values())
    advantages = read(sampled, "advantages", 1, learner="ada")
    omega = min(max(oracle["bo"] / oracle["ada"], 0.1), 10.0)
    assert advantages.filter(~pl.col("is_self"))["omega"].unique().to_list() == [pytest.approx(omega)]


def test_the_rollouts_to_learn_from_are_those_of_a_run_without_one(sampled: Path, finished: Path) -> None:
    with_side, without = contents(sampled), contents(finished)
    tables = [
        name for name in without if name.startswith(("rollouts/step=0001", "verdicts/step=0001", "data", "prompts"))
    ]
    assert len(tables) > 4
    assert [name for name in tables if with_side[name] != without[name]] == []
    assert not [name for name in without if "side_" in name]
    assert "side" not in (finished / RUN / "steps/0001/dvc.yaml").read_text()


def test_it_audits_clean_and_its_cost_is_said(sampled: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sampled)
    audit = cli("audit", RUN, "--json")
    assert audit.code == 0, audit.out
    covered = json.loads(audit.out)["coverage"]
    assert covered["rows"]["side_rollouts"] == covered["rows"]["side_verdicts"] == 2 * 2 * 8 * SIDE
    # Both kinds of responses, and the evaluations at the start and the end.
    assert covered["text"]["verified"] == 2 * 2 * 8 * (4 + SIDE) + 2 * 2 * 16 * 2
    assert "192 rollouts" in cli("status", RUN).out
    metrics = json.loads(Path("artifacts/small/report/metrics.json").read_text())
    assert (metrics["rollouts"], metrics["side_rollouts"]) == (128, 192)
    page = Path("artifacts/small/report/index.html").read_text()
    assert "rollouts of side samples, for capability" in page
    assert "ada, oracle" in page
    totals = json.loads(cli("estimate", RUN, "--json").out)["pipelines"][0]["totals"]
    assert (totals["rollouts"], totals["side_rollouts"]) == (128 + 192, 192)
    assert cli("run", RUN, "--jobs", 1).code == 0
    assert "everything is done" in cli("run", RUN, "--jobs", 1).err


def edit(path: Path, column: str, change: Callable[[Any], Any]) -> None:
    before = pq.read_table(path)
    rows = before.to_pylist()
    rows[0][column] = change(rows[0][column])
    pq.write_table(pa.Table.from_pylist(rows, schema=before.schema), path, compression="zstd", write_page_checksum=True)


@pytest.mark.parametrize(
    ("table", "column", "change", "expected"),
    [
        ("side_verdicts/step=0001/agent=ada/part-00000.parquet", "reward", lambda reward: 1 - reward, "verdicts"),
        ("side_rollouts/step=0002/agent=bo/part-00000.parquet", "policy", lambda policy: policy[::-1], "policy"),
        ("side_rollouts/step=0001/agent=bo/part-00000.parquet", "text", lambda text: text + " 1", "text"),
        ("capability/step=0001/capability.parquet", "oracle", lambda value: value + 1e-6, "capability"),
    ],
)
def test_an_audit_finds_what_was_edited(
    sandbox: Sandbox, cli: Cli, table: str, column: str, change: Callable[[Any], Any], expected: str
) -> None:
    edit(Path("artifacts/small") / table, column, change)
    texts = "all" if column == "text" else "none"
    found = json.loads(cli("audit", RUN, "--texts", texts, "--json").out)["findings"]
    assert (expected, column) in [(one["check"], one["column"]) for one in found]


def test_an_audit_finds_a_missing_table_and_one_that_nobody_asked_for(sandbox: Sandbox, cli: Cli) -> None:
    shutil.rmtree("artifacts/small/side_verdicts/step=0001/agent=bo")
    found = json.loads(cli("audit", RUN, "--texts", "none", "--json").out)["findings"]
    missing = "artifacts/small/side_verdicts/step=0001/agent=bo"
    assert ("files", missing) in [(one["check"], one["file"]) for one in found]


def test_a_missing_side_sample_is_one_line_with_its_command(sandbox: Sandbox, cli: Cli) -> None:
    shutil.rmtree("artifacts/small/side_verdicts/step=0002/agent=bo")
    error = cli("advantage", RUN, "--step", 2).error
    assert f"hacpo verify {RUN} --step 2 --agent bo --side" in error
    assert f"what comes first: hacpo verify {RUN} --step 2 --agent bo --side)" in cli("status", RUN).out


def test_what_if_compares_the_estimate_with_the_oracle(
    sampled: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sampled)
    same = json.loads(cli("what-if", RUN, "--step", 1, "--json").out)
    assert not [
        part["differing"] for part in same["learners"]["ada"].values() if isinstance(part, dict) and part["differing"]
    ]
    estimate = json.loads(
        cli("what-if", RUN, "--step", 1, "--set", "algorithm.advantage.baseline=capability", "--json").out
    )
    assert estimate["learners"]["ada"]["cross"]["differing"]["omega"] == 32
    more = cli("what-if", RUN, "--step", 1, "--set", f"algorithm.capability.oracle_samples={SIDE + 1}")
    assert "this needs a side sample of 7 responses" in more.error


# --- a given table ---------------------------------------------------------------------------------------------------

ORACLE = [(step, agent, value) for step in (1, 2) for agent, value in (("ada", 0.6), ("bo", 0.3))]


def write_oracle(
    path: Path, rows: list[tuple[Any, ...]], names: tuple[str, ...] = ("step", "agent", "capability")
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows]), path)


def test_a_given_table_is_taken_and_followed(cli: Cli, project: Path) -> None:
    (project / RUN / "params.yaml").write_text(with_oracle("oracle_table: data/oracle.parquet"))
    write_oracle(project / "data/oracle.parquet", ORACLE)
    assert cli("plan", "--check", RUN).code == 0
    done = cli("run", RUN, "--jobs", 1)
    assert done.code == 0, done.err
    # omega^(bo, ada) = .3 / .6, whatever the agents are worth.
    assert read(project, "advantages", 2, learner="ada").filter(~pl.col("is_self"))["omega"].unique().to_list() == [0.5]
    assert [row["oracle"] for row in capability(project, 2).values()] == [0.6, 0.3]
    audit = cli("audit", RUN)
    assert audit.code == 0, audit.out
    # Another table is another run from there on: DVC knows it.
    write_oracle(project / "data/oracle.parquet", [*ORACLE[:3], (2, "bo", 0.15)])
    again = cli("run", RUN, "--jobs", 1, "--yes")
    assert again.code == 0
    assert read(project, "advantages", 2, learner="ada").filter(~pl.col("is_self"))["omega"].unique().to_list() == [
        0.25
    ]
    assert "side" not in (project / RUN / "steps/0001/dvc.yaml").read_text()


@pytest.mark.parametrize(
    ("rows", "names", "message"),
    [
        (ORACLE[:3], ("step", "agent", "capability"), "has no capability of bo at step 2"),
        ([*ORACLE, (2, "bo", 0.1)], ("step", "agent", "capability"), "the same step and agent twice"),
        ([*ORACLE[:3], (2, "bo", 0.0)], ("step", "agent", "capability"), "must be finite and above 0 (found 0.0)"),
        ([*ORACLE[:3], (2, "bo", float("nan"))], ("step", "agent", "capability"), "must be finite and above 0"),
        ([*ORACLE[:3], (2, "bo", None)], ("step", "agent", "capability"), "a value is missing"),
        (ORACLE, ("step", "agent", "accuracy"), "needs column 'capability' once"),
        ([(1, "ada", "high")], ("step", "agent", "capability"), "step, agent, capability: "),
    ],
)
def test_a_table_that_is_no_oracle_is_one_line(
    cli: Cli, project: Path, rows: list[tuple[Any, ...]], names: tuple[str, ...], message: str
) -> None:
    (project / RUN / "params.yaml").write_text(with_oracle("oracle_table: data/oracle.parquet"))
    write_oracle(project / "data/oracle.parquet", rows, names)
    checked = cli("plan", "--check", RUN)
    assert checked.code == 1
    lines = [line for line in checked.out.splitlines() if "error: " in line]
    assert len(lines) == 1
    assert message in lines[0]


def test_no_table_no_parquet_and_no_oracle_at_all(cli: Cli, project: Path) -> None:
    params = project / RUN / "params.yaml"
    params.write_text(with_oracle("oracle_table: data/oracle.parquet"))
    assert "the table of capabilities is missing" in cli("plan", "--check", RUN).out
    (project / "data").mkdir(exist_ok=True)
    (project / "data/oracle.parquet").write_text("no")
    assert "not readable as Parquet" in cli("plan", "--check", RUN).out
    for setting, message in (
        ("window: 5", "baseline: oracle needs `capability.oracle_table` or `capability.oracle_samples`"),
        ("oracle_samples: 4, oracle_table: a.parquet", "give one of `oracle_table` and `oracle_samples`"),
    ):
        params.write_text(with_oracle(setting))
        assert message in cli("plan", RUN).error
    params.write_text(PARAMS)
    assert cli("resolve", RUN).code == 0
    assert (
        "--side needs algorithm.capability.oracle_samples"
        in cli("generate", RUN, "--step", 1, "--agent", "ada", "--side").error
    )
