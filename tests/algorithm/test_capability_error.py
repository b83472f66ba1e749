"""What an estimated capability may be off by: by hand, from the first samples of a group, and in a run's files."""

from __future__ import annotations

import html
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from conftest import PARAMS, Cli, make_finished
from hacpo.algorithm import capability_error
from hacpo.algorithm.advantage_table import CapabilityRow, capability_rows, capability_summary
from hacpo.algorithm.capability_error import accuracy_covariance, ratio_interval, smoothed_covariance
from hacpo.settings.algorithm import CapabilitySettings
from hacpo.settings.recipes import RECIPES
from tests.tampering import Sandbox

RUN = "pipelines/small"

# Three problems, four samples each. Of the first two: means .5, 0, 1 (ada) and .5, .5, 1 (bo).
ADA = np.array([[1, 0, 1, 1], [0, 0, 1, 0], [1, 1, 1, 1]], dtype=np.float64)
BO = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0]], dtype=np.float64)


def settings(**changes: Any) -> CapabilitySettings:
    return CapabilitySettings.model_validate({**RECIPES["hacpo"]["capability"], **changes})


def rows_of(**changes: Any) -> dict[str, CapabilityRow]:
    return {row.agent: row for row in capability_rows({"ada": ADA, "bo": BO}, {}, settings(**changes))}


def test_the_first_samples_alone_make_the_estimate() -> None:
    # ada: 3 of the first 6 responses, 8 of all 12; bo: 4 of the first 6, 4 of all 12.
    rows = rows_of(samples=2)
    assert [rows[name].accuracy for name in ("ada", "bo")] == [3 / 6, 4 / 6]
    assert [rows[name].accuracy_all for name in ("ada", "bo")] == [8 / 12, 4 / 12]
    everything = rows_of()
    assert [everything[name].accuracy for name in ("ada", "bo")] == [8 / 12, 4 / 12]
    assert everything["ada"].window == everything["ada"].window_all == rows["ada"].window_all


def test_covariances_by_hand() -> None:
    # Away from P = 1/2: 0, -1/2, 1/2; from P = 2/3: -1/6, -1/6, 1/3; divided by 3 * 2.
    # ada: (1/4 + 1/4) / 6 = 1/12; bo: (1/36 + 1/36 + 1/9) / 6 = 1/36; both: (0 + 1/12 + 1/6) / 6 = 1/24.
    covariance = accuracy_covariance(np.stack([ADA[:, :2], BO[:, :2]]))
    assert covariance == [pytest.approx([1 / 12, 1 / 24]), pytest.approx([1 / 24, 1 / 36])]
    rows = rows_of(samples=2)
    assert rows["ada"].window_covariance == [covariance[0]]
    assert rows["ada"].standard_error == pytest.approx(math.sqrt(1 / 12))
    # Two steps: (1/12 + 1/4) / 2^2 = 1/12, (1/24 + 0) / 4 = 1/96.
    assert smoothed_covariance([covariance[0], [1 / 4, 0.0]]) == pytest.approx([1 / 12, 1 / 96])


