"""`hacpo compare` on collected results whose numbers are known."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from conftest import Cli
from hacpo.pipeline.views.result_files import write_results
from hacpo.pipeline.views.run_results import SCHEMA
from tests.result_rows import run_rows

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
    return run_rows(
        f"study/{variant}/{seed}",
        correct,
        base="pair",
        variant=variant,
        seed=seed,
        start_seed=1,
        settings={**SETTINGS, "seed": seed, **(settings or {})},
        each=each,
        agent=agent,
        benchmark=benchmark,
    )


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


def test_no_interval_is_wider_than_a_difference_can_be(cli: Cli) -> None:
    # Two pairs differ by -1 and by +1: with one degree of freedom t is 12.7, and the interval 0 +- 12.7.
    wide = [rows(name, seed, [[4 * ((seed + one) % 2)] * 4]) for one, name in enumerate("ab") for seed in (1, 2)]
    assert "-1.000 to +1.000" in cli("compare", written(*wide)).out
    single = cli("compare", written(rows("a", 1, [[0] * 4]), rows("b", 1, [[1] * 4]))).out
    assert "a: 1 run, seed" in single


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
    assert cli("compare", "nothing.parquet").error == "hacpo: error: nothing.parquet: no such file"
    assert "there is one group" in cli("compare", written(rows("a", 1, [[0] * 4]))).error
    other = rows("b", 1, [[0] * 4])
    for row in other:
        row["problem_ids"] = ["q1", "q2", "q3", "q4"]
    assert "have no problem of heldout in common" in cli("compare", written(rows("a", 1, [[0] * 4]), other)).error


# --- files of strangers ----------------------------------------------------------------------------------------------

Row = dict[str, Any]


def everywhere(**changes: Any) -> Callable[[list[Row]], None]:
    """A change of every row of two runs."""
    return lambda rows: [row.update(changes) for row in rows] and None


def in_last(**changes: Any) -> Callable[[list[Row]], None]:
    return lambda rows: rows[-1].update(changes)


HOSTILE: dict[str, tuple[Callable[[list[Row]], None], str]] = {
    "settings are no JSON": (in_last(settings="{"), "column 'settings' holds no JSON"),
    "settings are no mapping": (in_last(settings="[1]"), "column 'settings' holds no mapping"),
    "settings without end": (in_last(settings='{"a":' * 900 + "1" + "}" * 900), "nested more than 100 levels"),
    "settings of megabytes": (in_last(settings=json.dumps({"a": "x" * 2**20})), "settings of more than 1,048,576"),
    "a key with half a character": (in_last(settings='{"\\ud800": 1}'), "holds a key that cannot be shown"),
    "endless seconds": (in_last(seconds=math.inf), "column 'seconds' is wrong in row 3 (expected 0 to 9,007"),
    "seconds that are none": (in_last(seconds=math.nan), "column 'seconds' is wrong in row 3"),
    "negative seconds": (in_last(seconds=-1.0), "found -1.0"),
    "rollouts beyond any float": (in_last(rollouts=2**62), "column 'rollouts' is wrong in row 3"),
    "a negative step": (in_last(step=-1), "column 'step' is wrong in row 3 (expected 0 or more, found -1)"),
    "accuracy that is none": (in_last(accuracy=math.nan), "column 'accuracy' is wrong in row 3"),
    "no response": (in_last(samples=[4, 4, 0, 4]), "expected 1 response or more to each problem"),
    "fewer than no correct one": (in_last(correct=[1, -1, 1, 1]), "column 'correct' is wrong in row 3"),
    "more correct ones than responses": (in_last(correct=[1, 5, 1, 1]), "no more of a problem than its samples"),
    "fewer counts than problems": (in_last(samples=[4] * 3), "column 'samples' is wrong in row 3"),
    "a count that is missing": (in_last(correct=[1, None, 1, 1]), "expected a value for each problem"),
    "a list that is missing": (in_last(samples=None), "cannot be read: Casting field 'samples' with null values"),
    "a name that is missing": (in_last(agent=None), "cannot be read: Casting field 'agent' with null values"),
    "no problem": (in_last(problem_ids=[], samples=[], correct=[]), "expected 1 to 50,000 problems, found 0 values"),
    "a problem twice": (in_last(problem_ids=["p1", "p2", "p3", "p3"]), "expected every problem once"),
    "a line end in a name": (
        everywhere(agent="ada\nhacpo: error: no"),
        r"holds a name that cannot be shown (found 'ada\n",
    ),
    "a terminal escape in a name": (everywhere(benchmark="\x1b[2J"), r"column 'benchmark' holds a name that cannot"),
    "a text turned around": (everywhere(variant="a\u202eb"), "column 'variant' holds a name that cannot be shown"),
    "a name without end": (everywhere(base="x" * 501), "column 'base' holds a name of more than 500 letters"),
    "no name": (everywhere(agent=""), "column 'agent' holds a name that cannot be shown"),
    "two seeds of one run": (in_last(seed=9), "run study/b/1 has more than one 'seed'"),
    "a row twice": (in_last(step=0, rollouts=0), "the same row is there twice (found run study/b/1, agent ada"),
    "spent and got back": (lambda rows: rows[2].update(updates=9), "column 'updates' falls from an evaluation to the"),
    "no row": (list.clear, "holds no results (expected a row for each evaluation, found no row)"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_no_run_has_is_refused_in_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Without the trial in another process, which is the next tests': it would say the same."""
    monkeypatch.setattr("hacpo.pipeline.views.result_files.try_reading", lambda *_, **__: None)
    change, said = HOSTILE[kind]
    given = [*rows("a", 1, [[0] * 4, [1] * 4]), *rows("b", 1, [[1] * 4, [2] * 4])]
    change(given)
    loose = pa.schema([field.with_nullable(True) for field in SCHEMA])
    pa.parquet.write_table(pa.Table.from_pylist(given, schema=loose), "given.parquet")
    for options in ((), ("--json",), ("--html", "page.html")):
        result = cli("compare", "given.parquet", *options)
        assert result.code == 4, (result.out, result.err)
        assert said in result.error
        assert result.error.startswith("hacpo: error: given.parquet: ")
        assert result.error.endswith("or a file that `hacpo sweep --collect` has written")
        assert result.out == ""
        assert result.err.isascii()
        assert result.err.count("\n") == 1
    assert not Path("page.html").exists()


