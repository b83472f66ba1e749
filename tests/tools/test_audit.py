"""`hacpo audit` as a command: clean runs of every recipe, unfinished runs, damage, options, and what it covers.

Which corruption is found where is in tests/tools/test_audit_tamper.py.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from conftest import PARAMS, ROOT, Cli, environment, make_project, train
from hacpo.artifacts.list_columns import ListColumn
from hacpo.artifacts.shards import differences
from hacpo.pipeline.project import Pipeline
from hacpo.tools.audit.audit_view import print_audit
from hacpo.tools.audit.lists import same_values
from hacpo.tools.audit.walk import ALL_TEXTS_UP_TO, Audit, audit
from tests.arrows_layout import in_arrows_layout
from tests.tampering import Sandbox

SMALL = Path("pipelines/small")


def run(**options: Any) -> Audit:
    return audit(Pipeline.open(SMALL), **{"texts": "none", **options})


def unlocked(sandbox: Sandbox) -> None:
    """Without DVC's records, which know every file: what is found then follows from the tables."""
    for lock in sandbox.pipeline.rglob("dvc.lock"):
        lock.unlink()


def found(result: Audit) -> set[tuple[str, str, str]]:
    return {
        (finding.check, finding.file.as_posix().removeprefix("artifacts/small/"), finding.column)
        for finding in result.findings
    }


# --- clean runs ------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_clean_and_the_coverage_counts_it_all(sandbox: Sandbox, cli: Cli) -> None:
    result = cli("audit", "pipelines/small", "--texts", "none", "--json")
    assert result.code == 0, result.out
    report = json.loads(result.out)
    assert (report["run"], report["clean"], report["findings"]) == ("small", True, [])
    assert report["steps"] == {"from": 0, "until": 2, "reached": 2, "audited": [1, 2]}
    rows = report["coverage"]["rows"]
    # 2 steps, 2 agents, 8 prompts, 4 samples; pools and advantages hold both agents' for each learner.
    assert (rows["rollouts"], rows["verdicts"]) == (128, 128)
    assert (rows["pool"], rows["advantages"]) == (256, 256)
    assert 0 < rows["trace"] <= 256
    assert (rows["capability"], rows["checkpoints"], rows["evaluations"]) == (4, 6, 2 * 2 * 16 * 2)
    assert rows["problems"] == 64 + 16
    assert rows["schedule"] == 2 * 16  # once as a whole and once step by step
    assert report["coverage"]["files"]["rollouts"] == 2 * 2 * 2  # shards of 20 rows


def test_the_output_is_a_verdict_and_what_was_covered(sandbox: Sandbox, cli: Cli) -> None:
    result = cli("audit", "pipelines/small", "--texts", "none")
    assert result.code == 0
    assert result.out.splitlines()[-1] == "small: no finding"
    assert "128 rollouts" in result.out
    assert "texts: none" in result.out
    assert "only `--deep` computes it again" in result.out
    assert result.err == ""


