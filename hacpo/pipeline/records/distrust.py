"""DVC's cache, believed only where what an entry holds is what its name says."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def distrusting(repo: Any) -> Iterator[None]:
    """Have DVC hash every object and every entry of its run cache that it comes across, and remove what is damaged.

    By itself it takes an object that is write-protected for good: restores it, and puts it in the place of a file
    that has just been made and should have its content.
    """
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
    """As `StageCache._load_cache` of DVC, which does not compare an entry with its name; a damaged one goes."""
    from dvc.stage.cache import _get_cache_hash

    entry = load(key, value)
    if entry is None or _get_cache_hash(entry) == value:
        return entry
    path = Path(runs._get_cache_path(key, value))
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # an empty folder there ends every later run of DVC; another entry may be in it
        path.parent.rmdir()
    return None
