"""Whether a stranger's Parquet file can be read at all, found out in a process whose memory is bounded.

What a file says of itself (sizes, counts of values) need not be so, and a dictionary makes terabytes of a few
kilobytes, so nothing of it is believed: it is read to the end in a process that may take `MEMORY` and no more.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from hacpo import kernel
from hacpo.data.importing.parquet_rows import MOST_BYTES, TooLargeError, read_parquet
from hacpo.errors import DataError, HacpoError, first_line, harmless

MEMORY = 3 * MOST_BYTES
"""Bytes that reading may take beyond what Python and Arrow do: Python's texts take up to four bytes a character."""

SECONDS = 600
"""Of processor time that reading may take."""

_TOO_LARGE = 3
_UNREADABLE = 4


def try_parquet(path: Path) -> None:
    """Read a Parquet file in another process, and forget what is in it.

    Raises:
        TooLargeError: it takes more than `MEMORY`.
        DataError: it cannot be read, or not within `SECONDS`.
    """
    command = [sys.executable, "-P", "-m", __spec__.name, str(MEMORY), str(SECONDS), str(os.getpid()), str(path)]
    # Arrow's own allocators take address space beforehand.
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"}
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
        raise DataError(done.stdout)
    if done.returncode == 1:  # Python's own, of what is no fault of the file
        why = (done.stderr.splitlines() or ["it says nothing"])[-1]
        raise HacpoError(f"the process that reads it failed: {harmless(why)[:160]}", where=path)
    if done.returncode == -signal.SIGXCPU:
        raise DataError(f"takes more than {SECONDS} seconds to read", where=path, remedy="import it in parts")
    if done.returncode != 0:  # by its own word, or by a signal: Arrow ends the process where it gets no memory
        raise TooLargeError(path)


def main() -> int:
    """`python -m hacpo.data.importing.trial BYTES SECONDS PARENT FILE`: reads the file; the exit code says what came
    of it."""
    more, seconds, parent, path = *map(int, sys.argv[1:4]), Path(sys.argv[4])
    kernel.end_with_parent()
    if os.getppid() != parent:
        return 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    kernel.bound_memory(more)
    try:
        read_parquet(path)
    except (MemoryError, TooLargeError):
        return _TOO_LARGE
    except DataError as error:
        print(error)
        return _UNREADABLE
    except Exception as error:  # a damaged file makes Arrow raise whatever its damage leads to
        print(DataError(f"not readable as Parquet: {first_line(error)}", where=path))
        return _UNREADABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
