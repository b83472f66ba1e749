"""Verdicts on answers that other projects have labelled, and on the gold answers of the data sets themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from hacpo.settings.verification import VerificationSettings
from hacpo.verifying.answers.algebra import UnreadableError
from hacpo.verifying.answers.equivalence import equivalent
from hacpo.verifying.answers.spelling import extract_answer, plain_verdict
from hacpo.verifying.verifier import Request, Verdict, Verifier

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
CASES = DATA / "verifier" / "cases.parquet"
SETS = {
    "math/train": 200,
    "math/test": 200,
    "math500/test": 100,
    "minerva/test": 80,
    "olympiadbench/test": 100,
    "gsm8k/train": 0,
    "gsm8k/test": 0,
    "aime2025/test": 0,
    "amc2023/test": 0,
}
"""Data set -> how many of its answers to read with the library; 0 where all are plain numbers."""

needs_cases = pytest.mark.skipif(not CASES.exists(), reason="the labelled cases in ../shared/data/verifier are missing")


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(VerificationSettings(timeout_seconds=20)) as verifier:
        yield verifier


@pytest.fixture(scope="module")
def labelled(verifier: Verifier) -> tuple[pl.DataFrame, list[Verdict]]:
    cases = pl.read_parquet(CASES)
    requests = [Request(row["case_id"], row["response"], "stop", row["gold"]) for row in cases.iter_rows(named=True)]
    return cases, verifier.verify(requests)


@pytest.mark.slow
@needs_cases
def test_firm_cases(labelled: tuple[pl.DataFrame, list[Verdict]]) -> None:
    cases, verdicts = labelled
    judged = cases.with_columns(correct=pl.Series([verdict.reward == 1.0 for verdict in verdicts])).filter(trust="firm")
    accuracy = (judged["correct"] == judged["expected"]).mean()
    precision = judged.filter(pl.col("correct"))["expected"].mean()
    assert judged.height > 500
    assert accuracy >= 0.996, judged.filter(pl.col("correct") != pl.col("expected"))["case_id"].to_list()
    assert precision >= 0.998, judged.filter(pl.col("correct") & ~pl.col("expected"))["case_id"].to_list()


@pytest.mark.slow
@needs_cases
def test_no_case_is_left_without_a_judgement(labelled: tuple[pl.DataFrame, list[Verdict]]) -> None:
    cases, verdicts = labelled
    undecided = [key for key, verdict in zip(cases["case_id"], verdicts, strict=True) if verdict.verdict == "timeout"]
    errors = [gold for gold, verdict in zip(cases["gold"], verdicts, strict=True) if verdict.verdict == "error"]
    assert undecided == []
    assert len(errors) <= 2  # gold answers that are not readable


@needs_cases
def test_the_fast_path_says_what_the_rules_say() -> None:
    """On every labelled pair, and on every pair of an answer with the next case's gold answer."""
    cases = pl.read_parquet(CASES)
    golds = cases["gold"].to_list()
    fast = 0
    for response, gold, other in zip(cases["response"], golds, golds[1:] + golds[:1], strict=True):
        answer = extract_answer(response)
        for wanted in (gold, other) if answer else ():
            plain = plain_verdict(answer or "", wanted)
            if plain is not None:
                fast += 1
                assert equivalent(answer or "", wanted) is plain, (answer, wanted)
    assert fast > 500


@pytest.mark.slow
@needs_cases
def test_the_fast_path_changes_no_verdict(
    labelled: tuple[pl.DataFrame, list[Verdict]], verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every labelled response once more, with every pair of answers compared by a worker."""
    cases, verdicts = labelled
    monkeypatch.setattr("hacpo.verifying.verifier.plain_verdict", lambda answer, gold: None)
    requests = [Request(row["case_id"], row["response"], "stop", row["gold"]) for row in cases.iter_rows(named=True)]
    assert verifier.verify(requests) == verdicts


FALSE_POSITIVES = [
    ("204_5", r"\boxed{204_6}", "stop"),
    ("3", r"\boxed{3:1}", "stop"),
    ("5", r"\boxed{x + y = 5}", "stop"),
    ("x + y = 5", r"\boxed{5}", "stop"),
    ("7", r"\boxed{__import__('os').getpid() or 7}", "stop"),
    ("7", r"It is 7. \boxed{\text{see above}}", "stop"),
    ("7", "It is 7.", "stop"),
    ("7", r"It is \boxed{7}", "length"),
    ("7", r"It is \boxed{7", "stop"),
    ("7", r"\boxed{7}, no, \boxed{8}", "stop"),
]
"""(gold answer, response, finish reason) of the kinds that ../shared/data/verifier/README.md lists."""


def test_known_false_positives_earn_nothing(verifier: Verifier) -> None:
    requests = [Request(f"{gold} {text}", text, finish, gold) for gold, text, finish in FALSE_POSITIVES]
    verdicts = dict(zip(FALSE_POSITIVES, verifier.verify(requests), strict=True))
    assert [case for case, verdict in verdicts.items() if verdict.reward or verdict.verdict == "error"] == []
    right = verifier.verify([Request("a", r"\boxed{8}, no, \boxed{7}", "stop", "7")])
    assert right == [Verdict(1.0, "correct", "7")]


@pytest.mark.parametrize("name", SETS)
def test_gold_answers_verify_against_themselves(name: str, verifier: Verifier) -> None:
    answers = _gold_answers(name)
    requests = [Request(str(index), rf"So $\boxed{{ {text} }}$.", "stop", text) for index, text in enumerate(answers)]
    assert {verdict.verdict for verdict in verifier.verify(requests)} == {"correct"}


@pytest.mark.parametrize("name", [name for name, count in SETS.items() if count])
def test_gold_answers_are_understood(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules and the library find each answer equal to itself, without noticing that the characters are the same."""
    for module in ("algebra", "equivalence"):
        monkeypatch.setattr(f"hacpo.verifying.answers.{module}.same_characters", lambda one, other: False)
    not_mathematics = ("np.arcsin(10/13)", "t(0,4]")  # as the data sets have them
    answers = [answer for answer in _gold_answers(name) if answer not in not_mathematics]
    assert [answer for answer in answers[: SETS[name]] if not equivalent(answer, answer)] == []


def _gold_answers(name: str) -> list[str]:
    path = DATA / f"{name}.parquet"
    if not path.exists():
        pytest.skip(f"../shared/data/{name}.parquet is missing")
    return list(pl.read_parquet(path)["answer"].shuffle(seed=0))


def test_unreadable_gold_is_an_error_and_not_a_zero(verifier: Verifier) -> None:
    with pytest.raises(UnreadableError):
        equivalent("5", "t(0,4]")
    assert verifier.verify([Request("a", r"\boxed{5}", "stop", "t(0,4]")]) == [
        Verdict(0.0, "error", "5", "the gold answer cannot be read")
    ]
