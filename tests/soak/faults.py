"""Every call with which a command names, makes or changes a file fails once with every error that fits.

Each command is run once to see its calls. A site is an operation on a path, with what differs between runs replaced. In
a copy of a finished run the command meets the fault, and must end in one line, or as if nothing had been; the same
command again must go on, and leave the bytes of the undisturbed run. Faults that last stand for a full or a read-only
disk.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import checks, shim, starved
from .forks import Done, Forks
from .frame import Bench, Part, Trial
from .sandbox import copy_tree
from .shim import Fault, Site
from .starved import PIPELINE, Golden

_ERRORS: dict[str, tuple[int, ...]] = {
    "open-new": (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EROFS),
    "open-write": (errno.EIO, errno.EMFILE, errno.EROFS),
    "open-read": (errno.EIO, errno.EMFILE),
    "write": (errno.ENOSPC, errno.EIO),
    "fsync": (errno.EIO,),
    "truncate": (errno.ENOSPC, errno.EIO),
    "mkdir": (errno.ENOSPC, errno.EIO, errno.EROFS),
    "link": (errno.ENOSPC, errno.EIO, errno.EROFS),
    "rename": (errno.ENOSPC, errno.EIO, errno.EROFS),
    "unlink": (errno.EIO, errno.EROFS),
    "rmdir": (errno.EIO, errno.EROFS),
    "chmod": (errno.EIO, errno.EROFS),
    "utime": (errno.EIO, errno.EROFS),
    "close": (errno.EIO,),
}
_LASTING = {errno.ENOSPC: ("write", "rename"), errno.EROFS: ("open-new",)}
"""A disk that is full, or becomes read-only, stays so."""
_REFUSED = 8
"""The exit code of `StorageError`."""


@dataclass(frozen=True)
class Scenario:
    """A command, and the state in which it begins."""

    name: str
    arguments: tuple[str, ...]
    golden: str = "three"
    prepare: Callable[[Path], None] = lambda _folder: None
    wanted: Callable[[Site], bool] = lambda _site: True
    """Which of its sites are its own; others are met in other scenarios."""
    changes: bool = True
    """Whether the run must be whole afterwards; it is not of commands that only write elsewhere."""


def _artifacts(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / "project" / "artifacts" / starved.RUN / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _without(*names: str) -> Callable[[Path], None]:
    return lambda folder: _artifacts(folder, *names)


def _stage(command: str, *options: str, without: tuple[str, ...] = (), name: str = "") -> Scenario:
    return Scenario(name or command, (command, PIPELINE, *options), prepare=_without(*without))


def _books(site: Site) -> bool:
    """What the driver and DVC do; how stages write their outputs is met in their own scenarios."""
    return not (site.path.startswith("project/artifacts/") and ".tmp-" in site.path and ".locks/" not in site.path)


def _forgotten(folder: Path) -> None:
    """Two stages must run, and nothing is in the run cache."""
    _artifacts(folder, "report", f"verdicts/step=0001/{_ADA}")
    shutil.rmtree(folder / "project" / ".dvc" / "cache" / "runs")


_RUN = ("run", PIPELINE, "--jobs", "1")
_ADA, _BO, _CY = (f"agent={name}" for name in ("ada", "bo", "cy"))
SCENARIOS = (
    _stage("resolve"),
    _stage("prepare"),
    _stage("prepare", without=("data", "prompts", "schedule.parquet"), name="prepare anew"),
    _stage("warmup", "--agent", "ada"),
    _stage("warmup", "--agent", "bo", name="warmup from scratch"),
    _stage("generate", "--step", "2", "--agent", "ada"),
    _stage("generate", "--step", "2", "--agent", "cy", without=(f"rollouts/step=0002/{_CY}",), name="generate anew"),
    _stage("verify", "--step", "1", "--agent", "ada"),
    _stage("pool", "--step", "1", "--learner", "ada"),
    _stage("advantage", "--step", "2"),
    _stage("update", "--step", "2", "--agent", "ada"),
    _stage("update", "--step", "2", "--agent", "cy", without=(f"checkpoints/step=0002/{_CY}",), name="update adapter"),
    _stage("evaluate", "--step", "2", "--agent", "cy"),
    _stage("report"),
    Scenario("run", _RUN, "two", _forgotten, _books),
    Scenario("run that restores", _RUN, "two", _without("report", "verdicts", "metrics/verify"), _books),
)


@dataclass(frozen=True)
class Planned:
    """One trial."""

    scenario: Scenario
    fault: Fault

    def __str__(self) -> str:
        lasting = ", and from then on" if self.fault.lasting else ""
        return f"{self.scenario.name}: {errno.errorcode[self.fault.number]} at {self.fault.site}{lasting}"


class Ground:
    """The runs to copy, and processes to run commands in, one for each thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._library = shim.library()
        self._local = threading.local()
        self._all: list[Forks] = []
        self.goldens = {
            "three": Golden.make(folder / "three", self.forks, starved.THREE),
            "two": Golden.make(folder / "two", self.forks, starved.TWO),
        }
        self.bytes = {name: starved.contents(golden.finished) for name, golden in self.goldens.items()}

    @property
    def forks(self) -> Forks:
        """This thread's."""
        if not hasattr(self._local, "forks"):
            self._local.forks = Forks(self.folder / f"out-{threading.get_ident()}", self._library)
            self._all.append(self._local.forks)
        found: Forks = self._local.forks
        return found

    def close(self) -> None:
        """End the processes and remove everything."""
        for forks in self._all:
            forks.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def copy(self, scenario: Scenario, folder: Path) -> None:
        """The state in which a scenario begins."""
        copy_tree(self.goldens[scenario.golden].finished, folder)
        scenario.prepare(folder)