RECIPES = {
    "gspo": "",
    "gspo_x2": "",
    "grpo": "",
    "naive": "",
    "naive_self": "  importance: {reference: self}",
    "no_capability_baseline": "",
    "no_discrepancy": "",
    "no_clip": "",
    "no_stepwise": "",
    "reference_code": "",
    "reference_code_main": "",
    "hacpo_alpha_2_self_first": (
        "  importance: {alpha: 2.0, ratio_norm: own_tokens}\n"
        "  loss: {minibatch_order: self_first, aggregation: mean, sampler_correction: truncated}"
    ),
    "hacpo_bytes_shrunk": (
        "  importance: {ratio_norm: bytes, score_eos: false}\n"
        "  advantage: {baseline: shrunk}\n  loss: {shuffle: false}\n"
        "  capability: {metric: positive_rate, window: 1}"
    ),
    "hacpo_balanced": "  loss: {minibatch_order: balanced, ranks: 2, kl_cap: 10.0}",
    "hacpo_own": "  advantage: {baseline: own, cross_baseline: learner, baseline_guard: false}",
    "hacpo_one_agent": "",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_clean(name: str, tmp_path: Path, models: Path, cli: Cli, monkeypatch: Any) -> None:
    recipe = next(known for known in ("naive", "hacpo", name) if name.startswith(known))
    head, _, tail = PARAMS.partition("algorithm:\n")
    rest = tail[tail.index("data:") :]
    params = f"{head}algorithm:\n  recipe: {recipe}\n{RECIPES[name]}\n{rest}"
    agents = ["ada"] if name == "hacpo_one_agent" else ["ada", "bo"]
    if agents == ["ada"]:
        params = params.replace("  bo: {model: models/bo}\n", "")
    root = make_project(tmp_path / "project", models, params)
    monkeypatch.chdir(root)
    assert cli("plan", "pipelines/small").code == 0
    train(cli, "small", agents, steps=2)
    result = cli("audit", "pipelines/small", "--texts", "all", "--json")
    assert result.code == 0, result.out
    assert json.loads(result.out)["steps"]["audited"] == [1, 2]


def test_a_narrow_terminal_shows_whole_names(sandbox: Sandbox) -> None:
    """80 columns fold a path and a row's key, but cut nothing off."""
    unlocked(sandbox)
    edited = sandbox.edit("verdicts/step=0001/agent=ada", "answer", lambda answer: "nonsense")
    console = Console(width=80, file=io.StringIO(), record=True)
    print_audit(console, run())
    rows = [line for line in console.export_text().splitlines() if line.startswith("│")]
    assert {len(row) for row in rows} == {80}
    place = "".join(row.split("│")[2].strip() for row in rows)
    assert f"artifacts/small/{edited['table']}/part-00000.parquet{edited['rollout_id']}" in place


# --- unfinished runs -------------------------------------------------------------------------------------------------


def test_a_run_that_has_not_begun(project: Path, cli: Cli) -> None:
    result = cli("audit", "pipelines/small")
    assert result.code == 2
    assert "nothing to audit" in result.error


def test_a_run_without_its_first_models_has_no_finding(project: Path, cli: Cli) -> None:
    for stage in ("plan", "resolve", "prepare"):
        assert cli(stage, "pipelines/small").code == 0
    result = cli("audit", "pipelines/small", "--texts", "all")
    assert result.code == 0, result.out
    assert "between the first and the last" not in result.out


def test_an_unfinished_run_is_audited_as_far_as_it_is(sandbox: Sandbox) -> None:
    unlocked(sandbox)
    for table in ("verdicts", "capability", "pool", "advantages", "updates", "checkpoints", "evaluations"):
        shutil.rmtree(sandbox.artifacts / table / "step=0002")
    shutil.rmtree(sandbox.artifacts / "rollouts" / "step=0002" / "agent=bo")
    (sandbox.artifacts / "metrics" / "generate" / "step=0002" / "bo.json").unlink()
    for stage in ("verify", "pool", "advantage", "update", "evaluate"):
        shutil.rmtree(sandbox.artifacts / "metrics" / stage / "step=0002")
    result = run()
    assert result.findings == []
    assert (result.reached, result.steps) == (2, [1, 2])
    assert result.rows["rollouts"] == 64 + 32
    shutil.rmtree(sandbox.artifacts / "rollouts" / "step=0002" / "agent=ada")
    shutil.rmtree(sandbox.artifacts / "metrics" / "generate" / "step=0002")
    result = run()
    assert result.findings == []
    assert (result.reached, result.steps) == (1, [1])


@pytest.mark.parametrize(
    "hole",
    [
        "rollouts/step=0001/agent=ada",
        "verdicts/step=0001/agent=bo",
        "pool/step=0001/learner=ada",
        "capability/step=0001/capability.parquet",
        "advantages/step=0002/learner=bo",
        "updates/step=0001/agent=ada/trace.parquet",
    ],
)
def test_a_hole_in_the_middle_is_a_finding(sandbox: Sandbox, hole: str) -> None:
    unlocked(sandbox)
    path = sandbox.artifacts / hole
    path.unlink() if path.is_file() else shutil.rmtree(path)
    result = run()
    assert ("files", hole, "") in found(result)
    assert {check for check, *_ in found(result)} == {"files"}, "the rest is still as it should be"
    assert len(result.findings) == 1


def test_pruned_checkpoints_are_not_checked_and_said_so(sandbox: Sandbox) -> None:
    unlocked(sandbox)
    shutil.rmtree(sandbox.artifacts / "checkpoints" / "step=0001")
    result = run()
    assert result.findings == []
    reasons = " ".join(what for what, _ in result.skipped)
    assert "policy of ada's rollouts" in reasons
    assert "checkpoints between the first and the last step" in reasons


def test_a_missing_last_checkpoint_is_a_finding(sandbox: Sandbox) -> None:
    unlocked(sandbox)
    shutil.rmtree(sandbox.artifacts / "checkpoints" / "step=0002" / "agent=bo")
    assert found(run()) == {("files", "checkpoints/step=0002/agent=bo", "")}


def test_a_range_of_steps(sandbox: Sandbox, cli: Cli) -> None:
    unlocked(sandbox)
    sandbox.edit("advantages/step=0001/learner=ada", "advantage", lambda value: value + 1e-8)
    assert run(first=2).findings == []
    assert run(last=0).findings == []
    assert {name for *_, name in found(run(last=1))} == {"advantage"}
    assert run(first=2).steps == [2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--from", "3"), "--from is out of range"),
        (("--until", "-1"), "--until is out of range"),
        (("--from", "2", "--until", "1"), "--from is after --until"),
        (("--texts", "some"), "some"),
    ],
)
def test_bad_options_are_one_line(sandbox: Sandbox, cli: Cli, options: tuple[str, ...], said: str) -> None:
    result = cli("audit", "pipelines/small", *options)
    assert result.code == 2
    assert said in result.error


