"""What reaches the disk, and in which order: a name counts only once that which it names would outlive a power cut.

A file that was written and renamed may be empty under its new name after a power cut, or still have the old one:
POSIX promises neither content before fsync(2) of the file, nor a name before fsync(2) of its folder. So: every file,
then every folder inside, then the rename, then the folder that holds the name. (Pillai et al., "All File Systems Are
Not Created Equal", OSDI 2014.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SWITCH = "HACPO_FSYNC"
"""Environment variable: `0` flushes nothing, whatever settings say (a machine whose disks are all for scratch)."""

_WITHOUT = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a filesystem says that has no fsync for such a file; it promises nothing then, and nothing can be done."""
_AT_ONCE = 8
_wanted = [True]


@contextlib.contextmanager
def flushing(wanted: bool) -> Iterator[None]:
    """Whether this process flushes what it writes while the block runs (setting `disk.fsync`)."""
    _wanted.append(wanted)
    try:
        yield
    finally:
        _wanted.pop()


def is_flushing() -> bool:
    """Whether this process flushes what it writes."""
    return _wanted[-1] and os.environ.get(SWITCH) != "0"


def flush(path: Path) -> None:
    """Have a file's content, or a folder's list of names, on the disk.

    Raises:
        OSError: the disk refuses. The content is to be written anew: a second fsync would call it good.
    """
    if not is_flushing():
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in _WITHOUT:
            raise
    finally:
        os.close(opened)


def flush_all(path: Path) -> None:
    """A file, or a folder with all that is in it: files first, then folders from the innermost out. Links are names,
    which their folder holds.

    Raises:
        OSError: the disk refuses.
    """
    if not is_flushing():
        return
    if not path.is_dir():
        flush(path)
        return
    files, folders = [], []
    for at, _, names in os.walk(path):
        folders.append(Path(at))
        files += [file for name in names if stat.S_ISREG((file := Path(at, name)).lstat().st_mode)]
    if len(files) > 2:
        with ThreadPoolExecutor(_AT_ONCE) as threads:  # a journal takes many at once nearly as fast as one
            list(threads.map(flush, files))
    else:
        for file in files:
            flush(file)
    for folder in reversed(folders):
        flush(folder)


def flush_names(folders: Iterable[Path], top: Path, known: set[Path]) -> None:
    """Folders that have got names, and the folders that hold their own, up to `top`.

    Args:
        known: folders whose names are known to be on the disk; those found to be are added.

    Raises:
        OSError: the disk refuses.
    """
    todo = set(folders)
    for folder in list(todo):
        at = folder
        while at != top and at not in known and at.parent != at:
            known.add(at)
            at = at.parent
            todo.add(at)
    for folder in sorted(todo, key=lambda path: -len(path.parts)):
        flush(folder)


def make_folders(folder: Path) -> None:
    """Make a folder and those that hold it, where they are not there, with their names on the disk.

    Raises:
        OSError: the disk refuses.
    """
    missing = [at for at in (folder, *folder.parents) if not at.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for at in missing:
        flush(at.parent)


def put_in_place(whole: Path, path: Path, aside: Path) -> None:
    """Give a file or folder that has been written its final name, in place of what is there.

    Args:
        aside: what a folder that is there is renamed to. It is for the caller to remove.

    Raises:
        OSError: the disk refuses; where there was nothing of that name, there is nothing.
    """
    flush_all(whole)
    new = not os.path.lexists(path)
    if path.is_dir():
        path.rename(aside)
        whole.rename(path)
    else:
        whole.replace(path)
    try:
        flush(path.parent)
    except OSError:
        if new:
            path.rename(whole)  # for the caller to remove, as before
        raise


def set_aside(path: Path, aside: Path) -> None:
    """Rename a folder that is about to be removed, so that no power cut leaves a part of it under its own name.

    Raises:
        OSError: the disk refuses.
    """
    path.rename(aside)
    flush(path.parent)
