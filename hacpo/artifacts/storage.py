"""Writing so that a path that exists is whole, and one error for what a disk, or the system before it, refuses.

Python and Arrow raise OSError; safetensors and tokenizers put the system's number into a text of their own; SQLite has
codes. Readers take what they meet for a damaged file, so what an error came from counts as well.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hacpo.artifacts.durability import make_folders, put_in_place
from hacpo.errors import HacpoError, StorageError

_ROOM, _WRITABLE = "make room", "fix the permissions"
_REMEDIES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "allow larger files (`ulimit -f`)",
    errno.EROFS: "make the disk writable",
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.EIO: "look after the disk (the system's log says more)",
    errno.EMFILE: "allow more open files (`ulimit -n`)",
    errno.ENFILE: "allow more open files (of the whole system)",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ESTALE: "look after the disk's server",
}
MACHINES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)
"""What no content of a file explains."""
_CLOCKS_SECONDS = 2.0
"""How far the system's clock for processes and the one for files may be apart."""
_OF_PROCESS = re.compile(r"\.(.+)\.tmp-\d+(-[a-z]+)?", re.DOTALL)
"""The name of a temporary sibling: what it is to become, a process's number, and what became of it."""
_OF_RUST = re.compile(r"\(os error (\d+)\)")
_OF_SQLITE = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_READONLY: errno.EROFS, sqlite3.SQLITE_IOERR: errno.EIO}


@dataclass(frozen=True)
class Refusal:
    """What was refused.

    Attributes:
        number: the system's; None if it is not known.
        reason: in words.
        path: which file, where the error says it.
    """

    number: int | None
    reason: str
    path: str | None = None

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return f"{_REMEDIES.get(self.number or 0, 'make room or fix the permissions')}, then repeat the command"


def refusal(error: BaseException) -> Refusal | None:
    """What the system refused where this error was raised, or one that it came from; None if that was not it."""
    return next((found for one in _origins(error) if (found := _refusal(one)) is not None), None)


def _origins(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was raised for or from: `from None` hides the latter, but does not forget them."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__


def _refusal(error: BaseException) -> Refusal | None:
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        names = [name for name in (error.filename, error.filename2) if isinstance(name, (str, os.PathLike))]
        return Refusal(error.errno, os.strerror(error.errno).lower(), str(names[-1]) if names else None)
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)
        number = None if code is None else _OF_SQLITE.get(code & 0xFF)
        if number is not None or code == sqlite3.SQLITE_CANTOPEN:
            reason = os.strerror(number).lower() if number else str(error)
            return Refusal(number, reason, "a database of DVC")
    if isinstance(error, Exception) and not isinstance(error, HacpoError):
        match = _OF_RUST.search(str(error))
        if match is not None and int(match[1]) in _REMEDIES:
            return Refusal(int(match[1]), os.strerror(int(match[1])).lower())
    return None


def refused(path: Path, reason: str | BaseException) -> StorageError:
    """The error for a write that the disk refused: by its word for it, or by the error that it raised."""
    cause = None if isinstance(reason, str) else refusal(reason)
    if cause is None:
        text = str(reason)
        cause = next((Refusal(number, text) for number in _REMEDIES if os.strerror(number).lower() == text), None)
        cause = cause or Refusal(None, text)
    return StorageError(
        f"cannot be written: {cause.reason}",
        where=path,
        remedy=f"nothing was changed; {cause.remedy}",
        reason=cause.reason,
    )


