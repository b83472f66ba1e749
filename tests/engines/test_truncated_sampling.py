"""Runs whose sampling is truncated: what was kept is stored, and every ratio and weight compares within it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from conftest import PARAMS, ROOT, Cli, make_finished
from hacpo.artifacts import parquet, tables
from hacpo.pipeline.project import Pipeline
from hacpo.settings.agents import MOST_KEPT, AgentSampling
from hacpo.settings.params import load
from hacpo.tools.audit.walk import audit
from hacpo.tools.estimate.disk import support_bytes
from hacpo.tools.estimate.known_models import agent_shape
from tests.tampering import Sandbox

TRUNCATED = (
    PARAMS.replace(
        "  bo: {model: models/bo}\n",
        "  bo: {model: models/bo}\n  eve: {model: models/ada, sampling: {top_k: null, top_p: 1.0}}\n",
    )
    .replace("{group_size: 4,", "{group_size: 4, top_k: 6, top_p: 0.9,")
    .replace("  clip:", "  loss: {sampler_correction: truncated, kl_coef: 0.01}\n  clip:")
)
"""ada and eve have the same tokenizer, bo another; eve samples from the whole vocabulary."""


def table(base: Path, name: str, agent: str, step: int = 1) -> pl.DataFrame:
    key = "learner" if name in ("pool", "advantages") else "agent"
    return pl.read_parquet(base / name / f"step={step:04d}" / f"{key}={agent}" / "*.parquet", hive_partitioning=False)


def by_id(rows: pl.DataFrame) -> dict[str, dict[str, Any]]:
    return {row["rollout_id"]: row for row in rows.to_dicts()}


@pytest.fixture(scope="module")
def project_root(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """The root of a finished run of two steps with top_k, top_p and the sampler's correction."""
    return make_finished(tmp_path_factory.mktemp("truncated"), models, TRUNCATED)


@pytest.fixture
def base(project_root: Path) -> Path:
    return project_root / "artifacts" / "small"


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("agent", ["ada", "bo"])
def test_the_behaviour_policy_is_the_one_that_sampled(base: Path, agent: str, step: int) -> None:
    for row in table(base, "rollouts", agent, step).to_dicts():
        assert len(row["support"]) == len(row["support_logprob"]) == len(row["token_ids"])
        assert all(t in kept == sorted(kept) for t, kept in zip(row["token_ids"], row["support"], strict=True))
        assert max(map(len, row["support"])) <= 6
        np.testing.assert_allclose(row["logprobs"], row["sampler_logprobs"], atol=1e-4)
    metrics = json.loads((base / f"metrics/generate/step=000{step}/{agent}.json").read_text())
    assert metrics["sampler_ess"] == pytest.approx(1.0, abs=1e-4)


def test_untruncated_rollouts_have_no_support(base: Path) -> None:
    rollouts = table(base, "rollouts", "eve")
    assert rollouts["support"].null_count() == rollouts["support_logprob"].null_count() == len(rollouts)


@pytest.mark.parametrize("agent", ["ada", "bo"])
def test_own_ratios_are_one_and_weights_do_not_starve(base: Path, agent: str) -> None:
    """Over the vocabulary a response's weight would be the product of the masses that its tokens' supports hold."""
    rollouts = by_id(table(base, "rollouts", agent))
    masses = {name: math.exp(sum(row["support_logprob"])) for name, row in rollouts.items()}
    trace = table(base, "updates", agent).filter("is_self")
    assert (trace["sampler_weight"] - 1).abs().max() < 1e-3
    assert min(masses[name] for name in trace["rollout_id"]) < 0.6
    first = trace.filter(pl.col("update") == 0)
    assert (first["ratio"] - 1).abs().max() < 1e-4


@pytest.mark.parametrize(("learner", "source"), [("bo", "ada"), ("ada", "bo"), ("eve", "bo")])
def test_retokenised_responses_compare_whole_vocabularies(base: Path, learner: str, source: str) -> None:
    rollouts = by_id(table(base, "rollouts", source))
    for row in table(base, "pool", learner).filter(pl.col("source") == source).to_dicts():
        rollout = rollouts[row["rollout_id"]]
        assert row["support"] is None
        whole = math.fsum([*rollout["logprobs"], *rollout["support_logprob"]])
        assert row["source_logprob"] == pytest.approx(whole, rel=1e-12)


