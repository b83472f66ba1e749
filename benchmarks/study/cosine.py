"""Whether other agents' responses pull a learner where its own do (the paper's Theorem 4.3), in finished runs.

    python -m benchmarks.study.cosine pipelines/RUN ... [--agents NAME ...] [--steps 1 10 ...] [--into FILE]

Of a step and an agent: the weights that its update began from, the step's pool and advantages as they are stored, and
the update's own code (`Trainer.accumulate`), with all of the step's responses as one update, the first (m = 0). Its
gradient is a sum over responses, so that of the own term and that of each other agent's are had apart, and each of them
in four parts: two random halves of the problems, by two random halves of each problem's responses. Models are computed
in float32. A step whose checkpoint before is gone is left out (docs/retention.md; `hacpo restore` remakes it).

A cosine between two noisy gradients is nearer 0 than one between what they estimate: 1 is not what to compare with, but
the cosine of the own gradient with itself, from other samples. Columns of the table:

    run, agent, step        whose update, and which
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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hacpo.algorithm.training_pool import TrainingPool, training_pool
from hacpo.algorithm.updates import plan_updates, shuffle_seeds
from hacpo.artifacts import tables
from hacpo.artifacts.run_files import RunFiles
from hacpo.artifacts.storage import atomic
from hacpo.errors import ArtifactError, HacpoError
from hacpo.pipeline.project import Pipeline
from hacpo.seeds import derive_seed

Floats = NDArray[np.float64]

_OUT = Path(__file__).resolve().parents[2] / "docs" / "results" / "cosines.parquet"
_KEY = ("run", "agent", "step", "other")
_SAME_POLICY = 1e-3
"""How far an own response's ratio may be from 1 where weights and rollouts belong together: float32's rounding."""


@dataclass(frozen=True)
class Gradients:
    """Gradients of the loss by whose responses they come from.

    Attributes:
        parts: source -> [2, 2, D]: half of the problems, half of each problem's responses, parameter.
        live: source -> share of its responses that have a gradient.
    """

    parts: Mapping[str, Floats]
    live: Mapping[str, float]


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


def halves(problem_b: Sequence[str], source_b: Sequence[str], seed: int) -> NDArray[np.int64]:
    """Which half of the problems each response is in, and which of the responses to its problem, [2, B]; each 0 or 1.

    Halves are equally large, or one larger by one: of the problems, and of each source's responses to each problem.
    """
    random = np.random.default_rng(seed)
    problems = sorted(set(problem_b))
    half_of = dict(zip(problems, random.permutation(len(problems)) % 2, strict=True))
    by_problem = np.array([half_of[problem] for problem in problem_b], dtype=np.int64)
    by_response = np.zeros_like(by_problem)
    groups: dict[tuple[str, str], list[int]] = {}
    for row, group in enumerate(zip(problem_b, source_b, strict=True)):
        groups.setdefault(group, []).append(row)
    for group in sorted(groups):
        rows = groups[group]
        by_response[rows] = random.permutation(len(rows)) % 2
    return np.stack([by_problem, by_response])


# --- from a run ------------------------------------------------------------------------------------------------------


def gradients_of(pipeline: Pipeline, agent: str, step: int) -> Gradients:
    """Gradients of an agent's update of a step, at the weights that it began from.

    Raises:
        HacpoError: the step's files are not there or do not belong together.
    """
    trainer, pool, plan = _opened(pipeline, agent, step)
    rows = sorted({row for part in plan.rows for row in part})
    counts = dict(sum((Counter(part) for part in plan.counts[: pipeline.settings.updates_per_pass]), Counter()))
    source, problem = (pool.table[name].take(pa.array(rows)).to_pylist() for name in ("source", "problem_id"))
    by_problem, by_response = halves(problem, source, derive_seed("cosine", pipeline.run, agent, step))
    pool = trainer.with_divisors(pool, plan)
    parts: dict[str, Floats] = {}
    live: dict[str, list[bool]] = {name: [] for name in counts}
    for name in counts:
        for a, b in np.ndindex(2, 2):
            chosen = (np.array(source) == name) & (by_problem == a) & (by_response == b)
            part = [row for row, taken in zip(rows, chosen, strict=True) if taken]
            gradient, with_gradient = _gradient(trainer, pool, part, counts, name == agent)
            parts.setdefault(name, np.zeros((2, 2, len(gradient))))[a, b] = gradient
            live[name] += with_gradient
    return Gradients(parts, {name: sum(flags) / len(flags) if flags else 0.0 for name, flags in live.items()})


def _gradient(
    trainer: Any, pool: TrainingPool, rows: list[int], counts: Mapping[str, int], is_self: bool
) -> tuple[Floats, list[bool]]:
    """Gradient of some responses' part of the loss, [D], and which of them have one."""
    trainer.optimizer.zero_grad()
    live: list[bool] = []
    for micro in trainer.accumulate(pool, rows, counts, 0):
        if is_self:
            _check_policy(micro.columns["ratio"])
        whatever_advantage = not is_self and trainer.algorithm.clip.cross == "likelihood"
        worth = [whatever_advantage or row.effective_advantage != 0 for row in pool.rows(micro.rows)]
        live += [not clipped and worth_it for clipped, worth_it in zip(micro.columns["clipped"], worth, strict=True)]
    found = [
        np.zeros(parameter.numel()) if parameter.grad is None else parameter.grad.double().flatten().cpu().numpy()
        for parameter in trainer.policy.trained().values()
    ]
    return np.concatenate(found), live


