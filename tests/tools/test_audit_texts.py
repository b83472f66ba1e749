"""Texts against numbers: whatever contradicts its text is found, and the rest is said to have been covered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import environment
from hacpo.pipeline.project import Pipeline
from hacpo.tools.audit import texts
from hacpo.tools.audit.audit_run import AuditRun
from hacpo.tools.audit.findings import Finding
from hacpo.tools.audit.texts import TextAudit, TextReport, Texts
from tests.tampering import Sandbox

ROLLOUTS = "rollouts/step=0001/agent=ada"
VERDICTS = "verdicts/step=0001/agent=ada"
POOL = "pool/step=0001/learner=bo"
EVALUATIONS = "evaluations/step=0002/agent=bo"


def audit(mode: Texts = "all", seed: int = 0) -> tuple[list[Finding], TextReport]:
    run = AuditRun(Pipeline.open(Path("pipelines/small")))
    with TextAudit(run, mode, seed) as texts:
        for step in range(run.settings.steps + 1):
            texts.check(step)
        return run.findings, texts.report


def places(findings: list[Finding]) -> set[tuple[str, str, str, str]]:
    return {
        (found.check, found.file.parent.relative_to("artifacts/small").as_posix(), found.row, found.column)
        for found in findings
    }


def at(findings: list[Finding], check: str, column: str) -> Finding:
    [found] = [found for found in findings if (found.check, found.column) == (check, column)]
    return found


# --- what is covered -------------------------------------------------------------------------------------------------


def test_a_clean_run_has_no_finding_and_all_of_it_is_covered(sandbox: Sandbox) -> None:
    findings, report = audit("all")
    assert findings == []
    rollouts = 2 * 2 * 8 * 4  # steps, agents, prompts, samples
    answers = 2 * 2 * 16 * 2  # evaluated steps, agents, problems, samples
    assert (report.decoded, report.decoded_of) == (rollouts, rollouts)
    assert (report.verified, report.verified_of) == (rollouts + answers, rollouts + answers)
    assert (report.retokenised, report.retokenised_of) == (rollouts, rollouts)  # each agent's once, for the other
    assert report.undecided == 0


def test_a_sample_is_a_part_and_says_so(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "SAMPLE_ROWS", 5)
    findings, report = audit("sample")
    assert findings == []
    assert (report.decoded, report.decoded_of) == (5 * 4, 128)
    assert (report.verified, report.verified_of) == (5 * 8, 256)
    assert (report.retokenised, report.retokenised_of) == (5 * 4, 128)


def test_a_sample_follows_its_seed(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong text of 32: 5 of 32 rows are looked at, so some seeds find it and some do not, always the same."""
    monkeypatch.setattr(texts, "SAMPLE_ROWS", 5)
    sandbox.edit(ROLLOUTS, "text", lambda text: f"{text} ")
    found = [bool(audit("sample", seed)[0]) for seed in range(12)]
    assert any(found)
    assert not all(found)
    assert found == [bool(audit("sample", seed)[0]) for seed in range(12)]


def test_none_looks_at_nothing(sandbox: Sandbox) -> None:
    sandbox.edit(ROLLOUTS, "text", lambda text: f"{text} ")
    assert audit("none") == ([], TextReport())


def test_nothing_heavy_is_loaded_before_a_text_is_read(sandbox: Sandbox) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom hacpo.pipeline.project import Pipeline\n"
        "from hacpo.tools.audit.texts import TextAudit\nfrom hacpo.tools.audit.audit_run import AuditRun\n"
        "TextAudit(AuditRun(Pipeline.open(Path('pipelines/small'))), 'none', 0).check(1)\n"
        "print([name for name in ('torch', 'transformers', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.strip() == "[]"


