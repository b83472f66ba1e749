"""One step of training of one agent: U optimizer updates over its pool, traced response by response."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from hacpo.algorithm.batching import batches, most_tokens
from hacpo.algorithm.loss import ResponseBatch, ResponseTerms, carries_kl, update_loss
from hacpo.algorithm.training_pool import TrainingPool, TrainingRow
from hacpo.algorithm.updates import UpdatePlan
from hacpo.artifacts import parquet, tables
from hacpo.engines.models.empty import empty_copy, fill
from hacpo.engines.training.logprobs import collate
from hacpo.engines.training.optimizer import Optimizer
from hacpo.engines.training.policy import Policy, keep_activations, recompute_activations, shard, weights
from hacpo.engines.training.world import World
from hacpo.settings.algorithm import AlgorithmSettings
from hacpo.settings.training import OptimizerSettings


@dataclass
class Trainer:
    """A policy and its optimizer.

    Args:
        model: the learner's model with the weights of the previous step; changed in place. Float32 where FSDP
            holds it. None on the processes that get their part of it from the first one.
        pad_token_id: filler, never scored.
        temperature: log-probabilities are taken at the sampling temperature.
        initial_model: of the KL penalty; None without one, and on the processes that get it from the first one.
        world: the processes that compute the step together. Each takes every world.size-th micro-batch.
        dtype: of weights and activations in forward and backward passes, and of the checkpoint's weights.
        device: where to compute; None: where the model is.
    """

    model: Any
    pad_token_id: int
    algorithm: AlgorithmSettings
    settings: OptimizerSettings
    temperature: float
    initial_model: Any = None
    world: World = field(default_factory=World)
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None
    policy: Policy = field(init=False)
    optimizer: Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.device = self.device or self.model.device
        whole, initial = self.model, self.initial_model
        if self.world.size > 1:
            self.model = empty_copy(whole, self.world)
        self.model.eval()  # no dropout: a ratio compares policies, not masks
        self.policy = Policy(self.model)
        if self.world.fsdp:
            shard(self.policy, self.world, self.device, self.dtype)
        if self.world.size > 1:
            fill(self.model, whole, self.device)
            if self.algorithm.loss.kl_coef:
                self.initial_model = empty_copy(initial, self.world)
                fill(self.initial_model, initial, self.device)
        self.optimizer = Optimizer(self.policy.trained(), self.settings, masters=self.dtype != torch.float32)
        self.initial = None if self.initial_model is None else Policy(self.initial_model)

    def train(
        self, plan: UpdatePlan, pool: TrainingPool, on_progress: Callable[..., None] | None = None
    ) -> tuple[pa.Table, dict[str, float]]:
        """Run every update of a step.

        Args:
            plan: which rows of the pool each update sees.

        Returns:
            The trace table, in the pool's order, and flat metrics; on every process.
        """
        if self.settings.gradient_checkpointing:
            recompute_activations(self.model)
        pool = self.with_divisors(pool, plan)
        done: list[MicroBatch] = []
        norms: list[float] = []
        for index, (rows, counts) in enumerate(zip(plan.rows, plan.counts, strict=True)):
            done += self.accumulate(pool, rows, counts, index)
            norms.append(self.optimizer.step())
            self.optimizer.zero_grad()  # the last gradients too: the model may stay in memory
            if on_progress:
                on_progress(index + 1, len(plan.rows), grad_norm=norms[-1])
        if self.settings.gradient_checkpointing:
            keep_activations(self.model)
        everyone = sorted(
            (micro for part in self.world.gather(done) for micro in part),
            key=lambda micro: (micro.update, micro.number),
        )
        trace = _trace(pool, everyone)
        metrics = {
            "loss": sum(micro.loss for micro in everyone) / len(plan.rows),
            "grad_norm": sum(norms) / len(norms),
            "micro_batches": len(everyone),
            **summarise(trace),
        }
        order = np.lexsort((np.asarray(trace["update"]), np.array([row for micro in everyone for row in micro.rows])))
        return trace.take(pa.array(order)).combine_chunks(), metrics

    def with_divisors(self, pool: TrainingPool, plan: UpdatePlan) -> TrainingPool:
        """The pool with the log-probabilities that ratios divide by, where these are not the stored ones."""
        if self.algorithm.importance.reference != "self":
            return pool
        return self._by_old_policy(pool, list(dict.fromkeys(row for part in plan.rows for row in part)))

    def accumulate(
        self, pool: TrainingPool, rows: Sequence[int], counts: Mapping[str, int], index: int
    ) -> list[MicroBatch]:
        """Add the gradient of some rows' part of an update's loss to what the parameters hold in `grad`.

        The parts add up: an update's gradient is the sum over any division of its rows.

        Args:
            pool: from `with_divisors`.
            rows: numbers of rows of the pool.
            counts: source -> responses scheduled for the whole update.
            index: m, updates already done within the step.

        Returns:
            This process's micro-batches.
        """
        done = []
        for number, batch in self._share(pool, rows):
            if batch is None:
                self._pass_along()
                continue
            value, terms = self._micro_loss(pool.rows(batch), counts, index)
            value.backward()  # type: ignore[no-untyped-call]
            done.append(MicroBatch(index, number, float(value.detach()), batch, _traced(terms)))
        return done

    def _share(self, pool: TrainingPool, rows: Sequence[int]) -> Iterator[tuple[int, Sequence[int] | None]]:
        """This process's micro-batches with their numbers; None where the others have one more."""
        tokens = most_tokens(self.settings.micro_batch_tokens, self._device.type)
        lengths = pool.lengths[rows].tolist()
        cuts = batches(lengths, most_rows=self.settings.micro_batch_size, most_tokens=tokens)
        parts = [rows[part.start : part.stop] for part in cuts]
        rounds = -(-len(parts) // self.world.size)
        for number in range(self.world.rank, rounds * self.world.size, self.world.size):
            yield number, parts[number] if number < len(parts) else None

    def _pass_along(self) -> None:
        """A pass that adds nothing: sharded weights and gradients are exchanged by all processes or by none."""
        batch = collate([([self.pad_token_id], [self.pad_token_id])], self.pad_token_id, self._device)
        values = self.policy(batch, self.temperature)
        if torch.is_grad_enabled():
            (values.sum() * 0.0).backward()

    @property
    def _device(self) -> torch.device:
        assert self.device is not None
        return self.device

    def _logprobs(self, policy: Policy, rows: Sequence[TrainingRow]) -> tuple[torch.Tensor, torch.Tensor]:
        batch = collate(
            [(row.prompt_token_ids, row.token_ids) for row in rows],
            self.pad_token_id,
            self._device,
            [row.support for row in rows],
        )
        return policy(batch, self.temperature), batch.mask

    @torch.no_grad()
    def _by_old_policy(self, pool: TrainingPool, rows: Sequence[int]) -> TrainingPool:
        """`reference: self`: cross ratios divide by the learner's own policy before this step's updates."""
        is_self = np.asarray(pool.table["is_self"])
        sums: dict[int, float] = {}
        for _, batch in self._share(pool, [row for row in rows if not is_self[row]]):
            if batch is None:
                self._pass_along()
                continue
            logprobs, mask = self._logprobs(self.policy, pool.rows(batch))
            sums |= dict(zip(batch, (logprobs.double() * mask).sum(dim=-1).tolist(), strict=True))
        return pool.divided_by({row: total for part in self.world.gather(sums) for row, total in part.items()})

    def _micro_loss(
        self, rows: Sequence[TrainingRow], counts: Mapping[str, int], index: int
    ) -> tuple[torch.Tensor, ResponseTerms]:
        learner_logprobs, mask = self._logprobs(self.policy, rows)
        batch = ResponseBatch.from_rows(
            rows,
            learner_logprobs,
            mask,
            counts=counts,
            algorithm=self.algorithm,
            initial_logprobs_bt=self._initial_logprobs(rows, learner_logprobs),
        )
        return update_loss(batch, index, self.algorithm)

    @torch.no_grad()
    def _initial_logprobs(self, rows: Sequence[TrainingRow], like: torch.Tensor) -> torch.Tensor | None:
        """Log-probabilities under the initial policy, [B, T] as `like`, of the responses that carry a KL penalty (0 for
        the others); None if none does."""
        penalised = carries_kl(torch.tensor([row.is_self for row in rows]), self.algorithm.loss)
        if not penalised.any():
            return None
        chosen = penalised.nonzero().flatten().tolist()
        assert self.initial is not None
        values, _ = self._logprobs(self.initial, [rows[number] for number in chosen])
        initial = torch.zeros_like(like)
        initial[chosen, : values.shape[1]] = values
        return initial

    # --- state -------------------------------------------------------------------------------------------------------

    def save(self, folder: Path | None) -> None:
        """Write optimizer state and counters into `folder` (made here); None on processes that only take part."""
        self.optimizer.save(folder)

    def load(self, folder: Path, updates: int | None = None) -> None:
        """Continue from what `save` wrote; arguments and errors as of `Optimizer.load`."""
        self.optimizer.load(folder, updates)

    def whole_weights(self) -> dict[str, torch.Tensor] | None:
        """Every weight put together, on the CPU of the first process, as checkpoints hold them; None where the model
        itself is whole, and on the other processes."""
        if not self.world.fsdp:
            return None
        whole = {name: value for name, value in weights(self.model, self.dtype) if self.world.leads}
        return whole if self.world.leads else None


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass gave: its place, its part of the loss, and its rows of the pool with their columns of the
    trace."""

    update: int
    number: int
    loss: float
    rows: Sequence[int]
    columns: Mapping[str, list[Any]]


_TRACED = (
    "learner_logprob",
    "source_logprob",
    "ratio",
    "lower",
    "upper",
    "clipped",
    "is_weight",
    "objective",
)


def _traced(terms: ResponseTerms) -> dict[str, list[Any]]:
    return {name: getattr(terms, f"{name}_b").tolist() for name in _TRACED}


def _trace(pool: TrainingPool, everyone: Sequence[MicroBatch]) -> pa.Table:
    """The trace table of micro-batches, one after another."""
    learned = pool.table.select(["rollout_id", "source", "is_self", "sampler_weight"])
    learned = learned.take(pa.array([row for micro in everyone for row in micro.rows], pa.int64()))
    columns = {name: [value for micro in everyone for value in micro.columns[name]] for name in _TRACED}
    updates = [micro.update for micro in everyone for _ in micro.rows]
    pooled = {name: learned[name] for name in learned.column_names}
    return parquet.to_arrow(tables.TRACE, {**pooled, **columns, "update": updates})


def summarise(trace: pa.Table) -> dict[str, float]:
    """Ratio and clip statistics of a step's trace, own and cross apart; a kind without rows has none.

    Ratios are per response (`ratio`); `clipped`, `below` and `above` are shares of rows.
    """
    metrics: dict[str, float] = {}
    own = np.asarray(trace["is_self"], dtype=np.bool_)
    for kind, mine in (("own", own), ("cross", ~own)):
        if not mine.any():
            continue
        rows = trace.filter(pa.array(mine))
        ratio, lower, upper = (rows[name].to_numpy() for name in ("ratio", "lower", "upper"))
        ratios = torch.tensor(ratio)
        metrics |= {
            f"{kind}.rows": len(rows),
            f"{kind}.ratio_mean": float(ratios.mean()),
            f"{kind}.ratio_sd": float(ratios.std(correction=0)),
            f"{kind}.ratio_min": float(ratios.min()),
            f"{kind}.ratio_max": float(ratios.max()),
            f"{kind}.clipped": sum(rows["clipped"].to_pylist()) / len(rows),
            f"{kind}.below": int((ratio < lower).sum()) / len(rows),
            f"{kind}.above": int((ratio > upper).sum()) / len(rows),
            f"{kind}.is_weight_mean": sum(rows["is_weight"].to_pylist()) / len(rows),
        }
        if kind == "own":
            metrics["own.sampler_weight_mean"] = sum(rows["sampler_weight"].to_pylist()) / len(rows)
    return metrics