def plan(ground: Ground) -> list[Planned]:
    """Every site of every scenario; the same on every machine with the same libraries.

    With every error where an operation is met first, in its folder and by its command. The same operation on the file's
    neighbours, and on it by other commands, goes through the same code: it has one of the errors, each in turn.
    """
    planned: list[Planned] = []
    met: set[Site] = set()
    turn = 0
    for scenario in SCENARIOS:
        folder, log = ground.folder / "recorded", ground.folder / "log"
        ground.copy(scenario, folder)
        steering = shim.environment(folder, names=starved.NAMES, log=log)
        done = starved.hacpo(ground.forks, folder, *scenario.arguments, **steering)
        assert done.code == 0, f"{scenario.name}: {done.err}"
        for site in sorted(shim.recorded(log)):
            shared = Site(site.operation, site.path.replace(scenario.arguments[0], "STAGE"))
            if not scenario.wanted(site) or (".locks/" in site.path and shared in met):
                continue
            faults = _faults(site)
            alike = {shared, Site(site.operation, f"{shared.path.rpartition('/')[0]}/")}
            if met & alike:
                turn += 1
                faults = [faults[turn % len(faults)]]
            met |= alike
            planned += [Planned(scenario, fault) for fault in faults]
        log.unlink()
        shutil.rmtree(folder)
    return planned


def _faults(site: Site) -> list[Fault]:
    """All that can happen to a call."""
    once = [Fault(site, number) for number in _ERRORS[site.operation]]
    return once + [
        dataclasses.replace(one, lasting=True) for one in once if site.operation in _LASTING.get(one.number, ())
    ]


def _judge_line(trial: Trial, what: str, done: Done, fault: Fault) -> None:
    """What a command that met a fault may say."""
    if done.timed_out:
        trial.find("wedge", f"{what}: did not end")
    if "Traceback" in done.err or done.code == 70:
        trial.find("traceback", f"{what}: {done.err.strip()[-1500:]}")
        return
    lines = [line for line in done.err.splitlines() if line.startswith("hacpo: error: ")]
    if done.code == 0:
        if lines:
            trial.find("refused", f"{what}: an error line, and exit code 0: {lines}")
        return
    reasons = [os.strerror(fault.number).lower()]
    if fault.site.path.startswith("site/"):  # SQLite has its own words
        reasons.append("a database of dvc: ")
    if fault.site.operation == "close":  # and so has Arrow
        reasons.append("error closing file")
    if done.code != _REFUSED or len(lines) != 1 or not any(reason in lines[0].lower() for reason in reasons):
        trial.find("refused", f"{what}: exit code {done.code}, {done.err.strip()[-600:]}")


def attack(ground: Ground, planned: Planned, trial: Trial) -> None:
    """One fault, and the same command again."""
    scenario, fault = planned.scenario, planned.fault
    folder, spent = trial.folder / "it", trial.folder / "spent"
    golden = ground.bytes[scenario.golden]
    steering = shim.environment(folder, names=starved.NAMES, fault=fault, spent=spent)
    for _ in range(2):  # a call that one run makes another need not: of a database that two threads share
        ground.copy(scenario, folder)
        done = starved.hacpo(ground.forks, folder, *scenario.arguments, **steering)
        trial.log.write_text(f"{planned}\nexit code {done.code}\n{done.out}\n{done.err}\n")
        if spent.exists():
            break
        trial.count("did not come up at first")
        shutil.rmtree(folder)
    else:
        trial.find("tool", f"{planned}: the call was not made, on two tries: nothing has failed")
        return
    trial.count("absorbed" if done.code == 0 else "refused")
    trial.count(f"fault: {fault.site.operation} {errno.errorcode[fault.number]}")
    _judge_line(trial, str(planned), done, fault)
    if wrong := starved.half_written(folder, golden):
        trial.find("wrong bytes", f"{planned}: under their own names after the fault: {wrong[:5]}")
    by_dvc = scenario.arguments[0] == "run"  # its temporary files go when the next run begins
    tolerated = by_dvc or fault.lasting or fault.site.operation in ("unlink", "rmdir") or "-old" in fault.site.path
    if not tolerated and (left := starved.leftovers(folder, at_rest=False)):
        trial.find("leftover", f"{planned}: after the fault: {left[:5]}")
    checks.age(folder / "project")
    again = starved.hacpo(ground.forks, folder, *scenario.arguments)
    with trial.log.open("a") as log:
        log.write(f"again: exit code {again.code}\n{again.out}\n{again.err}\n")
    if again.code != 0:
        third = starved.hacpo(ground.forks, folder, *scenario.arguments)
        kind = "wedge" if third.code else "by hand"
        trial.find(kind, f"{planned}: the same command again: exit code {again.code}, {again.err.strip()[-600:]}")
        return
    if scenario.changes:
        found = starved.contents(folder)
        if differ := sorted(name for name in golden.keys() | found.keys() if golden.get(name) != found.get(name)):
            trial.find("wrong bytes", f"{planned}: in the end: {differ[:5]}")
    if left := starved.leftovers(folder):
        trial.find("leftover", f"{planned}: in the end: {left[:5]}")


def run(bench: Bench) -> None:
    """See the module."""
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    ground = Ground(Path(tempfile.mkdtemp(prefix="hacpo-soak-", dir=base)))
    try:
        everything = plan(ground)
        bench.tally.planned = len(everything)
        bench.count("sites", len({(one.scenario.name, one.fault.site) for one in everything}))
        numbers = list(range(len(everything)))
        random.Random(bench.seed).shuffle(numbers)
        bench.spread(lambda trial: attack(ground, everything[trial.number], trial), numbers)
    finally:
        ground.close()


PART = Part("faults", "every call that touches a file fails in turn", run)
