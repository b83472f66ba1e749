"""The library that makes disks fail (`faults.c`): compiled where it is needed, and what steers it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .frame import SkippedError

_SOURCE = Path(__file__).with_name("faults.c")


def library() -> Path:
    """The compiled library, made once per version of its source.

    Raises:
        SkippedError: this machine cannot make or preload it.
    """
    if sys.platform != "linux":
        raise SkippedError("calls are intercepted by a preloaded library, which only Linux has in this form")
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise SkippedError("there is no C compiler (cc, gcc or clang) for the library that makes disks fail")
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"hacpo-soak-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    made = folder / f"faults-{digest}.so"
    if not made.is_file():
        scratch = made.with_suffix(f".{os.getpid()}")
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(scratch), str(_SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SkippedError(f"{Path(compiler).name} cannot compile {_SOURCE.name}: {done.stderr.strip()[:200]}")
        scratch.replace(made)
    return made


@dataclass(frozen=True, order=True)
class Site:
    """One place where a command touches the disk: what it does, and the path with all that differs between runs
    replaced."""

    operation: str
    path: str

    def __str__(self) -> str:
        return f"{self.operation} {self.path}"


@dataclass(frozen=True)
class Fault:
    """At the `nth` call of a site, this happens.

    Attributes:
        lasting: from then on every call that changes something fails, as on a full or read-only disk.
    """

    site: Site
    number: int
    nth: int = 1
    lasting: bool = False

    @property
    def words(self) -> str:
        """For the library."""
        return f"{self.number} {'rest' if self.lasting else 'once'} {self.nth} {self.site.operation} {self.site.path}"


def environment(
    root: Path, *, names: str = "", log: Path | None = None, fault: Fault | None = None, spent: Path | None = None
) -> dict[str, str]:
    """Variables for a process that has the library; `spent` exists afterwards if the call was made and has failed."""
    steered = {"HACPO_FAULTS_ROOT": str(root.resolve()), "HACPO_FAULTS_NAMES": names}
    if log is not None:
        steered["HACPO_FAULTS_LOG"] = str(log)
    if fault is not None:
        steered["HACPO_FAULTS_FAIL"] = fault.words
        steered["HACPO_FAULTS_SPENT"] = str(spent)
    return steered


def recorded(log: Path) -> Counter[Site]:
    """How often each site was called, by what the library wrote down."""
    calls: Counter[Site] = Counter()
    if log.is_file():
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            _, operation, path = line.split(" ", 2)
            calls[Site(operation, path)] += 1
    return calls
