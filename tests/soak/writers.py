"""Two commands at once on one run: every ordered pair, with the kernel's locks and without.

Afterwards one `hacpo run` finishes the run, and it must be as if nobody had come between.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

from . import checks
from .frame import Bench, Part, Trial
from .processes import Started
from .sandbox import PIPELINE, STEPS, Ended, Sandbox, Template, drivers, environment, hacpo
from .zygote import FORKED_STAGES, NO_FLOCK

_BUSY, _DVC_FAILED = 7, 255
_EXPORTED, _COPIED = "exported", "variant"
_DELAYS = (0.0, 0.02, 0.1, 0.3, 1.0, 3.0)
"""Seconds between the two."""
_MINUTES = 10.0
_LOCKLESS = Path(__file__).resolve().parent / "lockless"


@dataclass(frozen=True)
class Command:
    """One of the pair. `{step}` is the step under way, `{done}` the last one that is done.

    Attributes:
        codes: exit codes that are no problem beside another command: 0 and 7 (busy) are not for every one. 3: what it
            reads is just being made; 4: and is not what the records say yet.
    """

    words: tuple[str, ...]
    codes: tuple[int, ...]


def _stage(name: str, *options: str) -> Command:
    return Command((name, PIPELINE, *options), (0, _BUSY, 3))


COMMANDS = {
    "run": Command((), (0, _BUSY)),
    "repro": Command((), (0, _DVC_FAILED)),
    "plan": Command(("plan", PIPELINE), (0, _BUSY)),
    "status": Command(("status", PIPELINE), (0,)),
    "audit": Command(("audit", PIPELINE), (0, 1)),
    "repair": Command(("repair", PIPELINE), (0, _BUSY)),
    "resolve": _stage("resolve"),
    "generate": _stage("generate", "--step", "{step}", "--agent", "ada"),
    "advantage": _stage("advantage", "--step", "{step}"),
    "update": _stage("update", "--step", "{step}", "--agent", "bo"),
    "evaluate": _stage("evaluate", "--step", "{done}", "--agent", "bo"),
    "report": _stage("report"),
    "prune": Command(("prune", PIPELINE), (0, _BUSY, 2, 3)),
    "restore": Command(("restore", PIPELINE, "--step", "{done}", "--agent", "bo"), (0, _BUSY, 2, 3)),
    "export": Command(("export", PIPELINE, _EXPORTED, "--step", "{done}", "--agent", "ada", "--force"), (0, 3, 4)),
    "copy": Command(("copy", PIPELINE, f"pipelines/{_COPIED}"), (0, 2, 3, _BUSY)),
}
LOCKS = ("flock", "no flock")


def pairs(seed: int) -> list[tuple[str, str, str]]:
    """(first command, second, locks): all of them, in an order of the seed's."""
    every = list(itertools.product(COMMANDS, COMMANDS, LOCKS))
    random.Random(seed).shuffle(every)
    return every


def run(bench: Bench) -> None:
    """Every pair once."""
    every = pairs(bench.seed)
    bench.tally.planned = len(every)
    with Template.of(bench.work) as template:
        bench.spread(lambda trial: _disturb(trial, template, *every[trial.number % len(every)]), range(len(every)))


def _disturb(trial: Trial, template: Template, first: str, second: str, locks: str) -> None:
    dice, done = trial.dice, trial.dice.randrange(STEPS + 1)
    sandbox = template.copy(trial.folder, dice.choice(["kept", "pruned"]), done)
    variables = {FORKED_STAGES: "1"}
    if locks == "no flock":
        variables |= _without_locks(sandbox)
    begun: list[tuple[str, list[str], Started]] = []
    for number, name in enumerate((first, second)):
        own = replace(sandbox, log_name=f"log-{number + 1}.txt")
        command = _command(name, sandbox.kind, done)
        begun.append((name, command, own.start(command, **variables)))
        time.sleep(dice.choice(_DELAYS) if number == 0 else 0.0)
    for name, command, started in begun:
        ended = _ended(command, started)
        for problem in checks.of_output(ended):
            trial.find(problem.kind, f"{first} + {second} ({locks}): {problem.what}")
        if ended.code not in COMMANDS[name].codes:
            kind = "wedge" if ended.code is None else "refused"
            trial.find(kind, f"{first} + {second} ({locks}): {name}: exit code {ended.code}: {ended.output[-1000:]}")
        trial.count(f"{name}: {ended.code}")
    trial.count(locks)
    if not trial.problems:
        _finish(trial, sandbox, f"{first} + {second} ({locks})", variables)


def _command(name: str, kind: str, done: int) -> list[str]:
    if name in ("run", "repro"):
        return drivers(kind, jobs=1)[name]
    words = [word.format(step=min(done + 1, STEPS), done=done) for word in COMMANDS[name].words]
    return hacpo(*words)


def _without_locks(sandbox: Sandbox) -> dict[str, str]:
    """Turn flock off. DVC itself is told to lock by hard links, as docs/reliability.md says; such a lock is held while
    its file is there, and flock's files stay."""
    for name in ("lock", "rwlock.lock"):
        (sandbox.root / ".dvc" / "tmp" / name).unlink(missing_ok=True)
    config = sandbox.root / ".dvc" / "config"
    config.write_text(config.read_text() + "    hardlink_lock = true\n")
    return {"PYTHONPATH": os.pathsep.join((str(_LOCKLESS), environment()["PYTHONPATH"])), NO_FLOCK: "1"}


def _ended(command: list[str], started: Started) -> Ended:
    with started:
        try:
            code: int | None = started.process.wait(_MINUTES * 60)
        except subprocess.TimeoutExpired:
            code = None
    return Ended(tuple(command), code, started.output())


def _finish(trial: Trial, sandbox: Sandbox, title: str, variables: dict[str, str]) -> None:
    for made in (_EXPORTED, f"pipelines/{_COPIED}", f"artifacts/{_COPIED}"):
        shutil.rmtree(sandbox.root / made, ignore_errors=True)
    ended = sandbox.call(drivers(sandbox.kind, jobs=1)["run"], **variables)
    problems = list(checks.of_output(ended))
    for problem in problems:
        trial.find(problem.kind, f"{title}: {problem.what}")
    if ended.code != 0:
        trial.find("wedge", f"{title}: run afterwards: exit code {ended.code}: {ended.output[-1500:]}")
    else:
        for problem in checks.finished(sandbox, last="run"):
            trial.find(problem.kind, f"{title}: {problem.what}")


PART = Part("writers", "two commands at once, in every ordered pair, with flock and without", run, share=2.0)
