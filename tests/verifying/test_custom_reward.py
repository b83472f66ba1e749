"""Rewards of one's own: `verification.reward: package.module:function`, from the call of a function to a whole run."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from conftest import Cli, environment
from hacpo.artifacts.problem_rows import Problem
from hacpo.errors import DataError, SettingsError
from hacpo.settings.verification import VerificationSettings
from hacpo.verifying import function as reward_function
from hacpo.verifying.verifier import Request, Verdict, Verifier

PROBLEM = {
    "problem_id": "p1",
    "problem": "How many?",
    "answer": "2",
    "solution": None,
    "subject": "counting",
    "level": 3,
    "source": "here",
}
MISBEHAVING = """
    import os, signal, subprocess, sys, threading, time
    import numpy as np

    print('{"refused": "by what is printed"}', flush=True)

    def score(problem, response, finish_reason):
        if response == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                pass
        if response == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if response == "exit":
            sys.exit(1)
        if response == "leave":
            os._exit(0)
        if response == "eat":
            hoard = []
            while True:
                hoard.append(bytearray(8 << 20))
                time.sleep(0.01)
        if response == "recurse":
            return score(problem, response, finish_reason)
        if response == "interrupt":
            raise KeyboardInterrupt
        if response == "print":
            print('{"reward": 5.0, "verdict": "correct", "message": null}', flush=True)
            os.write(2, b"more")
        if response == "read":
            return input()
        if response == "start":
            subprocess.Popen(["sleep", "600.25"], start_new_session=True)
            time.sleep(60)
        returned = {"nan": float("nan"), "inf": (float("inf"), "correct"), "large": 1e39, "none": None, "text": "1",
                    "list": [1.0, "correct"], "three": (1.0, "correct", "x"), "verdict": (1.0, "great"),
                    "said": (0.0, "error"), "kind": (1.0, 1), "complex": 1j, "digits": 10**400,
                    "true": True, "int": 1, "numpy": np.float32(0.25), "tenth": 0.1, "negative": -0.5,
                    "format": (0.1, "wrong"), "cut": (0.0, "truncated"), "silent": (0, "no_answer")}
        if response in returned:
            return returned[response]
        return 1.0, "correct"
"""


def write(root: Path, text: str, name: str = "rewards.py") -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


def request(text: str, finish_reason: str = "stop", **problem: Any) -> Request:
    return Request(f"{problem}/{finish_reason}/{text}", text, finish_reason, "2", Problem(**{**PROBLEM, **problem}))


def verify(root: Path, requests: list[Request], name: str = "rewards:score", **settings: Any) -> list[Verdict]:
    with Verifier(VerificationSettings(reward=name, **settings), root) as verifier:
        return verifier.verify(requests)


@pytest.fixture(scope="module")
def misbehaving(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Verdict]]:
    """What a function that does all one can fear makes of each response."""
    root = tmp_path_factory.mktemp("misbehaving")
    write(root, MISBEHAVING)

    def judged(*responses: str, **settings: Any) -> dict[str, Verdict]:
        verdicts = verify(root, [request(response) for response in responses], **settings)
        return dict(zip(responses, verdicts, strict=True))

    return judged


# --- one call --------------------------------------------------------------------------------------------------------


def test_a_function_sees_the_whole_row_the_text_and_the_finish_reason(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        def score(problem, response, finish_reason):
            assert problem == {"problem_id": "p1", "problem": "How many?", "answer": "2", "solution": None,
                               "subject": "counting", "level": 3, "source": "here", "scorer": None}, problem
            assert response == "two \\ud800", ascii(response)
            return 0.75 if finish_reason == "stop" else (-0.25, "truncated")
        """,
    )
    verdicts = verify(tmp_path, [request("two \ud800"), request("two \ud800", "length")])
    assert verdicts == [Verdict(0.75, "correct", None), Verdict(-0.25, "truncated", None)]


