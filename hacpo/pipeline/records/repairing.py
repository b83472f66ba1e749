"""What a kill leaves in DVC's own files, found and mended. Nothing here removes a result: what is taken away is half a
record, or a copy that was never put in place.

A run's folder and `.dvc/config` may come from a stranger, so that a link or `cache.dir` makes anybody's folder look
like the project's. Only what lies where DVC puts it, under a name that DVC gives, is ever removed; no link below the
cache or the artifacts is followed; and where these lie outside the project, nothing is removed unless the user asks for
it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacpo.artifacts.layout import LOCKS
from hacpo.artifacts.links import OURS, is_ours
from hacpo.artifacts.storage import refused, remove, was_left_behind
from hacpo.artifacts.text_files import parse_yaml, read_bytes, read_text
from hacpo.errors import ArtifactError, BusyError, HacpoError, harmless
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records import rwlock
from hacpo.pipeline.records.seen import Seen

if TYPE_CHECKING:
    from hacpo.pipeline.records.bookkeeping import Books

_TEMPORARY = re.compile(r".*\.[\w-]{22}\.tmp")
"""What DVC writes to before it renames (`dvc_objects.fs.utils.tmp_fname`)."""
_CACHE_TEMPORARY = re.compile(r"([0-9a-f]{30}(\.dir)?|[0-9a-f]{64})?\.[\w-]{22}\.tmp")
"""The same in the cache, where it is named for nothing or for what it becomes."""
_HALF_LOCK = re.compile(r"\.dvc\.lock\.tmp-\d+")
"""What hacpo writes a record to; it goes with hacpo's next one, but DVC may write that."""
_STEPS, _STEP = (re.compile(text) for text in ("steps", r"\d{4}"))
_TWO, _KEY, _OBJECT = (re.compile(text) for text in ("[0-9a-f]{2}", "[0-9a-f]{64}", r"[0-9a-f]{30}(\.dir)?"))
_RUNS, _FILES, _MD5_DIR = (re.compile(text) for text in ("runs", "files", "md5"))
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
    left: dict[Path, int] = field(default_factory=dict)
    """A folder outside the project -> what a repair that is asked for would remove there."""

    def __str__(self) -> str:
        """In one line; empty if there was nothing."""
        parts = [f"removed {path}, which it had cut off; its stages are restored or run again" for path in self.locks]
        if self.rwlock:
            parts.append(".dvc/tmp/rwlock begun anew")
        for count, singular, plural, where in (
            (self.folders, "empty folder", "empty folders", "DVC's run cache"),
            (self.temporary, "temporary file", "temporary files", "DVC or hacpo"),
            (self.entries, "cut-off entry", "cut-off entries", "DVC's run cache"),
            (self.objects, "empty object", "empty objects", "DVC's cache"),
        ):
            parts += [f"removed {count} {singular if count == 1 else plural} of {where}"] if count else []
        sentences = [f"mended what a kill left: {'; '.join(parts)}"] if parts else []
        sentences += [
            f"left alone what a kill left in {harmless(str(at))}, outside the project: {count} file(s) or folder(s), "
            "which `hacpo repair` removes"
            for at, count in self.left.items()
        ]
        return "; ".join(sentences)


def lock_files(pipeline: Pipeline) -> list[Path]:
    """Every dvc.lock of a run, and the project's own."""
    return [*sorted(pipeline.folder.rglob("dvc.lock")), *pipeline.root.glob("dvc.lock")]


def repair(pipeline: Pipeline, books: Books, *, asked: bool = False) -> Repairs:
    """Mend whatever a kill left. The caller has the books `open`, so nobody else is writing what is looked at.

    Mended are: a dvc.lock cut off while DVC rewrote it, or its list of readers and writers (DVC then refuses every
    command); folders of the run cache without a file (DVC fails on them, on every try); temporary files in the run's
    artifacts, in the cache and beside its records. And what a power cut leaves of files that DVC has not flushed:
    objects of the cache, and entries of the run cache, that are empty or zeros.

    Args:
        asked: whether a cache or artifacts that lie outside the project are mended too, instead of counted.

    Raises:
        StorageError: the disk refuses.
        ArtifactError: a dvc.lock has conflicts of a merge in it, and only its owner knows which side counts; or is no
            regular file.
    """
    repo: Any = books.repo
    made = Repairs()
    root = Path(repo.root_dir)
    cache = Path(repo.stage_cache.cache_dir).parent
    artifacts, folder = (Path(os.path.abspath(path)) for path in (pipeline.layout.root, pipeline.folder))
    try:
        seen = Seen(pipeline, books)
        for path in lock_files(pipeline):
            if not seen.is_whole(path) and _is_cut_off(path):
                path.unlink()
                made.locks.append(path)
        made.rwlock = books.mend_rwlock()
        for kind, top, paths, wait in (
            ("temporary", artifacts, _temporary(artifacts), False),
            ("temporary", folder, _half_locks(folder), False),
            ("temporary", cache, _cache_temporary(cache), False),
            ("temporary", cache, _below(cache, _RUNS, _TWO, _KEY, _CACHE_TEMPORARY), True),
            ("entries", cache, _cut_off_entries(cache), True),
            ("objects", cache, _empty_objects(cache), False),
            ("folders", cache, _empty_folders(cache), True),
        ):
            own = is_own(top, root)
            for path in paths:
                if own or asked:
                    setattr(made, kind, getattr(made, kind) + _removed(path, own=own, wait=wait))
                else:
                    made.left[top] = made.left.get(top, 0) + 1
    except OSError as error:
        raise refused(Path(error.filename or Path(repo.root_dir) / ".dvc"), error) from None
    return made


