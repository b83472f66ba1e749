"""What every part of the attack shares: trials with a seed of their own, and findings with all that repeats them.

A part is a name and a function that is given a `Bench`; the bench runs its trials, some side by side, until they are
done or the time is up, keeps the sandbox of every trial that found something, and counts.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from .ending import kill_started

KINDS = ("wrong bytes", "wedge", "traceback", "leftover", "orphan", "by hand", "refused", "tool")
"""What can be found. `wedge`: a command that does not go on, on two tries; `by hand`: it does on the second, which a
person had to ask for; `refused`: an exit code or a line that is not documented; `tool`: the attack itself failed."""
_LAST_OUTPUT = 4000


class SkippedError(Exception):
    """A part cannot run on this machine; the message says why."""


@dataclass(frozen=True)
class Problem:
    """Something that must not be, in one trial."""

    kind: str
    what: str


@dataclass(frozen=True)
class Finding:
    """A problem with what repeats it."""

    part: str
    kind: str
    what: str
    seed: int
    trial: int
    sandbox: str
    output: str

    def again(self) -> str:
        """The command that does this trial alone."""
        return f"python -m tests.soak {self.part} --seed {self.seed} --only {self.trial}"


@dataclass
class Tally:
    """What came of one part."""

    name: str
    trials: int = 0
    planned: int = 0
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """What was done, in the part's own words: kills by target, faults by call."""
    skipped: str = ""
    seconds: float = 0.0

    def of(self, kind: str) -> int:
        """How many findings are of a kind."""
        return sum(finding.kind == kind for finding in self.findings)


@dataclass
class Trial:
    """One trial: its own dice, its own folder, and what it says."""

    number: int
    dice: random.Random
    folder: Path
    """Empty, and removed afterwards unless something was found. What is printed goes to `log*.txt` in it."""
    bench: Bench
    problems: list[Problem] = field(default_factory=list)

    @property
    def log(self) -> Path:
        """What a part writes itself of what it did."""
        return self.folder / "log.txt"

    def find(self, kind: str, what: str) -> None:
        """Note a problem."""
        assert kind in KINDS, kind
        self.problems.append(Problem(kind, what))

    def count(self, what: str, by: int = 1) -> None:
        """Add to the part's counts; seen at once by whoever watches."""
        self.bench.count(what, by)


@dataclass
class Bench:
    """Runs the trials of one part."""

    part: str
    seed: int
    work: Path
    """Where sandboxes are made."""
    deadline: float = float("inf")
    """By `time.monotonic`: no trial begins after it."""
    parallel: int = 1
    kills: int = 1000
    """For parts that kill: how often."""
    only: int | None = None
    """Do this trial alone."""
    told: Callable[[Tally], None] = lambda _tally: None
    """Is called whenever something was counted."""
    tally: Tally = field(init=False)
    _guard: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.tally = Tally(self.part)

    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.deadline

    def count(self, what: str, by: int = 1) -> None:
        """Add to the part's counts."""
        with self._guard:
            self.tally.counts[what] += by
            self.told(self.tally)

    def spread(self, trial: Callable[[Trial], None], numbers: Iterable[int]) -> None:
        """Do trials, `parallel` at a time, in the order of their numbers, until they or the time end.

        A trial's dice depend on the seed, the part and the trial's number alone, so any trial can be done again alone.
        """
        numbers = iter([self.only] if self.only is not None else numbers)
        with ThreadPoolExecutor(self.parallel) as threads, _trials_ended():
            running: set[Future[None]] = set()
            for number in numbers:
                running.add(threads.submit(self._do, trial, number))
                if len(running) == self.parallel:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for one in done:
                        one.result()
                if self.is_over():
                    break
            for one in running:
                one.result()

    def _do(self, work: Callable[[Trial], None], number: int) -> None:
        folder = self.work / f"{self.part}-{self.seed}-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        trial = Trial(number, random.Random(f"{self.seed} {self.part} {number}"), folder, self)
        try:
            work(trial)
        except Exception:
            trial.find("tool", traceback.format_exc())
        with self._guard:
            self.tally.trials += 1
            output = "".join(_tail(log) for log in sorted(folder.glob("log*.txt")))
            self.tally.findings += [
                Finding(self.part, problem.kind, problem.what, self.seed, number, str(folder), output)
                for problem in trial.problems
            ]
            self.told(self.tally)
        if not trial.problems:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _trials_ended() -> Iterator[None]:
    """Have trials at work fail at once where the block is left by an interrupt: their threads would be waited for."""
    try:
        yield
    except BaseException:
        kill_started()
        raise


def _tail(log: Path) -> str:
    return log.read_bytes()[-_LAST_OUTPUT:].decode(errors="replace")


@dataclass(frozen=True)
class Part:
    """One kind of attack."""

    name: str
    about: str
    run: Callable[[Bench], None]
    share: float = 1.0
    """Of the time, beside the other parts'."""


def run_parts(
    parts: Iterable[Part], make_bench: Callable[[Part, float], Bench], minutes: float | None = None
) -> Iterator[Tally]:
    """Run parts one after another; each is given its share of the time that is left."""
    left = list(parts)
    end = None if minutes is None else time.monotonic() + minutes * 60
    while left:
        part = left[0]
        begun = time.monotonic()
        deadline = (
            float("inf") if end is None else begun + (end - begun) * part.share / sum(other.share for other in left)
        )
        bench = make_bench(part, deadline)
        try:
            part.run(bench)
        except SkippedError as reason:
            bench.tally.skipped = str(reason)
        bench.tally.seconds = time.monotonic() - begun
        yield bench.tally
        left.pop(0)
