"""avg@n, pass@k, best@n, majority voting, errors: against arithmetic done by hand."""

from __future__ import annotations

import math
import time
from itertools import combinations
from typing import Any

import polars as pl
import pytest

from conftest import PARAMS, SHARED
from hacpo.errors import SettingsError
from hacpo.evaluation.metrics import Estimate, of_problem, pass_at_k, plain_mean, summarised, summary
from hacpo.evaluation.values import Response
from hacpo.settings import params as settings_of
from hacpo.settings.series import Metric, Series
from hacpo.verifying.answers.spelling import normal_form


def answers(*texts: str | None, gold: str = "1") -> list[Response]:
    """Responses by what they say; None says nothing."""
    return [Response(float(text == gold), "correct" if text == gold else "wrong", text) for text in texts]


# --- pass@k ----------------------------------------------------------------------------------------------------------


def test_pass_at_k_by_hand() -> None:
    # 4 responses, 2 correct: of the C(4,2) = 6 pairs one, the two wrong ones, holds no correct answer: 1 - 1/6.
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6, abs=1e-15)
    # 30 responses, 3 correct, k = 10: 1 - C(27,10)/C(30,10) = 1 - (20*19*18)/(30*29*28) = 1 - 6840/24360.
    assert pass_at_k(30, 3, 10) == pytest.approx(1 - 6840 / 24360, abs=1e-15)
    assert [pass_at_k(4, correct, 1) for correct in range(5)] == [0, 0.25, 0.5, 0.75, 1]
    assert [pass_at_k(4, correct, 4) for correct in range(5)] == [0, 1, 1, 1, 1]


def test_pass_at_k_is_the_share_of_all_draws_with_a_correct_response() -> None:
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-15)


@pytest.mark.parametrize("p", [0.01, 0.3, 0.9])
def test_pass_at_k_is_unbiased(p: float) -> None:
    """Its mean over c ~ Binomial(n, p) is 1 - (1 - p)^k, the chance that k fresh responses hold a correct one."""
    n = 12
    for k in range(1, n + 1):
        expected = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
        assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-13)


def test_pass_at_k_of_many_responses_loses_no_digit() -> None:
    assert pass_at_k(10_000, 1, 100) == 0.01  # one correct of n is among k of them with k / n
    # 1 - C(n-2,k)/C(n,k) = 1 - (n-k)(n-k-1) / (n(n-1)).
    assert pass_at_k(10_000, 2, 1) == 2e-4
    assert pass_at_k(10_000, 2, 9_999) == 1.0
    with pytest.raises(ValueError, match="no pass@5 of 4 responses"):
        pass_at_k(4, 2, 5)


# --- one problem -----------------------------------------------------------------------------------------------------


def test_avg_sees_grades_and_the_others_what_is_called_correct() -> None:
    graded = [Response(0.5, "correct", None), Response(-1.0, "wrong", None), Response(0.25, "wrong", None)]
    # avg: (0.5 - 1 + 0.25) / 3 = -1/12. One of three is called correct, though another has a positive reward.
    assert of_problem(Metric("avg", 3), graded) == pytest.approx(-1 / 12, abs=1e-15)
    assert of_problem(Metric("pass", 1), graded) == pytest.approx(1 / 3, abs=1e-15)
    assert of_problem(Metric("best", 3), graded) == of_problem(Metric("pass", 3), graded) == 1.0


@pytest.mark.parametrize(
    ("said", "right"),
    [
        (("1", "2", "1"), True),
        (("1", "2", "2"), False),
        (("2", "1"), False),  # a tie: what was said first
        (("1", "2"), True),
        ((None, "2", "1", "2", "1"), False),
        ((None, None, "1"), True),  # who says nothing does not vote
        ((None, None), False),
        (("2", "3", "1", "1"), True),  # a plurality is enough
        (("0.5", r"\frac{1}{2}", "1", "2/4", "1"), False),  # three times a half
    ],
)
def test_majority(said: tuple[str | None, ...], right: bool) -> None:
    responses = answers(*said)
    assert of_problem(Metric("maj", len(said)), responses) == float(right)


def test_a_vote_does_not_look_at_the_gold_answer() -> None:
    """Two spellings that only mathematics calls one are two answers, also where both are correct."""
    both = [Response(1.0, "correct", text) for text in (r"2\sqrt{2}", r"\sqrt{8}")]
    assert of_problem(Metric("maj", 5), [*both, *answers("7", "7", "7")]) == 0.0
    assert of_problem(Metric("maj", 4), [*both, *answers("7", "7")]) == 0.0


