"""Reads a run's tables and metrics files into plain numbers by step and agent. What is not there yet is absent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import polars as pl

from hacpo.artifacts import parquet, tables
from hacpo.artifacts.layout import Layout
from hacpo.artifacts.run_files import RunFiles
from hacpo.errors import ArtifactError
from hacpo.evaluation.metrics import Estimate
from hacpo.evaluation.values import best_step, change, estimate, read_values
from hacpo.pipeline.catalogue import PIPELINE, PREPARE, StageSpec
from hacpo.pipeline.noted import NotedError, all_numbers
from hacpo.settings.series import Series
from hacpo.verifying.judgement import GAVE_UP

Curve = dict[int, float]
"""Step -> value."""

STAGES = tuple(spec for spec in PIPELINE if spec.metrics)
"""Stages that leave metrics, in the order in which they run."""

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

_MOST_GRADES = 5
"""Rewards that are told apart; the page has as many colours for them."""

_NO_FALL = 1e-9
"""Means of the same rewards, added up in another order, differ in their last bits."""


@dataclass(frozen=True)
class Ratios:
    """Importance ratios of one learner's responses of one kind (own or cross) in one step.

    Attributes:
        rows: responses that were scored.
        mean: mean ratio.
        quantiles: at `QUANTILES`.
        lower: lowest and highest lower clip bound in force (it rises from update to update).
        upper: upper clip bound.
        below, above: share of responses whose gradient the clip stopped on that side.
        weight: mean importance weight; `weight_band` its 5 % and 95 % quantiles.
        by_source: source -> mean ratio.
    """

    rows: int
    mean: float
    quantiles: tuple[float, ...]
    lower: tuple[float, float]
    upper: float
    below: float
    above: float
    weight: float
    weight_band: tuple[float, float]
    by_source: dict[str, float]


@dataclass(frozen=True)
class PoolCount:
    """What one learner could use of one source's rollouts in one step."""

    step: int
    learner: str
    source: str
    statuses: dict[str, int]
    roundtrip: float
    source_tokens: int
    learner_tokens: int


@dataclass(frozen=True)
class Grades:
    """How often each agent's answers earned which reward, over the whole run.

    Attributes:
        low, high: the smallest and the largest reward of an answer that could be judged.
        names: of the bins, from the lowest: single rewards where there are few, else equal parts of the range.
        counts: agent -> for every bin step -> answers; those that could not be judged (timeout, error) are in none.
    """

    low: float = 0.0
    high: float = 0.0
    names: tuple[str, ...] = ()
    counts: dict[str, list[Curve]] = field(default_factory=dict)


