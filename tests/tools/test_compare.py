"""`hacpo compare` on collected results whose numbers are known."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from conftest import Cli
from hacpo.pipeline.views.run_results import SCHEMA, write_results

PROBLEMS = ["p1", "p2", "p3", "p4"]
SETTINGS = {"seed": 0, "steps": 2, "algorithm": {"recipe": "gspo", "clip": {"own_low": 0.03}}}


def rows(
    variant: str,
    seed: int,
    correct: Sequence[Sequence[int]],
    *,
    each: int = 10,
    agent: str = "ada",
    benchmark: str = "heldout",
    settings: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """A run of as many evaluations, one a step, with so many correct of 4 responses to each problem."""
    return [
        {
            "run": f"study/{variant}/{seed}",
            "base": "pair",
            "variant": variant,
            "seed": seed,
            "start_seed": 1,
            "agent": agent,
            "step": step,
            "benchmark": benchmark,
            "accuracy": sum(counts) / 16,
            "rollouts": step * each,
            "sampled_tokens": step * each * 7,
            "training_tokens": step * 5,
            "updates": step * 2,
            "seconds": step * 1.5,
            "problem_ids": PROBLEMS,
            "samples": [4] * 4,
            "correct": list(counts),
            "settings": json.dumps({**SETTINGS, "seed": seed, **(settings or {})}),
        }
        for step, counts in enumerate(correct)
    ]


def written(*parts: list[dict[str, Any]], name: str = "study.parquet") -> str:
    write_results(Path(name), pa.Table.from_pylist([row for part in parts for row in part], schema=SCHEMA))
    return name


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def by_measure(result: Any) -> dict[str, Any]:
    (comparison,) = json.loads(result.out)["comparisons"]
    return {one["measure"]: one for one in comparison["differences"] if not one["agent"]}


def test_accuracies_are_compared_at_equal_rollouts(cli: Cli) -> None:
    """Twice the rollouts a step: at 20 rollouts gspo has ended, gspo_x2 has made one step."""
    slow = [[0, 0, 0, 0], [2, 2, 2, 2], [4, 4, 4, 4]]  # accuracy 0, 1/2, 1 after 0, 10, 20 rollouts
    double = [[0, 0, 0, 0], [3, 3, 3, 3], [4, 4, 4, 4]]  # 0, 3/4, 1 after 0, 20, 40
    parts = [rows("gspo", seed, slow) for seed in range(6)] + [rows("x2", seed, double, each=20) for seed in range(6)]
    found = by_measure(cli("compare", written(*parts), "--json"))
    # Areas up to 20: gspo (0 + 1/2) / 2 x 1/2 + (1/2 + 1) / 2 x 1/2 = 1/2; x2 (0 + 3/4) / 2 = 3/8.
    assert (found["area"]["reference"], found["area"]["result"]) == (pytest.approx(1 / 2), pytest.approx(3 / 8))
    assert (found["at_budget"]["reference"], found["at_budget"]["result"]) == (1.0, 0.75)
    assert found["at_budget"]["verdict"] == "worse"  # runs and problems all agree
    assert found["last"]["change"]["mean"] == 0
    assert found["last"]["verdict"] == "no difference shown"
    by_steps = by_measure(cli("compare", "study.parquet", "--by", "steps", "--json"))
    # By steps the budget is 2: x2 has (0 + 3/4) / 4 + (3/4 + 1) / 4 = 5/8.
    assert by_steps["area"]["result"] == pytest.approx(5 / 8)
    assert by_steps["area"]["verdict"] == "better"


def test_what_differs_and_single_problems(cli: Cli) -> None:
    settings = {"algorithm": {"recipe": "hacpo", "clip": {"own_low": 0.03}}}
    parts = [rows("gspo", seed, [[0] * 4, [1, 2, 3, 4]]) for seed in (1, 2)]
    parts += [rows("hacpo", seed, [[0] * 4, [4, 2, 1, 4]], settings=settings) for seed in (1, 2)]
    printed = cli("compare", written(*parts)).out
    assert re.search(r'algorithm\.recipe +"gspo" +"hacpo"', printed)
    assert "own_low" not in printed
    assert "problems at the last evaluation: 1 won, 1 lost, 2 even" in printed
    (comparison,) = json.loads(cli("compare", "study.parquet", "--json").out)["comparisons"]
    assert comparison["problems"]["most_won"] == [["p1", 0.25, 1.0]]
    assert comparison["problems"]["most_lost"] == [["p3", 0.75, 0.25]]


def test_only_runs_of_the_same_seeds_are_pairs(cli: Cli) -> None:
    low, high = [[0] * 4, [1] * 4], [[0] * 4, [3] * 4]
    parts = [rows("a", 1, low), rows("a", 2, low), rows("b", 2, high), rows("b", 3, [[0] * 4, [0] * 4])]
    found = by_measure(cli("compare", written(*parts), "--json"))
    assert (found["last"]["reference"], found["last"]["result"]) == (0.25, 0.75)  # of seed 2 alone
    assert found["last"]["change"]["low"] is None
    assert found["last"]["verdict"] == "one pair of runs: nothing shown"
    alone = cli("compare", written(rows("a", 1, low), rows("b", 2, high)))
    assert "b and a have no seed in common" in alone.error


def test_runs_that_differ_in_nothing_but_seeds_are_one_group(cli: Cli) -> None:
    """Without a sweep, and with seeds that follow from the run's."""
    parts = []
    for name, low in (("a", 0.03), ("b", 0.02)):
        for seed in (1, 2):
            given = {"recipe": "sapo", "clip": {"own_low": low}, "rollouts": {"draw_seed": seed}}
            run = rows(name, seed, [[0] * 4, [2] * 4], settings={"algorithm": given, "start_seed": seed})
            parts.append([{**row, "base": "", "variant": row["run"]} for row in run])
    groups = json.loads(cli("compare", written(*parts), "--json").out)["groups"]
    assert [(group["name"], len(group["runs"])) for group in groups] == [("study/a/1", 2), ("study/b/1", 2)]
    assert re.search(r"algorithm\.clip\.own_low +0\.03 +0\.02", cli("compare", "study.parquet").out)


