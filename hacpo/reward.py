r"""Rewards from verified answers: 1 for a response whose last `\boxed{...}` says what the gold answer says, else 0.

`Verifier.verify` gives every response a `Verdict`. What needs no mathematics is decided here, in microseconds and
without importing a mathematics library; the rest is compared in worker processes (`hacpo.verification_worker`) under
limits on time and memory, where a comparison that hangs or dies costs its own response a `timeout` or an `error` and
nothing else. docs/verification.md states what counts as the same answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Literal, Self

from hacpo.answers import extract_answer, nesting, plain_verdict
from hacpo.errors import DataError, HacpoError

if TYPE_CHECKING:  # pydantic takes longer to import than everything here
    from hacpo.config import VerificationSettings

Outcome = Literal["correct", "wrong", "no_answer", "truncated", "timeout", "error"]
Progress = Callable[[int, int], None]
"""Called with the number of responses that have a verdict, and of all."""

_WORKER = (sys.executable, "-P", "-m", "hacpo.verification_worker")
_START_SECONDS = 120.0
"""Importing SymPy takes one second, many on a busy machine."""
_GRACE_SECONDS = 5.0
"""How much later than its limit a worker's own report may come before the worker is given up."""


@dataclass(frozen=True)
class Request:
    """One response to verify."""

    key: str
    """Identifies the response among those verified together, for example its rollout_id."""
    text: str
    finish_reason: str
    """`stop`, or `length` where the limit on new tokens cut the response."""
    answer: str
    """The gold answer: LaTeX as inside a box."""


@dataclass(frozen=True)
class Verdict:
    """What a response is worth."""

    reward: float
    """1.0 for `correct`, 0.0 otherwise."""
    verdict: Outcome
    extracted: str | None
    """The answer that was judged, cut to `verification.max_extracted` characters; None where there was none."""


_Pair = tuple[str, str]
"""(answer, gold answer)"""