@pytest.mark.parametrize(
    ("column", "values", "found"),
    [
        ("seconds", ["1.5"] * 4, "expected double, found string"),
        ("samples", [4] * 4, "expected list<item: int32>, found int64"),
        ("agent", [b"ada"] * 4, "expected string, found binary"),
        ("settings", [{"seed": 1}] * 4, "expected string, found struct<seed: int64>"),
        ("updates", pa.nulls(4), "expected int64, found null"),
    ],
)
def test_columns_of_other_types_are_refused_in_one_line(cli: Cli, column: str, values: Any, found: str) -> None:
    given = [*rows("a", 1, [[0] * 4, [1] * 4]), *rows("b", 1, [[1] * 4, [2] * 4])]
    table = pa.Table.from_pylist(given, schema=SCHEMA)
    table = table.set_column(table.schema.get_field_index(column), column, pa.array(values))
    pa.parquet.write_table(table, "given.parquet")
    result = cli("compare", "given.parquet")
    assert result.code == 4
    assert f"given.parquet: column {column!r} has the wrong type ({found}). Name a pipeline folder" in result.error


@pytest.mark.parametrize("limit", ["MOST_ROWS", "MOST_ANSWERED", "MOST_RUNS", "MOST_BENCHMARKS", "MOST_KEYS"])
def test_more_than_is_compared_is_refused_in_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Two runs of two evaluations of two benchmarks, of four problems: 2 runs, 2 benchmarks, 8 rows, 32 problems; four
    settings."""
    monkeypatch.setattr("hacpo.pipeline.views.result_files.try_reading", lambda *_, **__: None)
    most = {"MOST_ROWS": 8, "MOST_ANSWERED": 32, "MOST_RUNS": 2, "MOST_BENCHMARKS": 2, "MOST_KEYS": 4}[limit]
    parts = [rows(name, 1, [[0] * 4, [1] * 4], benchmark=benchmark) for name in "ab" for benchmark in ("easy", "hard")]
    name = written(*parts)
    monkeypatch.setattr(f"hacpo.pipeline.views.result_files.{limit}", most)
    assert cli("compare", name).code == 0
    monkeypatch.setattr(f"hacpo.pipeline.views.result_files.{limit}", most - 1)
    result = cli("compare", name)
    assert result.code == 4
    assert f"(expected at most {most - 1}, found {most}). Collect fewer runs into it" in result.error


def test_a_small_file_that_is_gigabytes_is_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """40,000 problems of 1 MiB are 39 GiB; the file says of itself that it is 1 MiB, with 40,000 values."""
    monkeypatch.setattr("hacpo.artifacts.trial.MEMORY", 1 << 29)
    problems = pa.DictionaryArray.from_arrays(pa.array([0] * 40_000, pa.int32()), pa.array(["x" * 2**20]))
    counts = pa.ListArray.from_arrays([0, 20_000, 40_000], pa.array([1] * 40_000, pa.int32()))
    table = pa.Table.from_pylist(rows("a", 1, [[0] * 4, [1] * 4]), schema=SCHEMA)
    for name in ("samples", "correct"):
        table = table.set_column(table.schema.get_field_index(name), name, counts)
    lists = pa.ListArray.from_arrays([0, 20_000, 40_000], problems)
    table = table.set_column(table.schema.get_field_index("problem_ids"), "problem_ids", lists)
    pa.parquet.write_table(table, "bomb.parquet", store_schema=False)
    assert Path("bomb.parquet").stat().st_size < 1 << 18
    result = cli("compare", "bomb.parquet")
    assert result.code == 4
    assert "bomb.parquet: takes more memory than is spent on a file of results" in result.error


def test_settings_are_one_text_for_all_rows_of_a_run(cli: Cli) -> None:
    """20,000 rows with 100 KB of settings each are 2 GB."""
    from hacpo.tools.compare.reading import read

    settings = json.dumps({"a": "x" * 100_000})
    given = [{**rows("a", 1, [[0] * 4])[0], "step": step, "settings": settings} for step in range(20_000)]
    write_results(Path("given.parquet"), pa.Table.from_pylist(given, schema=SCHEMA))
    assert read(["given.parquet"]).estimated_size() < 1 << 25


def test_a_run_of_any_number_of_steps_is_drawn(cli: Cli) -> None:
    last = 2**31 - 1
    parts = [rows(name, 1, [[0] * 4, [1] * 4]) for name in "ab"]
    for part in parts:
        part[-1]["step"] = last
    result = cli("compare", written(*parts), "--by", "steps", "--html", "page.html")
    assert result.code == 0, result.err
    assert "budget: 2.1 G steps" in result.out
    assert ">2000000000<" in Path("page.html").read_text()  # ticks every 500,000,000


def test_a_group_and_a_run_of_one_name_are_told_apart(cli: Cli) -> None:
    """Else one of them would stand for both."""
    parts = [rows(name, 1, [[0] * 4, [1] * 4]) for name in "ab"]
    for row in parts[0]:
        row.update(run="b", variant="b")  # a run without a group
    assert "b: a run, and a group of others, have this name. Name one of them" in cli("compare", written(*parts)).error


# --- what is written -------------------------------------------------------------------------------------------------


TARGETS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a folder": (Path.mkdir, "is there and is not replaced (found a folder). Name another file"),
    "a link": (lambda path: path.symlink_to("elsewhere"), "is there and is not replaced (found a link)"),
    "a pipe": (os.mkfifo, "is there and is not replaced (found a pipe)"),
    "somebody's text": (lambda path: path.write_text("mine"), "and is not replaced. Name another file, or remove it"),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_a_page_replaces_nothing_but_a_page(cli: Cli, kind: str) -> None:
    make, said = TARGETS[kind]
    name = written(rows("a", 1, [[0] * 4, [1] * 4]), rows("b", 1, [[1] * 4, [2] * 4]))
    make(Path("page.html"))
    before = os.lstat("page.html")
    result = cli("compare", name, "--html", "page.html")
    assert result.code == 2
    assert result.error.startswith("hacpo: error: page.html: is there")
    assert said in result.error
    assert result.out == ""
    after = os.lstat("page.html")
    assert (before.st_ino, before.st_mode, before.st_size) == (after.st_ino, after.st_mode, after.st_size)
    assert not Path("elsewhere").exists()


def test_groups_of_one_base_are_set_beside_each_other_alone(cli: Cli) -> None:
    parts = []
    for base, names in (("one", ("a", "b")), ("two", ("c", "d"))):
        for number, name in enumerate(names):
            made = rows(name, 1, [[0] * 4, [1] * 4], settings={"steps": 10 * len(base) + number})
            parts.append([{**row, "base": base, "run": f"{base}/{name}"} for row in made])
    assert cli("compare", written(*parts), "--against", "a", "--html", "page.html").code == 0
    page = Path("page.html").read_text()
    assert page.count(">Settings that differ<") == 2  # of a and b, of c and d
    assert page.count("<h3>one, heldout</h3>") == 2  # verdicts and curves
    assert page.count("<h3>two, heldout</h3>") == 1  # there is no `a` to compare with


def test_a_page_is_written_over_a_page_and_nowhere_else_of_a_programs_own(cli: Cli) -> None:
    name = written(rows("a", 1, [[0] * 4, [1] * 4]), rows("b", 1, [[1] * 4, [2] * 4]))
    assert cli("compare", name, "--html", "page.html").code == 0
    assert cli("compare", name, "--html", "page.html").code == 0
    Path(".dvc").mkdir()
    assert "page.html: must lie outside" in cli("compare", name, "--html", ".dvc/page.html").error
    assert cli("compare", name, "--html", "/proc/page.html").code == 8  # refused by the system
    assert cli("compare", name, "--html", f"{name}/page.html").code == 8
