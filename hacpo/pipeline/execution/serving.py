"""`hacpo serve`: a vLLM server of one agent, as a process of this one."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from hacpo.artifacts.layout import Layout
from hacpo.artifacts.storage import atomic
from hacpo.artifacts.text_files import read_text
from hacpo.artifacts.weights import whole_model
from hacpo.engines.vllm.servers import KEYS, key_of_environment
from hacpo.errors import MissingInputError, ModelError, SettingsError
from hacpo.kernel import end_with_parent
from hacpo.pipeline.locking.locks import only_one
from hacpo.pipeline.policies import check_policy
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.elsewhere import checkpoint_command
from hacpo.settings.engine import EngineSettings

START_SECONDS = 1800.0
"""Longest wait for a server to start: large weights come from slow disks."""

STOP_SECONDS = 20.0
"""How long a server may take to end by itself."""


def newest_checkpoint(pipeline: Pipeline, agent: str) -> tuple[int, Path]:
    """The last step whose checkpoint of an agent is there, and its folder.

    Raises:
        MissingInputError: there is none.
        ArtifactError: its weights are not those that the run's files were made with.
    """
    layout: Layout = pipeline.layout
    for step in range(pipeline.settings.steps, -1, -1):
        if (folder := layout.checkpoint(step, agent)).is_dir():
            check_policy(pipeline, step, agent)
            return step, folder
    raise MissingInputError(
        "there is no checkpoint to serve",
        where=layout.checkpoint(0, agent),
        remedy=f"run `{checkpoint_command(pipeline, 0, agent)}`",
    )


@contextlib.contextmanager
def issued_key(folder: Path, agent: str, port: int) -> Iterator[tuple[str, str | None]]:
    """The key that a server is to ask for, and the file that holds it, relative to the pipeline's folder; None where
    the key is the user's own, in `VLLM_API_KEY`. The file is its owner's alone and goes when the block is left.

    Raises:
        SettingsError: the user's key cannot be sent in a header.
        BusyError: another server of the agent has this port, or is about to.
        StorageError: the file cannot be written.
    """
    if (given := key_of_environment()) is not None:
        yield given, None
        return
    key, path = secrets.token_urlsafe(32), folder / KEYS / f"{agent}-{port}"
    if not (ignored := path.with_name(".gitignore")).is_file():
        with atomic(ignored) as scratch:
            scratch.write_text("*\n", encoding="utf-8")
    # Until its weights are loaded, a server does not listen yet: a free port does not say that there is none.
    with only_one(path.with_name(f".{path.name}.lock"), f"another `hacpo serve` of {agent} has port {port}"):
        with atomic(path) as scratch, open(scratch, "x", encoding="ascii", opener=_private) as file:
            file.write(key + "\n")
        try:
            yield key, path.relative_to(folder).as_posix()
        finally:
            with contextlib.suppress(OSError, ValueError):
                if read_text(path) == key + "\n":  # where there are no locks, another's may be there
                    path.unlink()


def entry_of(agent: str, url: str, key_file: str | None) -> str:
    """The line of `servers.yaml` for a server, without its key."""
    return f"{agent}: {url}" if key_file is None else f"{agent}: {{url: {json.dumps(url)}, key_file: {key_file}}}"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def server_command(
    folder: Path, agent: str, settings: EngineSettings, host: str, port: int, *, guarded: bool = True
) -> list[str]:
    """The command that starts vLLM's OpenAI server on a model folder, as `hacpo.engines.vllm.server` wants it.

    Args:
        guarded: whether the server asks for the key in its environment (`hacpo.engines.vllm.server_key`).
    """
    from hacpo.engines.vllm.local import command_line, engine_arguments
    from hacpo.engines.vllm.server_key import MIDDLEWARE

    arguments = {
        "model": whole_model(folder).resolve(),  # an adapter's base: the run loads merged weights into it
        "served_model_name": agent,
        "host": host,
        "port": port,
        **engine_arguments(settings),
        "data_parallel_size": settings.vllm.data_parallel,
        "uvicorn_log_level": "warning",
        "middleware": MIDDLEWARE if guarded else None,
    }
    return [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", *command_line(arguments)]


def check_port(host: str, port: int) -> None:
    """Refuse a port that is taken, before half a minute is spent on a model.

    Raises:
        SettingsError: it is, or the host is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SettingsError(
                f"cannot listen there: {error.strerror}", where=f"{host}:{port}", remedy="name another --port or --host"
            ) from None


@contextlib.contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], url: str, where: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers, ended with everything it started when the block is left.

    It is a session of its own, so that Ctrl-C reaches us alone, and we end it; should we be killed, the kernel ends it.

    Raises:
        ModelError: it ended before it answered, or did not answer in time.
    """
    with subprocess.Popen(
        list(command),
        env={**os.environ, **environment},
        start_new_session=True,
        # One system call, and no lock of another thread is needed.
        preexec_fn=partial(end_with_parent, signal.SIGTERM),  # noqa: PLW1509
    ) as process:
        try:
            _wait(process, url, where)
            yield process
        finally:
            _stop(process)


def _wait(process: subprocess.Popen[bytes], url: str, where: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None:
        # A proxy in the environment is for the internet.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with contextlib.suppress(urllib.error.URLError, OSError), opener.open(f"{url}/health", timeout=5):
            return
        if time.monotonic() > deadline:
            raise ModelError(f"the vLLM server did not answer in {START_SECONDS:.0f} s", where=where)
        time.sleep(0.2)
    raise ModelError(
        f"the vLLM server ended at its start, with exit code {process.returncode}",
        where=where,
        remedy="its own messages are above; VLLM_LOGGING_LEVEL=INFO shows more",
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and all its processes, by force if it does not end by itself."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # its session: also the workers of a server that is gone already
    process.wait()
