"""What the warm driver saves; see `bench`."""

from __future__ import annotations

import shutil
from pathlib import Path

from bench import Row, Side, measured
from starting import project

_STEPS = 2


@measured(
    "repro",
    ratio=Row(
        f"`dvc repro` over `hacpo run`: the smoke pipeline's {_STEPS} steps, start-up and report included", "<= 3"
    ),
    run=Row("`hacpo run`: the same, s a step"),
    repro=Row("`dvc repro`: the same, s a step"),
)
def repro(side: Side, folder: Path) -> dict[str, float]:
    """Both from the same warm start, each in a copy of its own."""
    base = folder / "base"
    if not base.exists():
        base.mkdir()
        project(side, base, "smoke", steps=_STEPS)
        side.run("hacpo", "run", "pipelines/smoke", "--until", "0", at=base)
    ways = {"run": ("hacpo", "run", "pipelines/smoke"), "repro": ("dvc", "repro", "pipelines/smoke/dvc.yaml")}
    took = {}
    for name, words in ways.items():
        copy = folder / name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(base, copy)
        took[name] = side.run(*words, at=copy) / _STEPS
    return {"ratio": took["repro"] / took["run"], **took}