@dataclass
class Measurements:
    """Everything that the page draws. Keys are (agent, ...); an agent or step without data has no entry."""

    agents: tuple[str, ...]
    accuracy: dict[tuple[str, str], dict[int, Estimate]] = field(default_factory=dict)
    """(agent, name of a series) -> step -> held-out result."""
    change: dict[tuple[str, str], Estimate] = field(default_factory=dict)
    """(agent, name of a series) -> last minus first evaluation, paired by problem."""
    fall: dict[tuple[str, str], Estimate] = field(default_factory=dict)
    """(agent, name of a series) -> best minus last evaluation, paired by problem; absent where the last is the best."""
    reward: dict[str, Curve] = field(default_factory=dict)
    verdicts: dict[str, dict[str, Curve]] = field(default_factory=dict)
    """agent -> verdict -> step -> count."""
    finish_reasons: dict[str, dict[str, Curve]] = field(default_factory=dict)
    """agent -> finish reason of its training answers -> step -> count."""
    grades: Grades = field(default_factory=Grades)
    batch_accuracy: dict[str, Curve] = field(default_factory=dict)
    """P_t of the capability table."""
    capability: dict[str, Curve] = field(default_factory=dict)
    omega: dict[tuple[str, str], Curve] = field(default_factory=dict)
    """(learner, source) -> the factor on the source's responses."""
    pool: list[PoolCount] = field(default_factory=list)
    ratios: dict[tuple[str, str], dict[int, Ratios]] = field(default_factory=dict)
    """(learner, `own` or `cross`) -> step -> ratios."""
    updated: dict[str, set[int]] = field(default_factory=dict)
    """agent -> steps that it has learned from, also those in which no response was usable."""
    metrics: dict[tuple[StageSpec, int, str], dict[str, float]] = field(default_factory=dict)
    """(stage, step, agent or `WHOLE_STEP`) -> the stage's metrics file."""

    @property
    def last_step(self) -> int:
        """The highest step of which anything is there."""
        steps = [step for stage, step, _ in self.metrics if stage != PREPARE]
        for curves in (self.accuracy, self.reward, self.capability):
            steps += [step for curve in curves.values() for step in curve]
        return max(steps, default=0)

    @property
    def steps_trained(self) -> int:
        """Steps that every agent has learned from, counted from 1 without a gap."""
        done = 0
        while all(done + 1 in self.updated.get(agent, ()) for agent in self.agents):
            done += 1
        return done

    def color_of(self, agent: str) -> str:
        """The CSS class of an agent's colour, the same everywhere on the page."""
        return f"c-agent-{self.agents.index(agent) % 8}"

    def metric(self, stage: StageSpec, key: str, agent: str = tables.WHOLE_STEP) -> Curve:
        """One number of a stage's metrics files by step; of an agent's, or of what it does for all at once."""
        return {
            step: values[key]
            for (recorded, step, name), values in sorted(self.metrics.items(), key=lambda item: item[0][1])
            if recorded == stage and name == agent and key in values
        }

    def best(self, agent: str, name: str) -> int:
        """The step of the best evaluation of an evaluated series: the latest if no other is better, else the earliest
        of equally good ones."""
        curve = self.accuracy[agent, name]
        best = best_step({step: result.mean for step, result in curve.items()})
        return max(curve) if best is None or (agent, name) not in self.fall else best

    def has_fallen(self, agent: str, name: str) -> bool:
        """Whether the latest evaluation is below the best by more than twice the standard error of their difference;
        false where that is not known (a benchmark of one problem)."""
        fall = self.fall.get((agent, name))
        return fall is not None and fall.error is not None and fall.mean > 2 * fall.error

    def total(self, stage: StageSpec, key: str, agent: str = tables.WHOLE_STEP) -> float:
        """The same number added up over all steps; 0 if there is none."""
        return sum(self.metric(stage, key, agent).values())


def collect(layout: Layout, run: str, agents: Sequence[str], steps: int, series: Sequence[Series]) -> Measurements:
    """Read everything that is there of steps 0..`steps`.

    Args:
        series: the held-out results to follow (`EvaluationSettings.series`).

    Raises:
        ArtifactError: a table or metrics file is damaged or belongs to another run.
    """
    results = Measurements(tuple(agents))
    numbers, files = range(steps + 1), RunFiles(run, layout)
    results.metrics = _read_metrics(layout, agents, numbers)
    _read_evaluations(results, layout, run, numbers, series)
    _read_finish_reasons(results, files, numbers)
    _read_verdicts(results, files, numbers)
    _read_capability(results, files, numbers)
    _read_advantages(results, files, numbers)
    _read_pool(results, files, numbers)
    _read_traces(results, files, numbers)
    return results


def gather(
    files: RunFiles, table: tables.Table, places: Iterable[tuple[int, str]], columns: Sequence[str]
) -> pl.DataFrame:
    """The tables that exist, one below the other, with `at` (the step) and `by` (the agent) in front.

    Raises:
        ArtifactError: one of them is damaged or belongs to another run.
    """
    pieces = [_placed(parquet.to_arrow(table, []), 0, "", columns).clear()]
    for step, agent in places:
        if files.has(table, step, agent):
            shards = files.shards(table, step, agent, columns=columns)
            pieces += [_placed(shard.content, step, agent, columns) for shard in shards]
    return pl.concat(pieces)


def _placed(content: Any, step: int, agent: str, columns: Sequence[str]) -> pl.DataFrame:
    frame = pl.from_arrow(content)
    assert isinstance(frame, pl.DataFrame)
    return frame.select(pl.lit(step, pl.Int64).alias("at"), pl.lit(agent, pl.String).alias("by"), *columns)


def _each(results: Measurements, numbers: Iterable[int]) -> list[tuple[int, str]]:
    return [(step, agent) for step in numbers for agent in results.agents]


