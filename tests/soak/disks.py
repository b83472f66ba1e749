"""A run on a disk that is really full, by room or by number of files, and has a little more at every try; and a run
whose folder of locks cannot be written.

The disk is a small tmpfs that only this trial has. A try must end in one line, or well; the last one must, with the
bytes of the undisturbed run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import starved
from .forks import Done, Forks
from .frame import Bench, Part, SkippedError, Trial
from .sandbox import copy_tree
from .starved import PIPELINE, Golden

_RUN = ("run", PIPELINE, "--jobs", "1")
_ROOM, _FILES = "room", "files"
_MOST_TRIES = 40


def _needed(folder: Path) -> tuple[int, int]:
    """Bytes in whole pages, and files, of a folder."""
    found = [path.lstat() for path in [folder, *folder.rglob("*")]]
    return sum(-(-one.st_size // 4096) * 4096 for one in found), len(found)


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SkippedError(f"no disk can be mounted here: {done.stderr.strip()[:120]}")


@contextlib.contextmanager
def _disk(folder: Path, options: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", options, "tmpfs", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def _judge(trial: Trial, what: str, done: Done, reasons: tuple[str, ...]) -> None:
    lines = [line for line in done.err.splitlines() if line.startswith("hacpo: error: ")]
    if done.timed_out or done.code < 0:
        trial.find("wedge", f"{what}: killed, or did not end: {done.code}, {done.err[-600:]}")
    elif "Traceback" in done.err or done.code == 70:
        trial.find("traceback", f"{what}: {done.err.strip()[-1500:]}")
    elif done.code and (done.code != 8 or len(lines) != 1 or not any(reason in lines[0] for reason in reasons)):
        trial.find("refused", f"{what}: exit code {done.code}, {done.err.strip()[-600:]}")


def _fill(forks: Forks, golden: Golden, trial: Trial, kind: str) -> None:
    """The project's outputs on a disk that grows."""
    wanted = starved.contents(golden.finished)
    before, after = _needed(golden.fresh), _needed(golden.finished)
    at = 0 if kind == _ROOM else 1
    step = max(1, (after[at] - before[at]) // trial.dice.randrange(12, 20))
    limit = before[at] + trial.dice.randrange(step) + (65536 if kind == _ROOM else 20)
    disk = trial.folder / "disk"
    name = "size" if kind == _ROOM else "nr_inodes"
    with _disk(disk, f"{name}={limit}"):
        shutil.copytree(golden.fresh, disk, symlinks=True, dirs_exist_ok=True)
        for number in range(_MOST_TRIES):
            done = starved.hacpo(forks, disk, *_RUN)
            trial.count(f"{kind}: {'completed' if done.code == 0 else 'refused'}")
            with trial.log.open("a") as log:
                log.write(f"{name}={limit}: exit code {done.code}\n{done.err}\n")
            what = f"{name}={limit}, try {number + 1}"
            _judge(trial, what, done, ("no space left on device", "disk i/o error", "database or disk is full"))
            if wrong := starved.half_written(disk, wanted):
                trial.find("wrong bytes", f"{what}: {wrong[:5]}")
            if done.code == 0:
                break
            limit += step
            _mount("-o", f"remount,{name}={limit}", str(disk))
        else:
            trial.find("wedge", f"{kind}: not done after {_MOST_TRIES} tries, with {limit}")
        if starved.contents(disk) != wanted:
            trial.find("wrong bytes", f"{kind}: in the end")
        if left := starved.leftovers(disk):
            trial.find("leftover", f"{kind}: in the end: {left[:5]}")


def _read_only_locks(forks: Forks, golden: Golden, trial: Trial) -> None:
    """The folder of the locks is on a disk that is read-only."""
    folder = trial.folder / "it"
    copy_tree(golden.finished, folder)
    locks = folder / "project" / "artifacts" / starved.RUN / ".locks"
    shutil.rmtree(locks)
    with _disk(locks, "ro"):
        for command in (_RUN, ("verify", PIPELINE, "--step", "1", "--agent", "ada"), ("prune", PIPELINE)):
            done = starved.hacpo(forks, folder, *command)
            _judge(trial, f"{command[0]} with read-only locks", done, ("read-only file system",))
            if done.code != 8:
                trial.find("refused", f"{command[0]} with read-only locks: exit code {done.code}, {done.err[-400:]}")
            trial.count("read-only locks: refused")
        for command in (("status", PIPELINE), ("audit", PIPELINE)):
            done = starved.hacpo(forks, folder, *command)
            if done.code != 0:
                trial.find("refused", f"{command[0]} with read-only locks: exit code {done.code}, {done.err[-400:]}")
    if starved.contents(folder) != starved.contents(golden.finished):
        trial.find("wrong bytes", "read-only locks")
    if starved.hacpo(forks, folder, *_RUN).code != 0:
        trial.find("wedge", "read-only locks: the run does not go on afterwards")


def run(bench: Bench) -> None:
    """See the module."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise SkippedError("mounting a small disk needs Linux and root")
    work = Path(tempfile.mkdtemp(prefix="hacpo-soak-"))
    forks = Forks(work / "out")
    try:
        golden = Golden.make(work / "golden", forks, starved.TWO)

        def trial(one: Trial) -> None:
            if one.number % 5 == 4:
                _read_only_locks(forks, golden, one)
            else:
                _fill(forks, golden, one, (_ROOM, _FILES)[one.number % 2])

        bench.tally.planned = 5
        parallel, bench.parallel = bench.parallel, 1  # one process that forks
        bench.spread(trial, range(5))
        bench.parallel = parallel
    finally:
        forks.close()
        shutil.rmtree(work, ignore_errors=True)


PART = Part("disks", "disks that are full, and read-only locks", run, share=0.3)
