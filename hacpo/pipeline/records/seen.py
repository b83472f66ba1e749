"""Steps found done, and what their files looked like then: as long as they look the same, DVC need not be asked again.

It is what DVC's own notes rest on, that a file of the same inode, size and modification time has the same content,
taken once for a step instead of once for a file. A note covers everything that decides whether a step is done: its
dvc.yaml and dvc.lock, and those of the step before and of the start; every file that its stages read or write, of which
checkpoints may be pruned later; the objects of DVC's cache that its outputs are; the project's settings of DVC. The
notes lie beside DVC's own, outside the project: what comes with somebody's files is not believed, and where these files
say where DVC's notes are (`core.site_cache_dir`), none are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacpo.artifacts.storage import refused, remove
from hacpo.artifacts.tables import step_of
from hacpo.artifacts.text_files import load_json, read_text
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.lock_text import entries, says
from hacpo.pipeline.records.order import is_between, is_checkpoint, step_file

if TYPE_CHECKING:
    from hacpo.pipeline.records.bookkeeping import Books

_FORMAT = "2"

Stamp = tuple[str, ...]
"""What a file or folder looks like."""


class Seen:
    """The notes on one run."""

    def __init__(self, pipeline: Pipeline, books: Books) -> None:
        from dvc import __version__

        repo: Any = books.repo
        self._pipeline = pipeline
        self._folder = notes_folder(pipeline, books)
        self._version = f"{_FORMAT} {__version__} {repo.cache.local.path}"
        self._listed = repo.cache.local.oid_to_path
        dvc = Path(repo.dvc_dir)
        self._always = [str(path) for path in (dvc / "config", dvc / "config.local", Path(repo.root_dir, ".dvcignore"))]
        self._clock = pipeline.layout.locks

    def now(self) -> int:
        """The time of the filesystem that the run lies on, in ns: what changes from here on is not older.

        Raises:
            StorageError: the disk refuses a file to take it from.
        """
        scratch = self._clock / f".clock.tmp-{secrets.token_hex(8)}"  # named as leases name theirs, which removes it
        try:
            self._clock.mkdir(parents=True, exist_ok=True)
            scratch.touch()
            moment = scratch.stat().st_mtime_ns
            scratch.unlink()
        except OSError as error:
            raise refused(scratch, error) from None
        return moment

    def forget(self) -> None:
        """Remove the notes."""
        if self._folder is not None:
            remove(self._folder)

    def is_unchanged(self, name: str) -> bool:
        """Whether all that a note covers is as it was; False where there is none.

        Args:
            name: `0007` for a step, `after` for what comes after all.
        """
        note = self._read(name)
        if note is None:
            return False
        looks = _texts(note["texts"], note["names"]), _look(note["files"]), _look(note["objects"], mode=True)
        return _digest(self._version, *looks) == note.get("digest") and all(
            digest == _digest(self._version, _look([path])) or self._may_have_been_pruned(path)
            for path, digest in note["checkpoints"].items()
        )

    def is_whole(self, lock: Path) -> bool:
        """Whether a step's dvc.lock is the one that was compared when the step was noted."""
        note = self._read(lock.parent.name)
        return note is not None and note["lock"] == [*map(list, _look([os.path.abspath(lock)]))]

    def note(self, name: str, stages: Mapping[Any, int | None], compare: Callable[[Any], bool]) -> None:
        """Note a step whose stages are all recorded and current; nothing where that is in doubt, or no note can be
        written or would be believed.

        Args:
            stages: each with the time (`now`) before it was last compared with its record. Where one of its files is
                younger, or there is no time, it is compared again.
            compare: a stage with its record; returns whether it is current.
        """
        if self._folder is None:
            return
        texts = self._records(name, stages)
        places = {item.fs_path for stage in stages for item in (*stage.deps, *stage.outs)}
        files = sorted(path for path in places if not any(str(above) in places for above in Path(path).parents))
        files += self._always
        objects = sorted(set(self._objects(stages)))
        of_path = {path: [*_look([path])] for path in files}
        looks, kept = [stamp for stamps in of_path.values() for stamp in stamps], [*_look(objects, mode=True)]
        gone = [stamp[0] for stamp in (*looks, *kept) if len(stamp) == 1 and stamp[0] not in self._always]
        if not all(map(is_checkpoint, gone)) or not all(map(_is_recorded, stages)):
            return
        doubtful = [
            stage
            for stage, looked_at in stages.items()
            if self._lies_elsewhere(stage) or not _is_older(stage, looks, looked_at)
        ]
        if doubtful and not (all(map(compare, doubtful)) and looks == [*_look(files)]):
            return
        names = [stage.name for stage in stages]
        checkpoints = {path: of_path.pop(path) for path in files if is_checkpoint(path)}
        rest = [stamp for stamps in of_path.values() for stamp in stamps]
        note = {
            "texts": texts,
            "names": names,
            "checkpoints": {path: _digest(self._version, stamps) for path, stamps in checkpoints.items()},
            "files": list(of_path),
            "objects": objects,
            "lock": [*_look(path for path in texts if path.endswith(f"/{name}/dvc.lock"))],
            "digest": _digest(self._version, _texts(texts, names), rest, kept),
        }
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            scratch = self._folder / f".{name}.tmp"  # one run at a time writes here
            scratch.write_text(json.dumps(note), encoding="utf-8")
            scratch.replace(self._folder / f"{name}.json")

    def _read(self, name: str) -> Any:
        if self._folder is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            note = load_json(self._folder / f"{name}.json")
            if isinstance(note, dict) and isinstance(note.get("lock"), list):
                parts = [note.get(key) for key in ("texts", "names", "files", "objects")]
                listed = all(isinstance(part, list) and all(isinstance(item, str) for item in part) for part in parts)
                if listed and isinstance(note.get("checkpoints"), dict):
                    return note
        return None

    def _records(self, name: str, stages: Iterable[Any]) -> list[str]:
        """The DVC files that say what the stages are, and what they and those that they lean on have made."""
        steps = {max(int(name) - 1, 0), 0, int(name)} if name.isdigit() else {0}
        files = {step_file(self._pipeline, step) for step in steps} | {Path(stage.path) for stage in stages}
        return sorted({os.path.abspath(path) for file in files for path in (file, file.with_name("dvc.lock"))})

    def _may_have_been_pruned(self, path: str) -> bool:
        """Whether a checkpoint is gone, and is neither of the start nor of the result."""
        step = step_of(Path(path).parent.name)
        return step is not None and is_between(self._pipeline, step) and not os.path.lexists(path)

    def _lies_elsewhere(self, stage: Any) -> bool:
        """Whether something that a stage reads or makes lies on another filesystem, which may have another clock."""
        here = self._clock.parent.stat().st_dev
        paths = [item.fs_path for item in (*stage.deps, *stage.outs)]
        return any(os.path.exists(path) and os.stat(path).st_dev != here for path in paths)

    def _objects(self, stages: Iterable[Any]) -> Iterator[str]:
        """Where DVC's cache has what the stages made."""
        for stage in stages:
            for out in stage.outs:
                if out.use_cache and out.hash_info:
                    path = self._listed(out.hash_info.value)
                    yield path
                    if out.hash_info.isdir:
                        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                            yield from (self._listed(item["md5"]) for item in load_json(Path(path)))


