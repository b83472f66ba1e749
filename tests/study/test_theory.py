"""Simulation of the paper's Theorem 4.1 against numbers worked out by hand, and the committed table against both."""

from __future__ import annotations

import math
import re

import numpy as np
import polars as pl
import pytest

from benchmarks.study.known_accuracies import BASELINES, CASES, Case, closed_form, simulated
from benchmarks.study.theory import estimate, quantities, rows, views
from tests.small_project import ROOT

EXACT = ("oracle", "joint", "own")
"""Baselines whose omega is known, or not needed: the closed form is exact."""


def by_hand(case: Case, baseline: str, quantity: str, group_size: int = 8) -> float:
    return closed_form(case, baseline, case.kinds, group_size).quantity(quantity)


def test_bias_and_spread_of_two_agents() -> None:
    case = Case("", ((0.84, 0.6), (0.84, 0.2)))
    # omega = .84 / mean(.6, .2) = 2.1. Bias (omega p_j - p_k) / 2 = (2.1 x .6 - .84) / 2 = .21, and
    # (2.1 x .2 - .84) / 2 = -.21 on the other kind; joint: (.6 - .84) / 2 = -.12; own: 0.
    # Spread sqrt(p_k q_k + omega^2 p_j q_j) / (2 sqrt(8)) = sqrt(.84 x .16 + 4.41 x .6 x .4) / (2 sqrt(8)).
    good = closed_form(case, "oracle", [case.kinds[0]])
    assert good.quantity("bias") == pytest.approx(0.21, abs=1e-12)
    assert good.quantity("sd") == pytest.approx(math.sqrt(0.1344 + 1.0584) / (2 * math.sqrt(8)), abs=1e-12)
    assert closed_form(case, "oracle", [case.kinds[1]]).quantity("bias") == pytest.approx(-0.21, abs=1e-12)
    assert by_hand(case, "oracle", "bias") == pytest.approx(0.0, abs=1e-12)
    assert closed_form(case, "joint", [case.kinds[0]]).quantity("bias") == pytest.approx(-0.12, abs=1e-12)
    assert by_hand(case, "own", "bias") == pytest.approx(0.0, abs=1e-12)


def test_a_partner_that_is_always_wrong_halves_the_baseline() -> None:
    case = Case("", ((0.5, 0.0),))
    # mu = (m_k + 10 x 0) / 2 = .25 in place of .5, with half of the own mean's spread: sqrt(.25 / 8) / 2.
    assert by_hand(case, "oracle", "bias") == pytest.approx(-0.25, abs=1e-12)
    assert by_hand(case, "oracle", "sd") == pytest.approx(math.sqrt(0.25 / 8) / 2, abs=1e-12)
    # kappa = 4: (8 m_k + 4 (m_k + 0) / 2) / 12 = 10/12 m_k; its mean .41667 is .08333 too small.
    assert by_hand(case, "shrunk", "bias") == pytest.approx(-1 / 12, abs=1e-12)


def test_punished_answers_and_the_guard_in_groups_of_two() -> None:
    kinds = ((0.5, 0.25),)
    # omega = 2, mu = (S_k + 2 S_j) / 4, P(S_k) = .25, .5, .25 and P(S_j) = 9/16, 6/16, 1/16.
    # A right answer of the learner's, and rewards that differ: S_k = 1, or S_k = 2 and S_j < 2: .5 + .25 x 15/16.
    # mu > 1 there: S_k = 1, S_j = 2 (mu 1.25): .5 / 16. (S_k = 2, S_j = 1 gives exactly 1.)
    assert by_hand(Case("", kinds), "oracle", "punished", 2) == pytest.approx(0.03125 / 0.734375, abs=1e-12)
    # The guard acts where mu > 1: that, and S_k = S_j = 2 (mu 1.5): (.5 + .25) / 16. It takes away
    # (1.25 - .5) x .5 / 16 + (1.5 - 1) x .25 / 16 = .03125 from a mean without bias.
    guarded = Case("", kinds, guard=True)
    assert by_hand(guarded, "oracle", "guarded", 2) == pytest.approx(0.046875, abs=1e-12)
    assert by_hand(guarded, "oracle", "bias", 2) == pytest.approx(-0.03125, abs=1e-12)
    assert by_hand(guarded, "oracle", "punished", 2) == 0.0


@pytest.mark.parametrize(
    "case",
    [
        Case("uneven", ((0.84, 0.2), (0.84, 0.6))),
        Case("uneven, guard", ((0.84, 0.2), (0.84, 0.6)), guard=True),
        Case("three", ((0.8, 0.4, 0.3),)),
        Case("bounds", ((0.9, 0.045),)),
    ],
    ids=lambda case: case.name,
)
def test_the_projects_functions_do_what_the_formulas_say(case: Case) -> None:
    for baseline, groups in simulated(case, 200).items():
        if baseline in EXACT:
            expected = closed_form(case, baseline, case.kinds)
            for quantity in ("bias", "sd", "punished", "guarded"):
                value, error = estimate(groups, quantity)
                assert abs(value - expected.quantity(quantity)) <= 5 * error + 1e-12, (baseline, quantity)


