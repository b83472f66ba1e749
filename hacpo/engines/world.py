"""The processes that compute one update together.

They are started by torchrun or anything else that sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; a
process started without them is a world of its own.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from hacpo.config import LauncherSettings
from hacpo.errors import SettingsError
from hacpo.processes import place

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Where this process stands among the others.

    Attributes:
        rank: from 0; process 0 leads and writes.
        size: processes in all.
        replicas: copies of the model, each sharded over size / replicas processes.
    """

    rank: int = 0
    size: int = 1
    replicas: int = 1

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


@contextlib.contextmanager
def joined(launcher: LauncherSettings, device: torch.device, *, shards: bool) -> Iterator[World]:
    """Meet the other processes, and part when the block ends.

    Args:
        device: where this process computes.
        shards: the block shards a model, which takes a process group even of one process.

    Raises:
        SettingsError: there are not as many as the settings say.
    """
    here = place()
    found = 1 if here is None else here.size
    if found != launcher.world_size:
        raise SettingsError(
            "the update was started with the wrong number of processes",
            where="launcher",
            expected=f"{launcher.world_size} (processes x nodes)",
            found=found,
            remedy="let `hacpo update` start them, or start as many by hand (docs/update.md)",
        )
    if not shards or (found == 1 and dist.is_initialized()):  # by vLLM, in this process
        yield World()
        return
    if here is not None and device.type == "cuda":
        torch.cuda.set_device(here.local_rank)
    alone: dict[str, Any] = {"store": HashStore(), "rank": 0, "world_size": 1} if found == 1 else {}
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE, **alone)
    try:
        if dist.get_world_size() != found:
            raise SettingsError("not all processes met", expected=found, found=dist.get_world_size())
        yield World(dist.get_rank(), found, launcher.replicas)
    except BaseException:
        if found == 1:
            dist.destroy_process_group()
        raise  # parting would wait for processes that wait for this one; whoever started them ends them
    dist.destroy_process_group()


_PATIENCE = datetime.timedelta(hours=2)
"""How long processes wait for each other: the first one writes checkpoints while the others wait."""
