"""`accelerate launch`: its command, and what a user's own `accelerate config` file may say.

Such a file decides how processes are started (which GPUs, ports, CPU affinity) and FSDP's options. What it says about
the computation itself must be what params.yaml says: a run's numbers follow params.yaml alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hacpo.errors import SettingsError, first_line
from hacpo.settings.engine import LauncherSettings
from hacpo.settings.root import Settings

DEFAULT = "default"
"""The value of `launcher.accelerate_config` that stands for the file which `accelerate config` writes."""

_SHIPPED = Path(__file__).with_name("accelerate.yaml")
_WHERE = "launcher.accelerate_config"
_PRECISION = {"float32": "no", "bfloat16": "bf16"}


def accelerate_command(settings: Settings, root: Path) -> list[str]:
    """The command that starts this machine's processes; a module's name and its arguments follow.

    Args:
        root: the project's.

    Raises:
        SettingsError: the user's file cannot be used, or contradicts the settings.
    """
    launcher, extra = settings.launcher, ["--main_process_port", "0"]
    path = accelerate_file(launcher, root)
    if path is not None:
        config = read_accelerate_config(path)
        check_accelerate_config(config, settings, path)
        if config.main_process_port is not None:
            extra = []
        if config.distributed_type == "MULTI_CPU":
            extra += ["--multi_gpu"]  # without it, accelerate starts one process and says nothing
    return [
        *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path or _SHIPPED)),
        *("--num_processes", str(launcher.world_size), *extra),
    ]


def accelerate_file(launcher: LauncherSettings, root: Path) -> Path | None:
    """The user's own `accelerate config` file; None where the settings name none."""
    if launcher.accelerate_config is None:
        return None
    if launcher.accelerate_config == DEFAULT:
        from accelerate.commands.config import default_config_file

        return Path(default_config_file)
    return root / launcher.accelerate_config


def read_accelerate_config(path: Path) -> Any:
    """A file as accelerate reads it (`ClusterConfig`).

    Raises:
        SettingsError: there is none, or accelerate refuses it.
    """
    if not path.is_file():
        raise SettingsError(
            "there is no such file", where=f"{_WHERE}: {path}", remedy="write one with `accelerate config`"
        )
    from accelerate.commands.config import load_config_from_file

    try:
        config = load_config_from_file(str(path))
    except Exception as error:  # ValueError, TypeError, KeyError, AttributeError or yaml's own, for odd content
        reason = first_line(error, 200)
        raise SettingsError(f"accelerate cannot read it: {reason}", where=f"{_WHERE}: {path}") from None
    if not hasattr(config, "num_processes"):
        raise SettingsError(
            "is for another place to compute", where=f"{_WHERE}: {path}", expected="compute_environment LOCAL_MACHINE"
        )
    return config


def check_accelerate_config(config: Any, settings: Settings, path: Path) -> None:
    """Refuse a file that contradicts the settings.

    Raises:
        SettingsError: one line for the first key that does.
    """
    for key, expected, given, setting in _rules(config, settings):
        if str(given).lower() not in {str(value).lower() for value in expected}:
            raise SettingsError(
                f"{key} contradicts {setting}",
                where=f"{_WHERE}: {path}",
                expected=" or ".join(str(value) for value in expected),
                found=given,
                remedy="correct one of the two",
            )


def _rules(config: Any, settings: Settings) -> Iterator[tuple[str, tuple[Any, ...], Any, str]]:
    """(key, what fits, what is said, which setting it has to fit); of what is left unsaid, nothing."""
    launcher, engine = settings.launcher, settings.engine
    kinds = {"cpu": ("MULTI_CPU", "FSDP", "MULTI_GPU"), "cuda": ("FSDP", "MULTI_GPU")}
    kind = getattr(config.distributed_type, "value", config.distributed_type)
    where = f"engine.device {engine.device} on {launcher.world_size} processes"
    yield "distributed_type", kinds.get(engine.device, kinds["cpu"]), kind, where
    if config.num_processes != -1:
        processes = f"launcher ({launcher.processes} processes x {launcher.nodes} nodes)"
        yield "num_processes", (launcher.world_size,), config.num_processes, processes
    yield "num_machines", (launcher.nodes,), config.num_machines, "launcher.nodes"
    if config.mixed_precision is not None:
        yield "mixed_precision", (_PRECISION[engine.dtype],), config.mixed_precision, f"engine.dtype {engine.dtype}"
    if config.use_cpu:
        yield "use_cpu", (False,) if engine.device != "cpu" else (True,), True, f"engine.device {engine.device}"
    compiled = _named(config.dynamo_config, "dynamo_").get("dynamo_backend", "NO")
    yield "dynamo_config.dynamo_backend", ("NO",), compiled, "how updates are computed (without torch.compile)"
    yield "mpirun_config", (False,), bool(config.mpirun_config), "how processes are started (launcher.command may)"
    if kind == "FSDP":
        yield from _fsdp_rules(_named(config.fsdp_config, "fsdp_"), settings)
    yield from _parallel_rules(_named(config.parallelism_config, "parallelism_config_"), launcher)


def _named(section: dict[str, Any], prefix: str) -> dict[str, Any]:
    """A section with its keys in full: accelerate takes them without their prefix too."""
    return {key if key.startswith(prefix) else prefix + key: value for key, value in section.items()}


def _fsdp_rules(config: dict[str, Any], settings: Settings) -> Iterator[tuple[str, tuple[Any, ...], Any, str]]:
    version = config.get("fsdp_version", 1)  # accelerate's own default
    yield "fsdp_config.fsdp_version", (2,), version, "how updates are computed (FSDP2)"
    for name in ("fsdp_offload_params", "fsdp_activation_checkpointing_offload"):
        yield (
            f"fsdp_config.{name}",
            (False,),
            config.get(name) or False,
            "how updates are computed (nothing is offloaded)",
        )
    if config.get("fsdp_activation_checkpointing"):
        checkpointing = settings.optimizer.gradient_checkpointing
        yield "fsdp_config.fsdp_activation_checkpointing", (checkpointing,), True, "optimizer.gradient_checkpointing"


def _parallel_rules(
    config: dict[str, Any], launcher: LauncherSettings
) -> Iterator[tuple[str, tuple[Any, ...], Any, str]]:
    wanted = {
        "dp_replicate_size": launcher.replicas,
        "dp_shard_size": launcher.world_size // launcher.replicas,
        **dict.fromkeys(("tp_size", "cp_size", "sp_size"), 1),
    }
    for name, size in wanted.items():
        given = config.get(f"parallelism_config_{name}", size)
        yield f"parallelism_config.{name}", (size,), given, f"launcher.replicas {launcher.replicas}"
