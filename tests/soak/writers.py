"""Two commands at once on one run: every ordered pair, with the kernel's locks and without.

Afterwards one `hacpo run` finishes the run, and it must be as if nobody had come between.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import checks
from .frame import Bench, Part, Problem, Trial
from .golden import digest
from .processes import Started
from .sandbox import PIPELINE, STEPS, Ended, Sandbox, Template, drivers, environment, hacpo
from .zygote import FORKED_STAGES, NO_FLOCK

_BUSY, _DVC_FAILED = 7, 255
_EXPORTED, _COPIED = "exported", "variant"
_DELAYS = (0.0, 0.02, 0.1, 0.3, 1.0, 3.0)
"""Seconds between the two."""
_MINUTES = 10.0
_ASKING = threading.Lock()
_LOCKLESS = Path(__file__).resolve().parent / "lockless"


@dataclass(frozen=True)
class Command:
    """One of the pair. `{step}` is the step under way, `{done}` the last one that is done.

    Attributes:
        codes: exit codes that are no problem, of all states that a run may be in: 3, what it reads is not made yet.
        beside: and those that are none where the other command writes: 7 (busy) is not for every one; 4, what it reads
            is not what the records say yet.
        writes: whether it does, in the run or in DVC's records.
    """

    words: tuple[str, ...]
    codes: tuple[int, ...]
    beside: tuple[int, ...] = ()
    writes: bool = True


def _stage(name: str, *options: str) -> Command:
    return Command((name, PIPELINE, *options), (0, 3), (_BUSY,))


COMMANDS = {
    "run": Command((), (0,), (_BUSY,)),
    "repro": Command((), (0,), (_DVC_FAILED,)),
    "plan": Command(("plan", PIPELINE), (0,), (_BUSY,)),
    "status": Command(("status", PIPELINE), (0,), writes=False),
    "audit": Command(("audit", PIPELINE), (0, 2), (1,), writes=False),  # 2: nothing is made yet
    "repair": Command(("repair", PIPELINE), (0,), (_BUSY,)),
    "resolve": _stage("resolve"),
    "generate": _stage("generate", "--step", "{step}", "--agent", "ada"),
    "advantage": _stage("advantage", "--step", "{step}"),
    "update": _stage("update", "--step", "{step}", "--agent", "bo"),
    "evaluate": _stage("evaluate", "--step", "{done}", "--agent", "bo"),
    "report": _stage("report"),
    "prune": Command(("prune", PIPELINE), (0, 2, 3), (_BUSY,)),
    "restore": Command(("restore", PIPELINE, "--step", "{done}", "--agent", "bo"), (0, 2, 3), (_BUSY,)),
    "export": Command(
        ("export", PIPELINE, _EXPORTED, "--step", "{done}", "--agent", "ada", "--force"), (0, 3), (4,), writes=False
    ),
    "copy": Command(("copy", PIPELINE, f"pipelines/{_COPIED}"), (0, 3), (2, _BUSY)),
}
LOCKS = ("flock", "no flock")


def pairs(seed: int) -> list[tuple[str, str, str]]:
    """(first command, second, locks): all of them, in an order of the seed's."""
    every = list(itertools.product(COMMANDS, COMMANDS, LOCKS))
    random.Random(seed).shuffle(every)
    return every


