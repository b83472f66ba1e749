"""Whether other agents' responses pull a learner where its own do (the paper's Theorem 4.3), in finished runs.

    python -m benchmarks.study.cosine pipelines/RUN ... [--agents NAME ...] [--steps 1 10 ...]
        [--set KEY=VALUE ...] [--into FILE]

Of a step and an agent: the weights that its update began from, the step's pool and advantages as they are stored, and
the update's own code (`Trainer.accumulate`), with all of the step's responses as one update, the first (m = 0). Its
gradient is a sum over responses, so that of the own term and that of each other agent's are had apart, and each of them
in four parts: two random halves of the problems, by two random halves of each problem's responses. Models are computed
in float32. A step whose checkpoint before is gone is left out (docs/retention.md; `hacpo restore` remakes it). `--set`
asks what the update would have been with other settings of `algorithm.clip`, `importance` or `loss`: the same weights,
responses and advantages, and the same halves.

A cosine between two noisy gradients is nearer 0 than one between what they estimate: 1 is not what to compare with, but
the cosine of the own gradient with itself, from other samples. Responses to one problem share a baseline, which makes
`control` a little too small; `control_problems` compares other problems. Columns of the table:

    run, agent, step        whose update, and which; `run` also names what was `--set`
    other                   whose responses
    cosine                  own term, cross term of `other`
    own_norm, cross_norm    their norms, before clipping
    control                 own term, own term: from halves of the responses to the same problems
    cosine_halves           as `cosine`, each from one half: mean of the four pairs; to be compared with `control`
    cross_control           cross term, cross term: from halves, as `control`
    control_problems        own term, own term: from halves of the problems
    cosine_problems         as `cosine`, each from another half of the problems; to be compared with `control_problems`
    cross_live              share of the other's responses that have a gradient: not clipped, with an advantage

A cosine with nothing (all of a term clipped, say) is null.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.study.gradients import Floats, Gradients, gradients_of
from hacpo.artifacts.storage import atomic
from hacpo.artifacts.targets import check_file
from hacpo.errors import HacpoError, SettingsError
from hacpo.pipeline.execution.opening import check_resolved
from hacpo.pipeline.project import Pipeline

_OUT = Path("docs/results/cosines.parquet")
_KEY = {"run": pa.string(), "agent": pa.string(), "step": pa.int32(), "other": pa.string()}
_NUMBERS = (
    "cosine",
    "own_norm",
    "cross_norm",
    "control",
    "cosine_halves",
    "cross_control",
    "control_problems",
    "cosine_problems",
    "cross_live",
)
SCHEMA = pa.schema([*_KEY.items(), *((name, pa.float64()) for name in _NUMBERS)])


def compared(gradients: Gradients, agent: str) -> Iterator[dict[str, Any]]:
    """`other` and the columns after it, for each other agent."""
    own = gradients.parts[agent]
    for other, cross in gradients.parts.items():
        if other == agent:
            continue
        yield {
            "other": other,
            "cosine": cosine(_sum(own), _sum(cross)),
            "own_norm": float(np.linalg.norm(_sum(own))),
            "cross_norm": float(np.linalg.norm(_sum(cross))),
            "control": cosine(*_by_responses(own)),
            "cosine_halves": _mean([cosine(a, b) for a in _by_responses(own) for b in _by_responses(cross)]),
            "cross_control": cosine(*_by_responses(cross)),
            "control_problems": cosine(*_by_problems(own)),
            "cosine_problems": _mean(
                [cosine(a, b) for a, b in zip(_by_problems(own), reversed(_by_problems(cross)), strict=True)]
            ),
            "cross_live": gradients.live[other],
        }


def cosine(a: Floats, b: Floats) -> float | None:
    """Of the angle between two vectors; None if one of them is 0."""
    norms = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(a @ b) / norms if norms else None


def _sum(parts: Floats) -> Floats:
    return np.asarray(parts.sum(axis=(0, 1)))


def _by_problems(parts: Floats) -> list[Floats]:
    return list(parts.sum(axis=1))


def _by_responses(parts: Floats) -> list[Floats]:
    return list(parts.sum(axis=0))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if len(known) == len(values) else None


def rows(
    pipeline: Pipeline, agents: Sequence[str], steps: Sequence[int], changes: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Rows of the table for one run: of those agents and steps whose checkpoint before is there.

    Args:
        pipeline: opened with the `changes`, KEY=VALUE, which the rows name.

    Raises:
        SettingsError: the run has no such agent, none learns from others, or no such update can be looked at.
        HacpoError: a step's files are not there or do not belong together.
    """
    if unknown := set(agents) - set(pipeline.settings.agents):
        known = ", ".join(pipeline.settings.agents)
        raise SettingsError("no such agent", where=pipeline.folder, expected=known, found=min(unknown))
    if all(pipeline.settings.learned_from(agent) == [agent] for agent in agents):
        raise SettingsError("agents learn from their own responses alone", where=pipeline.folder)
    there = [(a, step) for a in agents for step in steps if pipeline.layout.checkpoint(step - 1, a).is_dir()]
    if not there:
        raise SettingsError(
            "no checkpoint from which one of these updates began is there",
            where=pipeline.folder,
            remedy="`hacpo restore` remakes those that were pruned",
        )
    for agent, step in there:
        for row in compared(gradients_of(pipeline, agent, step), agent):
            yield {"run": " ".join([pipeline.run, *changes]), "agent": agent, "step": step, **row}


def merged(path: Path, found: Sequence[Mapping[str, Any]]) -> pa.Table:
    """What the file holds of other runs, agents and steps, and what was found, in order."""
    before = pq.read_table(path).to_pylist() if path.exists() else []
    by_key = {tuple(row[name] for name in _KEY): dict(row) for row in [*before, *found]}
    return pa.Table.from_pylist([by_key[key] for key in sorted(by_key)], SCHEMA)


def is_ours(path: Path) -> bool:
    """Whether a file is such a table."""
    try:
        return bool(pq.read_schema(path).equals(SCHEMA))
    except (OSError, pa.ArrowException):
        return False


def look(folder: Path, into: Path, *, agents: Sequence[str], steps: Sequence[int], changes: Sequence[str]) -> None:
    """Print what one run's rows are, and add them to the table.

    Args:
        agents, steps: all if empty.

    Raises:
        HacpoError: the run, or a step of it, cannot be looked at.
    """
    check_resolved(Pipeline.open(folder))
    pipeline = Pipeline.open(folder, changes)
    every = range(1, pipeline.settings.steps + 1)
    found = []
    for row in rows(pipeline, agents or list(pipeline.settings.agents), steps or every, changes):
        found.append(row)
        print("  ".join(f"{name} {_shown(value)}" for name, value in row.items()), flush=True)
    into.parent.mkdir(parents=True, exist_ok=True)
    table = merged(into, found)
    with atomic(into) as scratch:
        pq.write_table(table, scratch)


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main() -> None:
    """Look at some runs, one after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", metavar="pipelines/RUN")
    parser.add_argument("--agents", nargs="+", default=[], help="whose updates; all agents' if not given")
    parser.add_argument("--steps", type=int, nargs="+", default=[], help="which updates; all if not given")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other settings of the update")
    parser.add_argument("--into", type=Path, default=_OUT, help="the table; other rows in it stay")
    options = parser.parse_args()
    try:
        check_file(options.into, is_ours, what="table of cosines")
        for folder in options.runs:
            look(folder, options.into, agents=options.agents, steps=options.steps, changes=options.set)
    except HacpoError as error:
        sys.exit(f"cosine: error: {error}")


if __name__ == "__main__":
    main()
