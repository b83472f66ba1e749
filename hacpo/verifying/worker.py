"""The process in which responses are judged: `python -m hacpo.verifying.worker`, one JSON line in, one out.

Without arguments it compares answers: a question is [answer, gold answer]. With `reasoning_gym` it asks the scorer of
the problem's task: a question is [the problem's scorer as JSON, gold answer, answer, `partial` or empty]. With
`package.module:function` and the project's root it calls that function: a question is [row of the problems table as
JSON, response, finish reason].

The process that `verifying.worker_pool` starts imports the mathematics library, the scorers, or the function's module,
once and then only supervises. The judging is done by a child that it forks: a child that exceeds its time or memory is
killed from outside, which no code in it can prevent, and the next one is there in milliseconds, because nothing has to
be imported again.

A request is `{"question", "seconds", "bytes"}`, a reply `{"reward", "verdict", "message"}` (`judgement`). The
first line out is `{"ready": true}`, or `{"refused": "why"}` where the function cannot be used. Both processes end when
the one above them does, however it ends, or by SIGTERM to the upper one; what a function has started ends with them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hacpo import kernel
from hacpo.verifying.judgement import Judgement, failure

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
_IMPORT_SECONDS = 180
"""Longer than any caller waits."""

_Judge = Callable[[Sequence[str]], Judgement]


def main() -> None:
    """Answers requests until standard input or the process above ends."""
    replies = os.dup(1)
    os.dup2(2, 1)  # nothing that a library or a reward function prints may be taken for a reply
    requests = _Requests()
    kernel.control(kernel.CHILD_SUBREAPER, 1)  # what a reward function leaves running becomes ours to end
    signal.signal(signal.SIGTERM, _leave)
    try:
        judge = _opened(sys.argv[1:])
        signal.signal(signal.SIGTERM, _leave)  # a module may have set another
        gc.freeze()
        os.write(replies, b'{"ready": true}\n')
        _supervise(judge, requests, replies)
    except _RefusedError as refusal:
        os.write(replies, json.dumps({"refused": str(refusal)}).encode() + b"\n")
    except _CallerGoneError:
        pass
    finally:
        _end_children()


def _supervise(judge: _Judge, requests: _Requests, replies: int) -> None:
    """Judges until the caller is gone; what is there by then is the module's own, and stays as long."""
    kept = _children()
    child: _Child | None = None
    try:
        for line in requests.lines():
            request = json.loads(line)
            child = child or _Child(judge, int(request["bytes"]), replies)
            judgement = child.ask(line, float(request["seconds"]), requests)
            if child.is_spent:
                child.kill()
                child = None
                _end_children(kept)
            os.write(replies, json.dumps(asdict(judgement)).encode() + b"\n")
    finally:
        if child is not None:
            child.kill()


def _leave(*_: object) -> None:
    """End at once, whatever is going on, and all processes below."""
    _end_children()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # the child that judges, where the system does not say who is below
    os._exit(0)


class _RefusedError(Exception):
    """What rewards responses cannot be used; the message says why."""


def _opened(arguments: Sequence[str]) -> _Judge:
    """What judges in every child, its libraries loaded and their caches filled, for all children to share."""
    if not arguments:
        from hacpo.verifying.answers.equivalence import equivalent

        for answer, gold in _WARM_UP:
            equivalent(answer, gold)
        return _compare
    if list(arguments) == ["reasoning_gym"]:
        from hacpo.verifying import gym_scores

        try:
            gym_scores.load()
        except gym_scores.NotInstalledError as error:
            raise _RefusedError(str(error)) from error
        return _score
    from hacpo.verifying.function import UnusableError, load

    name, root = arguments
    signal.alarm(_IMPORT_SECONDS)  # nobody may be left to end an import that hangs
    try:
        function = load(name, Path(root))
    except UnusableError as error:
        raise _RefusedError(str(error)) from error
    finally:
        signal.alarm(0)
    return partial(_call, function)


def _compare(question: Sequence[str]) -> Judgement:
    from hacpo.verifying.answers.equivalence import equivalent

    answer, gold = question
    try:
        return Judgement(1.0, "correct") if equivalent(answer, gold) else Judgement(0.0, "wrong")
    except Exception as error:  # an unreadable gold answer, a number too large, recursion, memory: nothing is known
        return failure(_REASONS.get(type(error).__name__, f"the comparison raised {type(error).__name__}"))


