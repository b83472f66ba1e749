"""The settings that stages depend on, looked up as DVC does it, but in a file that is parsed once."""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

Read = Callable[..., Any]
_PLAIN = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")
"""A key that names one value: no pattern, no place in a list."""


def parsed_once(read: Read) -> Read:
    """DVC's `read_param_file` (3.67, dvc/dependency/param.py), which parses the file and walks through all of it for
    every key that it is asked for.

    Args:
        read: DVC's own, for whatever is not plainly a key of nested mappings in a file of this machine.
    """
    files: dict[str, tuple[tuple[int, ...], Any]] = {}

    @functools.wraps(read)
    def looked_up(fs: Any, path: str, key_paths: Sequence[str] | None = None, flatten: bool = False, **how: Any) -> Any:
        if fs.protocol != "local" or not flatten or not key_paths or how or not all(map(_PLAIN.fullmatch, key_paths)):
            return read(fs, path, key_paths, flatten, **how)
        at = os.stat(path)
        stamp = (at.st_ino, at.st_mtime_ns, at.st_ctime_ns, at.st_size)
        if files.get(path, ((), None))[0] != stamp:
            files[path] = (stamp, read(fs, path))
        values = {key: _value(files[path][1], key) for key in key_paths}
        if any(value is _odd for value in values.values()):
            return read(fs, path, key_paths, flatten)
        return {key: copy.deepcopy(value) for key, value in values.items() if value is not _missing}

    return looked_up


_missing, _odd = object(), object()


def _value(content: Any, key: str) -> Any:
    """What stands in nested mappings under `a.b.c`; `_odd` where they are not just mappings with words for keys."""
    for word in key.split("."):
        if not isinstance(content, dict) or not all(isinstance(known, str) and "." not in known for known in content):
            return _odd
        if word not in content:
            return _missing
        content = content[word]
    return content