def _read_metrics(
    layout: Layout, agents: Sequence[str], numbers: Iterable[int]
) -> dict[tuple[StageSpec, int, str], dict[str, float]]:
    metrics = {}
    for stage, step, name in product(STAGES, numbers, (*agents, tables.WHOLE_STEP)):
        path = layout.metrics(stage.name, step, name)
        if not path.is_file():
            continue
        try:
            read = all_numbers(layout, stage, step, name)
        except NotedError as error:
            raise ArtifactError(
                "is no flat JSON object of numbers",
                where=path,
                expected=error.expected,
                found=error.found,
                remedy=f"repeat the {stage.name} stage",
            ) from None
        metrics[stage, step, name] = {key: float(value) for key, value in read.items()}
    return metrics


def _read_evaluations(
    results: Measurements, layout: Layout, run: str, numbers: Iterable[int], series: Sequence[Series]
) -> None:
    for agent in results.agents:
        evaluated = {step: values for step in numbers if (values := read_values(layout, run, step, agent, series))}
        for each in series:
            curve = {
                step: result for step, values in evaluated.items() if (result := estimate(each, values)) is not None
            }
            if not curve:
                continue
            results.accuracy[agent, each.name] = curve
            difference = change(each, evaluated[min(curve)], evaluated[max(curve)])
            if difference is not None and len(curve) > 1:
                results.change[agent, each.name] = difference
            best = best_step({step: result.mean for step, result in curve.items()})
            fall = None if best is None else change(each, evaluated[max(curve)], evaluated[best])
            if fall is not None and fall.mean > _NO_FALL:
                results.fall[agent, each.name] = fall


def _read_finish_reasons(results: Measurements, files: RunFiles, numbers: Iterable[int]) -> None:
    table = gather(files, tables.ROLLOUTS, _each(results, numbers), ["finish_reason"])
    counts = table.group_by("at", "by", "finish_reason").len()
    for step, agent, reason, count in counts.sort("at", "by").iter_rows():
        results.finish_reasons.setdefault(agent, {}).setdefault(reason, {})[step] = count


def _read_verdicts(results: Measurements, files: RunFiles, numbers: Iterable[int]) -> None:
    table = gather(files, tables.VERDICTS, _each(results, numbers), ["reward", "verdict"])
    rewards = table.group_by("at", "by").agg(pl.col("reward").cast(pl.Float64).mean()).sort("at", "by")
    for step, agent, reward in rewards.iter_rows():
        results.reward.setdefault(agent, {})[step] = reward
    for step, agent, verdict, count in table.group_by("at", "by", "verdict").len().sort("at", "by").iter_rows():
        results.verdicts.setdefault(agent, {}).setdefault(verdict, {})[step] = count
    results.grades = _grades(table.filter(~pl.col("verdict").is_in(GAVE_UP)))


def _grades(judged: pl.DataFrame) -> Grades:
    """The rewards of judged answers in bins; `judged` has `at`, `by` and `reward`."""
    values = judged["reward"].cast(pl.Float64).unique().sort().to_list()
    if not values:
        return Grades()
    low, high = values[0], values[-1]
    if len(values) <= _MOST_GRADES:
        names = [_minus(f"{value:.4g}") for value in values]
        place = (
            pl.col("reward").cast(pl.Float64).replace_strict(values, list(range(len(values))), return_dtype=pl.Int64)
        )
    else:
        width = (high - low) / _MOST_GRADES
        edges = [low + width * index for index in range(_MOST_GRADES)] + [high]
        names = [_minus(f"{start:.3g} to {end:.3g}") for start, end in pairwise(edges)]
        place = ((pl.col("reward").cast(pl.Float64) - low) / width).floor().cast(pl.Int64).clip(0, _MOST_GRADES - 1)
    counts: dict[str, list[Curve]] = {}
    for step, agent, grade, count in judged.group_by("at", "by", place.alias("grade")).len().sort("at").iter_rows():
        counts.setdefault(agent, [{} for _ in names])[grade][step] = count
    return Grades(low, high, tuple(names), counts)


def _minus(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}")