@pytest.mark.parametrize(
    ("form", "spellings"),
    [
        ("5", ["5", " 5 ", "05", "+5", "5.0", "5.", "$5", r"\text{ 5 }", "5\u200b"]),
        ("1000", ["1,000", "1000.00", r"1\,000", "1{,}000"]),
        ("-1/2", ["-0.5", "-.50", r"-\frac{1}{2}", "-1/2", r"-\dfrac{2}{4}", r"-\frac12", "-½"]),
        ("0", ["0", "-0", "0.00", "0/7"]),
        (r"90^\circ", ["90°", r"90^\circ", r"90 ^{\circ}"]),
        ("3,400", ["3, 400", "3 , 400"]),
        ("(1,2)", ["(1,2)", "( 1, 2 )", r"\left(1,2\right)"]),
        ("A", ["A", r"\text{A}", r"\mathrm{A}"]),
        ("1/0", ["1/0"]),
        ("x=5", ["x=5", "x = 5"]),
        ("9" * 300, ["9" * 300]),
    ],
)
def test_normal_forms(form: str, spellings: list[str]) -> None:
    assert {normal_form(text) for text in spellings} == {form}


def test_a_normal_form_costs_little_whatever_the_text() -> None:
    hostile = ["½" * 1000, "{" * 1000, r"\frac" * 200, "1 " * 500, "9" * 1000, "(" * 500 + ")" * 500, "1/" * 500]
    started = time.process_time()
    for text in [*hostile, *(text * 1000 for text in hostile)]:
        normal_form(text)
    assert time.process_time() - started < 1  # a tenth of that; without the bound on length far more
    assert normal_form("9" * 1001 + ".0") == "9" * 1001 + ".0"


CASES = SHARED / "data" / "verifier" / "cases.parquet"


@pytest.mark.skipif(not CASES.exists(), reason="the labelled cases in ../shared/data/verifier are missing")
def test_answers_of_one_form_are_the_same_answer() -> None:
    """Labelled answers with the form of their gold answer are labelled right."""
    from hacpo.verifying.answers.spelling import extract_answer

    cases = pl.read_parquet(CASES).filter(trust="firm").iter_rows(named=True)
    said = [(row["case_id"], extract_answer(row["response"]), row["gold"], row["expected"]) for row in cases]
    alike = [one for one in said if one[1] and normal_form(one[1]) == normal_form(one[2])]
    assert len(alike) > 100
    assert [one for one in alike if not one[3]] == []


# --- benchmarks ------------------------------------------------------------------------------------------------------


def test_summary_of_a_benchmark() -> None:
    # Three problems, four responses each, 1, 0 and 3 correct.
    problems = [answers("1", "2", "2", "3"), answers("2", "2", None, "3"), answers("1", "1", "2", "1")]
    assert summary(problems, votes=True) == pytest.approx(
        {
            "accuracy": 4 / 12,
            "pass@2": (1 / 2 + 0 + 1) / 3,  # 1 - C(3,2)/C(4,2) = 1/2; 0; 1 - C(1,2)/6 = 1
            "best@4": 2 / 3,
            "maj@4": 1 / 3,
        },
        abs=1e-15,
    )
    assert summary([answers("1"), answers("2")], votes=True) == {"accuracy": 0.5}
    wide = summary([answers(*["1"] * 9)], votes=False)
    assert list(wide) == ["accuracy", "pass@2", "pass@4", "pass@8", "best@9"]


def test_a_series_by_the_numbers_of_metrics_files() -> None:
    first, second = ("a", Metric("avg", 4)), ("b", Metric("maj", 2))
    numbers = {"a.accuracy": 0.25, "a.tokens": 9, "b.accuracy": 0.125, "b.maj@2": 0.75}
    assert summarised(Series("a", "a", (first,)), numbers) == 0.25
    assert summarised(Series("average", "", (first, second)), numbers) == 0.5  # (0.25 + 0.75) / 2
    assert summarised(Series("average", "", (first, ("b", Metric("maj", 4)))), numbers) is None  # other samples
    assert summarised(Series("a.pass@3", "", (("a", Metric("pass", 3)),)), numbers) is None


def test_the_average_counts_each_benchmark_once() -> None:
    # Means 0.2 and 0.8; errors 0.03 and 0.04: sqrt(0.0009 + 0.0016) / 2 = 0.05 / 2.
    average = plain_mean([Estimate(0.2, 0.03, 5000), Estimate(0.8, 0.04, 30)])
    assert (average.mean, average.problems) == (0.5, 5030)
    assert average.error == pytest.approx(0.025, abs=1e-15)
    assert plain_mean([Estimate(0.2, 0.03, 9), Estimate(0.8, None, 1)]).error is None


