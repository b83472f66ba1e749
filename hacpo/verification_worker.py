"""The process in which answers are compared: `python -m hacpo.verification_worker`, one JSON line in, one out.

The process that `hacpo.reward` starts imports the mathematics library once and then only supervises. The comparing is
done by a child that it forks (it has no threads, and no torch): a child that exceeds its time or memory is killed from
outside, which no code in it can prevent, and the next one is there in milliseconds, because nothing has to be imported
again.

A request is `{"answer", "gold", "seconds", "bytes"}`, a reply `{"verdict"}`: `correct`, `wrong`, `timeout` or `error`.
The first line out is `{"ready": true}`. Both processes end when the one above them does, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

_POLL_SECONDS = 0.05
_RENEW_AFTER = 2000
"""Comparisons after which a child is replaced, so that SymPy's caches cannot add up to the memory limit."""
_WARM_UP = [
    (r"\frac{1}{2}", "0.5"),
    ("2(x+1)", "2x+2"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("x>2", r"(2,\infty)"),
    ("y=x", "x-y=0"),
]
_PAGE = resource.getpagesize()


def main() -> None:
    """Answers requests until standard input or the process above ends."""
    replies = os.dup(1)
    os.dup2(2, 1)  # nothing that a library prints may be taken for a reply
    requests = _Requests()
    from hacpo.equivalence import equivalent

    for answer, gold in _WARM_UP:  # fills the caches that every child then shares
        equivalent(answer, gold)
    gc.freeze()
    os.write(replies, b'{"ready": true}\n')
    child: _Child | None = None
    try:
        for line in requests.lines():
            request = json.loads(line)
            child = child or _Child(int(request["bytes"]), replies)
            verdict = child.ask(line, float(request["seconds"]), requests)
            if child.is_spent:
                child.kill()
                child = None
            os.write(replies, json.dumps({"verdict": verdict}).encode() + b"\n")
    except _CallerGoneError:
        pass
    finally:
        if child is not None:
            child.kill()


class _CallerGoneError(Exception):
    """Nobody waits for a reply any more."""


class _Requests:
    """Lines of standard input, and whether anybody is left to send some."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._received = b""

    def lines(self) -> Iterator[bytes]:
        while True:
            while b"\n" not in self._received:
                self.listen([], 1.0)
            line, _, self._received = self._received.partition(b"\n")
            yield line + b"\n"

    def listen(self, others: list[int], seconds: float) -> list[int]:
        """Waits for input; returns those of the `others` that can be read.

        Raises:
            _CallerGoneError: the input ended, or, where other processes still hold its far end, the parent is another.
        """
        readable, _, _ = select.select([0, *others], [], [], seconds)
        if 0 in readable:
            received = os.read(0, 1 << 16)
            self._received += received
            if not received:
                raise _CallerGoneError
        if os.getppid() != self._parent:
            raise _CallerGoneError
        return [other for other in others if other in readable]


class _Child:
    """A forked process that compares one pair after another."""

    def __init__(self, memory_bytes: int, inherited: int) -> None:
        requests_out, requests_in = os.pipe()
        replies_out, replies_in = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            for descriptor in (requests_in, replies_out, inherited, 0):
                os.close(descriptor)
            _serve(requests_out, replies_in, memory_bytes, parent)
        os.close(requests_out)
        os.close(replies_in)
        self._requests, self._replies = requests_in, replies_out
        self._memory = memory_bytes
        self._start = _resident(self._pid)
        self._asked = 0
        self.is_spent = False

    def ask(self, line: bytes, seconds: float, requests: _Requests) -> str:
        """The child's verdict, or why there is none: `timeout`, `error`."""
        deadline = time.monotonic() + seconds
        self._asked += 1
        self.is_spent = True  # until it has answered in time and in bounds
        with contextlib.suppress(BrokenPipeError):
            os.write(self._requests, line)
        while (left := deadline - time.monotonic()) > 0:
            answered = requests.listen([self._replies], min(left, _POLL_SECONDS))
            if self._grown() > self._memory:
                return "error"
            if answered:
                reply = os.read(self._replies, 4096)
                if not reply.endswith(b"\n"):
                    return "error"  # it died
                self.is_spent = self._asked >= _RENEW_AFTER or self._grown() > self._memory // 2
                return str(json.loads(reply)["verdict"])
        return "timeout"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._requests)
        os.close(self._replies)

    def _grown(self) -> int:
        return _resident(self._pid) - self._start


def _resident(pid: int) -> int:
    """Bytes of memory a process holds; 0 where there is no /proc, or no process any more."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _serve(requests: int, replies: int, memory_bytes: int, parent: int) -> NoReturn:
    """The child's life; it never returns, for what a fork has inherited must not be cleaned up twice."""
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the supervisor
        if os.getppid() == parent:
            _limit_memory(memory_bytes)
            for line in os.fdopen(requests, "rb"):
                request = json.loads(line)
                verdict = _verdict(str(request["answer"]), str(request["gold"]))
                os.write(replies, json.dumps({"verdict": verdict}).encode() + b"\n")
    finally:
        os._exit(0)


def _verdict(answer: str, gold: str) -> str:
    from hacpo.equivalence import equivalent

    try:
        return "correct" if equivalent(answer, gold) else "wrong"
    except Exception:  # an unreadable gold answer, a number too large, recursion, memory: nothing is known
        return "error"


def _limit_memory(memory_bytes: int) -> None:
    """Bounds the address space at twice the limit; the supervisor's look at the memory in use comes first.

    It should: SymPy swallows a MemoryError here and there and then calls two values unequal that it could not compare.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm", encoding="ascii") as statm:
        limit = int(statm.read().split()[0]) * _PAGE + 2 * memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
