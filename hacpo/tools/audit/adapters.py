"""Checkpoints that hold a LoRA adapter: of the size that the settings say, and of the base that is there."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from hacpo.artifacts.text_files import load_json
from hacpo.artifacts.weights import ADAPTER_BASE, ADAPTER_CONFIG, ADAPTER_FILES, ADAPTER_WEIGHTS, adapter_config
from hacpo.settings.agents import AdapterSettings
from hacpo.tools.audit.audit_run import AuditRun

_BY_ARCHITECTURE = {"target_modules", "fan_in_fan_out"}
"""Keys that depend on the model's layers, which are not known here."""


def check_adapter(run: AuditRun, folder: Path, agent: str, settings: AdapterSettings, names: Collection[str]) -> None:
    """Check the adapter of one checkpoint; `names` are the folder's files."""
    for name in ADAPTER_FILES:
        if name not in names:
            run.find("checkpoint", folder / name, expected="a file", found="no such file")
    for name in sorted(name for name in names if name.endswith(".safetensors") and name != ADAPTER_WEIGHTS):
        run.find("checkpoint", folder / name, expected="no such file", found="weights beside the adapter's")
    first = run.layout.checkpoint(0, agent)
    if ADAPTER_CONFIG in names:
        wanted = adapter_config(
            base=first.relative_to(run.pipeline.root).as_posix(),
            rank=settings.rank,
            alpha=settings.alpha,
            targets=sorted(settings.targets) if isinstance(settings.targets, list) else [],
            transposed=False,
        )
        free = _BY_ARCHITECTURE - ({"target_modules"} if isinstance(settings.targets, list) else set())
        _compare(run, folder / ADAPTER_CONFIG, wanted, free)
    if ADAPTER_BASE in names:
        policy = run.policy(0, agent)
        if policy is None:
            run.skip("the base of an adapter", "the checkpoint is not there")
        inside = Path("..", "..", *first.parts[-2:]).as_posix()
        _compare(run, folder / ADAPTER_BASE, {"folder": inside, "policy": policy}, set() if policy else {"policy"})


def _compare(run: AuditRun, path: Path, wanted: dict[str, Any], free: set[str]) -> None:
    """Every key of a JSON file; those that are `free` must be there and may say anything."""
    try:
        content = load_json(path)
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        run.find("checkpoint", path, expected="a JSON object", found="not readable")
        return
    for key in sorted(wanted.keys() | content.keys()):
        if key not in content:
            run.find("checkpoint", path, column=key, expected="a value", found="no such key")
        elif key not in wanted:
            run.find("checkpoint", path, column=key, expected="no such key", found=content[key])
        elif key not in free and content[key] != wanted[key]:
            run.find("checkpoint", path, column=key, expected=wanted[key], found=content[key])
