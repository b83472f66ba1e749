"""One step of training of one agent: U optimizer updates over its pool, traced response by response."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hacpo.config import AlgorithmSettings, OptimizerSettings
from hacpo.engines.checkpoint import storage_errors
from hacpo.engines.logprobs import collate, token_logprobs
from hacpo.errors import ArtifactError
from hacpo.loss import ResponseBatch, carries_kl, row_weights, update_loss
from hacpo.schema import write_json
from hacpo.updates import Row, UpdatePlan


@dataclass
class Trainer:
    """A model and its optimizer.

    Args:
        model: the learner's model with the weights of the previous step; changed in place.
        pad_token_id: filler, never scored.
        temperature: log-probabilities are taken at the sampling temperature.
    """

    model: Any
    pad_token_id: int
    algorithm: AlgorithmSettings
    settings: OptimizerSettings
    temperature: float
    initial_model: Any = None
    updates_done: int = 0
    optimizer: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        self.names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad],
            lr=self.settings.learning_rate,
            betas=(self.settings.beta1, self.settings.beta2),
            eps=self.settings.epsilon,
            weight_decay=self.settings.weight_decay,
        )

    def train(
        self, plan: UpdatePlan, on_progress: Callable[..., None] | None = None
    ) -> tuple[list[Row], dict[str, float]]:
        """Run every update of a step.

        Returns:
            The rows of the trace table, and flat metrics.
        """
        self.model.eval()  # no dropout: a ratio compares policies, not masks
        trace: list[Row] = []
        losses, norms = [], []
        if self.algorithm.importance.reference == "self":
            self._score_old_policy([row for part in plan.rows for row in part])
        for index, (rows, counts) in enumerate(zip(plan.rows, plan.counts, strict=True)):
            loss = 0.0
            self.optimizer.zero_grad(set_to_none=True)
            for batch in self._micro_batches(rows):
                value, terms = self._micro_loss(batch, counts, index)
                value.backward()
                loss += float(value.detach())
                columns = {name: getattr(terms, f"{name}_b").tolist() for name in _TRACED}
                trace += [
                    {
                        "rollout_id": row["rollout_id"],
                        "source": row["source"],
                        "is_self": row["is_self"],
                        "update": index,
                        **{name: values[number] for name, values in columns.items()},
                        "sampler_weight": row["sampler_weight"],
                    }
                    for number, row in enumerate(batch)
                ]
            norms.append(self._step())
            losses.append(loss)
            if on_progress:
                on_progress(index + 1, len(plan.rows), loss=loss)
        return trace, {"loss": sum(losses) / len(losses), "grad_norm": sum(norms) / len(norms), **summarise(trace)}

    def _micro_batches(self, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
        for start in range(0, len(rows), self.settings.micro_batch_size):
            yield rows[start : start + self.settings.micro_batch_size]

    def _logprobs(self, model: Any, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        batch = collate(
            [(row["prompt_token_ids"], row["token_ids"]) for row in rows], self.pad_token_id, self.model.device
        )
        return token_logprobs(model, batch, self.temperature), batch.mask

    @torch.no_grad()
    def _score_old_policy(self, rows: Sequence[Row]) -> None:
        """`reference: self`: cross ratios divide by the learner's own policy before this step's updates."""
        for batch in self._micro_batches([row for row in rows if not row["is_self"]]):
            logprobs, mask = self._logprobs(self.model, batch)
            sums = (logprobs.double() * mask).sum(dim=-1).tolist()
            for row, total in zip(batch, sums, strict=True):
                row["source_logprob"], row["source_tokens"] = total, row["learner_tokens"]

    def _micro_loss(self, rows: Sequence[Row], counts: Mapping[str, int], index: int) -> Any:
        learner_logprobs, mask = self._logprobs(self.model, rows)
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
        values, _ = self._logprobs(self.initial_model, [rows[number] for number in chosen])
        initial = torch.zeros_like(like)
        initial[chosen, : values.shape[1]] = values
        return initial

    def _step(self) -> float:
        """One optimizer step; returns the gradient's norm before clipping."""
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                # An update without a usable response still counts as one (eq. 14), with a gradient of zero.
                parameter.grad = torch.zeros_like(parameter)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm))
        self.updates_done += 1
        warm = min(1.0, self.updates_done / self.settings.warmup_updates) if self.settings.warmup_updates else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * warm
        if not math.isfinite(norm):
            raise ArtifactError(
                "the gradient is not finite, so the step was given up; nothing was written",
                where=f"update {self.updates_done - 1} since the start",
                remedy="lower optimizer.learning_rate, or look at the step's trace and advantages",
            )
        self.optimizer.step()
        return norm

    # --- state -----------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write optimizer state as safetensors and counters as JSON into `folder` (made here)."""
        folder.mkdir()
        tensors = {}
        for name, parameter in zip(self.names, self.optimizer.param_groups[0]["params"], strict=True):
            state = self.optimizer.state[parameter]
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"{key}.{name}"] = state[key].detach().cpu().contiguous()
        with storage_errors():
            save_file(tensors, folder / "optimizer.safetensors")
        (folder / "optimizer.safetensors").chmod(0o644)
        # Every random choice is derived from the seed and its place in the run, so there is no RNG state to keep.
        write_json(folder / "state.json", {"updates_done": self.updates_done})

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote.

        Raises:
            ArtifactError: damaged, or of another model.
        """
        try:
            tensors = load_file(folder / "optimizer.safetensors")
            self.updates_done = int(json.loads((folder / "state.json").read_text())["updates_done"])
            for name, parameter in zip(self.names, self.optimizer.param_groups[0]["params"], strict=True):
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(self.updates_done)),
                    **{key: tensors[f"{key}.{name}"].to(parameter.device).clone() for key in ("exp_avg", "exp_avg_sq")},
                }
        except Exception as error:
            # safetensors, json and torch each have their own errors for a damaged file.
            raise ArtifactError(
                f"the optimizer state cannot be used: {(str(error).splitlines() or ['?'])[0][:120]}", where=folder
            ) from None


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


def summarise(trace: Sequence[Row]) -> dict[str, float]:
    """Ratio and clip statistics of a step's trace, own and cross apart."""
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
