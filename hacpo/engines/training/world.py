"""The processes that compute one update together.

They are started by `accelerate launch`, torchrun or anything else that sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR
and MASTER_PORT, and meet through accelerate's `Accelerator`. A process started without them is a world of its own.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from hacpo.engines.training.processes import Place, place
from hacpo.errors import SettingsError
from hacpo.settings.engine import LauncherSettings

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Where this process stands among the others.

    Attributes:
        rank: from 0; process 0 leads and writes.
        size: processes in all.
        replicas: copies of the model, each sharded over size / replicas processes.
        fsdp: FSDP holds the model that they train (`Settings.fsdp`).
        reshard: let go of a layer's gathered weights between its forward and its backward pass.
    """

    rank: int = 0
    size: int = 1
    replicas: int = 1
    fsdp: bool = False
    reshard: bool = True

    @property
    def leads(self) -> bool:
        """Whether this process writes what all have computed."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every process's value, by rank; all processes must call this."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def share(self, value: T | None) -> T:
        """The first process's value; all processes must call this, the others' is not looked at."""
        if self.size == 1:
            assert value is not None
            return value
        values: list[Any] = [value if self.leads else None]
        dist.broadcast_object_list(values, src=0)
        return values[0]  # type: ignore[no-any-return]


@contextlib.contextmanager
def joined(
    launcher: LauncherSettings, device: torch.device, *, fsdp: bool, dtype: torch.dtype = torch.float32
) -> Iterator[World]:
    """Meet the other processes, and part when the block ends.

    Args:
        device: where this process computes.
        fsdp: the block hands a model to FSDP, which takes a process group even of one process.
        dtype: of weights and activations in forward and backward passes.

    Raises:
        SettingsError: there are not as many as the settings say, or whatever started them was told to have them
            compute in another way.
    """
    here = place()
    started = 1 if here is None else here.size
    if started != launcher.world_size:
        raise SettingsError(
            "the update was started with the wrong number of processes",
            where="launcher",
            expected=f"{launcher.world_size} (processes x nodes)",
            found=started,
            remedy="let `hacpo update` start them, or start as many by hand (docs/update.md)",
        )
    if here is not None and started > 1:
        with _accelerated(here, launcher, device, dtype) as world:
            yield world
        return
    if not fsdp or dist.is_initialized():  # by vLLM, in this process
        yield World(fsdp=fsdp)
        return
    backend = _BACKENDS[device.type]
    dist.init_process_group(backend, timeout=_PATIENCE, store=HashStore(), rank=0, world_size=1)
    try:
        yield World(fsdp=fsdp)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _accelerated(here: Place, launcher: LauncherSettings, device: torch.device, dtype: torch.dtype) -> Iterator[World]:
    """The process group and the device of this process, by accelerate."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import DistributedType

    plugin = _fsdp_plugin(dtype)
    try:
        accelerator = Accelerator(
            cpu=device.type == "cpu",
            mixed_precision=_PRECISION[dtype],
            fsdp_plugin=plugin,
            kwargs_handlers=[InitProcessGroupKwargs(backend=_BACKENDS[device.type], timeout=_PATIENCE)],
        )
    except ValueError as error:  # what accelerate finds that the device cannot do
        raise SettingsError(f"accelerate: {error}", where="launcher") from None
    if device.type == "cpu":
        wanted = DistributedType.MULTI_CPU
    else:
        wanted = DistributedType.MULTI_GPU if plugin is None else DistributedType.FSDP
    met = accelerator.distributed_type, accelerator.num_processes, accelerator.process_index, accelerator.device.type
    if met != (wanted, here.size, here.rank, device.type):
        raise SettingsError(
            "the processes did not meet as they were started",
            where="launcher",
            expected=f"{wanted.value}, {here.size} processes, this one {here.rank} on {device.type}",
            found=f"{met[0].value}, {met[1]} processes, this one {met[2]} on {met[3]}",
            remedy="whatever starts them sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        )
    # After an error parting would wait for processes that wait for this one; whoever started them ends them.
    # Several processes share the model: FSDP has it.
    yield World(
        here.rank, here.size, launcher.replicas, fsdp=True, reshard=plugin is None or plugin.reshard_after_forward
    )
    accelerator.end_training()


def _fsdp_plugin(dtype: torch.dtype) -> Any:
    """What `accelerate launch` was told about FSDP and hands on in the environment; None where nothing."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", _PRECISION[dtype]):  # `accelerate launch` says "no" where nobody said anything
        raise SettingsError(
            "accelerate was told another precision than engine.dtype says",
            where="mixed_precision",
            expected=_PRECISION[dtype],
            found=precision,
        )
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise SettingsError(
            "accelerate was told another version of FSDP", where="fsdp_version", expected=2, found=version
        )
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin()


_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}

_PRECISION = {torch.float32: "no", torch.bfloat16: "bf16"}
"""accelerate's words for `engine.dtype`."""

_PATIENCE = datetime.timedelta(hours=2)
"""How long processes wait for each other: the first one writes checkpoints while the others wait."""
