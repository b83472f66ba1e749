"""DVC's list of who reads and writes what, `.dvc/tmp/rwlock`: kept whole at any moment, and used as DVC uses it.

DVC (3.67, `dvc/rwlock.py`) holds an entry for every path that a stage reads or writes while its command runs, and
refuses what collides with one. A run holds an entry of its own on its artifacts, so `dvc repro` refuses before it
removes anything of a run under way, and a run does not begin beside `dvc repro`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hacpo.artifacts.durability import flushing
from hacpo.artifacts.storage import atomic
from hacpo.artifacts.text_files import load_json
from hacpo.errors import BusyError
from hacpo.pipeline.locking.locks import has_flock
from hacpo.pipeline.records.distrust import refuse_odd

Entry = dict[str, Any]
"""`pid` and `cmd` of a process."""

NAME, _GUARD = "rwlock", "rwlock.lock"
_WAIT_SECONDS = 2.0
"""For a DVC that is being killed to be gone."""


@contextmanager
def edited(folder: str, _filesystem: object = None, hardlink: bool = False) -> Iterator[dict[str, dict[str, Any]]]:
    """The entries, to be changed inside the block; DVC's `_edit_rwlock`, but written by rename.

    DVC truncates the file and writes it anew, so a kill between the two leaves every DVC command of the project
    refusing. All writers hold the guard: what is unreadable was cut off, and nobody is writing it.

    Args:
        folder: DVC's folder for temporary files.
        _filesystem: DVC passes it.
        hardlink: whether DVC is set to lock with hard links.

    Raises:
        LockError: another process keeps the guard.
        StorageError: the disk refuses.
    """
    path = Path(folder) / NAME
    with guard(Path(folder), _GUARD, hardlink=hardlink):
        recorded, written = read(path)
        whole = recorded or {}
        entries: dict[str, dict[str, Any]] = {
            "read": defaultdict(list, whole.get("read", {})),
            "write": defaultdict(dict, whole.get("write", {})),
        }
        _drop_impostors(entries, written)
        yield entries
        if recorded is None or json.dumps(entries) != json.dumps({"read": {}, "write": {}, **recorded}):
            # Not flushed: processes end with the power, and `repair` begins a list anew that cannot be read.
            with flushing(False), atomic(path) as scratch:
                scratch.write_text(json.dumps(entries), encoding="utf-8")


def temporary_folder(root: Path) -> Path | None:
    """DVC's folder for temporary files, of the repository that a folder lies in; None if it lies in none."""
    resolved = root.resolve()
    return next((at / ".dvc" / "tmp" for at in (resolved, *resolved.parents) if (at / ".dvc").is_dir()), None)


def guard(folder: Path, name: str, *, hardlink: bool) -> Any:
    """DVC's lock of that name. Where the filesystem has no locks, DVC itself refuses to work, and the lease that
    `Books` holds beside this one has to do.

    Raises:
        ArtifactError: something else than a file is in its place.
    """
    from dvc.lock import LockNoop, make_lock

    refuse_odd(folder / name)
    if not hardlink and not has_flock(folder):
        return LockNoop()
    return make_lock(str(folder / name), tmp_dir=str(folder), hardlink_lock=hardlink)


def read(path: Path) -> tuple[dict[str, Any] | None, float]:
    """The entries in a file, `{"write": {path: entry}, "read": {path: [entry]}}` (None if it was cut off), and when it
    was written, in seconds since 1970."""
    try:
        found, written = load_json(path), path.stat().st_mtime
    except FileNotFoundError:
        return {}, 0.0
    except ValueError:
        return None, 0.0
    return (found if _is_well_formed(found) else None), written


def _is_well_formed(found: Any) -> bool:
    """Whether DVC would accept it."""
    if not isinstance(found, dict) or not all(isinstance(found.get(kind, {}), dict) for kind in ("read", "write")):
        return False
    held = [*found.get("write", {}).values()]
    for several in found.get("read", {}).values():
        held += several if isinstance(several, list) else [None]
    entries = [entry for entry in held if isinstance(entry, dict)]
    typed = all(isinstance(entry.get("pid"), int) and isinstance(entry.get("cmd"), str) for entry in entries)
    return found.keys() <= {"read", "write"} and len(entries) == len(held) and typed