# --- settings --------------------------------------------------------------------------------------------------------

SAMPLED = "heldout: {data: arithmetic/heldout, samples: 2, temperature: 1.0}"


def loaded(tmp_path: Any, *changes: tuple[str, str]) -> Any:
    text = PARAMS
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path = tmp_path / "params.yaml"
    path.write_text(text)
    return settings_of.load(path).evaluation


def test_what_is_reported(tmp_path: Any) -> None:
    plain = loaded(tmp_path)
    assert [(one.name, one.title) for one in plain.series] == [("heldout", "heldout")]
    several = loaded(
        tmp_path,
        (
            "    arithmetic/heldout:",
            "    arithmetic/more: {task: arithmetic, split: heldout, problems: 4}\n    arithmetic/heldout:",
        ),
        (SAMPLED, SAMPLED + "\n    more: {data: arithmetic/more, samples: 30, temperature: 0.6}"),
        ("  benchmarks:", "  metrics: {more: [best@30, pass@5, maj, avg]}\n  benchmarks:"),
    )
    assert [(one.name, one.title) for one in several.series] == [
        ("heldout", "heldout"),
        ("more", "more best@30"),
        ("more.pass@5", "more pass@5"),
        ("more.maj@30", "more maj@30"),
        ("more.avg@30", "more avg@30"),
        ("average", "average of 2 benchmarks"),
    ]
    assert several.series[-1].parts == (("heldout", Metric("avg", 2)), ("more", Metric("best", 30)))
    assert several.leading == several.series[-1]


def test_two_benchmarks_of_the_same_problems_are_averaged_only_when_told(tmp_path: Any) -> None:
    greedy = (SAMPLED, SAMPLED + "\n    greedy: {data: arithmetic/heldout}")
    assert loaded(tmp_path, greedy).averaged == ()
    told = loaded(tmp_path, greedy, ("  benchmarks:", "  average: [greedy, heldout]\n  benchmarks:"))
    assert told.averaged == ("heldout", "greedy")
    assert loaded(tmp_path, ("  benchmarks:", "  average: []\n  benchmarks:")).averaged == ()


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            "metrics: {heldout: [pass@3]}",
            "metrics.heldout: 'pass@3' needs at least 3 responses per problem, but samples",
        ),
        ("metrics: {heldout: [best@30]}", "'best@30' is taken over all responses to a problem, but samples is 2"),
        ("metrics: {heldout: [pass]}", "'pass' is no metric (expected avg, best, maj or pass@k)"),
        ("metrics: {heldout: [pass@0]}", "'pass@0' is no metric"),
        ("metrics: {heldout: [mean]}", "'mean' is no metric"),
        ("metrics: {heldout: []}", "name at least one metric, and each once, found []"),
        ("metrics: {heldout: [avg, avg@2]}", "name at least one metric, and each once, found ['avg', 'avg@2']"),
        ("metrics: {heldot: [avg]}", "metrics: 'heldot' is not in evaluation.benchmarks (heldout)"),
        ("average: [heldout, other]", "average: 'other' is not in evaluation.benchmarks (heldout)"),
        ("average: [heldout]", "average: name several benchmarks, each once, or none, found ['heldout']"),
    ],
)
def test_what_cannot_be_reported_is_refused_in_one_line(tmp_path: Any, lines: str, says: str) -> None:
    with pytest.raises(SettingsError) as refused:
        loaded(tmp_path, ("  benchmarks:", f"  {lines}\n  benchmarks:"))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_metrics_that_mean_nothing_are_refused(tmp_path: Any) -> None:
    votes = ("  benchmarks:", "  metrics: {heldout: [maj]}\n  benchmarks:")
    with pytest.raises(
        SettingsError, match="at temperature 0 they are all the same; set evaluation.benchmarks.heldout.t"
    ):
        loaded(tmp_path, votes, (SAMPLED, SAMPLED.replace(", temperature: 1.0", "")))
    with pytest.raises(SettingsError, match="maj needs answers to vote on, but verification.reward is a function"):
        loaded(tmp_path, votes, ("seed: 1", "seed: 1\nverification: {reward: 'rewards:score'}"))
    with pytest.raises(SettingsError, match="'average' cannot be a name; it stands for the mean over benchmarks"):
        loaded(tmp_path, (SAMPLED, SAMPLED.replace("heldout:", "average:", 1)))