# --- damage ----------------------------------------------------------------------------------------------------------


def test_a_damaged_file_is_named_and_what_depends_on_it_is_not_checked(sandbox: Sandbox) -> None:
    unlocked(sandbox)
    shard = sandbox.shards("verdicts/step=0001/agent=ada")[1]
    shard.write_bytes(shard.read_bytes()[:200])
    result = run()
    assert found(result) == {("files", "verdicts/step=0001/agent=ada/part-00001.parquet", "")}
    assert "damaged or truncated" in str(result.findings[0].found)
    reasons = {what for what, _ in result.skipped}
    assert {"what follows from verdicts on ada", "capability of ada", "advantages of bo"} <= reasons


def test_a_flipped_bit_anywhere_in_a_shard_is_found(sandbox: Sandbox) -> None:
    """By the checksums of its pages and what follows from its rows; statistics in its footer only by DVC's records."""
    shard = sandbox.shards("rollouts/step=0001/agent=ada")[0]
    size = shard.stat().st_size
    by_tables = 0
    for at in range(4, size, size // 25):
        sandbox.flip(shard, at)
        checks = {finding.check for finding in run(last=1).findings}
        assert checks, f"byte {at} of {size}"
        by_tables += checks != {"lock"}
        sandbox.flip(shard, at)
    assert by_tables >= 15


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all" * 50])
def test_what_is_no_table_is_a_finding_whatever_it_is(sandbox: Sandbox, content: bytes) -> None:
    for place in ("schedule.parquet", "data/arithmetic/train.parquet", "updates/step=0001/agent=ada/trace.parquet"):
        (sandbox.artifacts / place).write_bytes(content)
        assert ("files", place, "") in found(run())
        sandbox.restore()


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000, '{"tokens": "many"}', '{"tokens": true}'])
def test_metrics_that_are_no_numbers(sandbox: Sandbox, text: str) -> None:
    unlocked(sandbox)
    (sandbox.artifacts / "metrics/generate/step=0001/ada.json").write_text(text)
    assert {(check, file) for check, file, _ in found(run())} == {("metrics", "metrics/generate/step=0001/ada.json")}


def test_tables_in_another_layout_of_parquet_are_audited_alike(sandbox: Sandbox) -> None:
    unlocked(sandbox)
    ours = run()
    assert in_arrows_layout(sandbox.artifacts) > 20
    others = run()
    assert others.findings == ours.findings == []
    assert (others.rows, others.skipped) == (ours.rows, ours.skipped)


def test_further_columns_and_metrics_are_no_finding(sandbox: Sandbox) -> None:
    unlocked(sandbox)
    for table in ("rollouts/step=0001/agent=ada", "updates/step=0001/agent=ada/trace.parquet"):
        for shard in sandbox.shards(table):
            content = pq.read_table(shard)
            wider = content.append_column("notes", pa.array(["mine"] * len(content)))
            pq.write_table(wider, shard, compression="zstd", write_page_checksum=True)
    metrics = sandbox.artifacts / "metrics/update/step=0001/ada.json"
    metrics.write_text(json.dumps({**json.loads(metrics.read_text()), "watts": 3}))
    assert run().findings == []


