"""Whether a stranger's file can be read at all, found out in a process whose memory and time are bounded.

What a file says of itself (sizes, counts of values) need not be so, and a dictionary makes terabytes of a few
kilobytes, so nothing of it is believed: it is read to the end in a process that may take so much and no more.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from hacpo import kernel
from hacpo.errors import HacpoError, first_line, harmless

MEMORY = 6 << 30
"""Bytes that reading may take beyond what Python and its libraries do."""

SECONDS = 600
"""Of processor time that reading may take."""

_TOO_LARGE = 3
_UNREADABLE = 4


def try_reading(
    path: Path,
    reader: Callable[..., Any],
    error: type[HacpoError],
    too_large: HacpoError,
    *,
    parts: str,
    into: Path | None = None,
    memory: int | None = None,
    seconds: int | None = None,
) -> str:
    """Read a file in another process, and forget what is in it, but for what the reader makes of it.

    Args:
        reader: a function of a module, called with `path`. A HacpoError of it says what is wrong with the file.
        error: what is raised with that line, or with one of this function's own.
        too_large: what is raised where reading takes more than `memory`.
        parts: what to do where it takes longer than `seconds`.
        into: a folder that the reader is called with as well, to write to.
        memory, seconds: the bounds, where they are not `MEMORY` and `SECONDS`.

    Returns:
        The line that the reader returns; empty if it returns none.

    Raises:
        HacpoError: as above; or the process failed for another reason.
    """
    memory, seconds = MEMORY if memory is None else memory, SECONDS if seconds is None else seconds
    named = f"{reader.__module__}:{reader.__qualname__}"
    given = [str(given) for given in (path, into) if given is not None]
    command = [sys.executable, "-P", "-m", __spec__.name, str(memory), str(seconds), str(os.getpid()), named, *given]
    # Arrow's own allocators take address space beforehand. Whatever a file names, nothing is fetched for it.
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode == _UNREADABLE:
        raise error(done.stdout)
    if done.returncode == 1:  # Python's own, of what is no fault of the file
        why = (done.stderr.splitlines() or ["it says nothing"])[-1]
        raise HacpoError(f"the process that reads it failed: {harmless(why)[:160]}", where=path)
    if done.returncode == -signal.SIGXCPU:
        raise error(f"takes more than {seconds} seconds to read", where=path, remedy=parts)
    if done.returncode != 0:  # by its own word, or by a signal: Arrow ends the process where it gets no memory
        raise too_large
    return (done.stdout.splitlines() or [""])[-1]


def main() -> int:
    """`python -m hacpo.artifacts.trial BYTES SECONDS PARENT MODULE:FUNCTION FILE [FOLDER]`: reads the file; the exit
    code says what came of it."""
    more, seconds, parent = map(int, sys.argv[1:4])
    module, _, function = sys.argv[4].partition(":")
    path, *into = map(Path, sys.argv[5:])
    kernel.end_with_parent()
    if os.getppid() != parent:
        return 1
    reader = getattr(import_module(module), function)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    kernel.bound_memory(more)
    try:
        line = reader(path, *into)
    except (MemoryError, SystemError):  # the latter of a library in C that got no memory and does not say so
        return _TOO_LARGE
    except HacpoError as error:
        print(error)
        return _UNREADABLE
    except Exception as error:  # a damaged file makes Arrow raise whatever its damage leads to
        print(HacpoError(f"cannot be read: {first_line(error)}", where=path))
        return _UNREADABLE
    if isinstance(line, str):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