def _check_policy(own_ratios: Sequence[float]) -> None:
    furthest = max(abs(ratio - 1) for ratio in own_ratios)
    if furthest > _SAME_POLICY:
        raise ArtifactError(
            "the rollouts are not of the checkpoint before",
            expected=f"ratios of own responses within {_SAME_POLICY} of 1",
            found=f"one {furthest:.3f} away",
            remedy="run `hacpo audit`, which says what does not belong together",
        )


def _opened(pipeline: Pipeline, agent: str, step: int) -> tuple[Any, TrainingPool, Any]:
    """Trainer with the weights of the step before, pool and plan, as `stages/update.py` has them."""
    import torch

    from hacpo.engines.models.adapter import settle_adapter
    from hacpo.engines.models.checkpoint import load_model, resolve_device
    from hacpo.engines.training.trainer import Trainer

    settings, layout = pipeline.settings, pipeline.layout
    if settings.engine.threads is not None:
        torch.set_num_threads(settings.engine.threads)
    device, before = resolve_device(settings.engine), layout.checkpoint(step - 1, agent)
    model = load_model(before, settings.engine, to_shard=True)
    settle_adapter(
        model,
        settings.agents[agent].adapter,
        step=step,
        before=before,
        base=layout.checkpoint(0, agent).relative_to(pipeline.root),
        seed=derive_seed(settings.seed, "adapter", agent),
        where=f"agents.{agent}.adapter",
    )
    penalised = settings.algorithm.loss.kl_coef > 0
    initial = load_model(layout.checkpoint(0, agent), settings.engine, to_shard=True) if penalised else None
    trainer = Trainer(
        model.to(device),
        0,  # filler is never scored: any token will do
        settings.algorithm,
        settings.optimizer,
        settings.agents[agent].sampling.temperature,
        initial_model=initial and initial.to(device),
        device=device,
    )
    pool = _pool(pipeline, agent, step)
    plan = plan_updates(
        pool.table,
        updates=settings.updates_per_pass,
        order=settings.algorithm.loss.minibatch_order,
        ranks=settings.algorithm.loss.ranks,
        seeds=shuffle_seeds(settings, step, agent),
        selected_b=pool.selected,
        by_group=settings.algorithm.rollouts.select == "sample",
    )
    return trainer, pool, plan


def _pool(pipeline: Pipeline, agent: str, step: int) -> TrainingPool:
    loss, files = pipeline.settings.algorithm.loss, RunFiles(pipeline.run, pipeline.layout)
    sampler_cap = loss.sampler_correction_cap if loss.sampler_correction == "truncated" else None
    of_sampler = ["sampler_logprobs"] if sampler_cap is not None else []
    return training_pool(
        files.read(tables.POOL, step, agent),
        files.read(tables.ADVANTAGES, step, agent, columns=["rollout_id", "effective_advantage", "selected"]),
        files.read(tables.ROLLOUTS, step, agent, columns=["rollout_id", "logprobs", "support", *of_sampler]),
        sampler_cap=sampler_cap,
        where=f"step {step}, {agent}",
    )


# --- as a table ------------------------------------------------------------------------------------------------------


def rows(pipeline: Pipeline, agents: Sequence[str], steps: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of the table for one run: of those agents and steps whose checkpoint before is there."""
    for agent in agents:
        for step in steps:
            if pipeline.layout.checkpoint(step - 1, agent).is_dir():
                for row in compared(gradients_of(pipeline, agent, step), agent):
                    yield {"run": pipeline.run, "agent": agent, "step": step, **row}


def merged(path: Path, found: Sequence[Mapping[str, Any]]) -> pa.Table:
    """What the file holds of other runs, agents and steps, and what was found, in order."""
    by_key = (
        {tuple(row[name] for name in _KEY): row for row in pq.read_table(path).to_pylist()} if path.exists() else {}
    )
    by_key |= {tuple(row[name] for name in _KEY): dict(row) for row in found}
    return pa.Table.from_pylist([by_key[key] for key in sorted(by_key)])


def main() -> None:
    """Look at some runs, print what came out and add it to the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", metavar="pipelines/RUN")
    parser.add_argument("--agents", nargs="+", help="whose updates; all agents' if not given")
    parser.add_argument("--steps", type=int, nargs="+", help="which updates; all if not given")
    parser.add_argument("--into", type=Path, default=_OUT, help="the table; other rows in it stay")
    options = parser.parse_args()
    found = []
    try:
        for folder in options.runs:
            pipeline = Pipeline.open(folder)
            steps = options.steps or range(1, pipeline.settings.steps + 1)
            for row in rows(pipeline, options.agents or list(pipeline.settings.agents), steps):
                found.append(row)
                print("  ".join(f"{name} {_shown(value)}" for name, value in row.items()), flush=True)
    except HacpoError as error:
        sys.exit(f"cosine: error: {error}")
    options.into.parent.mkdir(parents=True, exist_ok=True)
    table = merged(options.into, found)
    with atomic(options.into) as scratch:
        pq.write_table(table, scratch)


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
