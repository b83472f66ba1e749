"""What stages in one process share."""

from __future__ import annotations

from pathlib import Path

from hacpo.artifacts.problem_rows import Problem
from hacpo.pipeline.execution.session import ConsoleProgress, Session
from hacpo.settings.verification import VerificationSettings
from hacpo.verifying.verifier import Request, Verifier

HARD = Request("a", r"\boxed{x+1}", "stop", "1+x")
"""Needs a mathematics library."""


def process_of(verifier: Verifier) -> int:
    (worker,) = verifier._pool._workers
    return worker._process.pid


def test_the_next_stage_finds_the_verifier_at_work(tmp_path: Path) -> None:
    session = Session(ConsoleProgress())
    processes = []
    for _ in range(2):
        with session.verifier(VerificationSettings(), tmp_path) as verifier:
            assert [verdict.reward for verdict in verifier.verify([HARD])] == [1.0]
            processes.append(process_of(verifier))
    assert processes[0] == processes[1]
    session.close()
    assert len(verifier._pool) == 0


def test_other_limits_have_another_verifier(tmp_path: Path) -> None:
    session = Session(ConsoleProgress())
    with (
        session.verifier(VerificationSettings(), tmp_path) as one,
        session.verifier(VerificationSettings(memory_mib=64), tmp_path) as other,
    ):
        assert one is not other
    session.close()


def test_a_function_of_the_users_starts_anew_in_every_stage(tmp_path: Path) -> None:
    """It may count its calls: what it makes of a response must not depend on what ran before in this process."""
    tmp_path.joinpath("counting.py").write_text(
        "calls = 0\ndef score(problem, response, finish_reason):\n    global calls\n    calls += 1\n    return calls\n"
    )
    session = Session(ConsoleProgress())
    problem = Problem("a", "a question", "1", None, None, None, "here")
    request = Request("a", "text", "stop", "1", problem)
    for _ in range(2):
        with session.verifier(VerificationSettings(reward="counting:score"), tmp_path) as verifier:
            assert [verdict.reward for verdict in verifier.verify([request])] == [1.0]
