"""AdamW over a policy's trained parameters, sharded or not: schedule, clipping, and a state that any number of
processes can take up again."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from hacpo.artifacts.storage import write_json
from hacpo.artifacts.text_files import check_regular, load_json
from hacpo.artifacts.weights import optimizer_files, optimizer_name
from hacpo.engines.training.policy import like, whole
from hacpo.engines.training.processes import leads
from hacpo.errors import ArtifactError, first_line
from hacpo.settings.training import OptimizerSettings

FILE_BYTES = 4 << 30
"""Most of a state that is put together at once, and so held by one process: the size of its files."""

_SQUARED = 1 << 20
"""Gradients that are held in float64 at once."""

_MOMENTS = ("exp_avg", "exp_avg_sq")

_MOST_UPDATES = 1 << 24
"""AdamW counts them in float32, which has no odd number above."""

_LARGEST = torch.finfo(torch.float32).max


class Optimizer:
    """AdamW.

    Args:
        parameters: name -> parameter, in the model's order.
        masters: whether the parameters are float32 masters of weights that a checkpoint holds in another dtype; then
            they are part of the state.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], settings: OptimizerSettings, *, masters: bool = False
    ) -> None:
        self.parameters = dict(parameters)
        self.settings = settings
        self.masters = masters
        self.updates_done = 0
        self._adamw = torch.optim.AdamW(
            self.parameters.values(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            # Not fused: the second moment's last bits would depend on how a tensor is sharded (docs/performance.md).
        )

    def zero_grad(self) -> None:
        """Forget gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def step(self) -> float:
        """One update with the gradients that have added up; returns their norm before clipping.

        Raises:
            ArtifactError: it is not finite; no weight was changed.
        """
        for parameter in self.parameters.values():
            if parameter.grad is None:
                # An update without a usable response still counts as one (eq. 14), with a gradient of zero.
                parameter.grad = torch.zeros_like(parameter)
        norm = self._clip()
        self.updates_done += 1
        if not math.isfinite(norm):
            raise ArtifactError(
                "the gradient is not finite, so the step was given up; nothing was written",
                where=f"update {self.updates_done - 1} since the start",
                remedy="lower optimizer.learning_rate, or look at the step's trace and advantages",
            )
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate(self.settings, self.updates_done)
        self._adamw.step()
        return norm

    @torch.no_grad()
    def _clip(self) -> float:
        """Scale gradients down to `max_grad_norm`; returns the norm before.

        Squares add up in float64 and the norm is rounded to float32: in practice the same number of bits whatever the
        number of shards.
        """
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        squares = torch.stack([_square_sum(part) for part in local]).sum()
        if gradients and isinstance(gradients[0], DTensor):
            dist.all_reduce(squares, group=gradients[0].device_mesh.get_group("shard"))
        norm = squares.sqrt().float()
        scale = self.settings.max_grad_norm / (norm + 1e-6)
        for part in local if not scale >= 1 else ():  # a norm that is no number goes on to the gradients
            part.mul_(scale)
        return float(norm)

    # --- state -------------------------------------------------------------------------------------------------------

    def save(self, folder: Path | None) -> None:
        """Write the state as safetensors, whole tensors whatever the number of processes, and counters as JSON.

        Args:
            folder: made here; None on processes that only take part.
        """
        if folder is not None:
            folder.mkdir()
        files = self._files()
        for number, keys in enumerate(files, start=1):
            tensors = {f"{key}.{name}": value for key, name, value in self._whole(keys, keep=folder is not None)}
            if folder is None:
                continue
            path = folder / optimizer_name(number, len(files))
            save_file(tensors, path)
            path.chmod(0o644)
        if folder is not None:
            # Every random choice is derived from the seed and its place in the run: there is no RNG state to keep.
            write_json(folder / "state.json", {"updates_done": self.updates_done})

    def load(self, folder: Path, updates: int | None = None) -> None:
        """Continue from what `save` wrote: the first process reads it, and hands out tensor by tensor.

        Args:
            updates: how many have made it, all of them under these settings; None: that is not known.

        Raises:
            ArtifactError: damaged, of another model, or nothing that updates leave behind.
        """
        try:
            self.updates_done = _updates_done(load_json(folder / "state.json")["updates_done"], updates)
            files = _files_by_key(folder) if leads() else {}

            def read(kind: str, name: str, parameter: torch.Tensor) -> torch.Tensor:
                key = f"{kind}.{name}"
                value = _read(files[key], key) if leads() else None
                if value is not None:
                    _check(key, value, parameter, self._range(kind, clipped=updates is not None))
                return like(value, parameter)

            for name, parameter in self.parameters.items():
                state = {kind: read(kind, name, parameter) for kind in _MOMENTS}
                self._adamw.state[parameter] = {"step": torch.tensor(float(self.updates_done)), **state}
                if self.masters:
                    with torch.no_grad():
                        parameter.copy_(read("master", name, parameter))
        except Exception as error:
            # safetensors, json and torch each have their own errors for a damaged file.
            reason = f"{error} is missing" if isinstance(error, KeyError) else first_line(error)
            raise ArtifactError(f"the optimizer state cannot be used: {reason}", where=folder) from None

    def _range(self, kind: str, *, clipped: bool) -> tuple[float, float]:
        """Least and largest value that there can be: no gradient is larger than the norm that all are scaled down to,
        and no average of them (or of their squares) is; twice that, as averages are rounded.

        Args:
            clipped: all gradients were, under these settings.
        """
        most = min(2 * self.settings.max_grad_norm, _LARGEST) if clipped and kind in _MOMENTS else _LARGEST
        return (0.0, min(most**2, _LARGEST)) if kind == "exp_avg_sq" else (-most, most)

    def _files(self) -> list[list[tuple[str, str]]]:
        """(moment, parameter) of every tensor of the state, cut into files."""
        files: list[list[tuple[str, str]]] = [[]]
        held = 0
        for key in (*_MOMENTS, *(("master",) if self.masters else ())):
            for name, parameter in self.parameters.items():
                size = parameter.numel() * 4
                if files[-1] and held + size > FILE_BYTES:
                    files.append([])
                    held = 0
                files[-1].append((key, name))
                held += size
        return files

    def _whole(self, keys: list[tuple[str, str]], *, keep: bool) -> Iterator[tuple[str, str, torch.Tensor]]:
        for key, name in keys:
            parameter = self.parameters[name]
            value = whole(parameter if key == "master" else self._adamw.state[parameter][key])
            if keep:
                yield key, name, value.contiguous()


def _updates_done(stored: object, wanted: int | None) -> int:
    """The count of a state, if it can be one.

    Raises:
        ValueError: it is none, or not the one that is wanted.
    """
    least, most = (0, _MOST_UPDATES) if wanted is None else (wanted, wanted)
    if type(stored) is not int or not least <= stored <= most:
        expected = f"{least} to {most}" if wanted is None else f"{wanted}, after so many steps of these settings"
        raise ValueError(f"updates_done is {reprlib.repr(stored)}, expected {expected}")
    return stored


def _check(key: str, value: torch.Tensor, parameter: torch.Tensor, allowed: tuple[float, float]) -> None:
    """Refuse a tensor of a state that is not like its parameter.

    Raises:
        ValueError: it has another shape or type, or a value that is not allowed.
    """
    if value.shape != parameter.shape:
        raise ValueError(f"{key} has another shape")
    if value.dtype != parameter.dtype:
        raise ValueError(f"{key} is {value.dtype}, expected {parameter.dtype}")
    if not value.numel():
        return
    least, largest = (float(end) for end in torch.aminmax(value))
    if not (allowed[0] <= least and largest <= allowed[1]):  # NaN is neither
        possible = " to ".join(f"{end:.3g}" for end in allowed)
        raise ValueError(f"{key} holds {least:.3g} to {largest:.3g}, expected values of {possible}")


def _square_sum(values: torch.Tensor) -> torch.Tensor:
    """Of squares in float64, of a part at a time: a vocabulary's gradient twice in float64 would be a step's peak."""
    return torch.stack([part.double().square_().sum() for part in torch.split(values.reshape(-1), _SQUARED)]).sum()


def _files_by_key(folder: Path) -> dict[str, Path]:
    """Key of every tensor in a folder's state -> the file that has it."""
    found: dict[str, Path] = {}
    for file in optimizer_files(folder):
        check_regular(file)
        with safe_open(file, framework="pt") as opened:
            found |= dict.fromkeys(opened.keys(), file)
    return found


def _read(file: Path, key: str) -> torch.Tensor:
    """One tensor; the file is mapped for it alone, so that no more of a large state than it is in memory."""
    with safe_open(file, framework="pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(key)
        return tensor


def learning_rate(settings: OptimizerSettings, update: int) -> float:
    """Step size of an update, counted from 1 since the start of training.

    It rises linearly over `warmup_updates`, stays or falls until `schedule_updates`, and then stays at `final_rate`.
    """
    warm = min(1.0, update / settings.warmup_updates) if settings.warmup_updates else 1.0
    if settings.schedule == "constant" or settings.schedule_updates is None:
        return settings.learning_rate * warm
    peak = max(1, settings.warmup_updates)
    done = min(1.0, max(0, update - peak) / max(1, settings.schedule_updates - peak))
    left = 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.learning_rate * warm * (settings.final_rate + (1.0 - settings.final_rate) * left)