def test_sums_grow_with_the_problems_and_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 agents and 50 problems: 2 * 50 means of a problem, 2 of an agent, 2 * 2 covariances."""
    sums = []
    monkeypatch.setattr(capability_error.math, "fsum", lambda values: sums.append(1) or 0.0)
    accuracy_covariance(np.ones((2, 50, 4)))
    assert len(sums) == 2 * 50 + 2 + 2 * 2


def test_more_samples_of_the_same_answers_do_not_narrow_it() -> None:
    """A problem is one observation: every response four times over says nothing new."""
    once = accuracy_covariance(np.stack([ADA, BO]))
    assert accuracy_covariance(np.stack([np.tile(ADA, 4), np.tile(BO, 4)])) == [pytest.approx(row) for row in once]


def test_the_interval_of_omega_by_hand() -> None:
    # (1/12) / (1/4) + (1/36) / (4/9) - 2 (1/24) / (1/2 * 2/3) = 1/3 + 1/16 - 1/4 = 7/48; omega = (1/2) / (2/3) = 3/4.
    reach = math.exp(1.959963984540054 * math.sqrt(7 / 48))
    summary = capability_summary(list(rows_of(samples=2).values()), settings(samples=2), coupled=True)
    assert summary["ada.bo.omega"] == pytest.approx(0.75)
    assert summary["ada.bo.omega_low"] == pytest.approx(0.75 / reach)
    assert summary["ada.bo.omega_high"] == pytest.approx(0.75 * reach)
    assert summary["bo.ada.omega_low"] == pytest.approx(reach**-1 / 0.75)
    assert summary["ada.accuracy_error"] == pytest.approx(3 / 6 - 8 / 12)
    assert summary["bo.capability_error"] == pytest.approx(4 / 6 - 4 / 12)
    alone = capability_summary(list(rows_of().values()), settings(), coupled=False)
    assert not [key for key in alone if "omega" in key or (key.endswith("_error") and "standard" not in key)]


def test_the_order_of_agents_has_no_influence() -> None:
    rewards = {"ada": ADA, "bo": BO, "cy": 1 - ADA}
    first: dict[str, CapabilityRow] = {}
    turned: dict[str, CapabilityRow] = {}
    for _ in range(2):  # a window of two steps
        first = {row.agent: row for row in capability_rows(rewards, first, settings())}
        turned = {row.agent: row for row in capability_rows(dict(reversed(rewards.items())), turned, settings())}
    assert list(turned) == ["cy", "bo", "ada"]
    assert turned == first
    straight, back = (capability_summary(list(rows.values()), settings(), coupled=True) for rows in (first, turned))
    assert straight == back
    # bo's covariance with ada is ada's with bo. Its own, of means 1/4 1/4 1/2 with P = 1/3 (away -1/12 -1/12 1/6):
    # (1/144 + 1/144 + 1/36) / 6 = 1/144.
    assert first["bo"].window_covariance[0] == pytest.approx(
        [first["ada"].window_covariance[0][1], 1 / 144, -first["ada"].window_covariance[0][1]]
    )


def test_the_interval_stays_in_omegas_bounds_and_one_problem_has_none() -> None:
    bounds = {"ratio_min": 0.1, "ratio_max": 10.0}
    # An agent at the floor, with a variance that is not 0: exp would overflow.
    wide = [[1.0, 0.0], [0.0, 1.0]]
    assert ratio_interval([1e-8, 0.5], wide, 0, 1, **bounds) == pytest.approx((0.1, 10.0), rel=1e-15)
    # Everything right and everything wrong: nothing varies, and omega is at its bound.
    assert ratio_interval([1e-8, 1.0], [[0.0, 0.0], [0.0, 0.0]], 0, 1, **bounds) == pytest.approx((0.1, 0.1), rel=1e-15)
    one = capability_rows({"ada": ADA[:1], "bo": BO[:1]}, {}, settings())
    assert [row.standard_error for row in one] == [None, None]
    assert not [key for key in capability_summary(one, settings(), coupled=True) if key.endswith(("_low", "_high"))]
    # It is not known as long as that step is in the window.
    later = capability_rows({"ada": ADA, "bo": BO}, {row.agent: row for row in one}, settings())
    assert [row.standard_error for row in later] == [None, None]


# --- in a run --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def first_two(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """The root of a finished run that estimates capability from 2 of 4 samples."""
    params = PARAMS.replace("  recipe: hacpo", "  recipe: hacpo\n  capability: {samples: 2}")
    return make_finished(tmp_path_factory.mktemp("first_two"), models, params)


def rewards(root: Path, step: int, agent: str) -> pl.DataFrame:
    path = root / f"artifacts/small/verdicts/step={step:04d}/agent={agent}/*.parquet"
    return pl.read_parquet(path, hive_partitioning=False)


def table(root: Path, step: int) -> dict[str, dict[str, Any]]:
    path = root / f"artifacts/small/capability/step={step:04d}/capability.parquet"
    return {row["agent"]: row for row in pl.read_parquet(path).to_dicts()}


@pytest.mark.parametrize("step", [1, 2])
def test_a_runs_table_follows_from_its_verdicts(first_two: Path, step: int) -> None:
    """With Polars and numpy alone."""
    found = table(first_two, step)
    steps = range(1, step + 1)
    verdicts = {(at, agent): rewards(first_two, at, agent) for at in steps for agent in found}
    for agent, row in found.items():
        first = [verdicts[at, agent].filter(pl.col("sample") < 2)["reward"].mean() for at in steps]
        every = [verdicts[at, agent]["reward"].mean() for at in steps]
        assert first != every
        assert row["window"] == pytest.approx(first)
        assert row["window_all"] == pytest.approx(every)
        assert (row["accuracy"], row["accuracy_all"]) == pytest.approx((first[-1], every[-1]))
        assert row["capability"] == pytest.approx(np.mean(first))
    for number, at in enumerate(steps):
        means = [
            verdicts[at, agent]
            .filter(pl.col("sample") < 2)
            .group_by("problem_id", maintain_order=True)
            .agg(pl.col("reward").mean())["reward"]
            .to_numpy()
            for agent in found
        ]
        expected = np.cov(np.stack(means)) / 8  # 8 problems
        np.testing.assert_allclose([row["window_covariance"][number] for row in found.values()], expected, atol=1e-12)
    own = [row["window_covariance"][number][k] for k, row in enumerate(found.values()) for number in range(step)]
    wanted = [math.sqrt(sum(own[k * step : (k + 1) * step]) / step**2) for k in range(2)]
    assert [row["standard_error"] for row in found.values()] == pytest.approx(wanted)


@pytest.fixture(scope="module")
def damaged(first_two: Path) -> Path:
    """What `sandbox` is a copy of."""
    return first_two


def test_all_samples_train_and_the_run_audits_clean(first_two: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(first_two)
    advantages = pl.read_parquet("artifacts/small/advantages/step=0002/learner=ada/*.parquet", hive_partitioning=False)
    assert len(advantages) == 8 * 4 * 2
    capability = {name: row["capability"] for name, row in table(first_two, 2).items()}
    omega = capability["bo"] / capability["ada"]
    assert advantages.filter(~pl.col("is_self"))["omega"].unique().to_list() == [pytest.approx(omega)]
    metrics = json.loads(Path("artifacts/small/metrics/advantage/step=0002/all.json").read_text())
    assert metrics["bo.ada.omega"] == pytest.approx(omega)
    assert metrics["bo.ada.omega_low"] < omega < metrics["bo.ada.omega_high"]
    errors = [metrics[f"{name}.accuracy_error"] for name in capability]
    assert errors == [row["accuracy"] - row["accuracy_all"] for row in table(first_two, 2).values()]
    assert any(errors)
    audit = cli("audit", RUN)
    assert audit.code == 0, audit.out
    page = Path("artifacts/small/report/index.html").read_text()
    assert "How sure the estimate of ability is" in page
    assert "error of a step's accuracy" in html.unescape(page)


def test_an_audit_survives_covariances_of_another_number_of_agents(sandbox: Sandbox, cli: Cli) -> None:
    path = Path("artifacts/small/capability/step=0001/capability.parquet")
    edit(path, lambda rows: [row | {"window_covariance": [[0.1] * 3]} for row in rows])
    found = json.loads(cli("audit", RUN, "--texts", "none", "--json").out)["findings"]
    assert ("capability", "window_covariance") in [(one["check"], one["column"]) for one in found]


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("accuracy_all", lambda value: value + 1e-6),
        ("window_all", lambda window: [*window[:-1], window[-1] + 1e-6]),
        ("window_covariance", lambda steps: [[steps[0][0] * 1.001, *steps[0][1:]], *steps[1:]]),
        ("standard_error", lambda value: value * 1.001),
    ],
)
def test_an_audit_finds_what_was_edited(sandbox: Sandbox, cli: Cli, column: str, change: Any) -> None:
    path = Path("artifacts/small/capability/step=0002/capability.parquet")
    edit(path, lambda rows: [rows[0] | {column: change(rows[0][column])}, *rows[1:]])
    found = json.loads(cli("audit", RUN, "--texts", "none", "--json").out)["findings"]
    assert [("capability", "ada", column)] == [
        (one["check"], one["row"], one["column"]) for one in found if one["check"] == "capability"
    ]


def test_an_audit_finds_an_edited_interval(sandbox: Sandbox, cli: Cli) -> None:
    path = Path("artifacts/small/metrics/advantage/step=0001/all.json")
    metrics = json.loads(path.read_text())
    path.write_text(json.dumps(metrics | {"ada.bo.omega_low": metrics["ada.bo.omega_low"] * 0.9}))
    found = json.loads(cli("audit", RUN, "--texts", "none", "--json").out)["findings"]
    assert [one["column"] for one in found if one["check"] == "metrics"] == ["ada.bo.omega_low"]


def edit(path: Path, change: Any) -> None:
    """Change a file's rows and nothing else of it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    before = pq.read_table(path)
    after = pa.Table.from_pylist(change(before.to_pylist()), schema=before.schema)
    pq.write_table(after, path, compression="zstd", write_page_checksum=True)


def test_what_if_answers_for_other_samples(first_two: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the stage itself would have made step 2, had step 1 been made that way too."""
    monkeypatch.chdir(first_two)
    asked = json.loads(cli("what-if", RUN, "--step", 2, "--set", "algorithm.capability.samples=null", "--json").out)
    for agent, row in table(first_two, 2).items():
        after = asked["capability"][agent]["after"]
        assert after["window"] == pytest.approx(row["window_all"], abs=1e-15)
        assert after["capability"] == pytest.approx(np.mean(row["window_all"]), abs=1e-15)
    as_run = json.loads(cli("what-if", RUN, "--step", 2, "--json").out)
    assert as_run["capability"] == {}


def test_more_samples_than_there_are_responses_are_refused(cli: Cli, project: Path) -> None:
    path = Path(RUN) / "params.yaml"
    path.write_text(PARAMS.replace("  recipe: hacpo", "  recipe: hacpo\n  capability: {samples: 5}"))
    error = cli("plan", RUN).error
    assert "algorithm.capability.samples: 5 is more than the 4 responses" in error
