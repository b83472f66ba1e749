"""What must hold of a sandbox whose run is finished, whatever was done to it."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from . import processes
from .frame import Problem
from .sandbox import PIPELINE, RUN, Ended, Sandbox, drivers, dvc, hacpo

_ORPHAN_SECONDS = 10.0
_TEMPORARY = re.compile(r"\..*\.tmp(-.*)?|.*\.[\w-]{22}\.tmp")
"""What hacpo and DVC write to before they rename."""
_DVC_TMP = re.compile(r"btime|lock|rwlock|rwlock\.lock|flock|dvc\.lease\.\d+|\w+_checksum_cache.*|exps")
_LOCKS = re.compile(r".*\.lock|.*\.lease\.\d+|flock|policies")
_FAULT = 70


def of_output(ended: Ended) -> Iterator[Problem]:
    """A command that ran into a fault of ours, whatever it was to do."""
    name = " ".join(ended.command[2:])
    if "Traceback (most recent call last)" in ended.output:
        yield Problem("traceback", f"{name}: {ended.output[ended.output.index('Traceback') :][:2000]}")
    elif ended.code == _FAULT:
        yield Problem("traceback", f"{name}: exit code {_FAULT}: {ended.output[-500:]}")


def finished(sandbox: Sandbox, last: str) -> Iterator[Problem]:
    """Everything: bytes, what hacpo and DVC say, what lies about, what still runs.

    Args:
        last: the driver that finished it; the other one must find nothing to do.
    """
    for process in processes.orphans(str(sandbox.folder), _ORPHAN_SECONDS):
        yield Problem("orphan", processes.describe(process))
    ways = drivers(sandbox.kind, jobs=1)
    nothing_to_do = (ways["repro"], "up to date") if last == "run" else (ways["run"], "everything is done already")
    if last == "repro":  # DVC knows nothing of retention: the next `hacpo run` prunes
        yield from _says(sandbox, *nothing_to_do)
    for kind, what in sandbox.golden.differences(sandbox.root, RUN):
        yield Problem(kind, what)
    for command, expected in (
        *([nothing_to_do] if last == "run" else []),
        (hacpo("status", PIPELINE), "next: nothing, all outputs are there"),
        (hacpo("audit", PIPELINE), ": no finding"),
        (dvc("status"), sandbox.golden.status),
    ):
        yield from _says(sandbox, command, expected)
    yield from leftovers(sandbox.root)
    yield from damaged_objects(sandbox.root / ".dvc" / "cache" / "files" / "md5")


def _says(sandbox: Sandbox, command: list[str], expected: str) -> Iterator[Problem]:
    """A command that does not say what it should."""
    ended = sandbox.call(command)
    yield from of_output(ended)
    stanzas = _stanzas(expected)  # of `dvc status`, in the order in which the disk names folders
    said = _stanzas(ended.output) == stanzas if stanzas else expected in ended.output
    if ended.code != 0 or not said:
        name = " ".join(command[2:])
        yield Problem("wrong bytes", f"{name}: exit code {ended.code}, expected {expected!r}: {ended.output[-1500:]}")


def _stanzas(text: str) -> list[str]:
    """What `dvc status` says of each stage."""
    return sorted(one.strip() for one in re.split(r"^(?=\S)", text, flags=re.MULTILINE) if one.startswith("pipelines/"))


def age(root: Path) -> None:
    """Make what killed processes were writing beside locks look old: it goes with the next command only if nobody can
    be at work on it."""
    for folder in (root / "artifacts" / RUN / ".locks", root / ".dvc" / "tmp"):
        for path in folder.glob(".*.tmp-*"):
            os.utime(path, (time.time() - 3600,) * 2)


def leftovers(root: Path) -> Iterator[Problem]:
    """What no finished run has, outside what `Golden` compares."""
    for at, folders, names in os.walk(root):
        for name in [*folders, *names]:
            path = Path(at, name)
            if _TEMPORARY.fullmatch(name):
                yield Problem("leftover", str(path.relative_to(root)))
    for folder, known in ((root / ".dvc" / "tmp", _DVC_TMP), (root / "artifacts" / RUN / ".locks", _LOCKS)):
        for path in folder.iterdir() if folder.is_dir() else []:
            if not known.fullmatch(path.name) and not _TEMPORARY.fullmatch(path.name):
                yield Problem("leftover", str(path.relative_to(root)))
    for path in sorted(root.iterdir()):
        if path.name not in (".dvc", ".dvcignore", ".git", ".gitignore", "artifacts", "models", "pipelines"):
            yield Problem("leftover", path.name)
    for path in sorted((root / "artifacts").iterdir()):
        if path.name not in (RUN, ".gitignore"):
            kind = "traceback" if path.name == ".crashes" else "leftover"
            yield Problem(kind, str(path.relative_to(root)))
    for key in (root / ".dvc" / "cache" / "runs").glob("*/*"):
        if not any(key.iterdir()):
            yield Problem("leftover", f"empty {key.relative_to(root)}")


def damaged_objects(cache: Path) -> Iterator[Problem]:
    """Objects of DVC's cache that are not what their names say."""
    for path in cache.glob("*/*"):
        name = f"{path.parent.name}{path.name.removesuffix('.dir')}"
        if not _TEMPORARY.fullmatch(path.name) and hashlib.md5(path.read_bytes()).hexdigest() != name:
            yield Problem("wrong bytes", f"the object {path.parent.name}/{path.name} of the cache is damaged")