def test_capability_takes_omega_from_its_window() -> None:
    case = Case("window", ((0.8, 0.4),), problems=4, window=2)
    found = simulated(case, 60)
    omega = found["capability"].omega[:, 0]
    assert len(np.unique(omega)) > 30
    assert np.unique(found["oracle"].omega).tolist() == pytest.approx([2.0])
    # A window of one step jumps about more than one of two steps.
    jumpy = simulated(Case("window", ((0.8, 0.4),), problems=4, window=1), 60)["capability"].omega[:, 0]
    assert jumpy.std() > omega.std()


def test_rows_name_case_baseline_and_quantity_once() -> None:
    case = Case("three", ((0.84, 0.4, 0.2), (0.42, 0.2, 0.1)))
    table = pl.DataFrame(list(rows(case, 40)))
    assert table.select("case", "baseline", "quantity").is_duplicated().sum() == 0
    assert table["case"].unique(maintain_order=True).to_list() == [
        "three: every problem",
        "three: .84 | .4 .2",
        "three: .42 | .2 .1",
    ]
    assert set(table["baseline"]) == set(BASELINES)


def test_the_committed_table_is_this_programs() -> None:
    table = pl.read_parquet(ROOT / "docs" / "results" / "theory.parquet")
    assert table.columns == ["case", "baseline", "quantity", "value", "standard_error", "closed_form"]
    expected = {
        (name, baseline, quantity): closed_form(case, baseline, [case.kinds[number] for number in numbers])
        for case in CASES
        for name, numbers in views(case).items()
        for baseline in BASELINES
        for quantity in quantities(baseline)
    }
    found = {(row["case"], row["baseline"], row["quantity"]): row for row in table.to_dicts()}
    assert found.keys() == expected.keys()
    for key, row in found.items():
        assert row["closed_form"] == pytest.approx(expected[key].quantity(key[2]), abs=1e-12), key
        if key[1] in EXACT:
            assert abs(row["value"] - row["closed_form"]) <= 5 * row["standard_error"] + 1e-12, key


@pytest.mark.parametrize(
    ("said", "case", "baseline", "quantity"),
    [
        (".275 too low", "complementary agents: .75 | .2", "oracle", "bias"),
        (".192 beside", "ratio 2.1 everywhere: .84 | .4", "capability", "sd"),
        ("beside .130", "ratio 2.1 everywhere: .84 | .4", "own", "sd"),
        (".078 beside", "weak uneven learner, strong partner: .2 | .84", "capability", "sd"),
        ("beside .141", "weak uneven learner, strong partner: .2 | .84", "own", "sd"),
        (".095 too low", "strong learner, uneven partner, guard: every problem", "capability", "bias"),
        (".225 too low", "ratio 20, omega_max acts", "oracle", "bias"),
        (".25 where", "partner always wrong", "capability", "bias"),
    ],
)
def test_the_page_says_what_the_table_has(said: str, case: str, baseline: str, quantity: str) -> None:
    assert said in (ROOT / "docs" / "theory.md").read_text("utf-8")
    (row,) = (
        pl.read_parquet(ROOT / "docs" / "results" / "theory.parquet")
        .filter((pl.col("case") == case) & (pl.col("baseline") == baseline) & (pl.col("quantity") == quantity))
        .to_dicts()
    )
    (number,) = re.findall(r"\.\d+", said)
    assert f"{abs(row['closed_form' if baseline == 'oracle' else 'value']):.{len(number) - 1}f}" == f"0{number}"


def test_the_page_says_what_the_cosines_are() -> None:
    table = pl.read_parquet(ROOT / "docs" / "results" / "cosines.parquet")
    own = table.filter(pl.col("run") == "quickstart")
    columns = ["cosine_halves", "control", "cosine_problems", "control_problems"]
    columns += ["own_norm", "cross_norm", "cross_live"]
    page = (ROOT / "docs" / "theory.md").read_text("utf-8")
    rows = re.findall(r"^\| (ada|bo), (\d+)-(\d+) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 8
    for agent, first, last, cells in rows:
        of = own.filter((pl.col("agent") == agent) & pl.col("step").is_between(int(first), int(last)))
        assert [float(cell) for cell in cells.split(" | ")] == [
            pytest.approx(of[name].mean(), abs=0.0051) for name in columns
        ]
    halves, problems = own["cosine_halves"] - own["control"], own["cosine_problems"] - own["control_problems"]
    assert [f"{each.mean():.2f} +- {each.std() / len(each) ** 0.5:.2f}" for each in (halves, problems)] == [
        "-0.02 +- 0.03",
        "-0.03 +- 0.02",
    ]
    assert "-.02 +- .03 over 40 updates, on\n  other problems -.03 +- .02" in page
    without = table.filter(pl.col("run") != "quickstart").join(own, on=["agent", "step", "other"])
    for first, last, norm, change in ((1, 10, "2.4", "0.02 +- 0.03"), (11, 20, "1.7", "-0.07 +- 0.02")):
        of = without.filter(pl.col("step").is_between(first, last))
        difference = of["cosine_halves"] - of["cosine_halves_right"]
        assert f"{of['cross_norm'].mean() / of['cross_norm_right'].mean():.1f}" == norm
        assert f"{difference.mean():.2f} +- {difference.std() / len(difference) ** 0.5:.2f}" == change
