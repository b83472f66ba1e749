"""The study's page: its numbers follow from the collected files, and the way from sweeps to it is whole."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from benchmarks.study import markdown, quick, rates
from benchmarks.study.__main__ import FIGURES, PAGE, TITLE, study, write_pages
from benchmarks.study.asked import FAMILIES, HYPOTHESES, RESULTS, TABLES, difference, everything, read_study, verdicts
from conftest import ROOT
from hacpo.evaluation.bootstrap import holm
from hacpo.pipeline.sweeping.planned_cells import planned
from hacpo.pipeline.sweeping.sweep_file import SweepFile
from hacpo.pipeline.views.result_files import write_results
from hacpo.pipeline.views.run_results import SCHEMA
from hacpo.tools.compare.compare_page import render
from tests.result_rows import run_rows

NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(?:,\d{3})*(?:\.\d+)?")


def unlike(page: str, again: str) -> list[tuple[str, str]]:
    """Where two pages differ by more than one in a number's last digit, as other machines may round it."""
    if NUMBER.split(page) != NUMBER.split(again):
        return [("words", "other words")]
    pairs = zip(NUMBER.findall(page), NUMBER.findall(again), strict=True)
    return [(one, other) for one, other in pairs if one != other and not _close(one, other)]


def _close(one: str, other: str) -> bool:
    digits = [len(text.partition(".")[2]) for text in (one, other)]
    values = [float(text.replace(",", "")) for text in (one, other)]
    return digits[0] == digits[1] > 0 and abs(values[0] - values[1]) < 1.01 * 10 ** -digits[0]


# --- what is committed -----------------------------------------------------------------------------------------------


def test_every_number_of_the_page_follows_from_what_is_committed() -> None:
    page, done = (ROOT / PAGE).read_text("utf-8"), read_study(ROOT)
    assert not unlike(page, markdown.page(page, markdown.generated(ROOT, done)))
    whole = everything(done)
    assert (ROOT / FIGURES).exists() == (whole is not None)
    if whole is not None:
        assert not unlike((ROOT / FIGURES).read_text("utf-8"), render(whole, TITLE))
    assert sum(file.stat().st_size for file in (ROOT / RESULTS).glob("*")) < 10_000_000


def test_sweeps_are_the_protocols_and_learn_at_the_rates_that_tuning_chose() -> None:
    sweeps = {family: SweepFile.read(ROOT / quick.STUDY / family) for family in FAMILIES}
    recipes = sweeps["tuning"].settings.variants
    tuning = read_study(ROOT).groups.get("tuning")
    best = rates.chosen(rates.tuned(tuning)) if tuning else dict.fromkeys(recipes, 3e-4)
    for family, sweep in sweeps.items():
        assert (sweep.settings.keep, sweep.settings.audit) == ("results", True)
        if family == "tuning":
            continue
        assert len(sweep.settings.seeds) * len(sweep.settings.start_seeds) == (20 if family in ("main", "gap") else 5)
        for cell in planned(sweep):
            settings = cell.pipeline.settings
            assert settings.optimizer.learning_rate == rates.rate_of(cell.cell.variant, best), cell.cell.name
            assert [*settings.evaluation.benchmarks] == ["final"]
            assert (settings.steps, settings.evaluation.every) == (60, 5)
            assert settings.data.sets["gym/final"].problems == 200
            if cell.cell.variant in recipes:  # what is measured is what was tuned
                tuned = {"optimizer": {"learning_rate": best[cell.cell.variant]}}
                assert sweep.settings.variants[cell.cell.variant] == (recipes[cell.cell.variant] or {}) | tuned


# --- known differences -----------------------------------------------------------------------------------------------


def rows(base: str, variant: str, curve: Sequence[int], *, each: int = 10, rate: float = 3e-4) -> list[dict[str, Any]]:
    """20 runs of one agent: so many of 4 responses correct to each of 4 problems, after 0, 1 and 2 steps."""
    return [
        row
        for start in (1, 2)
        for seed in range(1, 11)
        for benchmark in ("heldout", "final")
        for row in run_rows(
            f"study/{base}/{variant}/{start}-{seed}",
            [[correct] * 4 for correct in curve],
            base=base,
            variant=variant,
            seed=seed,
            start_seed=start,
            settings={"seed": seed, "start_seed": start, "optimizer": {"learning_rate": rate}},
            each=each,
            benchmark=benchmark,
        )
    ]


