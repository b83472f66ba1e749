"""A run's held-out results with what they cost, in one small table: what comparisons are made of.

One row per agent, evaluated step and benchmark. Of every problem it has the number of responses and of correct ones, so
that means, their errors and resampling need neither the run nor its texts.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from hacpo.artifacts import tables
from hacpo.artifacts.run_files import RunFiles
from hacpo.errors import ArtifactError, MissingInputError, SettingsError, first_line
from hacpo.pipeline.catalogue import EVALUATE, GENERATE, PIPELINE, SIDE_GENERATE, UPDATE, StageSpec
from hacpo.pipeline.noted import stage_metrics
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.views.made_otherwise import MEANINGLESS, check_made_alike
from hacpo.settings import params
from hacpo.settings.root import Settings

_WORDS = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [
        pa.field(name, kind, nullable=False)
        for name, kind in {
            "run": _WORDS,
            "base": _WORDS,
            "variant": _WORDS,
            "seed": pa.int64(),
            "start_seed": pa.int64(),
            "agent": _WORDS,
            "step": pa.int32(),
            "benchmark": _WORDS,
            "accuracy": pa.float64(),
            "rollouts": pa.int64(),
            "sampled_tokens": pa.int64(),
            "training_tokens": pa.int64(),
            "updates": pa.int64(),
            "seconds": pa.float64(),
            "problem_ids": pa.list_(pa.string()),
            "samples": pa.list_(pa.int32()),
            "correct": pa.list_(pa.int32()),
            "settings": _WORDS,
        }.items()
    ]
)
"""
- `run`, `base`, `variant`, `seed`, `start_seed`: whose it is; `base` is empty and `variant` the run's name where no
  sweep made it.