def made_plain(error: BaseException) -> HacpoError | None:
    """The error that a user is told: one of ours as it is, unless the machine is why it was raised; None if nobody
    foresaw it."""
    if isinstance(error, StorageError):
        return error
    cause = refusal(error)
    ours = error if isinstance(error, HacpoError) else None
    if cause is None or (ours is not None and cause.number not in MACHINES):
        return ours
    where = cause.path or getattr(error, "where", None) or "a file"
    return StorageError(f"the system refuses it: {cause.reason}", where=where, remedy=cause.remedy, reason=cause.reason)


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary sibling to write to (a file, or a folder that the caller makes), flushed to the disk and renamed to
    `path` when the block ends (`hacpo.artifacts.durability`).

    If the block raises, the sibling is removed and `path` stays as it was. Siblings that a killed process left are
    removed; those of another that is at work here stay.

    Raises:
        StorageError: the disk is full or refuses the write.
    """
    scratch = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    retired = scratch.with_name(f"{scratch.name}-old")
    try:
        make_folders(path.parent)
        for sibling in path.parent.glob(f".{glob.escape(path.name)}.tmp-*"):
            if was_left_behind(sibling):
                remove(sibling)
        yield scratch
        put_in_place(scratch, path, retired)
    except StorageError as error:  # of a write inside this one: name what the user knows
        _undo(path, scratch, retired)
        raise refused(path, error.reason) from None
    except HacpoError:
        _undo(path, scratch, retired)
        raise
    except Exception as error:
        _undo(path, scratch, retired)
        if refusal(error) is not None or _is_arrows(error):
            raise refused(path, error) from None
        if isinstance(error, OSError) and error.strerror and _is_about(error, (scratch, retired)):
            # A file in a folder's place, a name that this file system does not have.
            raise refused(path, f"{error.strerror.lower()} ({error.filename})") from None
        raise
    except BaseException:
        _undo(path, scratch, retired)
        raise
    else:
        remove(retired)


def put(whole: Path, path: Path) -> None:
    """Give a folder that is whole the name of another, in place of what is there; where the disk refuses, both stay.

    Raises:
        StorageError: the disk refuses.
    """
    retired = path.with_name(f".{path.name}.tmp-{os.getpid()}-old")
    try:
        make_folders(path.parent)
        put_in_place(whole, path, retired)
    except OSError as error:
        with contextlib.suppress(OSError):
            if retired.exists():
                if path.exists():
                    path.rename(whole)
                retired.rename(path)
        raise refused(path, error) from None
    remove(retired)


def meant_for(name: str) -> str | None:
    """The name that a temporary sibling of this name is to have, or had until it was set aside; None: it is none."""
    sibling = _OF_PROCESS.fullmatch(name)
    return sibling[1] if sibling else None


def was_left_behind(path: Path) -> bool:
    """Whether something was being written, or removed, by a process that is no more."""
    return meant_for(path.name) is not None and not _is_being_written(path)


def _is_being_written(sibling: Path) -> bool:
    """Whether another process of this machine is at work on a temporary sibling: it is there, and was before the
    sibling, for numbers of processes are given anew."""
    import psutil

    number = sibling.name.rpartition(".tmp-")[2].partition("-")[0]
    if not number.isdecimal() or int(number) == os.getpid():
        return False
    try:
        process = psutil.Process(int(number))
        began = process.create_time() - _CLOCKS_SECONDS
        return bool(process.status() != psutil.STATUS_ZOMBIE and began <= sibling.lstat().st_ctime)
    except (psutil.Error, OSError):
        return False


def _is_about(error: OSError, paths: tuple[Path, ...]) -> bool:
    """Whether the system refused one of these temporary paths, what is in it, or a folder on the way."""
    named = {Path(name) for name in (error.filename, error.filename2) if isinstance(name, (str, os.PathLike))}
    return any(path in (name, *name.parents) or name in path.parents for name in named for path in paths)


def _is_arrows(error: Exception) -> bool:
    """Arrow forgets the system's number when a file cannot be closed."""
    return isinstance(error, OSError) and error.errno is None


def _undo(path: Path, scratch: Path, retired: Path) -> None:
    """Put back what was to be replaced, and remove what was being written. Where the disk refuses this too, the next
    try removes it."""
    with contextlib.suppress(OSError):
        if retired.exists():
            if path.exists():  # in place, but not on the disk
                path.rename(scratch)
            retired.rename(path)
    with contextlib.suppress(OSError):
        remove(scratch)


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write JSON with sorted keys, atomically."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def disk_bytes(folder: Path) -> int:
    """Bytes of all files below a folder, those left out that go while it is looked at."""
    size = 0
    for at, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.stat(os.path.join(at, name))
                size += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return size