def is_own(path: Path, root: Path) -> bool:
    """Whether a path lies in the project, and no link below the project's root is on the way to it."""
    real = Path(os.path.realpath(root))
    # The way to the project itself may lead through links, which are its owner's.
    above = next((at for at in (real, Path(os.path.abspath(root))) if path.is_relative_to(at)), None)
    return above is not None and os.path.realpath(path) == str(real / path.relative_to(above))


def repair_if_needed(pipeline: Pipeline) -> str:
    """Mend what a kill left, for commands that only read; returns one line, empty where nothing looks wrong.

    It looks without loading DVC, and leaves alone what another process may be writing just now.
    """
    folder = rwlock.temporary_folder(pipeline.root)
    try:
        if folder is None or not _looks_wrong(pipeline, folder):
            return ""
        from hacpo.pipeline.records.bookkeeping import Books

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
        or any(not read_bytes(path).endswith(b"\n") for path in lock_files(pipeline))
        or next(_empty_folders(folder.parent / "cache"), None) is not None
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
    except OSError as error:
        raise ArtifactError(f"cannot be read: {error.strerror}", where=path) from None
    except (ValueError, Invalid):
        return True
    return False


def _below(top: Path, *names: re.Pattern[str]) -> Iterator[Path]:
    """What lies below a folder under such a name on every level, links left out on every level."""
    try:
        entries = sorted(os.scandir(top), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if names[0].fullmatch(entry.name) and not entry.is_symlink():
            if len(names) == 1:
                yield Path(entry.path)
            elif entry.is_dir(follow_symlinks=False):
                yield from _below(Path(entry.path), *names[1:])


def _empty_folders(cache: Path) -> Iterator[Path]:
    """Folders of the run cache's keys without an entry; DVC makes the folder first. Temporary files have been
    removed."""
    for key in _below(cache, _RUNS, _TWO, _KEY):
        if key.is_dir() and not any(key.iterdir()):
            yield key


def _cut_off_entries(cache: Path) -> Iterator[Path]:
    """Entries of the run cache that DVC could not read, or would fail on, or that lack an output."""
    for path in _regular(_below(cache, _RUNS, _TWO, _KEY, _KEY)):
        content = read_bytes(path)
        if not content.endswith(b"\n") or b"\0" in content or b"\nouts:\n" not in content:
            yield path


def _empty_objects(cache: Path) -> Iterator[Path]:
    """Objects without content, or that begin with zeros, and should not. DVC takes them for good."""
    for path in _regular(_below(cache, _FILES, _MD5_DIR, _TWO, _OBJECT)):
        with path.open("rb") as file:
            first = file.read(1)
        if first in (b"", b"\0") and _md5(path) != f"{path.parent.name}{path.name.removesuffix('.dir')}":
            yield path


def _regular(paths: Iterable[Path]) -> Iterator[Path]:
    """Those that are files: a pipe would be waited for without end."""
    return (path for path in paths if stat.S_ISREG(path.lstat().st_mode))


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _temporary(artifacts: Path) -> Iterator[Path]:
    """DVC's temporary files among a run's artifacts, and what hacpo was writing or removing there: it goes with the
    next write of the same output, but DVC may bring that back from its cache."""
    for at, folders, names in os.walk(artifacts):
        here = Path(at)
        yield from _regular(here / name for name in names if _TEMPORARY.fullmatch(name))
        aside = [
            name for name in (*folders, *names) if _is_ours(here, name, artifacts) and was_left_behind(here / name)
        ]
        yield from (here / name for name in aside)
        gone = {*aside, LOCKS} if here == artifacts else {*aside}  # leases come and go
        folders[:] = [name for name in folders if name not in gone and _is_ours(here, name, artifacts)]


def _is_ours(folder: Path, name: str, artifacts: Path) -> bool:
    """Whether something right in a run's folder is one of its artifacts, or on its way to be; all below one is."""
    return folder != artifacts or is_ours(name, OURS)


def _half_locks(folder: Path) -> Iterator[Path]:
    """Records of a run that were never put in place."""
    yield from _regular(_below(folder, _HALF_LOCK))
    yield from _regular(_below(folder, _STEPS, _STEP, _HALF_LOCK))


def _cache_temporary(cache: Path) -> Iterator[Path]:
    """DVC's temporary files among the objects."""
    yield from _regular(_below(cache, _FILES, _MD5_DIR, _CACHE_TEMPORARY))
    yield from _regular(_below(cache, _FILES, _MD5_DIR, _TWO, _CACHE_TEMPORARY))


def _removed(path: Path, *, own: bool, wait: bool) -> bool:
    """Remove a file or a folder, if nobody can be using it; waits until that is so, or leaves it.

    Args:
        wait: a folder goes if it is empty then.
        own: whether it is this project's alone, whose lock is held.
    """
    try:
        seconds = _ENTRY_SECONDS if wait else _SHARED_SECONDS
        left = 0.0 if own else path.stat().st_mtime + seconds - time.time()
        if left > 0 and not wait:
            return False
        time.sleep(max(0.0, min(left, seconds)))
        if not path.is_dir():
            path.unlink()
        elif wait:
            path.rmdir()
        else:
            remove(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:  # its entry has come
            return False
        raise
    return True
