"""The hierarchical bootstrap, Student's distribution, Holm's correction, and numbers at equal budgets."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hacpo.evaluation.bootstrap import expanded, hierarchical, holm, mean_variance, student_cdf, student_quantile
from hacpo.evaluation.budgets import area, at_budget


def test_student_is_what_tables_say() -> None:
    assert student_cdf(1.0, 1) == pytest.approx(0.75)  # Cauchy: 1/2 + atan(1) / pi
    assert student_cdf(math.sqrt(2), 2) == pytest.approx(0.5 + math.sqrt(2) / (2 * math.sqrt(2 + 2)))
    for freedom, quantile in {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 9: 2.2622, 30: 2.0423}.items():
        assert student_quantile(0.975, freedom) == pytest.approx(quantile, abs=5e-5)
        assert student_cdf(-quantile, freedom) == pytest.approx(0.025, abs=1e-5)
    assert expanded(0.975, 5) == pytest.approx(math.sqrt(5 / 4) * 2.7764, abs=1e-4)


def test_holm() -> None:
    # Ascending .01, .03, .04: 3 x .01 = .03; 2 x .03 = .06; 1 x .04, but none is smaller than the one before.
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_resampling_that_is_kept_is_the_one_that_would_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(3).random((4, 7))
    kept = [hierarchical(values - shift, values * 0.01, seed=5, draws=2500) for shift in (0.1, 0.2)]
    monkeypatch.setattr("hacpo.evaluation.bootstrap._MOST_KEPT", 0)
    assert kept == [hierarchical(values - shift, values * 0.01, seed=5, draws=2500) for shift in (0.1, 0.2)]


def test_of_two_runs_and_nothing_else_it_is_students_interval() -> None:
    # Two runs of 0 and 1: the mean .5 and its standard error s / sqrt(2) = .7071 / 1.4142 = .5; t = 12.706.
    of = hierarchical(np.array([[0.0], [1.0]]), np.zeros((2, 1)), seed=1, draws=40_000)
    assert of.low is not None
    assert of.high is not None
    assert of.mean == 0.5
    assert of.high - 0.5 == pytest.approx(12.706 * 0.5, rel=0.02)
    assert 0.5 - of.low == pytest.approx(12.706 * 0.5, rel=0.02)
    # t = .5 / .5 = 1, with one degree of freedom: 2 (1/2 - atan(1) / pi).
    assert of.p == pytest.approx(0.5, abs=0.01)


def test_a_single_run_has_no_interval_and_what_never_differs_has_one_of_no_width() -> None:
    one = hierarchical(np.array([[0.2, 0.4]]), np.zeros((1, 2)), seed=1)
    assert (one.mean, one.low, one.high, one.p, one.runs) == (pytest.approx(0.3), None, None, None, 1)
    same = hierarchical(np.zeros((3, 4)), np.zeros((3, 4)), seed=1)
    assert (same.low, same.high, same.p) == (0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="runs by problems"):
        hierarchical(np.zeros((0, 2)), np.zeros((0, 2)), seed=1)


def test_responses_are_drawn_anew_too() -> None:
    # Every value .5 of one response: of 4 runs x 25 problems the mean varies by .25 / 100, by .05 in its standard
    # error, and by nothing else; with 4 runs t = 3.182.
    of = hierarchical(np.full((4, 25), 0.5), np.full((4, 25), 0.25), seed=3, draws=40_000)
    assert of.high is not None
    # Draws of runs and of problems with nothing between them add nothing: what varies is the responses' part alone.
    assert of.high - 0.5 == pytest.approx(3.182 * 0.05, rel=0.06)


def test_the_variance_of_a_mean_over_runs_and_problems() -> None:
    # Two runs of three problems: means of runs 2 and 4, of problems 2, 3 and 4, of all 3.
    # Runs: (1 + 1) / (2 x 1) = 1. Problems: (1 + 0 + 1) / (3 x 2) = 1/3. What is left, v - run - problem + 3:
    # 1 0 -1 and -1 0 1, so 4 / (1 x 2) = 2, over 6 values 1/3.
    values = np.array([[2.0, 2.0, 2.0], [2.0, 4.0, 6.0]])
    nothing = np.zeros_like(values)
    assert mean_variance(values, nothing) == pytest.approx(1 + 1 / 3 - 1 / 3)
    # Without what runs have of their own: 0 + 1/3 - 1/3 is less than the problems' part, which it is not taken for.
    assert mean_variance(values - [[2.0], [4.0]], nothing) == pytest.approx(1 / 3)
    assert mean_variance(nothing, np.full((2, 3), 0.6)) == pytest.approx(6 * 0.6 / 36)  # responses alone


def test_the_same_seed_gives_the_same_interval() -> None:
    values = np.random.default_rng(0).random((4, 10))
    first, again, other = (hierarchical(values, values / 10, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("runs", "problems", "samples", "of_runs", "of_problems", "most"),
    [
        (2, 40, 4, 0.04, 0.05, 300),  # with few runs they are too wide
        (5, 40, 4, 0.04, 0.05, 300),
        (10, 40, 4, 0.04, 0.05, 296),
        (20, 200, 2, 0.03, 0.05, 294),
        (20, 200, 2, 0.0, 0.0, 298),  # nothing but responses
    ],
)
def test_intervals_cover_a_known_difference(
    runs: int, problems: int, samples: int, of_runs: float, of_problems: float, most: int
) -> None:
    """Differences of pairs of runs: a true mean, what a run and a problem add, and the drawing of responses."""
    random, truth = np.random.default_rng(runs), 0.05
    covered, trials = 0, 300
    for trial in range(trials):
        easy = random.uniform(0.2, 0.8, problems)
        change = truth + random.normal(0, of_runs, (runs, 1)) + random.normal(0, of_problems, problems)
        shares = [
            random.binomial(samples, np.clip(easy + by, 0, 1), (runs, problems)) / samples for by in (change, 0.0)
        ]
        variance = sum(share * (1 - share) / samples for share in shares)
        of = hierarchical(shares[0] - shares[1], np.asarray(variance), seed=trial, draws=1000)
        assert of.low is not None
        assert of.high is not None
        covered += of.low <= truth <= of.high
    # 95 % of 300 are 285, with a standard deviation of 3.8.
    assert 275 <= covered <= most


def test_a_clear_difference_is_found_and_none_is_not() -> None:
    random = np.random.default_rng(5)
    clear = hierarchical(0.2 + random.normal(0, 0.03, (6, 50)), np.full((6, 50), 0.01), seed=0)
    none = hierarchical(random.normal(0, 0.1, (6, 50)), np.full((6, 50), 0.01), seed=0)
    assert clear.p is not None
    assert none.p is not None
    assert clear.p < 0.001
    assert none.p > 0.05


def test_numbers_at_a_budget() -> None:
    places = [0, 10, 20]
    assert at_budget(places, 15) == [0, 0.5, 0.5]
    assert at_budget(places, 20) == [0, 0, 1]
    # 0 to 10 is 2/3 of the way, half to each end: 1/3, 1/3. 10 to 15 is 1/3 of it, from the value v1 to (v1 + v2) / 2:
    # its mean is 3/4 v1 + 1/4 v2.
    assert area(places, 15) == pytest.approx([1 / 3, 1 / 3 + 1 / 4, 1 / 12])
    assert area(places, 20) == pytest.approx([1 / 4, 1 / 2, 1 / 4])
    assert area([0, 0, 10], 10) == pytest.approx([0, 1 / 2, 1 / 2])  # nothing was spent between two evaluations
    assert area([0], 0) == [1.0]
    # Beside a curve that is known at 0, 20 and 40 alone, and beside one that has no place after the start in common.
    assert area([0, 10, 20, 30, 40], 40, {0, 20, 40}) == pytest.approx([1 / 4, 0, 1 / 2, 0, 1 / 4])
    assert area([0, 10, 20, 30], 25, {0, 20}) == pytest.approx([2 / 5, 0, 2 / 5 + 3 / 20, 1 / 20])
    assert area([0, 10, 20], 20, {0, 15}) == area(places, 20)
    with pytest.raises(ValueError, match="outside the curve"):
        area(places, 21)
    with pytest.raises(ValueError, match="ascending"):
        at_budget([1, 0], 1)
