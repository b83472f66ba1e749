"""The generated part of docs/results.md: every number follows from the files in docs/results/."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import polars as pl

from benchmarks.study.asked import (
    BENCHMARK,
    PAPERS,
    RESULTS,
    TABLES,
    Hypothesis,
    Study,
    Table,
    by_start,
    difference,
    hypothesis_of,
    verdicts,
)
from benchmarks.study.quick import STUDY
from benchmarks.study.rates import chosen, tuned
from hacpo.phrases import amount
from hacpo.pipeline.sweeping.sweep_file import SWEEP, SweepFile
from hacpo.tools.compare.compare_view import TITLES, WORDS, interval
from hacpo.tools.compare.comparing import Compared, Comparison, Difference, Point
from hacpo.tools.compare.curves import AXES

BEGIN, END = "<!-- study: begin -->\n", "<!-- study: end -->\n"
_PAPERS_ROWS = ("grpo", "gspo", "gspo_x2", "naive", "hacpo")
_QUANTITIES = {
    "bias": "Bias of the baseline",
    "punished": "Of groups in which a right answer of the learner's could be punished, the share in which one is",
}


def page(text: str, generated: str) -> str:
    """A page with its generated part renewed; what is around it stays.

    Raises:
        ValueError: it has no such part.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {BEGIN.strip()} and {END.strip()} in the page")
    return f"{before}{BEGIN}{generated}{END}{after}"


def generated(root: Path, study: Study) -> str:
    """All tables, in Markdown."""
    parts = [_headline(study), *_absent(root, study)]
    parts += [part for table in TABLES for part in _section(study, table)]
    parts += [part for table in PAPERS for part in _papers(study, table)]
    parts += [*_costs(study), *_rates(study), *_theory(root), *_cosines(root)]
    return "\n".join(parts)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


# --- verdicts --------------------------------------------------------------------------------------------------------


def _headline(study: Study) -> str:
    found = verdicts(study)
    parts = ["## In one minute\n"]
    for measure, rank in (("area", "primary"), ("at_budget", "secondary")):
        header = ["", "hypothesis", "equal", "pairs of runs", "compared", "against", "difference", "95 % interval"]
        rows = [_verdict(study, hypothesis, comparison, measure) for hypothesis, comparison in found]
        columns = [*header, "by start", "p, corrected", "verdict"]
        parts += [f"{TITLES[measure].capitalize()} ({rank}):\n", table(columns, rows)]
    return "\n".join(parts)


def _verdict(study: Study, hypothesis: Hypothesis, comparison: Comparison | None, measure: str) -> list[str]:
    claim = f"{hypothesis.claim}: `{hypothesis.group}` against `{hypothesis.against}`, family `{hypothesis.family}`"
    if comparison is None:
        return [hypothesis.name, claim, WORDS[hypothesis.axis], *[""] * 7, "not run yet"]
    found = difference(comparison, measure)
    return [
        f"**{hypothesis.name}**",
        claim,
        f"{amount(comparison.budget)} {WORDS[comparison.axis]}",
        str(len(comparison.pairs)),
        f"{found.result:.3f}",
        f"{found.reference:.3f}",
        f"{found.change.mean:+.3f}",
        interval(found.change),
        ", ".join(f"{change:+.3f}" for change in by_start(study, hypothesis, measure).values()),
        _p(found.corrected),
        f"**{found.verdict}**",
    ]


def _p(value: float | None) -> str:
    return "" if value is None else "below .001" if value < 0.001 else f"{value:.3f}"


def _absent(root: Path, study: Study) -> Iterator[str]:
    """The runs of collected families that are not among the results."""
    for family, groups in study.groups.items():
        folder = root / STUDY / family
        if family == "tuning" or not (folder / SWEEP).is_file():  # of tuning, not all rates are run
            continue
        there = {(group.base, group.name, *unit) for group in groups for unit in group.runs}
        cells = [cell for cell in SweepFile.read(folder).cells() if cell.start_seed is not None]
        absent = [cell for cell in cells if (cell.base, cell.variant, cell.seed, cell.start_seed) not in there]
        if absent:
            names = ", ".join(cell.name for cell in absent)
            yield f"Family `{family}`: {len(absent)} of {len(cells)} runs are not among the results: {names}.\n"


# --- tables ----------------------------------------------------------------------------------------------------------


def _section(study: Study, asked: Table) -> Iterator[str]:
    """Accuracies at equal cost, a row for each group and base; and by step."""
    whole = study.compared(asked)
    if whole is None:
        return
    yield f"## {asked.title}\n"
    header = ["pair", "", "pairs of runs", f"equal {WORDS[asked.axis]}"]
    header += [
        cell
        for measure in ("area", "at_budget")
        for cell in (TITLES[measure], f"minus `{asked.against}`", "95 % interval", "verdict")
    ]
    yield table(header, _rows(whole, asked))
    steps = [point.step for point in next(iter(whole.curves.values()))]
    yield "Accuracy after so many steps:\n"
    yield table(
        ["pair", "", *map(str, steps)],
        ([base, f"`{name}`", *_by_step(points, steps)] for (base, name, _), points in whole.curves.items()),
    )


def _rows(whole: Compared, asked: Table) -> Iterator[list[str]]:
    said = set[tuple[str, float]]()
    for comparison in whole.comparisons:
        of = [difference(comparison, measure) for measure in ("area", "at_budget")]
        if (comparison.base, comparison.budget) not in said:
            said.add((comparison.base, comparison.budget))
            own = [cell for each in of for cell in (f"{each.reference:.3f}", "", "", "")]
            yield [comparison.base, f"`{comparison.against}`", "", amount(comparison.budget), *own]
        place = [comparison.base, f"`{comparison.group}`", str(len(comparison.pairs)), amount(comparison.budget)]
        primary = hypothesis_of(asked, comparison)
        yield [*place, *(cell for each in of for cell in (f"{each.result:.3f}", *_change(each, primary)))]