def test_a_function_imports_nothing_of_ours_under_a_name_of_its_own(tmp_path: Path) -> None:
    """`seeds` is no module of anybody's here, though there is hacpo/seeds.py."""
    write(
        tmp_path,
        """
        import hacpo.seeds

        try:
            import seeds
        except ImportError:
            seeds = None

        def score(problem, response, finish_reason):
            return 1.0 if seeds is None else 0.0
        """,
    )
    assert verify(tmp_path, [request("two")]) == [Verdict(1.0, "correct", None)]


def test_what_a_function_may_return(misbehaving: Callable[..., dict[str, Verdict]]) -> None:
    expected = {
        "anything": (1.0, "correct"),
        "true": (1.0, "correct"),
        "int": (1.0, "correct"),
        "numpy": (0.25, "correct"),
        "tenth": (0.10000000149011612, "correct"),  # 0.1 as a float32, 13421773 / 2^27
        "negative": (-0.5, "wrong"),
        "format": (0.10000000149011612, "wrong"),
        "cut": (0.0, "truncated"),
        "silent": (0.0, "no_answer"),
    }
    found = misbehaving(*expected)
    assert {name: (verdict.reward, verdict.verdict) for name, verdict in found.items()} == expected
    assert {verdict.message for verdict in found.values()} == {None}


def test_what_it_may_not_return_is_an_error_with_a_reason(misbehaving: Callable[..., dict[str, Verdict]]) -> None:
    expected = {
        "nan": "returned the reward nan, expected a finite number",
        "inf": "returned the reward inf, expected a finite number",
        "large": "returned a reward that is too large for a float32",
        "none": "returned NoneType, expected a number or (number, verdict)",
        "text": "returned str, expected a number or (number, verdict)",
        "list": "returned list, expected a number or (number, verdict)",
        "three": "returned (float, str, str), expected a number or (number, verdict)",
        "kind": "returned (float, int), expected a number or (number, verdict)",
        "complex": "returned complex, expected a number or (number, verdict)",
        "verdict": "returned the verdict 'great', expected one of correct, wrong, no_answer, truncated",
        "digits": "returned a reward that is too large for a float32",
        "said": "returned the verdict 'error', expected one of correct, wrong, no_answer, truncated",
    }
    found = misbehaving(*expected)
    assert found == {name: Verdict(0.0, "error", None, message) for name, message in expected.items()}


def test_one_bad_response_costs_one_verdict(misbehaving: Callable[..., dict[str, Verdict]]) -> None:
    expected = {
        "good": "correct",
        "hang": "timeout",
        "fine": "correct",
        "die": "error",
        "exit": "error",
        "leave": "error",
        "eat": "error",
        "recurse": "error",
        "interrupt": "error",
        "read": "error",
        "print": "correct",
        "last": "correct",
    }
    found = misbehaving(*expected, timeout_seconds=2.0, memory_mib=64)
    assert {name: verdict.verdict for name, verdict in found.items()} == expected
    assert found["print"].reward == 1.0  # not the 5.0 that it printed
    messages = {name: verdict.message for name, verdict in found.items() if verdict.message}
    assert messages.pop("hang") == "no verdict after 2 s"
    assert messages.pop("die") == messages.pop("leave") == "the process died of it"
    assert messages.pop("eat") == "it took more than 64 MiB of memory"
    assert messages.pop("exit").startswith("SystemExit: 1 (rewards.py:")
    assert messages.pop("recurse").startswith("RecursionError: maximum recursion depth exceeded")
    assert messages.pop("interrupt").startswith("KeyboardInterrupt (rewards.py:")
    assert messages.pop("read").startswith("EOFError: EOF when reading a line (rewards.py:")
    assert messages == {}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
def test_what_a_function_starts_ends_with_it(misbehaving: Callable[..., dict[str, Verdict]]) -> None:
    assert misbehaving("start", timeout_seconds=0.5)["start"].verdict == "timeout"
    assert ended_now("600.25") == 0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
