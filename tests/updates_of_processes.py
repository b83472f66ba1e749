"""Updates of several processes: their commands, their processes, and whether they computed the same."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl

UPDATE = ["update", "pipelines/small", "--step", 2, "--agent", "ada"]
TWO = ["--set", "launcher={processes: 2}"]
SAME = ("policy", "policy_config", "loss", "grad_norm", "updates", "own.ratio_mean", "cross.clipped")
HALVES = "optimizer.micro_batch_size=8"
"""The fixture's updates see 16 responses: two micro-batches, one for each process."""


def bytes_of(out: Path, name: str = "model.safetensors") -> bytes:
    return (out / "checkpoints/step=0002/agent=ada" / name).read_bytes()


def trace_of(out: Path) -> pl.DataFrame:
    return pl.read_parquet(out / "updates/step=0002/agent=ada/trace.parquet")


def metrics_of(out: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((out / "metrics/update/step=0002/ada.json").read_text())
    return found


def assert_same(one: Path, other: Path) -> None:
    assert {name: metrics_of(one)[name] for name in SAME} == {name: metrics_of(other)[name] for name in SAME}
    for name in ("model.safetensors", "trainer/optimizer.safetensors", "trainer/state.json", "config.json"):
        assert bytes_of(one, name) == bytes_of(other, name), name
    assert trace_of(one).equals(trace_of(other))


def ranks(mark: str) -> list[int]:
    """Processes of the update that writes to `mark`, those that torchrun started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            if mark in words and b"\0RANK=" in b"\0" + (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