- `accuracy`: mean reward of the held-out responses (avg@n).
- `rollouts`, `sampled_tokens`: that the agent has drawn up to this step, side samples included, evaluations not.
- `training_tokens`, `updates`: that it has learned from and made.
- `seconds`: of its stages up to this step, evaluations and warm start not; of a stage that serves all its share.
- `problem_ids`, `samples`, `correct`: by problem; `correct` of `samples` responses were.
- `settings`: the resolved ones, as JSON.
"""

SPENT = ("rollouts", "sampled_tokens", "training_tokens", "updates", "seconds")
"""Columns of what an agent has spent."""

_LEARNING = tuple(spec for spec in PIPELINE if spec.metrics and spec.at == "step")
_COUNTS = {
    GENERATE.name: {"rollouts": "rollouts", "tokens": "sampled_tokens"},
    SIDE_GENERATE.name: {"rollouts": "rollouts", "tokens": "sampled_tokens"},
    UPDATE.name: {"tokens": "training_tokens", "updates": "updates"},
}
"""Stage -> number of its metrics -> column that it counts for."""

_MOST = 2**40
"""Of anything that a stage spends."""


def difference(
    recorded: Mapping[str, Any], settings: Settings, apart_from: Collection[str] = MEANINGLESS
) -> str | None:
    """The first setting in which what a run was made with differs, `key old -> new`; None: none does.

    What was recorded by an earlier version, which knew fewer settings, is completed as its params.yaml would be.

    Args:
        recorded: all settings, as `params.dump` has them.
        settings: those that are asked for.
        apart_from: blocks that are not looked at; those that no number depends on.
    """
    now = _leaves(params.dump(settings), apart_from)
    was = _leaves(recorded, apart_from)
    if was != now:
        try:
            given = {key: value for key, value in recorded.items() if key != "agent_names"}
            was = _leaves(params.dump(params.resolve(given)), apart_from)
        except SettingsError:
            pass  # a setting that there is no more
    keys = sorted(was.keys() | now.keys())
    changed = next((key for key in keys if was.get(key) != now.get(key)), None)
    return None if changed is None else f"{changed} {json.dumps(was.get(changed))} -> {json.dumps(now.get(changed))}"


def _leaves(tree: Mapping[str, Any], apart_from: Collection[str]) -> dict[str, Any]:
    return params.leaves({key: value for key, value in tree.items() if key not in apart_from})


def results_of(pipeline: Pipeline, base: str = "", variant: str = "") -> pa.Table:
    """The results of a run, by agent, step and benchmark, of all evaluations that there are.

    Args:
        base, variant: what a sweep calls them.

    Raises:
        MissingInputError: there are none, or metrics of a step before the last of them are missing.
        ArtifactError: a table is damaged or belongs to another run; metrics hold no numbers; steps were made with other
            settings than the run's.
    """
    settings = pipeline.settings
    check_made_alike(pipeline, settings, settings.agents)
    same = {
        "run": pipeline.run,
        "base": base,
        "variant": variant or pipeline.run,
        "seed": settings.seed,
        "start_seed": settings.start_seed,
        "settings": json.dumps(params.dump(settings), sort_keys=True),
    }
    rows = [{**same, **row} for agent in settings.agents for row in _of_agent(pipeline, agent)]
    if not rows:
        raise MissingInputError(
            "has no evaluation yet", where=pipeline.layout.root, remedy=f"run `{pipeline.command('run')}`"
        )
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _of_agent(pipeline: Pipeline, agent: str) -> Iterator[dict[str, Any]]:
    spent, counted = dict.fromkeys(SPENT, 0.0), 0
    for step in range(pipeline.settings.steps + 1):
        if not pipeline.settings.evaluated(step) or not pipeline.layout.evaluation(step, agent).exists():
            continue
        for before in range(counted, step + 1):
            for name, value in _spent_in(pipeline, before, agent).items():
                spent[name] += value
        counted = step + 1
        so_far = {name: float(value) if name == "seconds" else int(value) for name, value in spent.items()}
        for row in _of_evaluation(pipeline, step, agent):
            yield {"agent": agent, "step": step, **so_far, **row}


def _spent_in(pipeline: Pipeline, step: int, agent: str) -> dict[str, float]:
    """What a step cost an agent."""
    spent = dict.fromkeys(SPENT, 0.0)
    for spec in _LEARNING:
        if not spec.runs(pipeline.settings, step):
            continue
        shared = spec.per == "run"
        counts = _COUNTS.get(spec.name, {})
        metrics = _numbers(pipeline, spec, step, "" if shared else agent, ("seconds", *counts))
        spent["seconds"] += metrics["seconds"] / (len(pipeline.settings.agents) if shared else 1)
        for key, name in counts.items():
            spent[name] += metrics[key]
    return spent


def _numbers(pipeline: Pipeline, spec: StageSpec, step: int, agent: str, keys: Iterable[str]) -> dict[str, float]:
    """Some numbers of a stage's metrics: without one of them nobody knows what was spent.

    Raises:
        MissingInputError: the file is missing.
        ArtifactError: it cannot be read, or one of them is no number.
    """
    path = pipeline.layout.metrics(spec.name, step, agent)
    again = f"run `{pipeline.command('run')}`"
    try:
        metrics = stage_metrics(pipeline.layout, spec, step, agent, strict=True)
    except FileNotFoundError:
        what = "is missing, so what the run has spent is not known"
        raise MissingInputError(what, where=path, remedy=again) from None
    except (OSError, ValueError) as error:
        remedy = f"remove it, and {again}"
        raise ArtifactError(f"cannot be read: {first_line(error)}", where=path, remedy=remedy) from None
    for key in keys:
        value: Any = metrics.get(key)
        if type(value) not in (int, float) or not 0 <= value <= _MOST:
            raise ArtifactError(
                "does not say what the run has spent",
                where=path,
                expected=f"{key}: 0 to {_MOST:,}",
                found=reprlib.repr(value),
                remedy=f"remove the file, and {again}",
            )
    return metrics


def _of_evaluation(pipeline: Pipeline, step: int, agent: str) -> Iterator[dict[str, Any]]:
    """By benchmark, problem by problem in the order of their ids."""
    import polars as pl

    files = RunFiles(pipeline.run, pipeline.layout)
    columns = ["benchmark", "problem_id", "reward", "verdict"]
    command = pipeline.command_for(EVALUATE, step, agent)
    frame = pl.from_arrow(files.read(tables.EVALUATIONS, step, agent, columns=columns, made_by=command))
    assert isinstance(frame, pl.DataFrame)
    for (benchmark,), rows in sorted(frame.group_by("benchmark"), key=lambda item: str(item[0])):
        problems = (
            rows.group_by("problem_id")
            .agg(pl.len().cast(pl.Int32).alias("samples"), (pl.col("verdict") == "correct").sum().alias("correct"))
            .sort("problem_id")
        )
        yield {
            "benchmark": benchmark,
            "accuracy": rows["reward"].cast(pl.Float64).mean(),
            "problem_ids": problems["problem_id"].to_list(),
            "samples": problems["samples"].to_list(),
            "correct": problems["correct"].to_list(),
        }
