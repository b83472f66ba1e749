"""Repeating a run with its checkpoints: what is skipped, and what still holds on a machine that computes other bits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from hacpo.pipeline.project import Pipeline
from hacpo.tools.audit import deep
from hacpo.tools.audit.audit_run import AuditRun
from hacpo.tools.audit.deep import DeepAudit, DeepReport
from hacpo.tools.audit.findings import Finding
from tests.tampering import Sandbox

ROLLOUTS = "rollouts/step=0001/agent=ada"
TRACE = "updates/step=0001/agent=ada/trace.parquet"
EVALUATIONS = "evaluations/step=0000/agent=ada"
AFTER = "checkpoints/step=0001/agent=ada"


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No share of equal rows is enough to be on the machine of the run."""
    monkeypatch.setattr(deep, "SAME_SHARE", 2.0)


def audit(step: int) -> tuple[list[Finding], DeepReport, AuditRun]:
    run = AuditRun(Pipeline.open(Path("pipelines/small")))
    with DeepAudit(run) as repeated:
        repeated.check(step)
        return run.findings, repeated.report, run


def test_the_same_machine_repeats_every_bit_and_leaves_nothing_behind(sandbox: Sandbox) -> None:
    before = sorted(Path().rglob("*"))
    findings, report, run = audit(1)
    assert findings == []
    assert report == DeepReport(replayed=4, exact=4)  # generate and update of two agents
    assert not run.skipped
    assert sorted(Path().rglob("*")) == before
    findings, report, _ = audit(0)
    assert (findings, report) == ([], DeepReport(replayed=2, exact=2))  # evaluate


def test_without_a_checkpoint_nothing_can_be_said(sandbox: Sandbox) -> None:
    """ada's after step 1: step 1's new weights, and all of step 2 but bo's."""
    shutil.rmtree(sandbox.artifacts / AFTER)
    findings, report, run = audit(1)
    assert (findings, report.exact) == ([], 4)
    assert run.skipped == {("the weights after an update", "the checkpoint is not there"): 1}
    findings, report, run = audit(2)
    # bo's generate and update, and both evaluations of step 2's own checkpoints.
    assert (findings, report.replayed) == ([], 4)
    assert run.skipped == {
        ("rescoring and sampling again", "the checkpoint is not there"): 1,
        ("repeating update", "the checkpoint is not there"): 1,
    }


def test_a_checkpoint_that_cannot_be_loaded_is_named(sandbox: Sandbox) -> None:
    (sandbox.artifacts / "checkpoints/step=0000/agent=ada/config.json").write_text("{}")
    findings, _, _ = audit(1)
    before = Path("artifacts/small/checkpoints/step=0000/agent=ada")
    rollouts = Path("artifacts/small") / ROLLOUTS
    assert {(found.check, found.file) for found in findings} == {("replay", before), ("replay", rollouts)}
    assert all("cannot be loaded" in str(found.found) for found in findings)


@pytest.mark.usefixtures("elsewhere")
def test_on_another_machine_a_clean_run_is_within_the_tolerances(sandbox: Sandbox) -> None:
    findings, report, _ = audit(1)
    assert findings == []
    assert report == DeepReport(replayed=2, exact=0)  # nothing is sampled again


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("change", "is_found"), [(5e-4, False), (2e-3, True)])
def test_the_tolerance_of_a_token(sandbox: Sandbox, change: float, is_found: bool) -> None:
    """1e-3 nats in float32."""
    row = sandbox.edit(ROLLOUTS, "logprobs", lambda values: [*values[:-1], values[-1] - change])
    findings, _, _ = audit(1)
    at = len(row["logprobs"]) - 1
    wanted = [(row["rollout_id"], f"logprobs[{at}]")] if is_found else []
    assert [(found.row, found.column) for found in findings] == wanted


@pytest.mark.usefixtures("elsewhere")
def test_the_tolerance_of_an_update_rises_after_the_first(sandbox: Sandbox) -> None:
    """1e-3 nats before any update, 1e-2 after one: a change of 5e-3 shows only in the first."""
    first = sandbox.edit(TRACE, "learner_logprob", lambda value: value - 5e-3, lambda row: row["update"] == 0)
    sandbox.edit(TRACE, "learner_logprob", lambda value: value - 5e-3, lambda row: row["update"] == 2)
    findings, _, _ = audit(1)
    assert [(found.row, found.column) for found in findings] == [(first["rollout_id"], "learner_logprob")]


@pytest.mark.usefixtures("elsewhere")
def test_the_tolerance_of_a_weight(sandbox: Sandbox) -> None:
    """Four updates of step size 3e-4 part two runs by at most 2 x 4 x 3e-4 = 2.4e-3."""
    path = sandbox.artifacts / AFTER / "model.safetensors"
    for change, count in ((2e-3, 0), (3e-3, 1)):
        sandbox.restore()
        tensors = load_file(path)
        name = min(tensors)
        tensors[name].view(-1)[7] += change
        save_file(tensors, path, metadata={"format": "pt"})
        findings, _, _ = audit(1)
        assert [(found.row, found.column) for found in findings] == [(name, "element[7]")] * count