class Verifier:
    """Verifies responses; a context manager that ends its worker processes.

    Workers start with the first pair of answers that needs one, and stay for later calls. May be used from any thread.
    """

    def __init__(self, settings: VerificationSettings) -> None:
        self._settings = settings
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker processes."""
        while self._workers:
            self._workers.pop().kill()

    def verify(self, requests: Iterable[Request], on_progress: Progress | None = None) -> list[Verdict]:
        """A verdict for each request, in their order.

        Raises:
            DataError: two requests have the same key, or a gold answer is empty.
            HacpoError: no worker process can be started.
        """
        requests = list(requests)
        verdicts: dict[str, Verdict] = {}
        waiting: dict[_Pair, list[str]] = {}
        for request in requests:
            if request.key in verdicts:
                raise DataError("two responses have the same key", where=request.key)
            verdict, pair = self._first_look(request)
            verdicts[request.key] = verdict
            if pair is not None:
                waiting.setdefault(pair, []).append(request.key)
        undecided = sum(map(len, waiting.values()))
        if on_progress:
            on_progress(len(requests) - undecided, len(requests))

        def decided(pair: _Pair, outcome: Outcome) -> None:
            nonlocal undecided
            for key in waiting[pair]:
                verdicts[key] = _verdict(outcome, verdicts[key].extracted)
            undecided -= len(waiting[pair])
            if on_progress:
                on_progress(len(requests) - undecided, len(requests))

        if waiting:
            with self._lock:
                self._compare(list(waiting), decided)
        return [verdicts[request.key] for request in requests]

    def _first_look(self, request: Request) -> tuple[Verdict, _Pair | None]:
        """The verdict where no mathematics is needed; else a provisional `error` and the pair of answers to compare."""
        settings = self._settings
        if not request.answer.strip():
            raise DataError("the gold answer is empty", where=request.key, remedy="leave the problem out")
        if request.finish_reason == "length":
            return _verdict("truncated", None), None
        answer = extract_answer(request.text, settings.max_characters)
        if not answer:
            return _verdict("no_answer", None), None
        extracted = answer[: settings.max_extracted].encode("utf-8", "replace").decode("utf-8")
        gold = request.answer
        if r"\boxed" in gold:
            gold = extract_answer(gold, settings.max_characters) or gold
        plain = plain_verdict(answer, gold)
        if plain is not None:
            return _verdict("correct" if plain else "wrong", extracted), None
        longest = max(len(answer), len(gold))
        if longest > settings.max_characters or max(nesting(answer), nesting(gold)) > settings.max_nesting:
            return _verdict("error", extracted), None
        return _verdict("error", extracted), (answer, gold)

    def _compare(self, pairs: Sequence[_Pair], decided: Callable[[_Pair, Outcome], None]) -> None:
        """Has the workers compare each pair; it ends, because every worker replies or is given up in bounded time."""
        self._workers = [worker for worker in self._workers if worker.is_alive()]
        self._workers += [_Worker() for _ in range(min(self._settings.workers, len(pairs)) - len(self._workers))]
        todo = deque(pairs)
        lost = 0.0
        try:
            while todo or any(worker.pair for worker in self._workers):
                seconds = self._settings.timeout_seconds * (1.0 if lost <= self._settings.patience_seconds else 0.1)
                for worker in self._workers:
                    if todo and worker.pair is None:
                        worker.ask(todo.popleft(), seconds, self._settings.memory_mib << 20)
                readable, _, _ = select.select([worker.replies for worker in self._workers], [], [], 0.5)
                for index, worker in enumerate(self._workers):
                    pair = worker.pair
                    outcome = worker.reply(worker.replies in readable)
                    if worker.is_lost:
                        worker.kill()
                        self._workers[index] = _Worker()
                    if pair is not None and outcome is not None:
                        lost += worker.seconds if outcome == "timeout" else 0.0
                        decided(pair, outcome)
        except BaseException:
            self.close()  # a worker that is still busy would answer the next call's question
            raise


def _verdict(outcome: Outcome, extracted: str | None) -> Verdict:
    return Verdict(1.0 if outcome == "correct" else 0.0, outcome, extracted)


class _Worker:
    """A worker process, and the pair it is comparing."""

    def __init__(self) -> None:
        root = str(Path(__file__).resolve().parent.parent)
        search = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `kill`)
        self._process = subprocess.Popen(
            _WORKER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            env={
                **os.environ,
                "PYTHONPATH": search,
                "PYTHONHASHSEED": "0",
            },  # SymPy's order of arguments follows hashes
            start_new_session=True,  # one group with its child; an interrupt at the terminal is the caller's to handle
        )
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self.replies = self._process.stdout
        self._requests = self._process.stdin
        self.pair: _Pair | None = None
        self.seconds = 0.0
        self.is_lost = False
        self._is_ready = False
        self._received = b""
        self._deadline = 0.0

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, pair: _Pair, seconds: float, memory_bytes: int) -> None:
        """Sends a pair; the worker must be idle."""
        self.pair, self.seconds = pair, seconds
        self._deadline = time.monotonic() + seconds + (_GRACE_SECONDS if self._is_ready else _START_SECONDS)
        request = {"answer": pair[0], "gold": pair[1], "seconds": seconds, "bytes": memory_bytes}
        with contextlib.suppress(BrokenPipeError):  # it is dead, which `reply` finds out
            self._requests.write(json.dumps(request).encode() + b"\n")

    def reply(self, readable: bool) -> Outcome | None:
        """The outcome for the current pair, None while there is none; sets `is_lost` when this was the worker's last.

        Raises:
            HacpoError: the process did not start.
        """
        if readable:
            received = os.read(self.replies.fileno(), 1 << 16)
            self._received += received
            self.is_lost = not received
        while b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            message = json.loads(line)
            if "ready" in message:
                self._is_ready = True
                self._deadline = time.monotonic() + self.seconds + _GRACE_SECONDS
            else:
                self.pair = None
                return message["verdict"]  # type: ignore[no-any-return]
        self.is_lost |= self.pair is not None and time.monotonic() > self._deadline
        if not self.is_lost:
            return None
        if not self._is_ready:
            raise HacpoError("a verification process did not start", found=self._last_words())
        return "timeout" if time.monotonic() > self._deadline else "error"

    def kill(self) -> None:
        """Ends the process and its child at once."""
        if self.is_alive():
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._requests.close()
        self.replies.close()
        self._errors.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-500:].decode("utf-8", "replace").strip() or "nothing on standard error"