def collected(root: Path, family: str, *parts: list[dict[str, Any]]) -> None:
    (root / RESULTS).mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([row for part in parts for row in part], schema=SCHEMA)
    write_results(root / RESULTS / f"{family}.parquet", table)
    (root / PAGE).write_text(f"# By hand\n\n{markdown.BEGIN}{markdown.END}\nBy hand, too.\n")


MAIN = (
    rows("model", "hacpo", [0, 2, 4]),  # accuracy 0, 1/2, 1 after 0, 10, 20 rollouts
    rows("model", "gspo_x2", [0, 3, 4], each=20),  # 0, 3/4, 1 after 0, 20, 40
    rows("model", "gspo_two_passes", [0, 2, 4]),
    rows("model", "naive", [0, 1, 4]),  # 0, 1/4, 1
)
GAP = (rows("gap", "hacpo", [0, 2, 4]), rows("gap", "own", [0, 1, 4]))


def test_verdicts_by_hand(tmp_path: Path) -> None:
    collected(tmp_path, "main", *MAIN)
    collected(tmp_path, "gap", *GAP)
    found = {
        hypothesis.name: difference(comparison, "area")
        for hypothesis, comparison in verdicts(read_study(tmp_path))
        if comparison
    }
    # Areas up to 20 rollouts: hacpo (0 + 1/2) / 4 + (1/2 + 1) / 4 = 1/2; gspo_x2 (0 + 3/4) / 2 = 3/8;
    # naive and own (0 + 1/4) / 4 + (1/4 + 1) / 4 = 3/8. By steps gspo_x2 has (0 + 3/4) / 4 + (3/4 + 1) / 4 = 5/8.
    assert {name: (each.change.mean, each.verdict) for name, each in found.items()} == {
        "H2": (pytest.approx(1 / 8), "better"),
        "H3": (pytest.approx(0), "no difference shown"),
        "H4": (pytest.approx(1 / 8), "better"),
        "H5": (pytest.approx(-1 / 8), "worse"),
        "H1": (pytest.approx(-1 / 8), "worse"),
    }
    write_pages(tmp_path)
    page = (tmp_path / PAGE).read_text("utf-8")
    assert page.startswith("# By hand\n")
    assert page.endswith("By hand, too.\n")
    order = re.findall(r"^\| \*\*(H\d)\*\* .*\| \*\*([a-z ]+)\*\* \|$", page.partition("secondary")[0], re.MULTILINE)
    assert order[0] == ("H2", "better")  # the equal-rollout comparison first
    assert order[-1] == ("H1", "worse")
    assert re.search(r"\*\*H2\*\* .*\| 20 rollouts \| 20 \| 0\.500 \| 0\.375 \| \+0\.125 \|", page)
    assert re.search(r"\| `gspo_x2` \| 2 \| 40 \| 280 \| 10 \| 4 \| 3 \|", page)  # what a run costs
    assert "## Table 1" not in page  # there is no gspo
    assert re.search(r"\*\*H2\*\* .*\| \+0\.125, \+0\.125 \|", page)  # on either start
    # What a hypothesis says has one verdict: .125, .125 again in the table, the other way round.
    assert re.search(r"^\| model \| `gspo_x2` \| 20 \| 20 \| 0\.375 \| -0\.125 \| .* \| see H2 \|", page, re.MULTILINE)
    assert re.search(r"^\| gap \| `own` .* \| see H5 \|", page, re.MULTILINE)
    assert "H2: HACPO beats" in (tmp_path / FIGURES).read_text("utf-8")


def test_hypotheses_are_the_protocols() -> None:
    lines = (ROOT / "docs/protocol.md").read_text("utf-8").splitlines()
    rows = [[cell.strip(" `*") for cell in line.split("|")[1:-1]] for line in lines if re.match(r"\| H\d ", line)]
    assert sorted((name, group, against, family, axis) for name, _, group, against, family, axis in rows) == sorted(
        (one.name, one.group, one.against, {"main": "model", "gap": "gap"}[one.family], one.axis) for one in HYPOTHESES
    )


def test_corrections_leave_out_what_has_its_verdict_elsewhere(tmp_path: Path) -> None:
    others = (rows("gap", "gspo", [1, 2, 4]), rows("gap", "gspo_x2", [1, 2, 4], each=20))
    collected(tmp_path, "gap", *(part[: 6 * 5] for part in (*GAP, *others)))
    whole = read_study(tmp_path).compared(next(table for table in TABLES if table.family == "gap"))
    assert whole is not None
    of = {comparison.group: difference(comparison, "area") for comparison in whole.comparisons}
    assert of["own"].corrected is None
    p_values = {name: of[name].change.p for name in ("gspo", "gspo_x2")}
    assert {name: of[name].corrected for name in p_values} == dict(
        zip(p_values, holm([*p_values.values()]), strict=True)  # type: ignore[list-item]
    )


