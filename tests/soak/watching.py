"""Waiting for something to happen to a file, to kill in that very moment (Linux: inotify)."""

from __future__ import annotations

import ctypes
import os
import re
import select
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

_CREATE, _MOVED_TO, _MOVED_FROM, _DELETE, _CLOSE_WRITE, _MODIFY = 0x100, 0x80, 0x40, 0x200, 0x8, 0x2
_ASKED = _CREATE | _MOVED_TO | _MOVED_FROM | _DELETE | _CLOSE_WRITE | _MODIFY
_IS_FOLDER, _GONE = 0x40000000, 0x8000
_HEAD = struct.Struct("iIII")
IS_AVAILABLE = sys.platform == "linux"


class Watch:
    """Sees every change of a name or content below some folders, those included that are made later."""

    def __init__(self, *roots: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._handle = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._handle < 0:
            raise OSError(ctypes.get_errno(), "inotify is not to be had")
        self._folders: dict[int, Path] = {}
        for root in roots:
            for _ in self._enter(root):
                pass

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._handle)

    def _enter(self, folder: Path) -> Iterator[Path]:
        """Watch a folder and those in it; what is in it already counts as seen just now."""
        number = self._libc.inotify_add_watch(self._handle, os.fsencode(folder), _ASKED)
        if number < 0:
            return
        self._folders[number] = folder
        try:
            inside = list(os.scandir(folder))
        except OSError:
            return
        for entry in inside:
            yield Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                yield from self._enter(Path(entry.path))

    def wait(self, pattern: re.Pattern[str], count: int, seconds: float, is_over: Callable[[], bool]) -> bool:
        """Whether `count` changes of paths that match were seen, before the time is up or `is_over` says so."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select([self._handle], [], [], min(left, 0.2))
            if not readable:
                if is_over():
                    return False
                continue
            for path in self._changes():
                if pattern.search(str(path)):
                    count -= 1
                    if count <= 0:
                        return True
        return False

    def _changes(self) -> Iterator[Path]:
        data = os.read(self._handle, 1 << 16)
        at = 0
        while at < len(data):
            number, mask, _cookie, size = _HEAD.unpack_from(data, at)
            name = data[at + _HEAD.size : at + _HEAD.size + size].rstrip(b"\0")
            at += _HEAD.size + size
            folder = self._folders.get(number)
            if folder is None or mask & _GONE or not name:
                continue
            path = folder / os.fsdecode(name)
            yield path
            if mask & _IS_FOLDER and mask & (_CREATE | _MOVED_TO):
                yield from self._enter(path)
