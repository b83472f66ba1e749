"""What a kill leaves in DVC's own files, found and mended. Nothing here removes a result: what is taken away is half a
record, or a copy that was never put in place."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacpo.errors import ArtifactError, BusyError, HacpoError
from hacpo.pipeline import rwlock
from hacpo.pipeline.project import Pipeline
from hacpo.storage import refused
from hacpo.text_files import parse_yaml, read_text

if TYPE_CHECKING:
    from hacpo.pipeline.bookkeeping import Books

_TEMPORARY = re.compile(r".*\.[\w-]{22}\.tmp")
"""What DVC writes to before it renames (`dvc_objects.fs.utils.tmp_fname`)."""
_CONFLICT = re.compile(r"^(<{7}|={7}|>{7})", re.MULTILINE)
"""What git writes into a file that was merged and is to be settled by hand."""
_SHARED_SECONDS = 3600.0
"""In a cache outside the project another project may be at work: only what is this old was left behind."""
_ENTRY_SECONDS = 2.0
"""The same of an entry of the run cache, which is written within a moment and so can be waited for."""


@dataclass
class Repairs:
    """What was mended."""

    locks: list[Path] = field(default_factory=list)
    """Records of stages, removed: DVC restores those stages from its cache, or runs them again."""
    rwlock: bool = False
    folders: int = 0
    temporary: int = 0
    entries: int = 0
    objects: int = 0

    def __str__(self) -> str:
        """In one line; empty if there was nothing."""
        parts = [f"removed {path}, which it had cut off; its stages are restored or run again" for path in self.locks]
        if self.rwlock:
            parts.append(".dvc/tmp/rwlock begun anew")
        for count, one, several, where in (
            (self.folders, "empty folder", "empty folders", "DVC's run cache"),
            (self.temporary, "temporary file", "temporary files", "DVC"),
            (self.entries, "cut-off entry", "cut-off entries", "DVC's run cache"),
            (self.objects, "empty object", "empty objects", "DVC's cache"),
        ):
            parts += [f"removed {count} {one if count == 1 else several} of {where}"] if count else []
        return f"mended what a kill left: {'; '.join(parts)}" if parts else ""


def lock_files(pipeline: Pipeline) -> list[Path]:
    """Every dvc.lock of a run, and the project's own."""
    return [*sorted(pipeline.folder.rglob("dvc.lock")), *pipeline.root.glob("dvc.lock")]


def repair(pipeline: Pipeline, books: Books) -> Repairs:
    """Mend whatever a kill left. The caller has the books `open`, so nobody else is writing what is looked at.

    Mended are: a dvc.lock cut off while DVC rewrote it, or its list of readers and writers (DVC then refuses every
    command); folders of the run cache without a file (DVC fails on them, on every try); temporary files in the run's
    artifacts and in the cache. And what a power cut leaves of files that DVC has not flushed: objects of the cache, and
    entries of the run cache, that are empty or zeros.

    Raises:
        StorageError: the disk refuses.
        ArtifactError: a dvc.lock has conflicts of a merge in it, and only its owner knows which side counts.
    """
    repo: Any = books.repo
    made = Repairs()
    try:
        for path in lock_files(pipeline):
            if _is_cut_off(path):
                path.unlink()
                made.locks.append(path)
        made.rwlock = books.mend_rwlock()
        root = Path(repo.root_dir)
        for path in [*_temporary(pipeline.layout.root), *_temporary(Path(repo.cache.local.path), deep=False)]:
            made.temporary += _removed(path, root)
        for path in _temporary(Path(repo.stage_cache.cache_dir)):
            made.temporary += _removed(path, root, wait=True)
        for path in _cut_off_entries(Path(repo.stage_cache.cache_dir)):
            made.entries += _removed(path, root, wait=True)
        for path in _empty_objects(Path(repo.cache.repo.path)):
            made.objects += _removed(path, root)
        for path in _empty_folders(Path(repo.stage_cache.cache_dir)):
            made.folders += _removed(path, root, wait=True)
    except OSError as error:
        raise refused(Path(error.filename or Path(repo.root_dir) / ".dvc"), error) from None
    return made