def _process(entry: Entry, written: float) -> str:
    """What became of the process of an entry: `there`, `gone`, or `other`: a zombie, or a process of another command
    line that got the number later, because whoever is in the list was there when it was written."""
    import psutil

    try:
        process = psutil.Process(entry["pid"])
        if process.status() == psutil.STATUS_ZOMBIE:
            return "other"
        # The entry has sys.argv: without the interpreter's own options, and with a path for the program.
        arguments = entry["cmd"].partition(" ")[2]
        same = process.create_time() <= written + 1 or " ".join(process.cmdline()).endswith(arguments)
    except psutil.AccessDenied:
        return "there"
    except (psutil.Error, ValueError):
        return "gone"
    return "there" if same else "other"


def _drop_impostors(entries: dict[str, dict[str, Any]], written: float) -> None:
    """Remove what DVC would take for a process at work for ever. Those that are gone it removes where they matter."""
    for paths in entries.values():
        for path, held in list(paths.items()):
            if isinstance(held, dict):
                if _process(held, written) == "other":
                    del paths[path]
            elif kept := [entry for entry in held if _process(entry, written) != "other"]:
                paths[path] = kept
            else:
                del paths[path]


def without_reading(entered: Any) -> Any:
    """DVC's `rwlock`, but without an entry for what only reads in a folder that this process has a `Claim` on: nobody
    else may write there, and DVC writes its list twice for every look at a stage."""

    @functools.wraps(entered)
    def entered_if_needed(folder: str, fs: Any, cmd: str, read: list[str], write: list[str], hardlink: bool) -> Any:
        claimed = tuple(f"{path}/" for path in _claimed)
        if not write and claimed and all(f"{path}/".startswith(claimed) for path in read):
            return contextlib.nullcontext()
        return entered(folder, fs, cmd, read, write, hardlink)

    return entered_if_needed


_claimed: set[str] = set()
"""The folders that this process has entered."""


def mend(folder: str, hardlink: bool) -> bool:
    """Begin the list anew if it was cut off, and drop what blocks without reason; returns whether it had been."""
    with edited(folder, hardlink=hardlink):
        return read(Path(folder) / NAME)[0] is None


class Claim:
    """This process's entry on a folder: it reads there, which keeps every DVC stage that would write there away.

    Not a writing entry: `dvc status` may look at a run under way. DVC lets a process pass its own entries, which it
    knows by process and command line.

    Args:
        folder: DVC's folder for temporary files.
        claimed: the folder to hold, as DVC writes paths (absolute, resolved).
    """

    def __init__(self, folder: str, claimed: str, hardlink: bool) -> None:
        self._folder, self._claimed, self._hardlink = folder, claimed, hardlink
        self._mine: Entry = {"pid": os.getpid(), "cmd": " ".join(sys.argv)}

    def take(self) -> None:
        """Enter it; a second time does nothing, but brings it back where a damaged list was mended.

        Raises:
            BusyError: a DVC command works on one of the folder's stages.
        """
        deadline = time.monotonic() + _WAIT_SECONDS
        while blocker := self._take():
            if time.monotonic() > deadline:
                words = str(blocker["cmd"]).split()
                name = " ".join([Path(words[0]).name.replace("__main__.py", "dvc"), *words[1:]]) if words else "DVC"
                raise BusyError(
                    f"`{name}` (process {blocker['pid']}) works on this pipeline",
                    where=os.path.relpath(self._claimed),
                    remedy="wait for it to end, or stop it",
                )
            time.sleep(0.1)

    def _take(self) -> Entry | None:
        """Enter it, or return who is in the way."""
        path = Path(self._folder) / NAME
        recorded, _ = read(path)
        if self._mine in ((recorded or {}).get("read", {}).get(self._claimed) or []):
            return None
        with edited(self._folder, hardlink=self._hardlink) as entries:
            written = read(path)[1]
            for at, entry in entries["write"].items():
                overlaps = f"{at}/".startswith(f"{self._claimed}/") or f"{self._claimed}/".startswith(f"{at}/")
                if overlaps and entry != self._mine and _process(entry, written) == "there":
                    return dict(entry)
            entries["read"][self._claimed].append(self._mine)
        _claimed.add(self._claimed)
        return None

    def give_back(self) -> None:
        """Remove the entry."""
        _claimed.discard(self._claimed)
        with edited(self._folder, hardlink=self._hardlink) as entries:
            kept = [entry for entry in entries["read"].pop(self._claimed, []) if entry != self._mine]
            if kept:
                entries["read"][self._claimed] = kept
