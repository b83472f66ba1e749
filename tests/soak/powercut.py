"""Power cuts: what a run leaves on the disk if the power goes at any moment, by the weakest promise a filesystem makes.

A run writes down what it does to files (`powercut.c`, preloaded). Cut anywhere, that journal says what the disk may
hold (`disk`): every name must stand for something whole, and a sample of such disks is made, and run to its end.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

from . import checks
from .disk import Disk, Record, Way, read_journal, violations
from .frame import Bench, Part, Problem, SkippedError, Trial
from .sandbox import STEPS, Sandbox, Template, drivers

_SOURCE = Path(__file__).with_name("powercut.c")
_MEANINGLESS = re.compile(
    r"(^|/)\.[^/]*\.tmp-|\.[\w-]{22}\.tmp$|^\.dvc/(tmp/|config)|/\.locks/[^/]*(\.lock|\.lease\.\d+|flock)$|/\.crashes/"
)
"""Names without a promise: of what is unfinished, and of processes, which end with the power."""
_OUTPUT = re.compile(r"artifacts/[^/]+/(data|prompts|(?!metrics|\.saved).*(agent|learner)=[^/]+)")
"""Folders that are one output."""
_PLANNED, _GOES_ON = 12, 2


def run(bench: Bench) -> None:
    """Journal runs from several beginnings, and cut them."""
    shim = build(bench.work)
    bench.tally.planned = _PLANNED
    with Template.of(bench.work) as template:
        bench.spread(lambda trial: _Cuts(trial, template, shim).cut(), range(_PLANNED))


def build(folder: Path) -> Path:
    """The compiled shim.

    Raises:
        SkippedError: this is no Linux, or has no compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not sys.platform.startswith("linux") or compiler is None:
        raise SkippedError("needs Linux and a C compiler")
    folder.mkdir(parents=True, exist_ok=True)
    shim = folder / "powercut.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(shim), str(_SOURCE), "-ldl", "-lpthread"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise SkippedError(f"the shim does not compile: {made.stderr[:300]}")
    return shim


def variables(shim: Path, root: Path, journal: Path, fsync: bool = True) -> dict[str, str]:
    """The environment under which a command writes down what it does below `root`."""
    return {
        "LD_PRELOAD": str(shim),
        "POWERCUT_ROOT": str(root.resolve()),
        "POWERCUT_JOURNAL": str(journal),
        "HACPO_FSYNC": "1" if fsync else "0",
    }


def is_promised(path: str) -> bool:
    """Whether a name stands for something whole, whenever it is there."""
    return not _MEANINGLESS.search(path)


def is_output(path: str) -> bool:
    """Whether a folder is one output."""
    return _OUTPUT.fullmatch(path) is not None


class _Cuts:
    """One journalled run, by a way and from a beginning that the dice choose."""

    def __init__(self, trial: Trial, template: Template, shim: Path) -> None:
        self._trial, self._dice, self._shim = trial, trial.dice, shim
        self._way = self._dice.choice(["run", "run", "repro"])
        kind, steps = self._dice.choice(["kept", "pruned"]), self._dice.randrange(STEPS)
        self._sandbox: Sandbox = template.copy(trial.folder, kind, steps)
        self._journal = trial.folder / "journal"

    def cut(self) -> None:
        """Journal one run, look at its cuts, and go on from some."""
        root, trial = self._sandbox.root, self._trial
        disk = Disk.of(root)
        journalled = dataclasses.replace(self._sandbox, zygote=None)  # the shim is for new processes
        self._drive(journalled, self._way, **variables(self._shim, root, self._journal))
        if trial.problems:
            return
        records = read_journal(self._journal, root)
        trial.count("operations", len(records))
        if self._way == "run":  # DVC flushes nothing: of its own files, nothing is promised
            found = violations(
                copy.deepcopy(disk), records, self._dice, is_promised, is_output, seen=lambda: trial.count("disks")
            )
            if (first := next(found, None)) is not None:
                trial.find("wrong bytes", first)
                return
        for _ in range(_GOES_ON):
            self._go_on(copy.deepcopy(disk), records, self._dice.randint(1, len(records)), self._dice.choice(list(Way)))

    def _go_on(self, disk: Disk, records: list[Record], moment: int, way: Way) -> None:
        """Make a disk that a cut leaves, and have the run finish on it."""
        trial, root = self._trial, self._sandbox.root
        if trial.problems:
            return
        for record in records[:moment]:
            disk.apply(record)
        shutil.rmtree(root)
        disk.write(root, way, self._dice)
        trial.count("went on")
        self._drive(self._sandbox, "run", HACPO_FSYNC="1")
        at = f"after a cut behind operation {moment} of {len(records)} of {self._way} ({way.value})"
        trial.problems[:] = [Problem(one.kind, f"{at}: {one.what}") for one in trial.problems]

    def _drive(self, sandbox: Sandbox, way: str, **environment: str) -> None:
        """To the end, with nothing done by hand, and with all that must hold there."""
        ended = sandbox.call(drivers(sandbox.kind)[way], **environment)
        for problem in checks.of_output(ended):
            self._trial.find(problem.kind, problem.what)
        if ended.code != 0:
            self._trial.find("wedge", f"{way}: exit code {ended.code}: {ended.output[-1500:]}")
        elif not self._trial.problems:
            for problem in checks.finished(self._sandbox, last=way):
                self._trial.find(problem.kind, problem.what)


PART = Part("powercut", "the disk that a power cut leaves, at any moment of a run", run)