def test_runs_that_lack_are_named(tmp_path: Path) -> None:
    quick.project(tmp_path, ROOT)
    collected(tmp_path, "gap", *GAP)
    (tmp_path / quick.STUDY / "gap/sweep.yaml").write_text(
        (ROOT / quick.STUDY / "gap/sweep.yaml").read_text("utf-8").replace("gspo_x2:", "grpo:")
    )
    write_pages(tmp_path)
    said = re.search(r"^Family `gap`: (.*)$", (tmp_path / PAGE).read_text("utf-8"), re.MULTILINE)
    assert said is not None
    assert said[1].startswith("40 of 80 runs are not among the results: gap/gspo/start-1-seed-1, gap/grpo/start-1-seed")


def test_no_family_is_run_before_its_learning_rates_are_chosen(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="learning rates are chosen by the family tuning"):
        study(tmp_path, ["main"], jobs=1)


def test_hypotheses_that_are_not_run_yet_count_in_the_correction(tmp_path: Path) -> None:
    collected(
        tmp_path,
        "gap",
        *(rows("gap", name, curve)[: 6 * 3] for name, curve in (("hacpo", [1, 2, 4]), ("own", [1, 3, 4]))),
    )
    found = {hypothesis.name: comparison for hypothesis, comparison in verdicts(read_study(tmp_path))}
    assert [name for name, comparison in found.items() if comparison] == ["H5"]
    one = difference(found["H5"], "area")  # type: ignore[arg-type]
    assert 0 < one.change.p < 1
    assert one.corrected == pytest.approx(min(1, len(HYPOTHESES) * one.change.p))
    write_pages(tmp_path)
    assert (tmp_path / PAGE).read_text("utf-8").count("not run yet") == 2 * 4


def test_theory_and_cosines_are_shown_where_they_are(tmp_path: Path) -> None:
    collected(tmp_path, "gap", *GAP)
    theory = {"case": "two: .7 | .3", "baseline": "own", "quantity": "bias", "value": -1e-5, "closed_form": 0.25}
    pl.DataFrame([theory]).write_parquet(tmp_path / RESULTS / "theory.parquet")
    same = {"run": "a", "step": 1, "own_norm": 2.0, "control": 0.5, "cosine_halves": 0.1, "cross_control": 0.3}
    cosines = [{**same, "cosine": c, "cross_norm": n, "cross_live": 0.5} for c, n in ((0.2, 1.0), (0.4, 2.0))]
    pl.DataFrame(cosines).write_parquet(tmp_path / RESULTS / "cosines.parquet")
    write_pages(tmp_path)
    page = (tmp_path / PAGE).read_text("utf-8")
    assert "| two: .7 \\| .3 | 0.000 (0.250) |" in page
    # Means: (.2 + .4) / 2 = .3; (1/2 + 2/2) / 2 = .75.
    assert "| a | 1 | 2 | 0.300 | 0.100 | 0.500 | 0.300 | 0.750 | 0.500 |" in page


def test_a_number_that_follows_from_nothing_is_found(tmp_path: Path) -> None:
    collected(tmp_path, "gap", *GAP)
    write_pages(tmp_path)
    page = (tmp_path / PAGE).read_text("utf-8")
    again = markdown.page(page, markdown.generated(tmp_path, read_study(tmp_path)))
    assert unlike(page, again) == []
    assert unlike(page.replace("-0.125", "+0.125"), again)
    assert unlike(page.replace("0.375", "0.373"), again) == [("0.373", "0.375")] * page.count("0.375")
    assert unlike(page.replace("worse", "better"), again)
    assert unlike(page.replace("0.375", "0.376"), again) == []  # another machine's rounding