def test_tables_that_cannot_be_read_are_left_to_the_audit_of_tables(sandbox: Sandbox) -> None:
    for table in (ROLLOUTS, "verdicts/step=0002/agent=bo", EVALUATIONS):
        sandbox.shards(table)[0].write_bytes(b"PAR1")
    findings, report = audit()
    assert findings == []
    assert report.decoded == 128 - 32


# --- rollouts --------------------------------------------------------------------------------------------------------


def test_an_edited_text(sandbox: Sandbox) -> None:
    row = sandbox.edit(ROLLOUTS, "text", lambda text: text[:-1] + "?")
    found = at(audit()[0], "text", "text")
    assert (found.file.parent, found.row, found.count) == (Path("artifacts/small") / ROLLOUTS, row["rollout_id"], 1)
    assert (found.expected, found.found) == (row["text"], row["new"])


def test_an_edited_token(sandbox: Sandbox) -> None:
    row = sandbox.edit(ROLLOUTS, "token_ids", lambda ids: [ids[0] + 1, *ids[1:]])
    found = at(audit()[0], "text", "text")
    assert (found.row, found.found) == (row["rollout_id"], row["text"])
    assert found.expected != row["text"]


def test_an_edited_prompt_token(sandbox: Sandbox) -> None:
    row = sandbox.edit(ROLLOUTS, "prompt_token_ids", lambda ids: [*ids[:-1], ids[-1] - 1])
    found = at(audit()[0], "prompt", "prompt_token_ids")
    assert (found.row, found.expected, found.found) == (row["rollout_id"], row["prompt_token_ids"], row["new"])


@pytest.mark.parametrize(("old", "new"), [("stop", "length"), ("length", "stop")])
def test_a_flipped_finish_reason(sandbox: Sandbox, old: str, new: str) -> None:
    row = sandbox.edit("rollouts", "finish_reason", lambda _: new, lambda row: row["finish_reason"] == old)
    found = at(audit()[0], "end", "finish_reason")
    assert (found.row, found.expected, found.found) == (row["rollout_id"], old, new)


def test_a_token_after_the_end(sandbox: Sandbox) -> None:
    row = sandbox.edit(ROLLOUTS, "token_ids", lambda ids: [ids[-1], *ids], lambda row: row["finish_reason"] == "stop")
    assert ("end", ROLLOUTS, row["rollout_id"], "token_ids") in places(audit()[0])


def test_rows_that_disagree_in_the_same_way_are_one_finding(sandbox: Sandbox) -> None:
    def worse(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**row, "text": row["text"] + "!"} for row in rows]

    for shard in sandbox.shards(ROLLOUTS):
        sandbox.rewrite(shard, worse)
    found = at(audit()[0], "text", "text")
    assert found.count == 32


def test_the_file_of_a_row_is_its_shard(sandbox: Sandbox) -> None:
    """20 rows in a file: row 25 lies in the second."""
    name = sandbox.rows(ROLLOUTS)[25]["rollout_id"]
    sandbox.edit(ROLLOUTS, "text", lambda text: f"{text} ", lambda row: row["rollout_id"] == name)
    found = at(audit()[0], "text", "text")
    assert (found.file.name, found.row) == ("part-00001.parquet", name)


# --- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [VERDICTS, EVALUATIONS])
@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("reward", lambda reward: 1.0 - reward),
        ("verdict", lambda verdict: "correct" if verdict == "wrong" else "wrong"),
        ("extracted", lambda extracted: f"{extracted}0"),
    ],
)
def test_an_edited_verdict(sandbox: Sandbox, table: str, column: str, change: Any) -> None:
    row = sandbox.edit(table, column, change, lambda row: row["extracted"] is not None)
    findings, _ = audit()
    key = row.get("rollout_id") or f"{row['benchmark']}/{row['problem_id']}/{row['sample']}"
    assert places(findings) == {("verdict", table, key, column)}
    assert (findings[0].expected, findings[0].found) == (row[column], row["new"])


