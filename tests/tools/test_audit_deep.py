"""Repeating a run with its checkpoints: what is skipped, and what still holds on a machine that computes other bits."""

from __future__ import annotations

import shutil
from pathlib import Path

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