def test_what_a_function_leaves_running_ends_with_the_command(finished_copy: Path, cli: Cli) -> None:
    """Left by an import, by calls that end, and by one that does not: below a shell that is killed before its child."""
    write(
        finished_copy,
        """
        import subprocess

        subprocess.Popen(["sleep", "600.31"], start_new_session=True)
        calls = 0

        def score(problem, response, finish_reason):
            global calls
            calls += 1
            if calls == 2:
                subprocess.run(["setsid", "sh", "-c", "sleep 600.33; true"])
            subprocess.Popen(["sleep", "600.32"], start_new_session=True)
            return 1.0
        """,
    )
    use("rewards:score", workers=1, timeout_seconds=2.0, max_error_rate=1.0)
    assert cli("resolve", "pipelines/small").code == 0
    result = cli("verify", "pipelines/small", "--step", 1, "--agent", "ada")
    verdicts = pl.read_parquet("artifacts/small/verdicts/step=0001/agent=ada/*.parquet")["verdict"]
    assert {left: ended_now(left) for left in ("600.31", "600.32", "600.33")} == dict.fromkeys(
        ("600.31", "600.32", "600.33"), 0
    )
    assert (result.code, {*verdicts}) == (0, {"correct", "timeout"})


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
def test_what_an_import_leaves_running_ends_where_the_function_cannot_be_used(tmp_path: Path) -> None:
    write(tmp_path, "import subprocess\nsubprocess.Popen(['sleep', '600.34'], start_new_session=True)\nraise OSError")
    with pytest.raises(SettingsError, match="importing rewards raised OSError"):
        verify(tmp_path, [request("two")])
    assert ended_now("600.34") == 0


def ended_now(seconds: str) -> int:
    """How many `sleep`s of so many seconds there were."""
    left = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"sleep\0{seconds}\0".encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), 9)
                left += 1
    return left


@pytest.mark.parametrize("misdeed", ["fork", "forge"])
def test_no_response_gets_the_reward_of_another(misdeed: str, tmp_path: Path) -> None:
    """Two processes that return a reward, or a verdict written to every pipe, would shift all later verdicts by one."""
    write(
        tmp_path,
        f"""
        import contextlib, os, time

        def fork():
            return os.fork() == 0

        def forge():
            for pipe in range(3, 32):
                with contextlib.suppress(OSError):
                    os.write(pipe, b'{{"reward": 9.0, "verdict": "correct", "message": null}}\\n')

        def score(problem, response, finish_reason):
            if response == "0":
                if {misdeed}():
                    return 0.0
                time.sleep(0.3)
            time.sleep(0.1)  # what comes late comes while the next is waited for
            return float(response)
        """,
    )
    verdicts = verify(tmp_path, [request(str(number)) for number in range(8)])
    wrong = [number for number, verdict in enumerate(verdicts) if verdict.reward != number]
    assert all(verdicts[number].verdict == "error" for number in wrong)
    assert sum(verdict.verdict == "error" for verdict in verdicts) == 1