def test_a_verdict_for_a_truncated_response(sandbox: Sandbox) -> None:
    row = sandbox.edit("verdicts", "verdict", lambda _: "no_answer", lambda row: row["verdict"] == "truncated")
    found = at(audit()[0], "verdict", "verdict")
    assert (found.row, found.expected, found.found) == (row["rollout_id"], "truncated", "no_answer")


def test_the_answer_is_the_schedules(sandbox: Sandbox) -> None:
    """A gold answer edited in the verdicts alone changes nothing here: the step's prompts decide."""
    sandbox.edit(VERDICTS, "answer", lambda answer: f"{answer}0")
    assert audit()[0] == []
    right = [row for row in sandbox.rows(VERDICTS) if row["verdict"] == "correct"]
    sandbox.edit(
        "prompts/step=0001",
        "answer",
        lambda answer: f"{answer}0",
        lambda row: row["problem_id"] == right[0]["problem_id"],
    )
    assert ("verdict", VERDICTS, right[0]["rollout_id"], "verdict") in places(audit()[0])


HARD = r"\boxed{(x+y+z)^{300}}"
"""Takes far longer than half a second to compare with a number."""


def test_a_timeout_of_an_easy_answer_is_doubted(sandbox: Sandbox) -> None:
    """Otherwise a verdict `timeout` would take any reward away unseen."""
    row = sandbox.edit(VERDICTS, "verdict", lambda _: "timeout", lambda row: row["verdict"] == "wrong")
    findings, report = audit()
    assert (at(findings, "verdict", "verdict").row, report.undecided) == (row["rollout_id"], 0)


def test_a_timeout_of_a_hard_answer_proves_nothing(sandbox: Sandbox) -> None:
    sandbox.replace(sandbox.pipeline / "params.yaml", "storage:", "verification: {timeout_seconds: 1.0}\nstorage:")
    row = sandbox.edit(ROLLOUTS, "text", lambda _: HARD, lambda row: row["finish_reason"] == "stop")
    for column, value in (("verdict", "wrong"), ("reward", 0.0), ("extracted", "(x+y+z)^{300}")):
        table_row = next(r for r in sandbox.rows(VERDICTS) if r["rollout_id"] == row["rollout_id"])
        if table_row[column] != value:
            sandbox.edit(VERDICTS, column, lambda _, value=value: value, lambda r: r["rollout_id"] == row["rollout_id"])
    findings, report = audit()
    assert report.undecided == 1
    assert not [found for found in findings if found.check == "verdict"]


# --- pools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("token_ids", lambda ids: [ids[0] + 1, *ids[1:]]),
        ("status", lambda _: "too_long"),
        ("roundtrip", lambda roundtrip: not roundtrip),
        ("learner_tokens", lambda count: count + 1),
    ],
)
def test_an_edited_cross_response(sandbox: Sandbox, column: str, change: Any) -> None:
    row = sandbox.edit(POOL, column, change, lambda row: not row["is_self"] and row["status"] == "kept")
    findings, _ = audit()
    assert places(findings) == {("retokenise", POOL, row["rollout_id"], column)}
    assert (findings[0].expected, findings[0].found) == (row[column], row["new"])


def test_an_edited_prompt_of_a_cross_response(sandbox: Sandbox) -> None:
    row = sandbox.edit(POOL, "prompt_token_ids", lambda ids: ids[1:], lambda row: not row["is_self"])
    assert places(audit()[0]) == {("prompt", POOL, row["rollout_id"], "prompt_token_ids")}


def test_an_unusable_tokenizer_is_named(sandbox: Sandbox) -> None:
    (sandbox.artifacts / "checkpoints/step=0000/agent=ada/tokenizer.json").write_text("{}")
    findings, report = audit()
    assert [(found.check, found.file) for found in findings] == [
        ("text", Path("artifacts/small/checkpoints/step=0000/agent=ada"))
    ]
    assert report.verified == 256  # verdicts need no tokenizer
