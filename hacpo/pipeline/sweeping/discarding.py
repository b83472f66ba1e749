"""Runs whose results are collected, removed from the disk: a study of hundreds leaves little more than its numbers.

What goes: the run's artifacts, its DVC files, and what DVC's cache has of it and of no other run of the project. Its
params.yaml stays, so the run can be made again, and so does whatever else somebody has put beside these. Killed at any
moment, the next call removes the rest.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from hacpo.artifacts import storage
from hacpo.artifacts.links import OF_DVC, OURS, check_links, is_ours
from hacpo.artifacts.text_files import load_json, read_text
from hacpo.errors import StorageError, first_line
from hacpo.pipeline.locking.locks import driver_lock
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.bookkeeping import Books
from hacpo.pipeline.records.history import History, dvc_records
from hacpo.pipeline.records.lock_text import made_objects, named_objects
from hacpo.pipeline.records.seen import Seen


def is_there(pipeline: Pipeline) -> bool:
    """Whether there is something of a run to remove."""
    return any(True for _ in _files(pipeline))


def discard(pipeline: Pipeline) -> None:
    """Remove a run but for its params.yaml.

    Raises:
        BusyError: somebody works on it.
        ArtifactError: a link lies among its files.
        StorageError: the disk refuses; what has gone by then has.
    """
    check_links(pipeline.layout, pipeline.folder)
    try:
        _remove(pipeline)
    except OSError as error:
        raise _refused(error.filename or pipeline.layout.root, error.strerror or first_line(error)) from None
    for path in _files(pipeline):
        if path != pipeline.layout.locks:  # somebody looks whether the run is there
            raise _refused(path, "it is still there")


def _refused(path: object, reason: str) -> StorageError:
    remedy = "remove it yourself, or give `hacpo sweep` again"
    return StorageError(f"cannot be removed: {reason}", where=path, remedy=remedy, reason=reason)


def _remove(pipeline: Pipeline) -> None:
    books = Books(pipeline.root)
    with books.claimed(pipeline.layout.root), driver_lock(pipeline.layout, command="hacpo sweep"), books.open():
        for path in _objects(pipeline, books):
            path.unlink(missing_ok=True)  # not the folder: runs beside this one remember that it is there, as DVC does
        for path in _run_cache(pipeline, books):
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # DVC has a folder for every note
        Seen(pipeline, books).forget()
        for path in _files(pipeline):
            if path != pipeline.layout.locks:
                storage.remove(path)
    storage.remove(pipeline.layout.locks)
    with contextlib.suppress(OSError):  # somebody has something there
        pipeline.layout.root.rmdir()


def _files(pipeline: Pipeline) -> Iterator[Path]:
    """What hacpo and DVC have written of a run; last the locks of its steps, which say what is in the cache."""
    for folder, ours in ((pipeline.layout.root, OURS), (pipeline.folder, OF_DVC)):
        found = folder.iterdir() if folder.is_dir() else ()
        yield from sorted((path for path in found if is_ours(path.name, ours)), key=lambda path: path.name == "steps")


def _objects(pipeline: Pipeline, books: Books) -> Iterator[Path]:
    """What DVC's cache has that this run has made, and that nothing else in the project names: no other lock, not what
    this one's stages read (somebody's models, problems, functions), no file that `dvc add` has written, and no commit;
    nothing where git does not tell. A cache outside the project may serve others."""
    cache, committed = books.repo.cache.local, History(pipeline.root).named()
    if committed is None or not Path(cache.path).resolve().is_relative_to(Path(books.repo.root_dir).resolve()):
        return
    here = pipeline.folder.resolve()
    mine: set[str] = set()
    read: set[str] = set()
    others: set[str] = set()
    for file in dvc_records(pipeline.root):
        text = read_text(file)
        if file.resolve().is_relative_to(here):
            mine |= made_objects(text)
            read |= named_objects(text) - made_objects(text)
        else:
            others |= named_objects(text)
    others |= (read - mine) | committed | {f"{name}.dir" for name in committed}
    for name in _with_contents(mine - others, cache) - _with_contents(others, cache):
        yield Path(cache.oid_to_path(name))


def _with_contents(names: set[str], cache: object) -> set[str]:
    """Objects, and those that are in the folders among them."""
    found = set(names)
    for name in names:
        if name.endswith(".dir"):
            try:
                found |= {item["md5"] for item in load_json(Path(cache.oid_to_path(name)))}  # type: ignore[attr-defined]
            except (OSError, ValueError, TypeError, KeyError):
                continue  # a checkpoint's, which is not in the cache
    return found


def _run_cache(pipeline: Pipeline, books: Books) -> Iterator[Path]:
    """DVC's notes of what was made of what, by this run's commands."""
    command = re.compile(rf"^cmd: hacpo \S+ pipelines/{re.escape(pipeline.run)}( |$)", re.MULTILINE)
    folder = Path(books.repo.stage_cache.cache_dir).resolve()
    for file in folder.glob("*/*/*") if folder.is_relative_to(Path(books.repo.root_dir).resolve()) else ():
        try:
            if command.search(read_text(file)):
                yield file
        except (OSError, ValueError):
            continue
