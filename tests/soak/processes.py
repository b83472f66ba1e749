"""Processes of a sandbox: started with a mark, found by it, killed by process and time of start."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from .ending import end_with
from .zygote import Fork, Zygote

MARK = "HACPO_SOAK_SANDBOX"
"""Environment variable that every process of a sandbox inherits."""


@dataclass
class Started:
    """A command at work, in a session of its own."""

    process: subprocess.Popen[bytes] | Fork
    log: Path
    begins: int
    """Where in the log its output begins."""

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill_group()

    def kill_group(self) -> None:
        """It and what it started in its session. The leader has not been waited for, so the number is still its own."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def kill_alone(self) -> None:
        """Only itself."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def below(self) -> list[psutil.Process]:
        """Processes that it started, and those they started."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def output(self) -> str:
        """What it printed, and what else was printed meanwhile by what an earlier one left."""
        return self.log.read_bytes()[self.begins :].decode(errors="replace")


def start(
    command: Sequence[str],
    root: Path,
    log: Path,
    environment: Mapping[str, str],
    mark: str,
    zygote: Zygote | None = None,
) -> Started:
    """Start a command, as a fork of `zygote` if it can be one; its output is added to the log."""
    environment = {**environment, MARK: mark}
    with log.open("ab") as file:
        file.write(f"\n$ {' '.join(command)}\n".encode())
        file.flush()
        begins = file.tell()
        if zygote is not None:
            return Started(zygote.start(command, root, log, environment), log, begins)
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=functools.partial(end_with, os.getpid()),  # noqa: PLW1509 (it takes no lock)
        )
    return Started(process, log, begins)


def marked(mark: str) -> Iterator[psutil.Process]:
    """Living processes of a sandbox: by what they inherited, forks of another's by where they work."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and (
                process.environ().get(MARK) == mark or f"{process.cwd()}/".startswith(f"{mark}/")
            ):
                yield process


def orphans(mark: str, within_seconds: float) -> list[psutil.Process]:
    """Processes of a sandbox that are still there after a while, in which none should be."""
    deadline = time.monotonic() + within_seconds
    while (found := list(marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def describe(process: psutil.Process) -> str:
    """Its number and command line."""
    with contextlib.suppress(psutil.Error):
        return f"process {process.pid}: {' '.join(process.cmdline())[:300]}"
    return f"process {process.pid}"