_REASONS = {
    "UnreadableError": "the gold answer cannot be read",
    "TooLargeError": "a number is too large to be computed with",
}


def _score(question: Sequence[str]) -> Judgement:
    from hacpo.verifying import gym_scores

    scorer, gold, answer, partial = question
    return gym_scores.judge(scorer, gold, answer, partial=partial == "partial")


def _call(function: Any, question: Sequence[str]) -> Judgement:
    from hacpo.verifying.function import judge

    problem, response, finish_reason = question
    return judge(function, json.loads(problem), response, finish_reason)


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
    """A forked process that judges one response after another."""

    def __init__(self, judge: _Judge, memory_bytes: int, inherited: int) -> None:
        requests_out, requests_in = os.pipe()
        replies_out, replies_in = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            for descriptor in (requests_in, replies_out, inherited):
                os.close(descriptor)
            _serve(judge, requests_out, replies_in, memory_bytes, parent)
        os.close(requests_out)
        os.close(replies_in)
        self._requests, self._replies = requests_in, replies_out
        self._memory = memory_bytes
        self._start = _resident(self._pid)
        self._asked = 0
        self.is_spent = False

    def ask(self, line: bytes, seconds: float, requests: _Requests) -> Judgement:
        """The child's judgement, or why there is none: `timeout`, `error`."""
        deadline = time.monotonic() + seconds
        self._asked += 1
        self.is_spent = True  # until it has answered in time and in bounds
        with contextlib.suppress(BrokenPipeError):
            unsent = memoryview(b"%d %s" % (self._asked, line))
            while unsent:
                unsent = unsent[os.write(self._requests, unsent) :]
        while (left := deadline - time.monotonic()) > 0:
            answered = requests.listen([self._replies], min(left, _POLL_SECONDS))
            if self._grown() > self._memory:
                return failure(f"it took more than {self._memory >> 20} MiB of memory")
            if answered:
                reply = os.read(self._replies, 4096)
                if not reply:
                    return failure("the process died of it")
                # A function that forks or writes to our pipe must not hand its reward to the next response.
                number, _, judgement = reply.partition(b" ")
                if number != b"%d" % self._asked or reply.find(b"\n") != len(reply) - 1:
                    return failure("the process sent something else than one verdict")
                self.is_spent = self._asked >= _RENEW_AFTER or self._grown() > self._memory // 2
                return Judgement(**json.loads(judgement))
            if os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return failure("the process died of it")  # though a process that it started keeps the pipe open
        return failure(f"no verdict after {seconds:g} s", "timeout")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._requests)
        os.close(self._replies)

    def _grown(self) -> int:
        return _resident(self._pid) - self._start


def _resident(pid: int) -> int:
    """Bytes of memory a process holds; 0 where that is not known."""
    _, held = kernel.memory(pid) or (0, 0)
    return held


def _children() -> set[int]:
    """The processes right below this one; none where there is no /proc."""
    found: set[int] = set()
    for thread in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            found.update(map(int, thread.read_text(encoding="ascii").split()))
    return found


def _end_children(kept: Iterable[int] = ()) -> None:
    """Ends the processes below this one but the `kept`: those of a process that has ended are this one's, as its
    reaper, so there may be more after each round."""
    spared = set(kept)
    while left := _children() - spared:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except PermissionError:  # it has become another user's
                spared.add(pid)
            except (ProcessLookupError, ChildProcessError):
                continue


def _serve(judge: _Judge, requests: int, replies: int, memory_bytes: int, parent: int) -> NoReturn:
    """The child's life; it never returns, for what a fork has inherited must not be cleaned up twice."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        kernel.end_with_parent()  # end with the supervisor
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # what is printed for every response would fill the disk in time
            os.dup2(nowhere, standard)
        if os.getppid() == parent:
            _limit_memory(memory_bytes)
            for line in os.fdopen(requests, "rb"):
                number, _, request = line.partition(b" ")
                judgement = judge(json.loads(request)["question"])
                os.write(replies, b"%s %s\n" % (number, json.dumps(asdict(judgement)).encode()))
    finally:
        os._exit(0)


def _limit_memory(memory_bytes: int) -> None:
    """Bounds the address space at twice the limit; the supervisor's look at the memory in use comes first.

    It should: SymPy swallows a MemoryError here and there and then calls two values unequal that it could not compare.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kernel.bound_memory(2 * memory_bytes, for_good=True)


if __name__ == "__main__":
    main()
