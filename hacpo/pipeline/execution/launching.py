"""Starting the processes that compute one update together.

They run the very command that starts them, `python -m hacpo.stages.update ...`, so that a user can start them by hand
as well. Process 0 locks and writes; it tells its progress on standard output, one line of JSON at a time.

As a module this is a command that turns into another one, and dies with the process that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from hacpo.engines.training.processes import LAUNCHED, leads
from hacpo.errors import HacpoError, SettingsError
from hacpo.pipeline.execution.accelerating import accelerate_command
from hacpo.pipeline.execution.orphans import die_with_parent
from hacpo.pipeline.execution.session import ProgressSink
from hacpo.settings.root import Settings

_PROGRESS = "hacpo-progress "
_ERROR = re.compile(r"hacpo: error\((\d+)\): (.*)")
_THIS = "hacpo.pipeline.execution.launching"


class UpdateFailedError(HacpoError):
    """A process of an update ended with an error of its own; line and exit code are that process's."""

    def __init__(self, what: str, exit_code: int = HacpoError.exit_code, *, remedy: str = "") -> None:
        super().__init__(what, remedy=remedy)
        self.exit_code = exit_code


class LineProgress:
    """Progress of process 0, for the stage that started it; the other processes are silent."""

    def report(self, stage: str, done: int, total: int, facts: dict[str, float]) -> None:  # noqa: ARG002
        """One line."""
        if leads():
            print(_PROGRESS + json.dumps([done, total, facts]), flush=True)

    def finished(self, stage: str, summary: str) -> None:
        """The stage that started this process says it."""

    def remark(self, text: str) -> None:
        """The same."""


def launch(settings: Settings, root: Path, arguments: Sequence[str], progress: ProgressSink, title: str) -> None:
    """Run `python -m hacpo.stages.update ARGUMENTS` in as many processes as the settings say, and wait for them.

    They are started by `accelerate launch`, or by the settings' own command. Each has `engine.threads` CPU threads;
    without that setting the cores are divided.

    Args:
        root: the project's.

    Raises:
        SettingsError: the user's `accelerate config` file contradicts the settings; nothing was started.
        UpdateFailedError: a process failed; the line is the first that one of them gave.
    """
    launcher, threads = settings.launcher, settings.engine.threads
    prefix = launcher.started_by or accelerate_command(settings, root)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")},
        LAUNCHED: "0",
        "OMP_NUM_THREADS": str(threads or max(1, cores // launcher.processes)),
    }
    last: deque[str] = deque(maxlen=200)
    with subprocess.Popen(
        [sys.executable, "-m", _THIS, str(os.getpid()), *prefix, "-m", "hacpo.stages.update", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
    ) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=last.extend, args=(process.stderr,), daemon=True)
        reader.start()
        try:
            for line in process.stdout:
                if line.startswith(_PROGRESS):
                    done, total, facts = json.loads(line.removeprefix(_PROGRESS))
                    progress.report(title, done, total, facts)
            code = process.wait()
        except BaseException:
            process.terminate()  # accelerate launch and torchrun pass it on to the processes that it started
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()
            raise
        reader.join(timeout=10)
    if code:
        raise _failure(list(last))


def error_line(line: str, code: int) -> str:
    """What a process that a stage started says of its failure to that stage."""
    return f"hacpo: error({code}): {line}"


def _failure(lines: Sequence[str]) -> UpdateFailedError:
    """The first process's own line; for a crash, what it printed last."""
    for line in lines:
        if (found := _ERROR.search(line)) is not None:
            return UpdateFailedError(found[2].strip(), int(found[1]))
    sys.stderr.writelines(lines)
    return UpdateFailedError(
        "a process of the update died; above is what they printed last",
        remedy="look there; one that was killed without a word was probably out of memory",
    )


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    if sys.argv[2] == sys.executable:
        os.environ[LAUNCHED] = str(os.getpid())  # accelerate launch's, from the next line on
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as reason:
        why = f"launcher.command: {sys.argv[2]!r} cannot be started: {reason.strerror}"
        sys.exit(error_line(why, SettingsError.exit_code))