def test_learning_rates_are_the_best_of_tuning_and_one_beyond_an_end_is_asked_for(tmp_path: Path) -> None:
    curves = {1.5e-4: [0, 2, 4], 3e-4: [0, 3, 4], 6e-4: [0, 1, 4]}
    parts = [
        rows("model", f"hacpo{rates.GRID}{rate:g}".replace(".", "_"), curve, rate=rate)
        for rate, curve in curves.items()
    ]
    parts += [
        rows("model", f"sgt{rates.GRID}{rate:g}".replace(".", "_"), curves[other], rate=rate)
        for rate, other in ((1.5e-4, 6e-4), (3e-4, 1.5e-4), (6e-4, 3e-4))
    ]
    collected(tmp_path, "tuning", *parts)
    means = rates.tuned(read_study(tmp_path).groups["tuning"])
    assert means["hacpo"] == {1.5e-4: pytest.approx(0.5), 3e-4: pytest.approx(0.625), 6e-4: pytest.approx(0.375)}
    assert rates.chosen(means) == {"hacpo": 3e-4, "sgt": 6e-4}
    assert rates.beyond(means) == ["*/sgt-learning_rate-0_0012/*"]
    names = {cell.variant for cell in SweepFile.read(ROOT / quick.STUDY / "tuning").cells()}
    assert {f"sgt{rates.GRID}{rate}" for rate in (*rates.INNER, *rates.OUTER.values())} <= names
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text((ROOT / quick.STUDY / "neighbours/sweep.yaml").read_text("utf-8"))
    rates.write(dict.fromkeys(["hacpo"], 3e-4) | {"sgt": 1.2e-3}, [sweep])
    assert "  sgt: {algorithm: {recipe: sgt}, optimizer: {learning_rate: 1.2e-03}}" in sweep.read_text()


# --- the way from runs to pages --------------------------------------------------------------------------------------


def test_the_quick_study_has_few_cells_of_every_family(tmp_path: Path) -> None:
    quick.project(tmp_path, ROOT)
    for family in FAMILIES:
        cells = planned(SweepFile.read(tmp_path / quick.STUDY / family))
        assert 2 <= len(cells) <= 8
        assert all(cell.pipeline.settings.steps == 10 for cell in cells)
    rates.write({"hacpo": 6e-4, "naive": 1.5e-4}, (tmp_path / quick.STUDY).glob("*/sweep.yaml"))
    cells = planned(SweepFile.read(tmp_path / quick.STUDY / "main"))
    assert {cell.cell.variant: cell.pipeline.settings.optimizer.learning_rate for cell in cells}["naive"] == 1.5e-4
    quick.project(tmp_path, ROOT)  # what was chosen stays
    assert planned(SweepFile.read(tmp_path / quick.STUDY / "main"))[0].pipeline.settings.optimizer.learning_rate == 6e-4


@pytest.mark.slow
def test_from_sweeps_to_the_page_and_again(project: Path) -> None:
    """Real runs of tiny models, one step each."""
    common = "\nkeep: results\nsettings: {steps: 1, batch: {prompts: 4}, evaluation: {benchmarks: {%s}}}\n"
    final = "heldout: null, final: {data: arithmetic/heldout, samples: 2, temperature: 1.0}"
    described = {
        "tuning": "variants:\n  hacpo: {algorithm: {recipe: hacpo}}\n"
        "grid: {optimizer.learning_rate: [3.0e-4]}\nseeds: [901]" + common % "",
        "main": "variants:\n  hacpo: {algorithm: {recipe: hacpo}, optimizer: {learning_rate: 9.0e-4}}\n"
        "  gspo_x2: {algorithm: {recipe: gspo_x2}, optimizer: {learning_rate: 9.0e-4}}\nseeds: [1]" + common % final,
    }
    for family, text in described.items():
        (project / quick.STUDY / family).mkdir(parents=True)
        (project / quick.STUDY / family / "sweep.yaml").write_text("bases: {model: ../../small}\n" + text)
    (project / RESULTS).mkdir(parents=True)
    (project / PAGE).write_text(markdown.BEGIN + markdown.END)
    study(project, ["tuning", "main"], jobs=2)
    page = (project / PAGE).read_text("utf-8")
    assert re.search(r"\*\*H2\*\* .*\| 16 rollouts \| 1 \|", page)  # 4 prompts x 4 responses; one pair of runs
    assert "## Learning rates" in page
    best = rates.chosen(rates.tuned(read_study(project).groups["tuning"]))["hacpo"]
    results = pl.read_parquet(project / RESULTS / "main.parquet")
    assert {json.loads(text)["optimizer"]["learning_rate"] for text in results["settings"].cast(pl.String)} == {best}
    written = {path: path.read_bytes() for path in (project / "docs").rglob("*.*")}
    study(project, ["tuning", "main"], jobs=2)
    assert {path: path.read_bytes() for path in (project / "docs").rglob("*.*")} == written
    assert not any((project / "artifacts/study/main").glob("model/*/*"))  # only results are kept
