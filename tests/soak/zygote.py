"""Commands as forks of a process that has loaded everything: at work at once, where a fresh interpreter takes seconds.

As a module it is that process: it reads one request a line, and answers each with one. What it forks is an ordinary
process in a session of its own; whoever asked for it kills it, and waits for it here.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from .ending import end_with

FORKED_STAGES = "HACPO_SOAK_FORKED_STAGES"
"""Environment variable: whether the stages that a forked DVC starts are forks too."""
NO_FLOCK = "HACPO_SOAK_NO_FLOCK"
"""Environment variable: whether flock does nothing in a fork. In a new interpreter `lockless` sees to it."""
_MODULES = {"hacpo.cli": "hacpo", "dvc": "dvc"}
"""`python -m` of what is done without a new interpreter."""
_LOADED = """
    configobj dateutil.relativedelta diskcache dulwich.client dulwich.bundle dulwich.repo dulwich.walk dvc.data_cloud
    dvc.repo.metrics dvc.utils.strictyaml dvc.repo.graph dvc.scm dvc.lock dvc.stage.cache dvc.commands.repro
    dvc.cli.parser dvc.repo dvc.repo.stage dvc.repo.params dvc.commands.status dvc.rwlock dvc.repo.plots
    dvc.repo.index dvc.cli dvc.cachemgr dvc.repo.datasets dvc.repo.artifacts dvc_data.hashfile.db.local dvc_data.index
    flufl.lock hacpo.tools.report.page hacpo.tools.audit.audit_view hacpo.engines.transformers
    hacpo.verifying.worker_pool hacpo.cli hacpo.engines.cache hacpo.pipeline.records.bookkeeping
    hacpo.pipeline.running.driver hacpo.tools.audit.walk hacpo.engines.training.trainer
    hacpo.engines.training.warm_start hacpo.tools.audit.texts
    networkx numpy.ma platformdirs.unix polars pyarrow.parquet pyarrow.acero pyarrow.dataset pydantic.type_adapter
    pyparsing ruamel.yaml safetensors.torch scmrepo.git sqlite3 torch transformers.generation
    transformers.models.llama.modeling_llama transformers.models.qwen3.modeling_qwen3 zc.lockfile
"""


def is_for(command: Sequence[str]) -> bool:
    """Whether a command can be a fork. One that starts interpreters of its own
    gains nothing by it."""
    spawns = "--jobs" in command and command[command.index("--jobs") + 1] != "1"
    return command[:2] == [sys.executable, "-m"] and command[2] in _MODULES and not spawns


class Zygote:
    """The process, as seen from outside."""

    def __init__(self, root: Path, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.zygote"],
            cwd=root,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: object) -> Any:
        """One request, one answer.

        Raises:
            RuntimeError: it has died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(f"the process that forks has ended with {self._process.wait()}")
        return json.loads(answer)

    def start(self, command: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str]) -> Fork:
        """Start a command, its output added to a log."""
        name, *arguments = command[2:]
        started = self.ask(
            name=name, arguments=arguments, folder=str(folder), log=str(log), environment=dict(environment)
        )
        return Fork(self, started)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Fork:
    """A forked command; as much of `subprocess.Popen` as is needed here."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self._zygote, self.pid = zygote, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, once it has ended. Until that was asked for, its number stays its own."""
        if self.returncode is None:
            self.returncode = self._zygote.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for it.

        Raises:
            TimeoutExpired: it has not ended in time.
        """
        deadline = time.monotonic() + timeout if timeout is not None else float("inf")
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        return code


# --- the process that forks ------------------------------------------------------------------------------------------

_answers: IO[str]


def _serve() -> None:
    os.dup2(2, 1)
    for name in _LOADED.split():
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or each fork copies all pages of it to look at what it never frees
    for line in sys.stdin:
        request = json.loads(line)
        _answers.write(json.dumps(_poll(request["poll"]) if "poll" in request else _fork(request)) + "\n")
        _answers.flush()


def _poll(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _fork(request: dict[str, Any]) -> int:
    begun, begins = os.pipe()
    mine, child = os.getpid(), os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            end_with(mine)
            os.closerange(begun, begins + 1)  # from here on its group can be killed
            code = _become(request)
        finally:
            os._exit(code)
    os.close(begins)
    os.read(begun, 1)
    os.close(begun)
    return child


def _become(request: dict[str, Any]) -> int:
    """Be the command, in this fork."""
    import tempfile

    _answers.close()
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for source, number in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    sys.argv = [_MODULES[request["name"]], *request["arguments"]]
    sys.path[0] = os.getcwd()
    if os.environ.get(NO_FLOCK):
        fcntl.flock = lambda *_: None  # type: ignore[assignment]
    return _ended(lambda arguments: _call(request["name"], arguments), request["arguments"])


def _ended(main: Callable[[list[str]], int], arguments: list[str]) -> int:
    """The exit code of a command, with all done that an interpreter does at its end."""
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    return code


def _call(name: str, arguments: list[str]) -> int:
    if name != "dvc":
        return _hacpo(arguments)
    import dvc.stage.run
    from dvc.cli import main

    if os.environ.get(FORKED_STAGES):
        dvc.stage.run._run = _run_stage
    return int(main(arguments))


def _hacpo(arguments: list[str]) -> int:
    from hacpo.cli import app
    from hacpo.pipeline.execution.command_line import run_app

    return run_app(app, arguments)


def _run_stage(executable: str, command: str, *, cwd: str, env: dict[str, str], **_: object) -> None:
    """In place of DVC's own, which has a shell start a new interpreter: the stage is a fork of DVC's process."""
    from dvc.stage.exceptions import StageCmdFailedError

    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(env)
            sys.argv = shlex.split(command)
            code = _ended(_hacpo, sys.argv[1:])
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        raise StageCmdFailedError(command, os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _answers = os.fdopen(os.dup(1), "w")
    _serve()
