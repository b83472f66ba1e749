"""What a disk, or the system before it, refuses: one error for it, whichever library met it and whatever became of it.

Python and Arrow raise OSError; safetensors and tokenizers put the system's number into a text of their own; SQLite has
codes. Readers take what they meet for a damaged file, so what an error came from counts as well.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
}
MACHINES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)
"""What no content of a file explains."""
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
        found = _OF_RUST.search(str(error))
        if found is not None and int(found[1]) in _REMEDIES:
            return Refusal(int(found[1]), os.strerror(int(found[1])).lower())
    return None


def refused(path: Path, reason: str | BaseException) -> StorageError:
    """The error for a write that the disk refused: by its word for it, or by the error that it raised."""
    found = None if isinstance(reason, str) else refusal(reason)
    if found is None:
        text = str(reason)
        found = next((Refusal(number, text) for number in _REMEDIES if os.strerror(number).lower() == text), None)
        found = found or Refusal(None, text)
    return StorageError(
        f"cannot be written: {found.reason}",
        where=path,
        remedy=f"nothing was changed; {found.remedy}",
        reason=found.reason,
    )


def made_plain(error: Exception) -> HacpoError | None:
    """The error that a user is told: one of ours as it is, unless the machine is why it was raised; None if nobody
    foresaw it."""
    if isinstance(error, StorageError):
        return error
    found = refusal(error)
    ours = error if isinstance(error, HacpoError) else None
    if found is None or (ours is not None and found.number not in MACHINES):
        return ours
    where = found.path or getattr(error, "where", None) or "a file"
    return StorageError(f"the system refuses it: {found.reason}", where=where, remedy=found.remedy, reason=found.reason)