@pytest.mark.usefixtures("elsewhere")
def test_the_policy_has_no_tolerance(sandbox: Sandbox) -> None:
    row = sandbox.edit(ROLLOUTS, "policy", lambda policy: policy[::-1])
    findings, _, _ = audit(1)
    assert [(found.row, found.column) for found in findings] == [(row["rollout_id"], "policy")]


def test_what_is_chosen_from_many_samples_is_not_what_the_seed_gives(sandbox: Sandbox) -> None:
    """A response of another sample in the place of one, with its right log-probabilities and all that follows: the
    numbers agree, the random stream does not."""
    shard = sandbox.shards(ROLLOUTS)[0]
    rows = pq.read_table(shard).to_pylist()
    other = next(row for row in rows[1:4] if row["token_ids"] != rows[0]["token_ids"])
    names = ("token_ids", "text", "finish_reason", "logprobs", "sampler_logprobs")
    sandbox.rewrite(shard, lambda rows: [{**rows[0], **{name: other[name] for name in names}}, *rows[1:]])
    findings, _, _ = audit(1)
    named = {(found.row, found.column.split("[")[0]) for found in findings}
    assert (rows[0]["rollout_id"], "token_ids") in named


def every_answer_right(sandbox: Sandbox, at: str) -> int:
    """Every held-out answer the gold one, with what its verdict says; returns how many there are."""
    golds = {row["problem_id"]: row["answer"] for row in sandbox.rows("data")}

    def right(row: dict[str, Any]) -> dict[str, Any]:
        gold = golds[row["problem_id"]]
        told = {"text": f"\\boxed{{{gold}}}", "finish_reason": "stop", "token_count": 5, "extracted": gold}
        return {**row, **told, "reward": 1.0, "verdict": "correct", "message": None}

    for shard in sandbox.shards(at):
        sandbox.rewrite(shard, lambda rows: [right(row) for row in rows])
    return len(sandbox.rows(at))


def test_evaluations_that_were_wholly_forged_are_found(sandbox: Sandbox) -> None:
    """Not one row is as repeated: that this is the run's machine, rollouts tell, of a step that is not audited."""
    rows = every_answer_right(sandbox, EVALUATIONS)
    findings, report, run = audit(0)
    assert report == DeepReport(replayed=2, exact=2)
    [text] = [found for found in findings if found.column == "text"]
    assert (text.check, text.file, text.count) == ("replay", Path("artifacts/small") / EVALUATIONS, rows)
    assert {"reward", "verdict", "token_count"} <= {found.column for found in findings}
    assert not run.skipped


@pytest.mark.usefixtures("elsewhere")
def test_forged_evaluations_are_found_on_another_machine_and_what_differs_is_counted(sandbox: Sandbox) -> None:
    """All rewards that differ are above those repeated: n of n where 5 sqrt(n) are allowed, so any n above 25."""
    every_answer_right(sandbox, EVALUATIONS)
    findings, report, run = audit(0)
    [found] = findings
    above = found.count
    assert above > 25
    assert (found.column, found.found) == ("reward", f"{above} above, 0 below")
    assert report == DeepReport(replayed=2, exact=1)  # bo's answers come out as they are
    told = dict(run.skipped.keys())
    assert "32 of 64" in told["held-out answers that come out otherwise"]
    assert "0 of 128 differ" in told["rollouts by sampling them again, and any number to the bit"]


def test_log_probabilities_all_one_ulp_off_do_not_end_the_comparison(sandbox: Sandbox) -> None:
    """None of ada's rollouts of step 1 is rescored to the bit, and still this is the machine of the run."""

    def moved(row: dict[str, Any]) -> dict[str, Any]:
        values = np.asarray(row["logprobs"], np.float32)
        return {**row, "logprobs": np.nextafter(values, np.float32(-np.inf)).tolist()}

    for shard in sandbox.shards(ROLLOUTS):
        sandbox.rewrite(shard, lambda rows: [moved(row) for row in rows])
    findings, report, run = audit(1)
    assert not run.skipped
    assert report == DeepReport(replayed=4, exact=4)
    [found] = [found for found in findings if found.column.startswith("logprobs")]
    assert found.file == Path("artifacts/small") / ROLLOUTS
    assert (found.count, found.note) == (
        len(sandbox.rows(ROLLOUTS)),
        "this is the run's machine type: bo's rollouts of step 1 come out to the bit",
    )


def test_a_step_that_a_run_has_not_come_to_is_not_repeated(sandbox: Sandbox) -> None:
    """Step 2 has rollouts, and no pool, update or checkpoint yet."""
    for kind in ("pool", "updates", "checkpoints", "evaluations"):
        for path in (sandbox.artifacts / kind).glob("step=0002"):
            shutil.rmtree(path)
    findings, report, _ = audit(2)
    assert findings == []
    assert report == DeepReport(replayed=2, exact=2)  # generate of two agents
