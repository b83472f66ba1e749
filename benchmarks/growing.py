"""Whether a long run's steps stay as cheap as its first; see `bench`."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from bench import Row, Side, measured
from starting import project
from usage import Usage, used

_FEW, _MANY = 20, 300
_WINDOW = 18
_WARM = 30
"""Steps of the long command after which its processes have loaded what they need."""
_EVERY = 0.2


@measured(
    "growth",
    ratio=Row(
        f"processor time of steps {_MANY - _WINDOW + 1} to {_MANY} over steps 3 to {_FEW}, smallest work", "<= 1.05"
    ),
    memory=Row(f"memory of all processes at step {_MANY} over step {_WARM}", "flat"),
    descriptors=Row(f"open files of all processes at step {_MANY} less those at step {_WARM}", "0"),
    few=Row(f"`hacpo run` with nothing to do after {_FEW} of {_MANY} steps, s of processor time", "<= 1"),
    many=Row(f"`hacpo run` with nothing to do after {_MANY} steps, s of processor time", "<= 4"),
)
def growth(side: Side, folder: Path) -> Mapping[str, float]:
    """One run of two tiny agents, in the first round only: to a few steps, with nothing to do, on to many, again.

    Of processes that ended between two looks nobody knows; looks are .2 s apart, a step takes about one second.
    """
    if (folder / "artifacts").exists():
        return {}
    _smallest(side, folder)
    run, command = folder / "artifacts" / "smoke", ("hacpo", "run", "pipelines/smoke")
    early = watched(side, folder, run, *command, "--until", str(_FEW))
    few = side.processor_seconds(*command, "--until", str(_FEW), at=folder)
    late = watched(side, folder, run, *command)
    many = side.processor_seconds(*command, at=folder)
    first = (early[_FEW].seconds - early[2].seconds) / (_FEW - 2)
    last = (late[_MANY].seconds - late[_MANY - _WINDOW].seconds) / _WINDOW
    return {
        "ratio": last / first,
        "memory": late[_MANY].memory / late[_WARM].memory,
        "descriptors": late[_MANY].descriptors - late[_WARM].descriptors,
        "few": few,
        "many": many,
    }


def _smallest(side: Side, folder: Path) -> None:
    """The smoke pipeline with more steps, and as little work in each of them as there can be."""
    project(side, folder, "smoke")
    pipeline = folder / "pipelines" / "smoke"
    (pipeline / "params.yaml").rename(pipeline / "shipped.yaml")
    (pipeline / "params.yaml").write_text(
        f"extends: shipped.yaml\nsteps: {_MANY}\n"
        "agents: {ada: {tiny: {warmup: {steps: 2}}}, bo: {tiny: {warmup: {steps: 2}}}}\n"
        "sampling: {group_size: 2, max_new_tokens: 6}\nbatch: {prompts: 2, minibatch_prompts: 2}\n"
        f"evaluation: {{every: {_MANY}}}\n"
    )


def watched(side: Side, folder: Path, run: Path, *words: str, agents: int = 2) -> dict[int, Usage]:
    """Run a command; step -> what its processes had used when all agents had finished the step.

    Raises:
        CalledProcessError: the command failed.
    """
    found: dict[int, Usage] = {}
    started = _finished(run, agents)
    with subprocess.Popen(side.command(*words), cwd=folder, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(_EVERY)
            step = _finished(run, agents)
            usage = used(process.pid)
            if usage is not None and step > started:
                found |= dict.fromkeys(range(max(found, default=started) + 1, step + 1), usage)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
    return found


def _finished(run: Path, agents: int) -> int:
    """The last step that all agents have updated in."""
    folders = sorted(run.glob("metrics/update/step=*"))
    done = [folder for folder in folders[-2:] if len(list(folder.glob("*.json"))) == agents]
    return int(done[-1].name.removeprefix("step=")) if done else 0
