"""Commands in forks of a process that has loaded everything: half a second where a fresh interpreter takes four.

As a module it is that process: it reads one request per line, and answers with one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .ending import end_with

_ROOT = Path(__file__).resolve().parents[2]
_LIBRARY = "HACPO_FAULTS_LIBRARY"
_TIMED_OUT = 124


@dataclass(frozen=True)
class Done:
    """What a command did."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def timed_out(self) -> bool:
        """It did not end, and was killed."""
        return self.code == _TIMED_OUT


class Forks:
    """Runs `hacpo` or `dvc` commands, one at a time.

    Args:
        library: to preload (`shim.library`).
        scratch: a folder for what commands print.
    """

    def __init__(self, scratch: Path, library: Path | None = None) -> None:
        self._scratch = scratch
        scratch.mkdir(parents=True, exist_ok=True)
        preloaded = {} if library is None else {"LD_PRELOAD": str(library), _LIBRARY: str(library)}
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": os.pathsep.join(paths),
                "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "passive",
                "DVC_NO_ANALYTICS": "true",
                **preloaded,
            },
        )

    def run(
        self,
        arguments: Sequence[object],
        folder: Path,
        variables: Mapping[str, str] | None = None,
        *,
        limit_seconds: float = 120.0,
        address_space: int | None = None,
    ) -> Done:
        """Run a command line, whose first word is `hacpo` or `dvc`, in a folder."""
        out, err = self._scratch / "out", self._scratch / "err"
        request = {
            "arguments": [str(word) for word in arguments],
            "folder": str(folder),
            "variables": dict(variables or {}),
            "out": str(out),
            "err": str(err),
            "limit": limit_seconds,
            "memory": address_space,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        begun = time.monotonic()
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(f"the process that forks has ended with {self._process.wait()}")
        code = int(answer)
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in (out, err)]
        return Done(code, *texts, time.monotonic() - begun)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed
            self._process.stdin.close()
        self._process.wait()


# --- the process that forks ------------------------------------------------------------------------------------------


def _load() -> None:
    """Import whatever commands import, and compute nothing: a fork has no threads but its own."""
    import hacpo

    for found in pkgutil.walk_packages(hacpo.__path__, "hacpo."):
        if not found.name.startswith(("hacpo.engines.vllm.local", "hacpo.verifying.worker")):
            importlib.import_module(found.name)
    for name in (
        *(
            "dvc.cli",
            "dvc.cli.parser",
            "dvc.data_cloud",
            "dvc.lock",
            "dvc.scm",
            "dvc.utils.strictyaml",
            "scmrepo.git",
            "dulwich.repo",
            "networkx",
            "pyarrow.dataset",
            "dateutil.relativedelta",
            "dvc.repo.stage",
            "dvc.repo",
            "dvc.commands.repro",
            "dvc.stage.cache",
            "dvc_data.index",
            "dvc_data.hashfile.db.local",
        ),
        *("transformers.models.qwen3.modeling_qwen3", "transformers.models.llama.modeling_llama"),
        *("transformers.generation", "peft", "safetensors.torch", "tokenizers", "torch", "polars", "pyarrow.parquet"),
        *("transformers.tokenization_utils_tokenizers", "sqlite3", "diskcache", "scipy", "sklearn", "asyncio"),
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _load()
    gc.collect()
    gc.freeze()  # or each fork copies all pages of it to look at what it never frees
    mine, asking = os.getpid(), os.getppid()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setsid()
                end_with(mine)
                code = _become(request)
            finally:
                os._exit(code)
        answers.write(f"{_wait(child, request['limit'], asking)}\n")
        answers.flush()


def _wait(child: int, limit_seconds: float, asking: int) -> int:
    """Its exit code; it is killed when its time is up, or when the process that asked for it has gone."""
    deadline = time.monotonic() + limit_seconds
    pause = 0.002
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        if time.monotonic() > deadline or os.getppid() != asking:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return _TIMED_OUT
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it has left running
    return os.waitstatus_to_exitcode(status)


def _become(request: dict[str, object]) -> int:
    """Be the command, in this fork."""
    import resource

    for number, name in ((1, "out"), (2, "err")):
        file = os.open(str(request[name]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(str(request["folder"]))
    os.environ.update(request["variables"])  # type: ignore[arg-type]
    program, *arguments = request["arguments"]  # type: ignore[misc]
    sys.argv = [program, *arguments]
    import tempfile

    tempfile.tempdir = None
    if memory := request["memory"]:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))  # type: ignore[arg-type]
    if library := os.environ.get(_LIBRARY):
        ctypes.CDLL(library).faults_arm()
    try:
        code = _call(program, arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    return code


def _call(program: str, arguments: list[str]) -> int:
    if program == "dvc":
        from dvc.cli import main

        return int(main(arguments))
    from hacpo.cli import app
    from hacpo.pipeline.execution.command_line import run_app

    return run_app(app, arguments)


if __name__ == "__main__":
    _serve()