def test_exceptions_are_told_in_one_short_line_that_is_the_same_every_time(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        class Odd(Exception):
            def __str__(self):
                raise ValueError

        def score(problem, response, finish_reason):
            if response == "odd":
                raise Odd
            if response == "address":
                raise ValueError(object())
            raise ValueError("a long\\n story \\ud800 " + "\\U0001f600" * 5000)
        """,
    )
    odd, address, long = (
        verdict.message or "" for verdict in verify(tmp_path, [request(text) for text in ("odd", "address", "long")])
    )
    assert odd == "Odd (rewards.py:8)"
    assert address == "ValueError: <object object at 0x...> (rewards.py:10)"
    assert long.startswith("ValueError: a long story ? \U0001f600")
    assert long.endswith("...")
    assert len(long) == 300


def test_equal_calls_are_made_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        f"""
        def score(problem, response, finish_reason):
            with open({str(tmp_path / "calls")!r}, "a") as calls:
                calls.write(problem["problem_id"] + response + finish_reason + "\\n")
            return 1.0
        """,
    )
    problems = [Problem(**{**PROBLEM, "problem_id": name}) for name in ("p", "q")]
    requests = [
        Request(f"{problem.problem_id}{text}{finish}{sample}", text, finish, "2", problem)
        for sample in range(5)
        for problem in problems
        for text in ("a", "b")
        for finish in ("stop", "length")
    ]
    seen: list[tuple[int, int]] = []
    with Verifier(VerificationSettings(reward="rewards:score"), tmp_path) as verifier:
        assert len(verifier.verify(requests, lambda done, total: seen.append((done, total)))) == 40
    calls = (tmp_path / "calls").read_text().split()
    assert sorted(calls) == sorted(f"{p}{text}{finish}" for p in "pq" for text in "ab" for finish in ("stop", "length"))
    assert seen[0] == (0, 40)
    assert seen[-1] == (40, 40)


def test_long_texts_reach_the_function_from_any_thread(tmp_path: Path) -> None:
    write(tmp_path, "def score(problem, response, finish_reason):\n    return float(len(response))")
    results: dict[int, list[float]] = {}
    with Verifier(VerificationSettings(reward="rewards:score", workers=2), tmp_path) as verifier:

        def work(number: int) -> None:
            texts = ["x" * (number + 1) * 300_000, "x" * number, "é" * 100_000]
            results[number] = [verdict.reward for verdict in verifier.verify([request(text) for text in texts])]

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {number: [(number + 1) * 300_000.0, float(number), 100_000.0] for number in range(3)}


def test_hanging_calls_end_in_bounded_time(misbehaving: Callable[..., dict[str, Verdict]], tmp_path: Path) -> None:
    write(tmp_path, "def score(problem, response, finish_reason):\n    while True: pass")
    start = time.monotonic()
    # The first waits 1 s, which exceeds the patience of 0.5 s; the other 9 wait 0.1 s each.
    verdicts = verify(tmp_path, [request(str(i)) for i in range(10)], timeout_seconds=1.0, patience_seconds=0.5)
    assert time.monotonic() - start < 10
    assert [verdict.message for verdict in verdicts] == ["no verdict after 1 s"] + ["no verdict after 0.1 s"] * 9


# --- finding the function --------------------------------------------------------------------------------------------

UNUSABLE = {
    "raise ValueError('not today')": r"importing rewards raised ValueError: not today \(rewards.py:1\)",
    "import no_such_library": r"importing rewards raised ModuleNotFoundError: No module named 'no_such_library' "
    r"\(rewards.py:1\)",
    "def score(:": r"importing rewards raised SyntaxError: invalid syntax \(rewards.py, line 1\)\)$",
    "raise SystemExit(0)": r"importing rewards raised SystemExit: 0 \(rewards.py:1\)",
    "score = 5": r"rewards has no function 'score'",
    "def other(): pass": r"rewards has no function 'score'",
    "def score(problem, response): pass": r"score does not take \(problem, response, finish_reason\): too many",
    "async def score(problem, response, finish_reason): pass": "score is asynchronous",
    "import os; os._exit(3)": None,
}


@pytest.mark.parametrize(("text", "line"), UNUSABLE.items())
def test_a_function_that_cannot_be_used_is_said_before_anything_is_verified(
    tmp_path: Path, text: str, line: str | None
) -> None:
    write(tmp_path, text)
    verifier = Verifier(VerificationSettings(reward="rewards:score"), tmp_path)
    if line is None:
        with pytest.raises(Exception, match="did not start"), verifier:
            pass
    else:
        with pytest.raises(SettingsError, match="^verification.reward: .*" + line), verifier:
            pass
    assert len(verifier._pool) == 0


def test_a_function_needs_the_problem(tmp_path: Path) -> None:
    write(tmp_path, "def score(problem, response, finish_reason):\n    return 1")
    with pytest.raises(DataError, match="needs the problem's row"):
        verify(tmp_path, [Request("a", "text", "stop", "2")])


@pytest.mark.parametrize("name", ["maths", "rewards", "rewards.score", "a:b:c", "a-b:c", ":score", "rewards:", "a.:b"])
def test_names_that_name_no_function_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="`math`, `reasoning_gym` or `package.module:function`"):
        VerificationSettings(reward=name)


def test_the_default_error_rate_depends_on_whose_code_runs() -> None:
    assert VerificationSettings().error_limit == 1.0
    assert VerificationSettings(reward="rewards:score").error_limit == 0.1
    assert VerificationSettings(reward="rewards:score", max_error_rate=0.0).error_limit == 0.0
    assert VerificationSettings(max_error_rate=0.5).error_limit == 0.5


def test_where_a_module_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "flat.py",
        "package/__init__.py",
        "package/module.py",
        "bare/module.py",
        "src/editable/__init__.py",
        ".venv/lib/site-packages/installed.py",
        "venv/lib/site-packages/other.py",
    ):
        write(tmp_path, "raise AssertionError('this must not run')", name)
    for folder in ("src", ".venv/lib/site-packages", "venv/lib/site-packages"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    found = {
        name: reward_function.module_file(f"{name}:score", tmp_path)
        for name in (
            "flat",
            "package",
            "package.module",
            "bare.module",
            "editable",
            "installed",
            "other",
            "json",
            "sys",
        )
    }
    assert found == {
        "flat": Path("flat.py"),
        "package": Path("package/__init__.py"),
        "package.module": Path("package/module.py"),
        "bare.module": Path("bare/module.py"),
        "editable": Path("src/editable/__init__.py"),
        "installed": None,
        "other": None,
        "json": None,
        "sys": None,
    }
    for missing in ("nowhere", "package_.module"):
        with pytest.raises(SettingsError, match=f"there is no module '{missing}'"):
            reward_function.module_file(f"{missing}:score", tmp_path)


# --- in a pipeline ---------------------------------------------------------------------------------------------------

GRADED = """
    def score(problem, response, finish_reason):
        print("some progress")
        assert problem["subject"] in ("chains", "linear", "modular", "words") and problem["solution"]
        if finish_reason == "length":
            return -1.0, "truncated"
        return 0.1 * min(len(response), 7) + (problem["answer"] in response)
    """


def use(function: str, **more: object) -> None:
    """Set the run's reward in params.yaml."""
    path = Path("pipelines/small/params.yaml")
    text = path.read_text().split("verification:")[0]
    extra = "".join(f", {key}: {value}" for key, value in more.items())
    path.write_text(f"{text}verification: {{reward: '{function}'{extra}}}\n")


@pytest.mark.slow
def test_graded_rewards_reach_the_weights(project: Path, cli: Cli) -> None:
    """A whole run with rewards from -1 to 1.7: all numbers are finite, and rewards are the function's."""
    write(project, GRADED)
    use("rewards:score")
    result = cli("run", "pipelines/small", "--jobs", "1")
    assert result.code == 0, result.err
    tables = {
        name: pl.read_parquet(f"artifacts/small/{name}/**/*.parquet", hive_partitioning=False)
        for name in ("rollouts", "verdicts", "advantages", "capability", "evaluations", "updates")
    }
    for table in tables.values():
        for column in table.select(pl.selectors.float()).iter_columns():
            assert column.is_finite().all()
    problems = {row["problem_id"]: row for row in pl.read_parquet("artifacts/small/data/**/*.parquet").to_dicts()}
    scope: dict[str, Any] = {}
    exec(textwrap.dedent(GRADED), scope)
    judged = tables["rollouts"].join(tables["verdicts"], on="rollout_id")
    for row in judged.to_dicts():
        expected = scope["score"](problems[row["problem_id"]], row["text"], row["finish_reason"])
        value, verdict = expected if isinstance(expected, tuple) else (expected, "correct" if expected > 0 else "wrong")
        assert math.isclose(row["reward"], value, rel_tol=1e-7), row  # float32
        assert (row["verdict"], row["message"], row["extracted"]) == (verdict, None, None)
    assert judged["reward"].n_unique() > 3
    assert tables["advantages"]["effective_advantage"].abs().max() > 0
    assert "accuracy" in Path("artifacts/small/metrics/evaluate/step=0002/ada.json").read_text()
    held_out = tables["evaluations"]
    assert held_out["reward"].n_unique() > 2
    again = cli("run", "pipelines/small", "--jobs", "1")
    assert "everything is done already" in again.err


@pytest.mark.slow
def test_editing_the_module_repeats_what_calls_it(finished_copy: Path, cli: Cli) -> None:
    write(finished_copy, "def score(problem, response, finish_reason):\n    return float(len(response) % 2)")
    use("rewards:score")
    assert cli("run", "pipelines/small", "--until", "1", "--jobs", "1", "--yes").code == 0
    step = Path("pipelines/small/steps/0001/dvc.yaml").read_text()
    assert step.count("- rewards.py\n") == 1
    assert step.count("data/arithmetic/train.parquet") == 1  # only verify
    assert Path("pipelines/small/steps/0000/dvc.yaml").read_text().count("- rewards.py\n") == 1
    path = next(Path("artifacts/small/verdicts/step=0001/agent=ada").glob("*.parquet"))
    before = pl.read_parquet(path)["reward"]
    write(finished_copy, "def score(problem, response, finish_reason):\n    return 3. + len(response) % 2")
    result = cli("run", "pipelines/small", "--until", "1", "--jobs", "1", "--yes")
    assert result.code == 0
    after = pl.read_parquet(path)["reward"]
    assert after.to_list() == [value + 3 for value in before]
    assert "generate" not in {line.split()[0] for line in result.out.splitlines() if line}


@pytest.mark.slow
def test_too_many_errors_fail_the_stage_after_the_table(project: Path, cli: Cli) -> None:
    broken = 'def score(problem, response, finish_reason):\n    return 1 / (problem["answer"] == "no such answer")'
    write(project, broken)
    use("rewards:score")
    result = cli("run", "pipelines/small", "--jobs", "1")
    assert result.code == 9
    table = Path("artifacts/small/evaluations/step=0000/agent=ada")
    assert f"{table}: too many responses could not be judged" in result.error
    assert "expected at most 10 % by verification.max_error_rate, found 32 of 32 (100 %)" in result.error
    assert "the first: ZeroDivisionError: division by zero (rewards.py:2)" in result.error
    held_out = pl.read_parquet(table / "*.parquet")
    assert set(held_out["message"]) == {"ZeroDivisionError: division by zero (rewards.py:2)"}
    assert set(held_out["verdict"]) == {"error"}
    assert set(held_out["reward"]) == {0.0}
    lock = Path("pipelines/small/steps/0000/dvc.lock").read_text()
    assert "warmup" in lock
    assert "evaluate" not in lock
    again = cli("run", "pipelines/small", "--jobs", "1")
    assert again.code == 9  # not taken for done
    assert again.error == result.error
    write(project, "def score(problem, response, finish_reason):\n    return float(len(response))")
    assert cli("run", "pipelines/small", "--until", "1", "--jobs", "1").code == 0


def test_verify_fails_after_writing_and_downstream_does_not_run(finished_copy: Path, cli: Cli) -> None:
    write(
        finished_copy,
        """
        def score(problem, response, finish_reason):
            if len(response) % 2:
                raise LookupError(f"no rule for {len(response)} characters")
            return 1.0
        """,
    )
    use("rewards:score", max_error_rate=0.0)
    assert cli("resolve", "pipelines/small").code == 0
    verdicts = Path("artifacts/small/verdicts/step=0001/agent=ada")
    result = cli("verify", "pipelines/small", "--step", 1, "--agent", "ada")
    assert result.code == 9
    assert f"{verdicts}: too many" in result.error
    assert "LookupError: no rule for" in result.error
    table = pl.read_parquet(verdicts / "*.parquet").join(
        pl.read_parquet("artifacts/small/rollouts/step=0001/agent=ada/*.parquet").select("rollout_id", "text"),
        on="rollout_id",
    )
    for row in table.to_dicts():
        odd = len(row["text"]) % 2 == 1
        assert row["verdict"] == ("error" if odd else "correct")
        assert row["message"] == (
            f"LookupError: no rule for {len(row['text'])} characters (rewards.py:4)" if odd else None
        )
    share = (table["verdict"] == "error").mean()
    assert isinstance(share, float)
    assert 0 < share < 1
    use("rewards:score", max_error_rate=round(share + 0.01, 4))
    assert cli("resolve", "pipelines/small").code == 0
    assert cli("verify", "pipelines/small", "--step", 1, "--agent", "ada").code == 0


@pytest.mark.slow
def test_dvc_keeps_the_table_of_a_failed_stage_and_repeats_it(finished_copy: Path, cli: Cli) -> None:
    use("rewards:score")
    lock = Path("pipelines/small/steps/0001/dvc.lock")
    before = lock.read_text()

    def repro() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dvc", "repro", "pipelines/small/steps/0001/dvc.yaml:pool@ada"]
        return subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)

    write(finished_copy, "def score(problem, response, finish_reason):\n    return 1 / 0")
    assert cli("plan", "pipelines/small").code == 0
    for _ in range(2):
        failed = repro()
        assert failed.returncode != 0
        agent = failed.stdout.rpartition("dvc.yaml:verify@")[2].partition("'")[0]  # which one DVC begins with is open
        assert f"> hacpo verify pipelines/small --step 0001 --agent {agent}" in failed.stdout
        assert "> hacpo pool" not in failed.stdout
        assert "too many responses could not be judged" in failed.stderr
        assert "first: ZeroDivisionError: division by zero (rewards.py:2)" in failed.stderr
        table = pl.read_parquet(f"artifacts/small/verdicts/step=0001/agent={agent}/*.parquet")
        assert set(table["verdict"]) == {"error"}
        assert lock.read_text() == before
    write(finished_copy, "def score(problem, response, finish_reason):\n    return 1")
    good = repro()
    assert good.returncode == 0, good.stderr
    assert "> hacpo pool" in good.stdout