def test_shared_token_ids_are_compared_within_what_the_source_kept(base: Path) -> None:
    """eve begins with ada's weights: before the first update her ratio is 1 to ada's own responses."""
    rollouts, pool = by_id(table(base, "rollouts", "ada")), by_id(table(base, "pool", "eve"))
    for name, rollout in rollouts.items():
        assert pool[name]["support"] == rollout["support"]
        assert pool[name]["source_logprob"] == pytest.approx(math.fsum(rollout["logprobs"]), rel=1e-12)
    first = table(base, "updates", "eve").filter((pl.col("update") == 0) & (pl.col("source") == "ada"))
    assert len(first) >= 4
    assert (first["ratio"] - 1).abs().max() < 1e-4
    own = [row for row in table(base, "pool", "ada").to_dicts() if row["is_self"]]
    assert all(row["support"] is None for row in own)  # beside them, in the rollouts
    others = [row for row in table(base, "pool", "ada").to_dicts() if row["source"] == "eve"]
    assert all(row["as_sampled"] and row["support"] is None for row in others)  # eve's sampling cuts nothing


def test_a_truncated_run_audits_clean(project_root: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project_root)
    result = cli("audit", "pipelines/small", "--deep")
    assert result.code == 0, result.out + result.err


def test_a_table_made_before_supports_were_kept_is_read(finished_copy: Path, cli: Cli) -> None:
    for path in (finished_copy / "artifacts/small/rollouts").rglob("*.parquet"):
        old = pq.read_table(path).drop_columns(["support", "support_logprob"])
        pq.write_table(old, path, compression="zstd", write_page_checksum=True)
    rollouts = parquet.read_table(path.parent, tables.ROLLOUTS)
    assert rollouts["support"].null_count == len(rollouts)
    assert cli("pool", "pipelines/small", "--step", 1, "--learner", "ada", "--out", "again").code == 0
    said = cli("audit", "pipelines/small").out
    assert "no such column" not in said
    assert "support" not in said


def test_disk_is_near_what_is_stored(project_root: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project_root)
    (found,) = json.loads(cli("estimate", "pipelines/small", "--json").out)["pipelines"]
    for name in ("rollouts", "pool"):
        stored = sum(path.stat().st_size for path in Path("artifacts/small", name).rglob("*.parquet"))
        assert 2 * found["disk_bytes"]["step"][name] == pytest.approx(stored, rel=0.5), name


def test_bytes_of_a_token_by_hand() -> None:
    shape = agent_shape("ada", load(ROOT / "pipelines/quickstart/params.yaml").agents["ada"], ROOT)
    sizes = {
        (top_p, top_k): support_bytes(AgentSampling(max_new_tokens=9, top_p=top_p, top_k=top_k), shape)
        for top_p, top_k in ((1.0, None), (1.0, 10), (0.9, 10), (0.9, None))
    }
    # top_k alone: 10 ids of 1.4 bytes. top_p .9: 1.2 / .1 = 12 ids of 2 bytes on average, or 10 if there are no more.
    assert sizes == pytest.approx({(1.0, None): 0.0, (1.0, 10): 14.0, (0.9, 10): 20.0, (0.9, None): 24.0})