def test_verdicts_are_corrected_for_their_number(cli: Cli) -> None:
    random = [[0] * 4, [1, 2, 2, 3]]
    better = [[0] * 4, [2, 3, 2, 3]]
    parts = [rows(name, seed, random if name == "a" else better) for name in "abcd" for seed in (1, 2, 3, 4)]
    one = json.loads(cli("compare", written(*parts), "--json").out)["comparisons"]
    ps = [each["differences"][-1]["change"]["p"] for each in one]
    corrected = [each["differences"][-1]["corrected"] for each in one]
    assert ps[0] == ps[1] == ps[2]
    assert corrected == pytest.approx([min(1.0, 3 * ps[0])] * 3)
    against = json.loads(cli("compare", "study.parquet", "--against", "d", "--json").out)["comparisons"]
    assert [each["group"] for each in against] == ["a", "b", "c"]


def test_agents_benchmarks_and_the_page(cli: Cli) -> None:
    low, high = [[0] * 4, [1] * 4], [[0] * 4, [3] * 4]
    parts = [
        rows(name, seed, low if (name, agent) == ("a", "bo") else high, agent=agent, benchmark=benchmark)
        for name in ("a", "<b>&")
        for seed in (1, 2)
        for agent in ("ada", "bo")
        for benchmark in ("easy", "hard")
    ]
    shown = cli("compare", written(*parts), "--benchmark", "hard", "--html", "page.html", "--json")
    (comparison,) = json.loads(shown.out)["comparisons"]
    last = {one["agent"]: one["change"]["mean"] for one in comparison["differences"] if one["measure"] == "last"}
    assert last == {"": 0.25, "ada": 0.0, "bo": 0.5}  # (3 - 1) / 4 of bo, and half of that in the mean
    page = Path("page.html").read_text()
    assert "<b>&" not in page
    assert "&lt;b&gt;&amp;" in page
    assert page.count('class="chart"') == 6  # one for everything that can be spent
    assert "http" not in re.sub(r'xmlns="[^"]*"|http-equiv', "", page)
    assert "50.0" in page
    assert Path("page.html").read_bytes() == _again(cli)


def _again(cli: Cli) -> bytes:
    assert cli("compare", "study.parquet", "--benchmark", "hard", "--html", "again.html").code == 0
    return Path("again.html").read_bytes()


def test_bad_input_is_one_line(cli: Cli) -> None:
    ours = written(rows("a", 1, [[0] * 4]), rows("b", 1, [[1] * 4]))
    pa.parquet.write_table(pa.table({"x": [1]}), "other.parquet")
    Path("broken.parquet").write_bytes(b"PAR1 nothing")
    assert "other.parquet: holds no results of runs" in cli("compare", "other.parquet").error
    assert "broken.parquet: cannot be read" in cli("compare", "broken.parquet").error
    assert "is named twice" in cli("compare", ours, ours).error
    assert "--against: there is no 'c' (expected a, b)" in cli("compare", ours, "--against", "c").error
    assert "--benchmark: not all runs have 'x'" in cli("compare", ours, "--benchmark", "x").error
    assert "is no pipeline folder" in cli("compare", "nothing").error
    assert "there is one group" in cli("compare", written(rows("a", 1, [[0] * 4]))).error
    other = rows("b", 1, [[0] * 4])
    for row in other:
        row["problem_ids"] = ["q1", "q2", "q3", "q4"]
    assert "have no problem of heldout in common" in cli("compare", written(rows("a", 1, [[0] * 4]), other)).error