def _change(found: Difference, primary: Hypothesis | None = None) -> list[str]:
    verdict = f"see {primary.name}" if primary else found.verdict
    return [f"{found.change.mean:+.3f}", interval(found.change), verdict]


def _by_step(points: Sequence[Point], steps: Sequence[int]) -> list[str]:
    at = {point.step: f"{point.accuracy.mean:.3f}" for point in points}
    return [at.get(step, "") for step in steps]


def _papers(study: Study, asked: Table) -> Iterator[str]:
    """Table 1 of the paper, one for each pair: rows are recipes, columns agents."""
    whole = study.compared(asked)
    for base in dict.fromkeys(comparison.base for comparison in whole.comparisons) if whole else ():
        assert whole is not None
        found = {comparison.group: comparison for comparison in whole.comparisons if comparison.base == base}
        first = next(iter(found.values()))
        agents = [each.agent for each in first.differences if each.measure == "last" and each.agent]
        rows = []
        for name in [name for name in _PAPERS_ROWS if (base, name, BENCHMARK) in whole.curves]:
            of = [difference(found.get(name, first), "last", agent) for agent in agents]
            own = [f"{each.result if name in found else each.reference:.3f}" for each in of]
            end = whole.curves[base, name, BENCHMARK][-1].accuracy
            mean = [f"{end.mean:.3f}", "none" if end.low is None else f"{end.low:.3f} to {end.high:.3f}"]
            change = _change(difference(found[name], "last")) if name in found else [""] * 3
            rows.append([f"`{name}`", *own, *mean, *change])
        header = ["", *(f"`{agent}`" for agent in agents), "mean", "95 % interval", f"minus `{asked.against}`"]
        yield f"## Table 1: `{base}`, after equally many steps\n"
        yield table([*header, "95 % interval", "verdict"], rows)


def _costs(study: Study) -> Iterator[str]:
    """What a whole run costs one agent."""
    axes = [axis for axis in AXES if axis != "steps"]
    rows, seen = [], set[tuple[str, str]]()
    for asked in TABLES:
        whole = study.compared(asked) if asked.family != "ablations" else None
        for (base, name, _), points in whole.curves.items() if whole else ():
            if (base, name) not in seen:
                seen.add((base, name))
                end = points[-1]
                rows.append([base, f"`{name}`", str(end.step), *(amount(end.spent[axis]) for axis in axes)])
    if rows:
        yield "## What a run costs an agent\n"
        yield table(["pair", "", "steps", *(WORDS[axis] for axis in axes)], rows)


def _rates(study: Study) -> Iterator[str]:
    if "tuning" not in study.groups:
        return
    means = tuned(study.groups["tuning"])
    best = chosen(means)
    rates = sorted({rate for of_rates in means.values() for rate in of_rates})
    rows = []
    for recipe, of_rates in means.items():
        shown = {rate: f"**{mean:.3f}**" if rate == best[recipe] else f"{mean:.3f}" for rate, mean in of_rates.items()}
        rows.append([f"`{recipe}`", *(shown.get(rate, "") for rate in rates)])
    yield "## Learning rates\n\nMean accuracy up to the budget on `heldout`, on tuning's seeds; the best is bold.\n"
    yield table(["", *(f"{rate:.1e}" for rate in rates)], rows)


# --- theory ----------------------------------------------------------------------------------------------------------


def _theory(root: Path) -> Iterator[str]:
    """theory.parquet: a table for each quantity, a row for each case, a column for each baseline."""
    file = root / RESULTS / "theory.parquet"
    if not file.is_file():
        return
    frame = pl.read_parquet(file)
    baselines = frame["baseline"].unique(maintain_order=True).to_list()
    yield "## Bias of the capability baseline (Theorem 4.1)\n"
    for quantity, what in _QUANTITIES.items():
        of = frame.filter(pl.col("quantity") == quantity)
        cells = {
            (case, baseline): f"{_rounded(value)} ({_rounded(expected)})"
            for case, baseline, value, expected in of.select("case", "baseline", "value", "closed_form").iter_rows()
        }
        cases = of["case"].unique(maintain_order=True).to_list()
        yield f"{what}; simulated, and in brackets in closed form:\n"
        rows = ([case.replace("|", "\\|"), *(cells.get((case, each), "") for each in baselines)] for case in cases)
        yield table(["case", *(f"`{each}`" for each in baselines)], rows)


def _cosines(root: Path) -> Iterator[str]:
    """cosines.parquet, by run and step: means over agents and their partners."""
    file = root / RESULTS / "cosines.parquet"
    if not file.is_file():
        return
    means = {
        "cosine": pl.col("cosine"),
        "of halves": pl.col("cosine_halves"),
        "own with own, of halves": pl.col("control"),
        "cross with cross, of halves": pl.col("cross_control"),
        "cross norm / own norm": pl.col("cross_norm") / pl.col("own_norm"),
        "cross responses with a gradient": pl.col("cross_live"),
    }
    averages = [each.mean().alias(name) for name, each in means.items()]
    frame = pl.read_parquet(file).group_by("run", "step").agg(pl.len(), *averages).sort("run", "step")
    yield "## Cosine between gradients of own and of cross responses (Theorem 4.3)\n"
    rows = ([run, str(step), str(count), *map(_rounded, rest)] for run, step, count, *rest in frame.iter_rows())
    yield table(["run", "step", "compared", *means], rows)


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{round(value, 3) + 0:.3f}"  # + 0: no -0
