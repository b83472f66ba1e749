"""DVC's copies and moves, flushed to the disk: it flushes nothing, so what it puts in its cache could be empty after a
power cut, beneath a lock that says otherwise."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hacpo.artifacts.durability import flush
from hacpo.artifacts.storage import MACHINES


@contextmanager
def flushed_copies() -> Iterator[set[Path]]:
    """Have DVC (dvc_objects 5) flush every file before it gets its name, while the block runs.

    Yields:
        The folders that got names; filled as DVC works. They are for the caller to flush (`durability.flush_names`).

    Raises:
        OSError: what the machine refused, where DVC only says that a file could neither be linked nor copied.
    """
    from dvc.exceptions import CacheLinkError
    from dvc_objects.fs import local, system
    from dvc_objects.fs.utils import tmp_fname

    files: Any = local
    links: Any = system
    copyfile, move, reflink, hardlink = files.copyfile, files.move, links.reflink, links.hardlink
    folders: set[Path] = set()
    met: list[OSError] = []

    def flushed_copyfile(source: str, target: str, *arguments: Any, **options: Any) -> None:
        copyfile(source, target, *arguments, **options)
        _flushed(target, target)

    def flushed_move(source: str, target: str) -> None:
        _flushed(source, target)
        move(source, target)

    def flushed_hardlink(source: str, target: str) -> None:
        _flushed(source, target)
        hardlink(source, target)

    def whole_reflink(source: str, target: str) -> None:
        """DVC makes an empty file of the final name first, and only then learns whether the filesystem can link."""
        beside = os.path.join(os.path.dirname(target), str(tmp_fname()))
        try:
            reflink(source, beside)
            _flushed(beside, target)
            os.rename(beside, target)
        finally:
            Path(beside).unlink(missing_ok=True)

    def _flushed(path: str, target: str) -> None:
        if os.path.isfile(path):
            flush(Path(path))
        folders.add(Path(os.path.abspath(target)).parent)

    files.copyfile, files.move = _noting(flushed_copyfile, met), flushed_move
    links.reflink, links.hardlink = _noting(whole_reflink, met), _noting(flushed_hardlink, met)
    try:
        yield folders
    except CacheLinkError:
        if met:
            raise met[-1] from None
        raise
    finally:
        files.copyfile, files.move = copyfile, move
        links.reflink, links.hardlink = reflink, hardlink


def _noting(function: Callable[..., None], met: list[OSError]) -> Callable[..., None]:
    """The function, with what the machine refused it added to `met`."""

    def noted(*arguments: Any, **options: Any) -> None:
        try:
            function(*arguments, **options)
        except OSError as error:
            met.extend([error] if error.errno in MACHINES else [])
            raise

    return noted


@contextmanager
def linked_at_once() -> Iterator[None]:
    """Have DVC (dvc_data 3) put a copy of its cache's in the place of a file in one go, while the block runs: it
    removes what it has just put in its cache and then copies it back, and stages may be reading it. What the system
    refuses there is raised as such: DVC would only say that no kind of link is possible."""
    from dvc_data.hashfile import checkout
    from dvc_objects.fs.utils import tmp_fname

    checking: Any = checkout
    relink, as_dvc = checking._relink, checking.Link

    class Linking(as_dvc):  # type: ignore[misc, valid-type]
        def __call__(self, *arguments: Any, **options: Any) -> None:
            try:
                super().__call__(*arguments, **options)
            except checkout.LinkError as error:
                raise error.__cause__ or error from None

    def relink_at_once(
        link: Any, cache: Any, source: str, fs: Any, path: str, in_cache: bool, *how: Any, **options: Any
    ) -> None:
        if not in_cache:
            relink(link, cache, source, fs, path, in_cache, *how, **options)
            return
        beside = str(tmp_fname(path))
        try:
            link(cache, source, fs, beside)
            os.replace(beside, path)
        finally:
            Path(beside).unlink(missing_ok=True)
        cache.protect(source)

    checking._relink, checking.Link = relink_at_once, Linking
    try:
        yield
    finally:
        checking._relink, checking.Link = relink, as_dvc