def test_a_module_that_cannot_be_imported_stops_everything_at_once(project: Path, cli: Cli) -> None:
    use("rewards:score")
    missing = cli("run", "pipelines/small", "--jobs", "1")
    assert missing.code == 2
    assert "verification.reward: there is no module 'rewards' (expected rewards.py in the project" in missing.error
    assert not Path("artifacts/small/checkpoints").exists()
    write(project, "import no_such_library")
    broken = cli("run", "pipelines/small", "--jobs", "1")
    assert broken.code == 2
    assert "verification.reward: the reward function cannot be used (found importing rewards raised " in broken.error
    assert not Path("artifacts/small/evaluations").exists()


def test_the_module_is_found_from_another_folder(
    finished_copy: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(finished_copy, "def score(problem, response, finish_reason):\n    return 1", "scoring/plain.py")
    use("scoring.plain:score")
    assert cli("resolve", "pipelines/small").code == 0
    monkeypatch.chdir("pipelines")
    assert cli("verify", "small", "--step", 1, "--agent", "ada").code == 0
    assert not list((finished_copy / "scoring").rglob("*.pyc"))


def test_a_run_with_math_has_an_empty_message(finished: Path) -> None:
    table = pl.read_parquet(finished / "artifacts/small/verdicts/**/*.parquet", hive_partitioning=False)
    judged = table.filter(~pl.col("verdict").is_in(["error", "timeout"]))
    assert judged["message"].null_count() == len(judged)
    assert "rewards" not in (finished / "pipelines/small/steps/0001/dvc.yaml").read_text()