def test_what_sampled_under_auto_is_what_the_metrics_say(sandbox: Sandbox) -> None:
    """The run's machine may have had a GPU: its stages' metrics say which of them sampled with vLLM."""
    unlocked(sandbox)
    sandbox.replace(sandbox.pipeline / "params.yaml", "device: cpu", "device: auto")
    sandbox.replace(sandbox.artifacts / "settings.json", '"device": "cpu"', '"device": "auto"')
    for shard in sandbox.artifacts.rglob("*.parquet"):
        content = pq.read_table(shard)
        metadata = {key: value.replace(b'"cpu"', b'"auto"') for key, value in content.schema.metadata.items()}
        pq.write_table(content.replace_schema_metadata(metadata), shard, compression="zstd", write_page_checksum=True)
    assert run().findings == []
    sandbox.edit("rollouts/step=0001/agent=ada", "sampler_logprobs", lambda values: [values[0] - 0.1, *values[1:]])
    assert "rollouts" in {check for check, *_ in found(run())}
    path = sandbox.artifacts / "metrics/generate/step=0001/ada.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vllm_seconds": 0.5}))
    result = run()
    assert {check for check, *_ in found(result)} == {"metrics"}
    assert any("sampler_logprobs against logprobs" in what for what, _ in result.skipped)


def test_what_no_stage_makes_is_found(sandbox: Sandbox) -> None:
    unlocked(sandbox)
    places = [
        "notes.txt",
        "rollouts/step=0001/agent=eve/part-00000.parquet",
        "rollouts/step=0001/agent=ada/old.parquet",
        "pool/step=0000/learner=ada/part-00000.parquet",
        "pool/.step=0002.tmp-1/part-00000.parquet",
        "checkpoints/step=0001/agent=ada/.cache/x",
        "metrics/generate/step=0001/eve.json",
        "data/other/train.parquet",
        "report/.index.html.tmp-7",
    ]
    for place in places:
        path = sandbox.artifacts / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    result = run()
    assert {check for check, *_ in found(result)} == {"unknown"}
    named = {file for _, file, _ in found(result)}
    assert len(named) == len(places)
    assert all(any(place.startswith(name) for name in named) for place in places)


def test_steps_beyond_the_last_are_left_alone_and_said_so(sandbox: Sandbox) -> None:
    unlocked(sandbox)
    (sandbox.artifacts / "rollouts/step=0003/agent=ada").mkdir(parents=True)
    (sandbox.artifacts / "rollouts/step=0003/agent=ada/part-00000.parquet").write_bytes(b"x")
    result = run()
    assert result.findings == []
    assert any("beyond the last" in what for what, _ in result.skipped)


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edited", ["params", "settings"])
def test_a_setting_changed_after_the_run_is_one_finding(sandbox: Sandbox, edited: str) -> None:
    """Whichever of the two was changed, the audit goes by what the run's files say, not by the change."""
    unlocked(sandbox)
    if edited == "params":
        sandbox.replace(sandbox.pipeline / "params.yaml", "alpha: 1.0", "alpha: 3.0")
    else:
        sandbox.replace(sandbox.artifacts / "settings.json", '"alpha": 1.0', '"alpha": 3.0')
    result = run()
    assert found(result) == {("settings", "settings.json", "algorithm.importance.alpha")}
    [finding] = result.findings
    assert {finding.expected, finding.found} == {1.0, 3.0}


def test_a_setting_changed_everywhere_but_in_the_tables_is_in_every_file(sandbox: Sandbox) -> None:
    unlocked(sandbox)
    sandbox.replace(sandbox.pipeline / "params.yaml", "alpha: 1.0", "alpha: 3.0")
    sandbox.replace(sandbox.artifacts / "settings.json", '"alpha": 1.0', '"alpha": 3.0')
    result = run()
    column = "hacpo.settings algorithm.importance.alpha"
    assert len([finding for finding in result.findings if finding.column == column]) == 4, "one for each trace"


def test_differences_of_settings() -> None:
    wanted = {"a": {"b": 1, "c": 2.0}, "d": [1]}
    assert differences(wanted, {"a": {"b": 1, "c": 2.0}, "d": [1]}) == []
    assert differences(wanted, {"a": {"b": 1.0, "c": 3.0}, "d": [1], "e": 0}) == [
        ("a.b", 1, 1.0),
        ("a.c", 2.0, 3.0),
        ("e", "not there", 0),
    ]


@pytest.mark.slow
def test_the_speed_benchmark_makes_a_run_that_is_clean() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "audit_speed.py"), "--steps", "2", "--rollouts", "160"]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "640 rollouts" in result.stdout


# --- texts, torch, lists ---------------------------------------------------------------------------------------------