def notes_folder(pipeline: Pipeline, books: Books) -> Path | None:
    """Where this user's notes on a run lie, outside the project; None where the project itself says where."""
    repo: Any = books.repo
    told = any("site_cache_dir" in repo.config.load_one(level)["core"] for level in repo.config.REPO_LEVELS)
    return None if told else Path(repo.site_cache_dir) / "hacpo" / pipeline.run


def _look(paths: Iterable[str], *, mode: bool = False) -> Iterator[Stamp]:
    """Every file and folder at some paths and below: its path alone if it cannot be looked at, else also what tells it
    from another, of a file its inode, its size and, if asked for, its mode, and of both the times of its content and
    of its name."""
    for path in paths:
        try:
            at = os.stat(path)
            names = sorted(os.listdir(path)) if stat.S_ISDIR(at.st_mode) else []
        except OSError:
            yield (path,)
            continue
        if stat.S_ISDIR(at.st_mode):
            yield path, "folder", str(len(names)), str(at.st_mtime_ns), "0"
            yield from _look((f"{path}/{name}" for name in names), mode=mode)
        else:
            kind = ("link " if os.path.islink(path) else "") + (str(stat.S_IMODE(at.st_mode)) if mode else "")
            yield path, kind, str(at.st_ino), str(at.st_size), str(at.st_mtime_ns), str(at.st_ctime_ns)


def _is_older(stage: Any, looks: Iterable[Stamp], looked_at: int | None) -> bool:
    """Whether all that a stage reads and makes, and the names of it, are older than a time; files that it makes may
    also be younger, if they are what is recorded: DVC puts a copy of its cache's in their place."""
    places = tuple(f"{item.fs_path}/" for item in (*stage.deps, *stage.outs))
    same = {out.fs_path for out in stage.outs if out.use_cache and _has(out.fs_path, out.hash_info.value)}
    mine = (stamp for stamp in looks if len(stamp) > 1 and stamp[0] not in same and f"{stamp[0]}/".startswith(places))
    return looked_at is not None and all(int(moment) < looked_at for stamp in mine for moment in stamp[-2:])


def _has(path: str, md5: str) -> bool:
    """Whether a path is a file of that hash."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "md5").hexdigest() == md5
    except OSError:
        return False


def _texts(paths: Iterable[str], names: Sequence[str]) -> Iterator[Stamp]:
    """What DVC files say, but for which checkpoints are in its cache: that comes and goes, and decides nothing.

    Args:
        names: stages; a lock that is no step's may have others', which are somebody else's to note.
    """
    for path in paths:
        try:
            text = read_text(Path(path))
        except (OSError, ValueError):
            yield (path,)
            continue
        if path.endswith("/dvc.lock") and not Path(path).parent.name.isdigit():
            known = entries(text) or {}
            text = "".join(known.get(name, "") for name in names)
        lines = text.splitlines()
        kept = [line.removesuffix(":") if line.startswith("      - ") else line for line in lines]
        yield path, "text", *(line for line in kept if line.strip() != "cache: false")


def _is_recorded(stage: Any) -> bool:
    """Whether the stage's lock says of it what this process knows."""
    from dvc.stage.serialize import to_lockfile

    ((name, entry),) = to_lockfile(stage).items()
    try:
        return says(read_text(Path(stage.path).with_name("dvc.lock")), name, entry)
    except (OSError, ValueError):
        return False


def _digest(version: str, *looks: Iterable[Stamp]) -> str:
    """Of what files look like, but not of the times of folders, nor of when files got their names: what is put into
    DVC's cache by link, or taken out, changes these."""
    digest = hashlib.sha256(version.encode())
    for stamps in looks:
        for stamp in stamps:
            told = stamp[:3] if stamp[1:2] == ("folder",) else stamp if stamp[1:2] in ((), ("text",)) else stamp[:-1]
            digest.update("\0".join(told).encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()