def _read_capability(results: Measurements, files: RunFiles, numbers: Iterable[int]) -> None:
    table = gather(files, tables.CAPABILITY, [(step, "") for step in numbers], ["agent", "accuracy", "capability"])
    for step, agent, accuracy, capability in table.drop("by").iter_rows():
        results.batch_accuracy.setdefault(agent, {})[step] = accuracy
        results.capability.setdefault(agent, {})[step] = capability


def _read_advantages(results: Measurements, files: RunFiles, numbers: Iterable[int]) -> None:
    table = gather(files, tables.ADVANTAGES, _each(results, numbers), ["source", "is_self", "omega"])
    cross = table.filter(~pl.col("is_self")).group_by("at", "by", "source").agg(pl.col("omega").median())
    for step, learner, source, omega in cross.sort("at", "by", "source").iter_rows():
        results.omega.setdefault((learner, source), {})[step] = omega


def _read_pool(results: Measurements, files: RunFiles, numbers: Iterable[int]) -> None:
    columns = ["source", "status", "roundtrip", "source_tokens", "learner_tokens"]
    table = gather(files, tables.POOL, _each(results, numbers), columns)
    kept = pl.col("status") == "kept"
    keys = ("at", "by", "source")
    sums = table.group_by(*keys).agg(
        pl.col("roundtrip").mean(),
        pl.col("source_tokens").cast(pl.Int64).filter(kept).sum(),
        pl.col("learner_tokens").cast(pl.Int64).filter(kept).sum(),
    )
    statuses: dict[tuple[int, str, str], dict[str, int]] = defaultdict(dict)
    for step, learner, source, status, count in table.group_by(*keys, "status").len().sort(*keys, "status").iter_rows():
        statuses[step, learner, source][status] = count
    for step, learner, source, roundtrip, source_tokens, learner_tokens in sums.sort(*keys).iter_rows():
        counts = statuses[step, learner, source]
        results.pool.append(PoolCount(step, learner, source, counts, roundtrip, source_tokens, learner_tokens))


def _read_traces(results: Measurements, files: RunFiles, numbers: Iterable[int]) -> None:
    for step, agent in _each(results, numbers):
        if files.has(tables.TRACE, step, agent):
            results.updated.setdefault(agent, set()).add(step)
    columns = ["source", "is_self", "ratio", "lower", "upper", "clipped", "is_weight"]
    table = gather(files, tables.TRACE, _each(results, numbers), columns)
    keys = ("at", "by", "is_self")
    ratio, clipped = pl.col("ratio"), pl.col("clipped")
    summary = table.group_by(*keys).agg(
        pl.len().alias("rows"),
        ratio.mean().alias("mean"),
        *(ratio.quantile(q, "linear").alias(f"q{q}") for q in QUANTILES),
        pl.col("lower").min().alias("lower_min"),
        pl.col("lower").max().alias("lower_max"),
        pl.col("upper").max().alias("upper_max"),
        (clipped & (ratio < pl.col("lower"))).mean().alias("below"),
        (clipped & (ratio > pl.col("upper"))).mean().alias("above"),
        pl.col("is_weight").mean().alias("weight"),
        pl.col("is_weight").quantile(0.05, "linear").alias("weight_low"),
        pl.col("is_weight").quantile(0.95, "linear").alias("weight_high"),
    )
    sources: dict[tuple[int, str, bool], dict[str, float]] = defaultdict(dict)
    for step, learner, is_self, source, mean in (
        table.group_by(*keys, "source").agg(ratio.mean()).sort(*keys, "source").iter_rows()
    ):
        sources[step, learner, is_self][source] = mean
    for row in summary.sort(*keys).iter_rows(named=True):
        kind = "own" if row["is_self"] else "cross"
        results.ratios.setdefault((row["by"], kind), {})[row["at"]] = Ratios(
            rows=row["rows"],
            mean=row["mean"],
            quantiles=tuple(row[f"q{q}"] for q in QUANTILES),
            lower=(row["lower_min"], row["lower_max"]),
            upper=row["upper_max"],
            below=row["below"],
            above=row["above"],
            weight=row["weight"],
            weight_band=(row["weight_low"], row["weight_high"]),
            by_source=sources[row["at"], row["by"], row["is_self"]],
        )


def last(curve: Mapping[int, float]) -> float | None:
    """The value at the highest step."""
    return curve[max(curve)] if curve else None
