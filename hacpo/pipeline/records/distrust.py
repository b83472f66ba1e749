"""DVC's cache, believed only where what an entry holds is what its name says; and files hashed only where they end."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hacpo.errors import ArtifactError

_OF_OUTPUT = {"path", "hash", "md5", "size", "nfiles"}
"""What DVC says of an output of ours."""

_HASH = re.compile(r"[0-9a-f]{32}(\.dir)?")
"""What an object of DVC's cache is called."""


def open_regular_files_alone() -> None:
    """Have DVC (dvc_objects 5) refuse to open a pipe or a device, in this process from here on, be it to hash it or as
    one of its own files: it would wait for the one, or read the other, without end."""
    from dvc_objects.fs.local import FsspecLocalFileSystem

    files: Any = FsspecLocalFileSystem
    open_any = files.open

    def open_regular(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
        refuse_odd(Path(path))
        return open_any(self, path, *arguments, **options)

    if open_any.__name__ != open_regular.__name__:
        files.open = open_regular


def refuse_odd_names() -> None:
    """Have DVC (dvc_data 3) take no path for a hash, and none that leads out of a folder for a file in it, in this
    process from here on. Locks and lists of folders' files may be a stranger's: DVC would restore, and remove, what
    such names lead to.

    What it meets then raises an ArtifactError.
    """
    from dvc_data.hashfile.db.local import LocalHashFileDB
    from dvc_data.hashfile.tree import Tree

    objects: Any = LocalHashFileDB
    trees: Any = Tree
    any_path, any_files = objects.oid_to_path, trees.from_list

    def path_of_hash(self: Any, oid: str) -> str:
        if not _HASH.fullmatch(oid):
            raise _odd_name("a hash", "32 hexadecimal digits, for a folder with .dir", oid)
        return str(any_path(self, oid))

    def files_inside(listed: Any, *arguments: Any, **options: Any) -> Any:
        """Of lists in the cache, in locks and in the run cache alike."""
        tree = any_files(listed, *arguments, **options)
        for parts, *_ in tree:
            if not {"", ".", ".."}.isdisjoint(parts):
                raise _odd_name("a file of a folder", "a path within the folder", "/".join(parts))
        return tree

    if any_path.__name__ != path_of_hash.__name__:
        objects.oid_to_path, trees.from_list = path_of_hash, staticmethod(files_inside)


def _odd_name(what: str, expected: str, found: str) -> ArtifactError:
    return ArtifactError(
        f"one of DVC's files names {what} that is none",
        where="dvc.lock, or a list of files in DVC's cache",
        expected=expected,
        found=repr(found)[:200],
        remedy="hacpo and DVC write no such names: take neither locks nor cache from where this came",
    )


def refuse_odd(path: Path) -> None:
    """Refuse a pipe, a socket, a device, or links in a circle.

    Raises:
        ArtifactError: it is one.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:  # what else is wrong is said by whoever opens it
        if error.errno == errno.ELOOP:
            raise ArtifactError(
                "is a link that leads in a circle", where=os.path.relpath(path), remedy="remove the link"
            ) from None
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ArtifactError("is no regular file", where=os.path.relpath(path), remedy="put a file in its place")


@contextmanager
def distrusting(repo: Any) -> Iterator[None]:
    """Have DVC hash every object and every entry of its run cache that it comes across, and remove what is damaged.

    By itself it takes an object that is write-protected for good: restores it, and puts it in the place of a file
    that has just been made and should have its content.
    """
    if "_load_cache" in vars(repo.stage_cache):  # within such a block
        yield
        return
    caches, runs = [repo.cache.repo, repo.cache.legacy], repo.stage_cache
    for cache in caches:
        cache.check = functools.partial(check_object, cache)
    runs._load_cache = functools.partial(_entry, runs, runs._load_cache)
    try:
        yield
    finally:
        for changed, name in [(runs, "_load_cache"), *((cache, "check") for cache in caches)]:
            delattr(changed, name)


def check_object(cache: Any, oid: str, check_hash: bool = True, _info: Any = None) -> Any:  # noqa: ARG001
    """As `HashFileDB.check` of DVC, but hashing always, whatever notes and permissions say; a damaged object goes.

    Raises:
        ObjectFormatError: it is damaged.
    """
    from dvc_data.hashfile.hash import hash_file
    from dvc_objects.errors import ObjectFormatError

    path = cache.oid_to_path(oid)
    meta, actual = hash_file(path, cache.fs, cache.hash_name)
    if str(actual.value).partition(".")[0] != oid.partition(".")[0]:
        with contextlib.suppress(FileNotFoundError):
            cache.fs.remove(path)
        raise ObjectFormatError(f"{path} is damaged")
    cache.protect(path)
    return meta


def _entry(runs: Any, load: Any, key: str, value: str) -> Any:
    """As `StageCache._load_cache` of DVC, which does not compare an entry with its name, nor its outputs with the stage
    that it is of; one that is damaged, or not as DVC writes it of a stage of ours, goes."""
    from dvc.stage.cache import _get_cache_hash

    entry = load(key, value)
    if entry is None or (
        _get_cache_hash(entry) == value
        and _get_cache_hash(copy.deepcopy(entry), key=True) == key  # of the stage, and of its outputs' paths
        and all(out.keys() <= _OF_OUTPUT for out in entry.get("outs", ()))
    ):
        return entry
    path = Path(runs._get_cache_path(key, value))
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # an empty folder there ends every later run of DVC; another entry may be in it
        path.parent.rmdir()
    return None
