"""Chat templates rendered in a process of their own, within bounds of time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hacpo.errors import HacpoError

SECONDS = 10.0
"""Longest time for one prompt; real templates take a millisecond."""

MEMORY = 256 << 20
"""Bytes that the rendering of one prompt may take; real templates take a few times the prompt's length."""

_START_SECONDS = 120.0
"""Importing Jinja takes a tenth of a second, longer on a busy machine."""

_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "LANG", "LC_ALL")
"""Variables that the process gets: where Python and Jinja are, and their encoding."""

_WORKER = "hacpo.tokens.template_worker"
_FILE = Path(__file__).with_name("template_worker.py")


class RefusedError(Exception):
    """The template refuses the messages, or cannot be used; the message says why.

    Attributes:
        beyond_bounds: it took too long, or too much memory: no other messages are worth a try.
    """

    def __init__(self, why: str, *, beyond_bounds: bool = False) -> None:
        super().__init__(why)
        self.beyond_bounds = beyond_bounds


class Renderer:
    """Renders one template; its process starts with the first prompt and ends with this object, or with ours.

    Args:
        template: Jinja, of a stranger's.
    """

    def __init__(self, template: str) -> None:
        self._template = template
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._received = b""

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text that the template makes of its variables.

        Raises:
            RefusedError: it refuses, fails, makes what is no text, or takes more than `SECONDS` or `MEMORY`.
            HacpoError: no process can be started.
        """
        request = {"template": self._template, "variables": dict(variables), "bytes": MEMORY}
        with self._lock:
            process = self._started()
            reply = self._ask(process, json.dumps(request, default=str).encode() + b"\n")
        if reply is None:
            raise RefusedError(f"it takes more than {SECONDS:g} s or {MEMORY >> 20} MiB", beyond_bounds=True)
        if "refused" in reply:
            raise RefusedError(reply["refused"], beyond_bounds=reply["beyond_bounds"])
        text = str(reply["text"])
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RefusedError("it makes half a character (a lone surrogate)") from None
        return text

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._received = b""
        self._process = subprocess.Popen(
            # Without `-P` files of the working directory would stand for `jinja2` and others.
            [sys.executable, "-P", "-m", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            # A template gets at nothing of the process around it; should one get out of Jinja's sandbox, no key of the
            # user's (HF_TOKEN, VLLM_API_KEY) is there.
            env={name: value for name in _ENVIRONMENT if (value := os.environ.get(name)) is not None},
        )
        weakref.finalize(self, _end, self._process)
        if self._line(self._process, time.monotonic() + _START_SECONDS) is None:
            _end(self._process)
            raise HacpoError(
                "the process that renders chat templates did not start",
                where=_FILE,
            )
        return self._process

    def _ask(self, process: subprocess.Popen[bytes], request: bytes) -> dict[str, Any] | None:
        """The reply; None if there is none in time, and the process is ended."""
        assert process.stdin is not None
        reply: dict[str, Any] | None = None
        try:
            with contextlib.suppress(BrokenPipeError):  # it is dead, as the missing reply says
                unsent = memoryview(request)
                while unsent:
                    unsent = unsent[process.stdin.write(unsent) :]
            line = self._line(process, time.monotonic() + SECONDS)
            reply = None if line is None else json.loads(line)
        finally:
            if reply is None:  # also when interrupted: the reply to this prompt must not be taken for the next one's
                _end(process)
        return reply

    def _line(self, process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
        assert process.stdout is not None
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                return None
            received = process.stdout.read(1 << 16)
            if not received:
                return None
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line


_RENDERERS: weakref.WeakValueDictionary[str, Renderer] = weakref.WeakValueDictionary()


def renderer_of(template: str) -> Renderer:
    """The renderer of a template: tokenizers of the same template share one, and so a process."""
    return _RENDERERS.setdefault(template, Renderer(template))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
