"""What `hacpo run` adds to the work of its stages; see `bench`."""

from __future__ import annotations

import json
from pathlib import Path

from bench import Row, Side, measured
from starting import project

_STAGES = ("generate", "verify", "pool", "advantage", "update", "evaluate")
_FIRST, _LAST = 2, 20


@measured(
    "quickstart",
    ratio=Row("quickstart: wall of a step over compute on its critical path", "<= 1.15"),
    wall=Row("quickstart: wall of a step, s"),
    noop=Row("`hacpo run` with nothing to do after 20 steps, s", "<= 1"),
)
def quickstart(side: Side, folder: Path) -> dict[str, float]:
    """Steps 3 to 20 of the quickstart, evaluations included, and the same command again.

    The critical path of a step: its agents work side by side, so of the stages that one of them has to itself the
    longest of both counts from the step's first table to what all of them wait for (`pool` and `advantage` read
    everybody's verdicts), and again from there.
    """
    run = folder / "artifacts" / "quickstart"
    if not run.exists():
        project(side, folder, "quickstart", steps=_LAST)
        side.run("hacpo", "run", "pipelines/quickstart", "--until", "0", at=folder)
    for kind in run.iterdir():  # all but the start, of this run and of DVC's cache
        for step in kind.glob("step=*") if kind.is_dir() and kind.name != "prompts" else ():
            if step.name != "step=0000":
                side.run("rm", "-r", str(step), at=folder)
    for kept in (".dvc/cache/runs", "artifacts/quickstart/report"):
        side.run("rm", "-rf", kept, at=folder)
    for lock in (folder / "pipelines/quickstart").glob("steps/*/dvc.lock"):
        if lock.parent.name != "0000":
            lock.unlink()
    side.run("hacpo", "run", "pipelines/quickstart", at=folder)
    wall = _finished(run, _LAST) - _finished(run, _FIRST)
    steps = range(_FIRST + 1, _LAST + 1)
    return {
        "wall": wall / len(steps),
        "ratio": wall / sum(_critical(run, step) for step in steps),
        "noop": side.run("hacpo", "run", "pipelines/quickstart", at=folder),
    }


def _critical(run: Path, step: int) -> float:
    """Seconds of the stages on a step's critical path, as they measured themselves."""
    took = {
        (stage, path.stem): json.loads(path.read_text())["seconds"]
        for stage in _STAGES
        for path in (run / "metrics" / stage / f"step={step:04d}").glob("*.json")
    }
    agents = {agent for _, agent in took} - {"all"}

    def longest(*stages: str) -> float:
        return max(sum(took.get((stage, agent), 0.0) for stage in stages) for agent in agents)

    return (
        longest("generate", "verify") + max(longest("pool"), took["advantage", "all"]) + longest("update", "evaluate")
    )


def _finished(run: Path, step: int) -> float:
    """When a step's last agent had finished all that is its own."""
    folders = (run / "metrics" / stage / f"step={step:04d}" for stage in ("update", "evaluate"))
    return max(path.stat().st_mtime for folder in folders for path in folder.glob("*.json"))
