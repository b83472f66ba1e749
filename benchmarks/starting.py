"""How long commands take from a cold start; see `bench`."""

from __future__ import annotations

import shutil
from pathlib import Path

from bench import Row, Side, measured

_STEP = ("pipelines/smoke", "--step", "1")
_COLD = {
    "help": ("--help",),
    "verify": ("verify", *_STEP, "--agent", "ada"),
    "pool": ("pool", *_STEP, "--learner", "ada"),
    "advantage": ("advantage", *_STEP),
}


@measured(
    "starting",
    help=Row("`hacpo --help`, s of processor time", "<= 0.25"),
    verify=Row("`hacpo verify` cold, s of processor time", "<= 0.6"),
    pool=Row("`hacpo pool` cold, s of processor time", "<= 0.6"),
    advantage=Row("`hacpo advantage` cold, s of processor time", "<= 0.6"),
)
def starting(side: Side, folder: Path) -> dict[str, float]:
    """Each command in a smoke run that has its first step; what it loads is in the system's memory after one round."""
    if not (folder / "artifacts").exists():
        project(side, folder, "smoke")
        side.run("hacpo", "run", "pipelines/smoke", "--until", "1", at=folder)
    return {name: side.processor_seconds("hacpo", *words, at=folder) for name, words in _COLD.items()}


def project(side: Side, folder: Path, name: str, *, steps: int | None = None) -> None:
    """A DVC project with one shipped pipeline, of its own number of steps unless another is named."""
    source, target = side.root / "pipelines" / name / "params.yaml", folder / "pipelines" / name / "params.yaml"
    target.parent.mkdir(parents=True)
    text = source.read_text()
    if steps is not None:
        lines = [f"steps: {steps}" if line.startswith("steps:") else line for line in text.splitlines()]
        text = "\n".join(lines) + "\n"
    target.write_text(text)
    shutil.copy(side.root / ".dvcignore", folder)
    side.run("dvc", "init", "--quiet", "--no-scm", at=folder)
