"""One step of training of one agent: U optimizer updates over its pool, traced response by response."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hacpo.algorithm.loss import ResponseBatch, carries_kl, row_weights, update_loss
from hacpo.algorithm.updates import Row, UpdatePlan, micro_batches
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
        model: the learner's model with the weights of the previous step; changed in place. Float32 where `dtype` or
            several processes shard it. None on the processes that get their part of it from the first one.
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
        if self.sharded:
            shard(self.policy, self.world, self.device, self.dtype)
        if self.world.size > 1:
            fill(self.model, whole, self.device)
            if self.algorithm.loss.kl_coef:
                self.initial_model = empty_copy(initial, self.world)
                fill(self.initial_model, initial, self.device)
        self.optimizer = Optimizer(self.policy.trained(), self.settings, masters=self.dtype != torch.float32)
        self.initial = None if self.initial_model is None else Policy(self.initial_model)

    @property
    def sharded(self) -> bool:
        """Whether the model is in FSDP's hands."""
        return self.world.size > 1 or self.dtype != torch.float32

    def train(
        self, plan: UpdatePlan, on_progress: Callable[..., None] | None = None
    ) -> tuple[list[Row], dict[str, float]]:
        """Run every update of a step.

        Returns:
            The rows of the trace table, and flat metrics; on every process.
        """
        if self.settings.gradient_checkpointing:
            recompute_activations(self.model)
        if self.algorithm.importance.reference == "self":
            self._score_old_policy([row for part in plan.rows for row in part])
        done: list[_MicroBatch] = []
        norms: list[float] = []
        for index, (rows, counts) in enumerate(zip(plan.rows, plan.counts, strict=True)):
            for number, batch in self._share(rows):
                if batch is None:
                    self._pass_along()
                    continue
                value, terms = self._micro_loss(batch, counts, index)
                value.backward()
                done.append(_MicroBatch(index, number, float(value.detach()), _traced(batch, terms, index)))
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
        trace = [row for micro in everyone for row in micro.rows]
        return trace, {
            "loss": sum(micro.loss for micro in everyone) / len(plan.rows),
            "grad_norm": sum(norms) / len(norms),
            "micro_batches": len(everyone),
            **summarise(trace),
        }

    def _share(self, rows: Sequence[Row]) -> Iterator[tuple[int, Sequence[Row] | None]]:
        """This process's micro-batches with their numbers; None where the others have one more."""
        batches = micro_batches(
            rows, most_rows=self.settings.micro_batch_size, most_tokens=self.settings.micro_batch_tokens
        )
        rounds = -(-len(batches) // self.world.size)
        for number in range(self.world.rank, rounds * self.world.size, self.world.size):
            yield number, batches[number] if number < len(batches) else None

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

    def _logprobs(self, policy: Policy, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        batch = collate(
            [(row["prompt_token_ids"], row["token_ids"]) for row in rows],
            self.pad_token_id,
            self._device,
            [row.get("support") for row in rows],
        )
        return policy(batch, self.temperature), batch.mask

    @torch.no_grad()
    def _score_old_policy(self, rows: Sequence[Row]) -> None:
        """`reference: self`: cross ratios divide by the learner's own policy before this step's updates."""
        cross = [row for row in rows if not row["is_self"]]
        own_totals: dict[str, float] = {}
        for _, batch in self._share(cross):
            if batch is None:
                self._pass_along()
                continue
            logprobs, mask = self._logprobs(self.policy, batch)
            sums = (logprobs.double() * mask).sum(dim=-1).tolist()
            own_totals |= {row["rollout_id"]: total for row, total in zip(batch, sums, strict=True)}
        totals = {key: total for part in self.world.gather(own_totals) for key, total in part.items()}
        for row in cross:
            row["source_logprob"], row["source_tokens"] = totals[row["rollout_id"]], row["learner_tokens"]

    def _micro_loss(self, rows: Sequence[Row], counts: Mapping[str, int], index: int) -> Any:
        learner_logprobs, mask = self._logprobs(self.policy, rows)
        old = None
        if self.algorithm.importance.level == "token":
            old = torch.zeros_like(learner_logprobs)
            for number, row in enumerate(rows):
                if row["is_self"]:
                    old[number, : len(row["token_ids"])] = torch.tensor(row["old_logprobs"], dtype=old.dtype)
        sources = list(counts)

        def column(name: str, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([row[name] for row in rows], dtype=dtype, device=mask.device)

        batch = ResponseBatch(
            learner_logprobs_bt=learner_logprobs,
            mask_bt=mask,
            source_logprob_b=column("source_logprob", torch.float64),
            source_tokens_b=column("source_tokens", torch.int64),
            text_bytes_b=column("text_bytes", torch.int64),
            is_self_b=column("is_self", torch.bool),
            effective_advantage_b=column("effective_advantage", torch.float64),
            weight_b=row_weights(
                torch.tensor([sources.index(row["source"]) for row in rows], device=mask.device),
                torch.tensor(list(counts.values()), device=mask.device),
                self.algorithm.loss.aggregation,
            ),
            sampler_weight_b=column("sampler_weight", torch.float64),
            old_logprobs_bt=old,
            initial_logprobs_bt=self._initial_logprobs(rows, learner_logprobs),
        )
        return update_loss(
            batch,
            update_index=index,
            importance=self.algorithm.importance,
            clip=self.algorithm.clip,
            loss=self.algorithm.loss,
        )

    @torch.no_grad()
    def _initial_logprobs(self, rows: Sequence[Row], like: torch.Tensor) -> torch.Tensor | None:
        """Log-probabilities under the initial policy, [B, T] as `like`, of the responses that carry a KL penalty (0 for
        the others); None if none does."""
        penalised = carries_kl(torch.tensor([row["is_self"] for row in rows]), self.algorithm.loss)
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

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote.

        Raises:
            ArtifactError: damaged, or of another model.
        """
        self.optimizer.load(folder)

    def whole_weights(self) -> dict[str, torch.Tensor] | None:
        """Every weight put together, on the CPU of the first process, as checkpoints hold them; None where the model
        itself is whole, and on the other processes."""
        if not self.sharded:
            return None
        found = {name: value for name, value in weights(self.model, self.dtype) if self.world.leads}
        return found if self.world.leads else None


@dataclass(frozen=True)
class _MicroBatch:
    """What one forward pass gave: its place, its part of the loss, and its rows of the trace."""

    update: int
    number: int
    loss: float
    rows: list[Row]


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


def _traced(rows: Sequence[Row], terms: Any, index: int) -> list[Row]:
    """Rows of the trace table."""
    columns = {name: getattr(terms, f"{name}_b").tolist() for name in _TRACED}
    return [
        {
            "rollout_id": row["rollout_id"],
            "source": row["source"],
            "is_self": row["is_self"],
            "update": index,
            **{name: values[number] for name, values in columns.items()},
            "sampler_weight": row["sampler_weight"],
        }
        for number, row in enumerate(rows)
    ]


def summarise(trace: Sequence[Row]) -> dict[str, float]:
    """Ratio and clip statistics of a step's trace, own and cross apart; a kind without rows has none.

    Ratios are per response (`ratio`); `clipped`, `below` and `above` are shares of rows.
    """
    metrics: dict[str, float] = {}
    for kind, rows in (
        ("own", [row for row in trace if row["is_self"]]),
        ("cross", [row for row in trace if not row["is_self"]]),
    ):
        if not rows:
            continue
        ratios = torch.tensor([row["ratio"] for row in rows], dtype=torch.float64)
        metrics |= {
            f"{kind}.rows": len(rows),
            f"{kind}.ratio_mean": float(ratios.mean()),
            f"{kind}.ratio_sd": float(ratios.std(correction=0)),
            f"{kind}.ratio_min": float(ratios.min()),
            f"{kind}.ratio_max": float(ratios.max()),
            f"{kind}.clipped": sum(row["clipped"] for row in rows) / len(rows),
            f"{kind}.below": sum(row["ratio"] < row["lower"] for row in rows) / len(rows),
            f"{kind}.above": sum(row["ratio"] > row["upper"] for row in rows) / len(rows),
            f"{kind}.is_weight_mean": sum(row["is_weight"] for row in rows) / len(rows),
        }
        if kind == "own":
            metrics["own.sampler_weight_mean"] = sum(row["sampler_weight"] for row in rows) / len(rows)
    return metrics