def judged(ends: Sequence[tuple[str, int | None]]) -> Iterator[Problem]:
    """What the exit codes of the two must not be.

    Args:
        ends: name and exit code of each; None: it did not end.
    """
    for (name, code), (other, _) in zip(ends, reversed(ends), strict=True):
        command = COMMANDS[name]
        if code not in command.codes + (command.beside if COMMANDS[other].writes else ()):
            yield Problem("wedge" if code is None else "refused", f"{name}: exit code {code} beside {other}")
    if all(code == _BUSY for _, code in ends):
        yield Problem("refused", "each was refused for the other")
    if all(name == "copy" for name, _ in ends) and {code for _, code in ends} not in ({0, 2}, {3}):
        yield Problem("refused", "of two copies to one folder, one is made, and the other finds it there")


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
    ends: list[tuple[str, int | None]] = []
    title = f"{first} + {second} ({locks}), {done} steps done"
    for number, name in enumerate((first, second)):
        own = replace(sandbox, log_name=f"log-{number + 1}.txt")
        command = _command(name, sandbox.kind, done)
        begun.append((name, command, own.start(command, **variables)))
        time.sleep(dice.choice(_DELAYS) if number == 0 else 0.0)
    for name, command, started in begun:
        ended = _ended(command, started)
        for problem in checks.of_output(ended):
            trial.find(problem.kind, f"{title}: {problem.what}")
        ends.append((name, ended.code))
        trial.count(f"{name}: {ended.code}")
    trial.count(locks)
    for problem in judged(ends):
        trial.find(problem.kind, f"{title}: {problem.what}")
    if not trial.problems:
        for what in _made_elsewhere(sandbox, template, done, ends):
            trial.find("wrong bytes", f"{title}: {what}")
        _finish(trial, sandbox, title, variables)


def _command(name: str, kind: str, done: int) -> list[str]:
    if name in ("run", "repro"):
        return drivers(kind, jobs=1)[name]
    words = [word.format(step=min(done + 1, STEPS), done=done) for word in COMMANDS[name].words]
    return hacpo(*words)


def _made_elsewhere(
    sandbox: Sandbox, template: Template, done: int, ends: Sequence[tuple[str, int | None]]
) -> Iterator[str]:
    """What `export` and `copy` have made that they do not make undisturbed, of a finished run: both take what is made
    once, the weights of a step and the start. Refused, they leave nothing."""
    for name, path in (("export", _EXPORTED), ("copy", f"artifacts/{_COPIED}"), ("copy", f"pipelines/{_COPIED}")):
        if name not in dict(ends):
            continue
        made = sandbox.root / path
        if made.exists() != ((name, 0) in ends):
            yield f"{name}: {path} is {'' if made.exists() else 'not '}there, exit codes {ends}"
        elif made.exists():
            with _ASKING:
                kind, step = ("kept", done) if name == "export" else (sandbox.kind, STEPS)
                wanted = _undisturbed(template, kind, name, step) / path
            yield from (f"{name}: {path}/{one}" for one in differences(made, wanted, complete=done > 0))


@functools.cache
def _undisturbed(template: Template, kind: str, name: str, done: int) -> Path:
    """The project in which a command has made what it makes, of a finished run that has all checkpoints."""
    folder = template.folder / f"{name}-{kind}-{done}"
    shutil.rmtree(folder, ignore_errors=True)
    ended = template.copy(folder, kind, STEPS).call(_command(name, kind, done))
    if ended.code != 0:
        raise RuntimeError(f"undisturbed, {name} ended with {ended.code}: {ended.output}")
    return folder / "project"


def differences(made: Path, wanted: Path, *, complete: bool) -> list[str]:
    """Files that are not what they are undisturbed. Of a card, which says what was known just then, the lines with the
    weights' hashes count.

    Args:
        complete: nothing may be missing; a start that was just being made is not copied.
    """

    def content(path: Path, base: Path) -> object:
        if path.name == "README.md":
            return [line for line in path.read_text().splitlines() if "SHA-256" in line and "settings.json" not in line]
        return complete if path.name == "dvc.lock" and not complete else digest(path, path.relative_to(base))

    there, known = (
        {
            str(path.relative_to(base)): content(path, base)
            for path in base.rglob("*")
            if path.is_file() and ".locks" not in path.parts
        }
        for base in (made, wanted)
    )
    differ = {path for path in there if path not in known or there[path] != known[path]}
    return sorted(differ | (known.keys() - there.keys() if complete else set()))


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
