"""Gradients of a finished run's updates, by whose responses they come from: stored tables, the update's own code.

Models are computed in float32. A KL penalty belongs to the responses that carry it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hacpo.algorithm.training_pool import TrainingPool, training_pool
from hacpo.algorithm.updates import UpdatePlan, plan_updates, shuffle_seeds
from hacpo.artifacts import tables
from hacpo.artifacts.run_files import RunFiles
from hacpo.errors import ArtifactError
from hacpo.pipeline.project import Pipeline
from hacpo.seeds import derive_seed

Floats = NDArray[np.float64]

_SAME_POLICY = {True: 1e-3, False: 0.05}
"""How far from 1 an own response's ratio may be where weights and rollouts belong together: what rounding does to the
mean log-probability of a token, in runs in float32, and in others."""


@dataclass(frozen=True)
class Gradients:
    """Gradients of the loss by whose responses they come from.

    Attributes:
        parts: source -> [2, 2, D]: half of the problems, half of each problem's responses, parameter.
        live: source -> share of its responses that have a gradient.
    """

    parts: Mapping[str, Floats]
    live: Mapping[str, float]


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
    within = _SAME_POLICY[pipeline.settings.engine.dtype == "float32"]
    parts: dict[str, Floats] = {}
    live: dict[str, list[bool]] = {name: [] for name in counts}
    for name in counts:
        for a, b in np.ndindex(2, 2):
            chosen = (np.array(source) == name) & (by_problem == a) & (by_response == b)
            part = [row for row, taken in zip(rows, chosen, strict=True) if taken]
            gradient, with_gradient = _gradient(trainer, pool, part, counts, within if name == agent else None)
            parts.setdefault(name, np.zeros((2, 2, len(gradient))))[a, b] = gradient
            live[name] += with_gradient
    return Gradients(parts, {name: sum(flags) / len(flags) if flags else 0.0 for name, flags in live.items()})


def _gradient(
    trainer: Any, pool: TrainingPool, rows: list[int], counts: Mapping[str, int], within: float | None
) -> tuple[Floats, list[bool]]:
    """Gradient of some responses' part of the loss, [D], and which of them have one.

    Args:
        within: of own responses, how far their ratios may be from 1; None for others'.
    """
    trainer.optimizer.zero_grad()
    live: list[bool] = []
    for micro in trainer.accumulate(pool, rows, counts, 0):
        if within is not None:
            _check_policy(micro.columns["ratio"], within)
        whatever_advantage = within is None and trainer.algorithm.clip.cross == "likelihood"
        worth = [whatever_advantage or row.effective_advantage != 0 for row in pool.rows(micro.rows)]
        live += [not clipped and worth_it for clipped, worth_it in zip(micro.columns["clipped"], worth, strict=True)]
    found = [
        np.zeros(parameter.numel()) if parameter.grad is None else parameter.grad.double().flatten().cpu().numpy()
        for parameter in trainer.policy.trained().values()
    ]
    return np.concatenate(found), live


def _check_policy(own_ratios: Sequence[float], within: float) -> None:
    furthest = max(abs(ratio - 1) for ratio in own_ratios)
    if furthest > within:
        raise ArtifactError(
            "the rollouts are not of the checkpoint before",
            expected=f"ratios of own responses within {within} of 1",
            found=f"one {furthest:.3f} away",
            remedy="run `hacpo audit`, which says what does not belong together",
        )


def _opened(pipeline: Pipeline, agent: str, step: int) -> tuple[Any, TrainingPool, UpdatePlan]:
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
    initial = load_model(layout.checkpoint(0, agent), settings.engine, to_shard=True).to(device) if penalised else None
    trainer = Trainer(
        model.to(device),
        0,  # filler is never scored: any token will do
        settings.algorithm,
        settings.optimizer,
        settings.agents[agent].sampling.temperature,
        initial_model=initial,
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
