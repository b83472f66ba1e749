"""The caller's side of the verification processes: several workers, each with one question at a time.

A worker (`hacpo.verifying.worker`) replies or is given up in bounded time, so `WorkerPool.ask_all` ends whatever the
questions are. Workers are started by `subprocess`, from any thread, and never by forking the caller.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from hacpo.errors import HacpoError, SettingsError
from hacpo.verifying.judgement import Judgement, failure

Question = tuple[str, ...]
"""What a worker is asked; `verifying.worker` says what it is with which reward."""

_WORKER = (sys.executable, "-P", "-m", "hacpo.verifying.worker")
_START_SECONDS = 120.0
"""Importing SymPy takes one second, many on a busy machine; the module of a reward function may import more."""
_GRACE_SECONDS = 5.0
"""How much later than its limit a worker's own report may come before the worker is given up."""
_LEAVING_SECONDS = 5.0
"""What a worker gets to end what a reward function started, and itself."""
_HURRIED = 0.1
"""Share of the time limit that is left to a question once timeouts have cost `patience_seconds`."""


class WorkerPool:
    """Worker processes that start when first needed and stay until `close`.

    Args:
        count: most processes.
        arguments: of the worker's command line (`verifying.worker`).
        timeout_seconds, patience_seconds, memory_bytes: limits (`VerificationSettings`).
    """

    def __init__(
        self,
        count: int,
        arguments: Sequence[str],
        *,
        timeout_seconds: float,
        patience_seconds: float,
        memory_bytes: int,
    ) -> None:
        self._count = count
        self._arguments = tuple(arguments)
        self._timeout_seconds = timeout_seconds
        self._patience_seconds = patience_seconds
        self._memory_bytes = memory_bytes
        self._workers: list[_Worker] = []

    def __len__(self) -> int:
        return len(self._workers)

    def start(self) -> None:
        """Make sure that one worker is ready to be asked.

        Raises:
            HacpoError: no worker can be started; SettingsError where its reward function cannot be used.
        """
        self._fill(1)
        try:
            while not any(worker.is_ready for worker in self._workers):
                self._listen()
        except BaseException:
            self.close()
            raise

    def ask_all(self, questions: Sequence[Question], decided: Callable[[Question, Judgement], None]) -> None:
        """Ask every question once; `decided` hears of each judgement, in the order in which they come.

        Raises:
            HacpoError: as `start`.
        """
        self._fill(min(self._count, len(questions)))
        todo = deque(questions)
        lost = 0.0
        try:
            while todo or any(worker.question for worker in self._workers):
                hurry = 1.0 if lost <= self._patience_seconds else _HURRIED
                for worker in self._workers:
                    if todo and worker.is_ready and worker.question is None:
                        worker.ask(todo.popleft(), self._timeout_seconds * hurry, self._memory_bytes)
                for worker, question, judgement in self._listen():
                    lost += worker.seconds if judgement.verdict == "timeout" else 0.0
                    decided(question, judgement)
        except BaseException:
            self.close()  # a worker that is still busy would answer the next call's question
            raise

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.dismiss()
        while self._workers:
            self._workers.pop().kill()

    def _fill(self, count: int) -> None:
        for worker in self._workers:
            if not worker.is_alive():
                worker.kill()
        self._workers = [worker for worker in self._workers if worker.is_alive()]
        self._workers += [_Worker(self._arguments) for _ in range(count - len(self._workers))]

    def _listen(self) -> list[tuple[_Worker, Question, Judgement]]:
        """What the workers reply within half a second; a worker that is lost is replaced."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.replies, selectors.EVENT_READ)
            readable = {key.fileobj for key, _ in selector.select(0.5)}
        heard = []
        for index, worker in enumerate(self._workers):
            question = worker.question
            judgement = worker.reply(worker.replies in readable)
            if worker.is_lost:
                worker.kill()
                self._workers[index] = _Worker(self._arguments)
            if question is not None and judgement is not None:
                heard.append((worker, question, judgement))
        return heard


class _Worker:
    """A worker process, and the question it has been asked."""

    def __init__(self, arguments: Sequence[str]) -> None:
        root = str(Path(__file__).resolve().parents[2])
        search = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `kill`)
        self._process = subprocess.Popen(
            [*_WORKER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            # SymPy's order of arguments follows hashes.
            env={**os.environ, "PYTHONPATH": search, "PYTHONHASHSEED": "0"},
            start_new_session=True,  # one group with its child; an interrupt at the terminal is the caller's to handle
        )
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self.replies = self._process.stdout
        self._requests = self._process.stdin
        self.question: Question | None = None
        self.seconds = 0.0
        self.is_ready = False
        self.is_lost = False
        self._received = b""
        self._deadline = time.monotonic() + _START_SECONDS

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: Question, seconds: float, memory_bytes: int) -> None:
        """Sends a question; the worker must be ready and idle, so that it reads even what no pipe can hold."""
        self.question, self.seconds = question, seconds
        self._deadline = time.monotonic() + seconds + _GRACE_SECONDS
        request = json.dumps({"question": question, "seconds": seconds, "bytes": memory_bytes}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it is dead, which `reply` finds out
            unsent = memoryview(request)
            while unsent:
                unsent = unsent[self._requests.write(unsent) :]

    def reply(self, readable: bool) -> Judgement | None:
        """The judgement on the current question, None while there is none; sets `is_lost` when this was its last.

        Raises:
            HacpoError: the process did not start; SettingsError where its reward function cannot be used.
        """
        if readable:
            received = os.read(self.replies.fileno(), 1 << 16)
            self._received += received
            self.is_lost = not received
        while b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            message = json.loads(line)
            if "refused" in message:
                raise SettingsError(
                    "the reward function cannot be used", where="verification.reward", found=message["refused"]
                )
            if "ready" in message:
                self.is_ready = True
            else:
                self.question = None
                return Judgement(**message)
        is_waited_for = self.question is not None or not self.is_ready
        is_late = is_waited_for and time.monotonic() > self._deadline
        self.is_lost |= is_late
        if not self.is_lost:
            return None
        if not self.is_ready:
            raise HacpoError("a verification process did not start", found=self._last_words())
        if is_late:
            return failure(f"no verdict after {self.seconds:g} s", "timeout")
        return failure("the verification process died")

    def dismiss(self) -> None:
        """Asks the process to end, with all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Ends the process and its child, and, unless it is stuck, what the reward function has started."""
        self.dismiss()
        try:
            self._process.wait(_LEAVING_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._requests.close()
        self.replies.close()
        self._errors.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-500:].decode("utf-8", "replace").strip() or "nothing on standard error"