def repair_if_needed(pipeline: Pipeline) -> str:
    """Mend what a kill left, for commands that only read; returns one line, empty where nothing looks wrong.

    It looks without loading DVC, and leaves alone what another process may be writing just now.
    """
    folder = rwlock.temporary_folder(pipeline.root)
    if folder is None or not _looks_wrong(pipeline, folder):
        return ""
    from hacpo.pipeline.bookkeeping import Books

    try:
        books = Books(pipeline.root)
        with books.open(0):
            return str(repair(pipeline, books))
    except BusyError:
        return ""  # whoever works there leaves it whole
    except (HacpoError, OSError) as error:
        return f"what a kill left is not mended: {error}"


def _looks_wrong(pipeline: Pipeline, folder: Path) -> bool:
    """Whether there may be something to mend, by what is seen without DVC; a lock cut off just between two lines of its
    YAML is not."""
    return (
        rwlock.read(folder / rwlock.NAME)[0] is None
        or any(not path.read_bytes().endswith(b"\n") for path in lock_files(pipeline))
        or next(_empty_folders(folder.parent / "cache" / "runs"), None) is not None
        or next(_temporary(pipeline.layout.root), None) is not None
    )


def _is_cut_off(path: Path) -> bool:
    """Whether DVC would refuse a dvc.lock, and not because of a merge (`ArtifactError`)."""
    from dvc.schema import COMPILED_LOCKFILE_SCHEMA
    from voluptuous import Invalid

    try:
        text = read_text(path)
        if _CONFLICT.search(text):
            raise ArtifactError(
                "holds conflicts of a merge",
                where=path,
                remedy="settle them (`git checkout --ours` or `--theirs`), then repeat the command",
            )
        COMPILED_LOCKFILE_SCHEMA(parse_yaml(text))
    except (ValueError, Invalid):
        return True
    return False


def _empty_folders(run_cache: Path) -> Iterator[Path]:
    """Folders of keys without an entry; DVC makes the folder first. Temporary files have been removed."""
    for key in run_cache.glob("*/*"):
        if key.is_dir() and not any(key.iterdir()):
            yield key


def _cut_off_entries(run_cache: Path) -> Iterator[Path]:
    """Entries that DVC could not read, or would fail on, or that lack an output."""
    for path in run_cache.glob("*/*/*"):
        content = path.read_bytes()
        if not content.endswith(b"\n") or b"\0" in content or b"\nouts:\n" not in content:
            yield path


def _empty_objects(cache: Path) -> Iterator[Path]:
    """Objects without content, or that begin with zeros, and should not. DVC takes them for good."""
    for path in cache.glob("*/*"):
        if path.is_file() and not _TEMPORARY.fullmatch(path.name):
            with path.open("rb") as file:
                first = file.read(1)
            if first in (b"", b"\0") and _md5(path) != f"{path.parent.name}{path.name.removesuffix('.dir')}":
                yield path


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _temporary(folder: Path, *, deep: bool = True) -> Iterator[Path]:
    """DVC's temporary files below a folder; two levels deep only for the cache, whose files lie there."""
    if deep:
        found = (Path(at) / name for at, _, names in os.walk(folder) for name in names)
    else:
        found = (path for pattern in ("*.tmp", "*/*.tmp") for path in folder.glob(pattern))
    yield from (path for path in found if _TEMPORARY.fullmatch(path.name))


def _removed(path: Path, root: Path, *, wait: bool = False) -> bool:
    """Remove a file or an empty folder, if nobody can be using it; waits until that is so, or leaves it."""
    try:
        seconds = _ENTRY_SECONDS if wait else _SHARED_SECONDS
        left = 0.0 if path.resolve().is_relative_to(root) else path.stat().st_mtime + seconds - time.time()
        if left > 0 and not wait:
            return False
        time.sleep(max(0.0, min(left, seconds)))
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:  # its entry has come
            return False
        raise
    return True