def test_two_processes_and_recomputed_activations_keep_the_supports(
    project_root: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharded, and by token: the bytes of one process. eve learns from rows with and without a support at once."""
    monkeypatch.chdir(project_root)
    update = ["update", "pipelines/small", "--step", 2, "--agent", "eve", "--set", "optimizer.micro_batch_size=12"]
    update += ["--set", "algorithm.importance.level=token", "--set", "algorithm.loss.sampler_correction=none"]
    sharded = ["--set", "launcher={processes: 2}", "--set", "optimizer.gradient_checkpointing=true"]
    written = []
    for out, more in ((tmp_path / "one", []), (tmp_path / "two", sharded)):
        result = cli(*update, *more, "--out", out)
        assert result.code == 0, result.err
        checkpoint = out / "checkpoints/step=0002/agent=eve"
        written.append([checkpoint / "model.safetensors", out / "updates/step=0002/agent=eve/trace.parquet"])
    one, two = written
    assert one[0].read_bytes() == two[0].read_bytes()
    assert pl.read_parquet(one[1]).equals(pl.read_parquet(two[1]))


# --- tampering -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def damaged(project_root: Path) -> Path:
    return project_root


def without_the_sampled(row: dict[str, Any]) -> list[list[int]]:
    place = next(number for number, kept in enumerate(row["support"]) if len(kept) > 1)
    row["support"][place].remove(row["token_ids"][place])
    return list(row["support"])


def an_unlikelier(row: dict[str, Any]) -> list[list[int]]:
    """Another id in place of one that was not sampled: only the model knows."""
    place = next(number for number, kept in enumerate(row["support"]) if len(kept) > 1)
    kept = row["support"][place]
    gone = next(token for token in kept if token != row["token_ids"][place])
    new = next(token for token in range(100) if token not in kept)
    row["support"][place] = sorted([new, *(token for token in kept if token != gone)])
    return list(row["support"])


ROLLOUTS = "rollouts/step=0001/agent=ada"
CASES: list[tuple[str, str, Any, str, bool]] = [
    (ROLLOUTS, "support", without_the_sampled, "the sampled token among those that were kept", False),
    (ROLLOUTS, "support", lambda row: [kept[::-1] for kept in row["support"]], "ids in ascending order", False),
    (ROLLOUTS, "support", lambda row: row["support"][1:], "a set of ids for each token", False),
    (ROLLOUTS, "support", lambda _: None, "a value: top_k or top_p cut", False),
    (ROLLOUTS, "support", an_unlikelier, "", True),
    (ROLLOUTS, "support_logprob", lambda row: [0.5, *row["support_logprob"][1:]], "a finite number not above 0", False),
    (ROLLOUTS, "support_logprob", lambda row: [-9.0, *row["support_logprob"][1:]], "", True),
    (
        ROLLOUTS.replace("ada", "eve"),
        "support",
        lambda row: [[t] for t in row["token_ids"]],
        "null: nothing was",
        False,
    ),
    ("pool/step=0001/learner=eve", "support", an_unlikelier, "the ids that the source kept", False),
    ("pool/step=0001/learner=bo", "support", lambda row: [[t] for t in row["token_ids"]], "null: own", False),
]


@pytest.mark.parametrize(("name", "column", "change", "expected", "deep"), CASES)
def test_corruption_is_found(sandbox: Sandbox, name: str, column: str, change: Any, expected: str, deep: bool) -> None:
    def is_long(row: dict[str, Any]) -> bool:
        fits = not name.startswith("pool") or row["source"] == "ada"
        return fits and len(row["token_ids"]) > 5 and (row[column] is not None or expected.startswith("null"))

    shard = sandbox.shards(name)[0]
    rows = pq.read_table(shard).to_pylist()
    place = next(number for number, row in enumerate(rows) if is_long(row))
    rows[place][column] = change(rows[place])
    sandbox.rewrite(shard, lambda _: rows)
    report = audit(Pipeline.open(sandbox.pipeline), deep=deep, first=1, last=1)
    said = [one for one in report.findings if one.row == rows[place]["rollout_id"] and one.column.startswith(column)]
    checks = {one.check for one in said}
    assert checks & ({"replay"} if deep else {"support"}), report.findings
    assert any(expected in str(one.expected) for one in said)


# --- settings --------------------------------------------------------------------------------------------------------


def test_top_p_alone_bounds_what_is_kept(project: Path) -> None:
    params = project / "pipelines" / "small" / "params.yaml"
    text = params.read_text()
    for given, found in (
        ("top_p: 0.9", (0.9, MOST_KEPT)),
        ("top_p: 0.9, top_k: null", (0.9, MOST_KEPT)),
        ("top_p: 0.9, top_k: 2000", (0.9, 2000)),
        ("top_p: 1.0", (1.0, None)),
    ):
        params.write_text(text.replace("{group_size: 4,", f"{{group_size: 4, {given},"))
        settings = load(params)
        for sampling in (settings.sampling, settings.agents["ada"].sampling):
            assert (sampling.top_p, sampling.top_k) == found


@pytest.mark.parametrize(
    ("sampling", "more", "said"),
    [
        ("top_k: 1", "", "top_k: 1 keeps one token"),
        ("top_p: 0.3", "", "top_p: 0.3 keeps one token at most positions"),
        ("top_p: 0.99, top_k: 50000", "", "top_k: 50,000 stores up to 50,000 ids for every sampled token"),
        ("top_k: 20", "dtype: bfloat16, ", "sampler_correction: its weight is a product over up to 2,048 tokens"),
    ],
)
def test_a_check_warns_of_what_starves(project: Path, cli: Cli, sampling: str, more: str, said: str) -> None:
    params = project / "pipelines" / "small" / "params.yaml"
    text = params.read_text().replace("{group_size: 4,", f"{{group_size: 4, {sampling},")
    if more:
        text = text.replace("max_new_tokens: 26", "max_new_tokens: 2048").replace(
            "{device: cpu,", f"{{device: cpu, {more}"
        )
        text = text.replace("  clip:", "  loss: {sampler_correction: truncated}\n  clip:")
    params.write_text(text)
    assert said in cli("plan", "--check", "pipelines/small").out


def test_a_check_says_nothing_of_usual_truncation(project: Path, cli: Cli) -> None:
    params = project / "pipelines" / "small" / "params.yaml"
    params.write_text(params.read_text().replace("{group_size: 4,", "{group_size: 4, top_p: 0.95, top_k: 20,"))
    assert "sampling" not in cli("plan", "--check", "pipelines/small").out
