"""Verdicts for batches of responses, and worker processes that hang, die, eat memory or lose their parent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hostile
import pytest

from hacpo.errors import DataError, HacpoError
from hacpo.settings.verification import VerificationSettings
from hacpo.verifying import worker_pool as verification_pool
from hacpo.verifying.verifier import Request, Verdict, Verifier

ROOT = Path(__file__).resolve().parents[2]

MISBEHAVING = """
import os, signal, time
from hacpo.verifying import worker

honest = worker._compare

def compare(question):
    answer, gold = question
    if answer.startswith("hang"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass
    if answer.startswith("die"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if answer.startswith("exit"):
        os._exit(0)
    if answer.startswith("eat"):
        hoard = []
        while True:
            hoard.append(bytearray(8 << 20))
            time.sleep(0.01)
    if answer.startswith("orphan"):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    if answer.startswith("print"):
        print('{"verdict": "correct"}', flush=True)
    return honest(question)

worker._compare = compare
worker.main()
"""


@pytest.fixture
def misbehaving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers in which some answers do what hostile text might achieve."""
    monkeypatch.setattr(verification_pool, "_WORKER", (sys.executable, "-c", MISBEHAVING))


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(VerificationSettings()) as verifier:
        yield verifier


def boxed(key: str, answer: str, gold: str = "x+1", finish_reason: str = "stop") -> Request:
    return Request(key, rf"Hence $\boxed{{{answer}}}$.", finish_reason, gold)


def outcomes(verdicts: list[Verdict]) -> list[str]:
    return [verdict.verdict for verdict in verdicts]


def test_every_kind_of_verdict(verifier: Verifier) -> None:
    verdicts = verifier.verify(
        [
            boxed("correct", "1+x"),
            boxed("wrong", "x-1"),
            Request("unboxed", "x+1", "stop", "x+1"),
            Request("empty box", r"x+1 \boxed{}", "stop", "x+1"),
            Request("open box", r"\boxed{x+1} no, \boxed{x+1", "stop", "x+1"),
            boxed("cut off", "x+1", finish_reason="length"),
            boxed("large", "9^{9^{9^9}}"),
        ]
    )
    assert verdicts == [
        Verdict(1.0, "correct", "1+x"),
        Verdict(0.0, "wrong", "x-1"),
        Verdict(0.0, "no_answer", None),
        Verdict(0.0, "no_answer", None),
        Verdict(0.0, "no_answer", None),
        Verdict(0.0, "truncated", None),
        Verdict(0.0, "error", "9^{9^{9^9}}", "a number is too large to be computed with"),
    ]


def test_boxed_answers_of_cut_off_responses_count_where_it_is_asked() -> None:
    cut = [
        boxed("right", "x+1", finish_reason="length"),
        boxed("other", "x-1", finish_reason="length"),
        boxed("mathematics", "1+x", finish_reason="length"),
        Request("none", "x+1", "length", "x+1"),
        Request("open", r"\boxed{x+1} or \boxed{x+", "length", "x+1"),
        Request("empty", r"\boxed{}", "length", "x+1"),
        Request("whole", "x+1", "stop", "x+1"),
    ]
    with Verifier(VerificationSettings(truncated="boxed")) as verifier:
        assert outcomes(verifier.verify(cut)) == [
            "correct", "wrong", "correct", "truncated", "truncated", "truncated", "no_answer"
        ]  # fmt: skip
    with pytest.raises(ValueError, match="truncated is for reward `math`"):
        VerificationSettings(reward="rewards:mine", truncated="boxed")


def test_what_the_authors_scorer_accepts_is_accepted(verifier: Verifier) -> None:
    r"""verl's MATH scorer knows `\dfrac` and 0.5, and takes away `\left`, units in `\text{ }`, degrees, % and `x=`."""
    same = {
        r"\dfrac12": r"\frac{1}{2}",
        "0.5": r"\frac{1}{2}",
        "1/2": r"\frac{1}{2}",
        "x=5": "5",
        r"10\text{ cm}": "10",
        r"90^\circ": "90",
        r"50\%": "50",
        r"\$5": "5",
        ".5": "0.5",
        r"\sqrt3": r"\sqrt{3}",
        r"\left(1, 2\right)": "(1,2)",
    }
    verdicts = verifier.verify([boxed(answer, answer, gold) for answer, gold in same.items()])
    assert dict(zip(same, outcomes(verdicts), strict=True)) == dict.fromkeys(same, "correct")


def test_the_last_box_counts_and_prose_does_not(verifier: Verifier) -> None:
    texts = {
        r"\boxed{41}, or rather \boxed{42}": "correct",
        r"\boxed{42}, or rather \boxed{41}": "wrong",
        r"It is 42. \boxed{\text{see above}}": "wrong",
        r"\boxed{__import__('os').getpid() or 42}": "wrong",
        "It is 42.": "no_answer",
    }
    requests = [Request(text, text, "stop", "42") for text in texts]
    assert outcomes(verifier.verify(requests)) == list(texts.values())


def test_gold_may_come_in_a_box_itself(verifier: Verifier) -> None:
    requests = [boxed("a", "42", r"\boxed{42}"), boxed("b", r"\frac12", r"$\boxed{0.5}$")]
    assert outcomes(verifier.verify(requests)) == ["correct", "correct"]


def test_verdicts_are_in_the_order_of_the_requests_and_the_same_every_time(verifier: Verifier) -> None:
    requests = [boxed(f"{index}", f"x+{index % 7}", f"{index % 5}+x") for index in range(70)]
    expected = ["correct" if index % 7 == index % 5 else "wrong" for index in range(70)]
    assert outcomes(verifier.verify(requests)) == expected
    assert outcomes(verifier.verify(requests[::-1])) == expected[::-1]
    with Verifier(VerificationSettings(workers=2)) as two:
        assert outcomes(two.verify(requests)) == expected


def test_equal_pairs_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    ask = verification_pool._Worker.ask

    def counted(worker: verification_pool._Worker, question: tuple[str, ...], *limits: float) -> None:
        asked.append(question)
        ask(worker, question, *limits)  # type: ignore[arg-type]

    monkeypatch.setattr(verification_pool._Worker, "ask", counted)
    with Verifier(VerificationSettings()) as verifier:
        verdicts = verifier.verify([boxed(str(index), "1+x" if index % 2 else "x-1") for index in range(40)])
    assert sorted(asked) == [("1+x", "x+1"), ("x-1", "x+1")]
    assert outcomes(verdicts) == ["wrong", "correct"] * 20


def test_progress_counts_responses(verifier: Verifier) -> None:
    seen: list[tuple[int, int]] = []
    requests = [boxed("a", "1+x"), boxed("b", "1+x"), boxed("c", "x-1"), boxed("d", "x+1")]
    verifier.verify(requests, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (3, 4), (4, 4)]  # d at once, a and b together, then c


def test_what_cannot_be_verified_is_refused(verifier: Verifier) -> None:
    with pytest.raises(DataError, match="same key"):
        verifier.verify([boxed("a", "1"), boxed("a", "2")])
    with pytest.raises(DataError, match="gold answer is empty"):
        verifier.verify([boxed("a", "1", " ")])
    assert verifier.verify([]) == []


def test_limits_come_before_any_parsing() -> None:
    settings = VerificationSettings(max_characters=40, max_nesting=3, max_extracted=8)
    with Verifier(settings) as verifier:
        verdicts = verifier.verify(
            [
                boxed("long", "x+" * 30 + "1"),
                boxed("deep", "((((x+1))))"),
                boxed("same but deep", "((((x+1))))", "((((x+1))))"),
                boxed("surrogate", "abc\ud800def, and so on", "5"),
            ]
        )
        assert len(verifier._pool) == 1  # for the last one
    assert outcomes(verdicts) == ["error", "error", "correct", "wrong"]
    kept = [verdict.extracted.partition("…")[0] for verdict in verdicts if verdict.extracted]
    assert kept == ["x+x+x+x+", "((((x+1)", "((((x+1)", "abc?def,"]


def test_an_answer_that_is_too_long_is_never_compared_by_its_beginning(verifier: Verifier) -> None:
    zeros, digits = "0" * 1000, "7" * 5000
    verdicts = verifier.verify(
        [
            boxed("its first 1001 digits are 5", zeros + "54321", "5"),
            boxed("its first 1001 characters are spaces and 5", " " * 1000 + "54321", "5"),
            boxed("the gold answer and more", digits + "1", digits),
            boxed("the gold answer, spaces and more", digits + " " * 2000 + "1", digits),
            boxed("the gold answer", digits, digits),
            boxed("the gold answer, boxed", digits, rf"So \boxed{{{digits}}}"),
        ]
    )
    assert outcomes(verdicts) == ["error"] * 4 + ["correct"] * 2


def test_extracted_answers_that_differ_late_stay_apart(verifier: Verifier) -> None:
    """A vote counts `extracted`: two answers of 300 characters with the same first 200 are two answers."""
    same = "1" * 299
    first, second, again = (
        verdict.extracted
        for verdict in verifier.verify([boxed("a", same + "2"), boxed("b", same + "3"), boxed("c", same + "2")])
    )
    assert first == again != second
    assert first is not None
    assert first.startswith("1" * 200 + "…")


def test_plain_numbers_need_no_process_and_no_library() -> None:
    """512 whole numbers, as the quickstart verifies them every step."""
    script = """
        import sys
        from hacpo.verifying.verifier import Request, Verifier
        from hacpo.settings.verification import VerificationSettings
        requests = [Request(str(i), f"So {i} \\\\boxed{{{i % 40}}}", "stop", str(i % 30)) for i in range(512)]
        with Verifier(VerificationSettings()) as verifier:
            verdicts = verifier.verify(requests)
            assert not len(verifier._pool)
        assert sum(verdict.reward for verdict in verdicts) == sum(i % 40 == i % 30 for i in range(512))
        assert not {"sympy", "math_verify", "torch", "antlr4"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, check=True)


@pytest.mark.usefixtures("misbehaving")
def test_one_bad_answer_costs_one_verdict() -> None:
    answers = {
        "1+x": "correct",
        "hang": "timeout",
        "2+x-1": "correct",
        "die": "error",
        "exit": "error",
        "print": "wrong",
        "eat": "error",
        "orphan": "error",
        "x-1": "wrong",
        "x+2-1": "correct",
    }
    with Verifier(VerificationSettings(timeout_seconds=1, memory_mib=64)) as verifier:
        verdicts = verifier.verify([boxed(answer, answer) for answer in answers])
        assert dict(zip(answers, outcomes(verdicts), strict=True)) == answers


@pytest.mark.usefixtures("misbehaving")
def test_a_batch_of_hanging_answers_ends_in_bounded_time() -> None:
    # The first waits 1 s, which exceeds the patience of 0.5 s; the other 9 wait 0.1 s each.
    settings = VerificationSettings(timeout_seconds=1, patience_seconds=0.5)
    requests = [boxed("good", "x+2-1"), *(boxed(f"{index}", f"hang {index}") for index in range(10))]
    with Verifier(settings) as verifier:
        verifier.verify([boxed("warm", "1+x")])
        start = time.monotonic()
        verdicts = verifier.verify(requests)
        assert time.monotonic() - start < 10
    assert outcomes(verdicts) == ["correct"] + ["timeout"] * 10


@pytest.mark.slow
def test_hostile_text_is_never_correct_and_ends_in_bounded_time() -> None:
    honest = [boxed(f"honest {index}", f"{index}+x", f"x+{index}") for index in range(5)]
    attacks = [
        boxed(f"{index}/{gold}", answer, gold)
        for index, answer in enumerate(hostile.answers(3 * len(hostile.FAMILIES)))
        for gold in ("5", r"\frac{x+1}{2}")
    ]
    settings = VerificationSettings(timeout_seconds=1, patience_seconds=2)
    with Verifier(settings) as verifier:
        verifier.verify([boxed("warm", "1+x")])
        start = time.monotonic()
        verdicts = verifier.verify(honest + attacks)
        seconds = time.monotonic() - start
    # One worker: 2 s of patience, 1 s that may end it, 0.1 s for each of 144 answers; 20 s for a busy machine.
    assert seconds < 2 + 1 + 0.1 * len(attacks) + 20
    assert outcomes(verdicts[:5]) == ["correct"] * 5
    assert set(outcomes(verdicts[5:])) == {"wrong", "error", "timeout", "no_answer"}
    assert [verdict for verdict in verdicts if verdict.verdict == "error" and not verdict.message] == []


def test_any_thread_may_verify(verifier: Verifier) -> None:
    results: dict[int, list[str]] = {}

    def work(number: int) -> None:
        results[number] = outcomes(verifier.verify([boxed("a", f"{number}+x", f"x+{number}"), boxed("b", "x-1")]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: ["correct", "wrong"] for number in range(4)}


def test_an_interrupted_call_leaves_nothing_behind() -> None:
    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with Verifier(VerificationSettings(workers=2)) as verifier:
        with pytest.raises(KeyboardInterrupt):
            verifier.verify([boxed("a", "1+x"), boxed("b", "2+x")], on_progress=interrupt)
        assert len(verifier._pool) == 0
        assert outcomes(verifier.verify([boxed("c", "x+2-2"), boxed("d", "x-1+2")])) == ["wrong", "correct"]


def test_a_worker_that_does_not_start_is_said_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification_pool, "_WORKER", (sys.executable, "-c", "raise SystemExit('no such library')"))
    with (
        Verifier(VerificationSettings()) as verifier,
        pytest.raises(HacpoError, match="did not start .found no such library"),
    ):
        verifier.verify([boxed("a", "1+x")])


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not waited for does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
def test_workers_end_with_a_parent_that_is_killed() -> None:
    script = f"""
        import sys, threading, time
        from pathlib import Path
        from hacpo.verifying import verifier as reward, worker_pool as verification_pool
        from hacpo.settings.verification import VerificationSettings
        verification_pool._WORKER = (sys.executable, "-c", {MISBEHAVING!r})
        verifier = reward.Verifier(VerificationSettings(timeout_seconds=60))
        request = lambda answer: reward.Request("a", "\\\\boxed{{" + answer + "}}", "stop", "x+1")
        verifier.verify([request("1+x")])
        threading.Thread(target=verifier.verify, args=([request("hang")],)).start()
        time.sleep(0.5)
        supervisor = verifier._pool._workers[0]._process.pid
        print(supervisor, Path(f"/proc/{{supervisor}}/task/{{supervisor}}/children").read_text(), flush=True)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
        parent.kill()
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in pids if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