def test_all_texts_of_a_small_run_and_a_sample_of_a_large_one(sandbox: Sandbox, monkeypatch: Any) -> None:
    from hacpo.tools.audit import walk

    assert ALL_TEXTS_UP_TO == 20_000
    assert run(texts=None).texts == "all"
    monkeypatch.setattr(walk, "ALL_TEXTS_UP_TO", 127)  # the run has 128
    result = run(texts=None, first=1, last=1)
    assert result.texts == "sample"


def test_every_audit_draws_another_sample_and_says_which(sandbox: Sandbox, cli: Cli) -> None:
    """Whoever altered a text must not know that it will not be read; what was read can be read again."""
    command = ("audit", "pipelines/small", "--texts", "sample", "--until", "0", "--json")
    first, second = (json.loads(cli(*command).out)["coverage"]["seed"] for _ in range(2))
    assert first != second
    again = cli(*command[:-1], "--seed", first)
    assert f"texts (sample, --seed {first}): " in again.out


def test_torch_is_not_loaded(sandbox: Sandbox) -> None:
    code = """
import sys
from hacpo.pipeline.execution.command_line import run_app
from hacpo.cli import app
assert run_app(app, ["audit", "pipelines/small", "--texts", "none"]) == 0
loaded = {"torch", "transformers", "vllm", "math_verify", "dvc"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), cwd=os.getcwd())


def test_lists_by_hand() -> None:
    column = ListColumn.of(pa.chunked_array([pa.array([[1, 2], []]), pa.array([[3, 4, 5]])]))
    assert column.lengths.tolist() == [2, 0, 3]
    assert column.sums().tolist() == [3.0, 0.0, 12.0]
    assert column.row(2) == [3, 4, 5]
    assert column.heads(np.array([1, 0, 2])).values.tolist() == [1, 3, 4]
    other = ListColumn.of(pa.array([[3, 4, 5], [1, 2], [], [3, 4]]))
    assert column.same_as(other, np.array([1, 2, 0])).tolist() == [True, True, True]
    assert column.same_as(other, np.array([0, 2, 3])).tolist() == [False, True, False]
    changed = ListColumn.of(pa.array([[1, 2], [], [3, 4, 6]]))
    assert changed.same_as(column, np.arange(3)).tolist() == [True, True, False]
    assert ListColumn.of(pa.array([[], []], pa.list_(pa.int32()))).sums().tolist() == [0.0, 0.0]


def test_values_are_compared_list_by_list() -> None:
    """However nested; a null is a null and no empty list, NaN is nothing, and a tolerance is for numbers."""
    nan = float("nan")
    numbers = pa.array([1.0, nan, None, None, 2.0]), pa.array([1.0, nan, None, 1.0, 2.5])
    assert same_values(*numbers).tolist() == [True, False, True, False, False]
    assert same_values(*numbers, 0.5).tolist() == [True, False, True, False, True]
    assert same_values(*numbers, np.array([0, 0, 0, 9, 0.4])).tolist() == [True, False, True, False, False]
    lists = pa.array([[1.0, 2.0], [], [], [3.0], None]), pa.array([[1.0, 2.5], [], None, [3.0, 4.0], None])
    assert same_values(*lists).tolist() == [False, True, False, False, True]
    assert same_values(*lists, 0.5).tolist() == [True, True, False, False, True]
    nested = pa.array([[[1], [2, 3]], [[1]], [[]], None, [[5]]]), pa.array([[[1], [2, 3]], [[2]], [], None, [None]])
    assert same_values(*nested).tolist() == [True, False, False, True, False]
    texts = pa.array(["a", None, "b"]), pa.array(["a", None, "c"])
    assert same_values(*texts).tolist() == [True, True, False]
    assert same_values(pa.array([], pa.list_(pa.int32())), pa.array([], pa.list_(pa.int32()))).tolist() == []


def test_advantages_that_cannot_be_read_accuse_no_trace(finished_copy: Path, cli: Cli) -> None:
    """Whether an own response was clipped depends on its advantage's sign: without it nothing is to be said."""
    table = next(Path("artifacts/small/advantages/step=0002/learner=ada").glob("*.parquet"))
    table.write_bytes(table.read_bytes()[:-100])
    findings = json.loads(cli("audit", "pipelines/small", "--texts", "none", "--json").out)["findings"]
    assert {finding["check"] for finding in findings} & {"trace"} == set()
    assert any(finding["file"].endswith(table.name) for finding in findings)
