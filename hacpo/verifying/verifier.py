r"""Rewards of responses: from verified answers (`verification.reward: math`), from the scorers of reasoning-gym
(`reasoning_gym`), or from a function of the user's own.

`Verifier.verify` gives every response a `Verdict`. With `math` it is 1 for a response whose last `\boxed{...}` says
what the gold answer says, else 0: what needs no mathematics is decided here, in microseconds and without importing a
mathematics library. The rest, and every call of a scorer or of the user's function, is done in worker processes
(`verifying.worker_pool`) under limits on time and memory, where a response that makes one hang or die costs its own
verdict a `timeout` or an `error` and nothing else. docs/verification.md states what counts as the same answer, and what
a function may do.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from hacpo.callbacks import OnProgress
from hacpo.errors import DataError, RewardError
from hacpo.verifying.answers.spelling import extract_answer, nesting, plain_verdict, shortened
from hacpo.verifying.judgement import GAVE_UP, Judgement, Outcome, failure
from hacpo.verifying.worker_pool import Question, WorkerPool

if TYPE_CHECKING:  # pydantic and pyarrow take longer to import than everything here
    import pyarrow as pa

    from hacpo.artifacts.problem_rows import Problem
    from hacpo.settings.verification import VerificationSettings


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
    problem: Problem | None = None
    """Only scorers and functions of the user's own need it."""


@dataclass(frozen=True)
class Verdict:
    """What a response is worth."""

    reward: float
    """With `math` 1.0 for `correct` and 0.0 otherwise; a scorer's from 0 to 1; a function's any finite float32."""
    verdict: Outcome
    extracted: str | None
    """The answer that was judged, None where there was none; beyond `verification.max_extracted` characters shortened
    (`spelling.shortened`)."""
    message: str | None = None
    """Why nobody can tell, where the verdict is `error` or `timeout`."""


class Verifier:
    """Verifies responses; a context manager that ends its worker processes.

    With `math`, workers start with the first pair of answers that needs one; else entering the context starts one and
    so makes sure that scorers or function can be used. They stay for later calls. May be used from any thread.

    Args:
        settings: the reward and its limits.
        root: the project's root, where a function's module is looked for first; None: the working directory.
    """

    def __init__(self, settings: VerificationSettings, root: Path | None = None) -> None:
        self._settings = settings
        self._pool = WorkerPool(
            settings.workers,
            _arguments(settings, root),
            timeout_seconds=settings.timeout_seconds,
            patience_seconds=settings.patience_seconds,
            memory_bytes=settings.memory_mib << 20,
        )
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self.make_ready()
        return self

    def make_ready(self) -> None:
        """Start what `math` starts only when it is needed: scorers or a function that cannot be used are found out
        before anything is sampled.

        Raises:
            SettingsError: scorers or function cannot be used.
        """
        if not self._settings.is_math:
            with self._lock:
                self._pool.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()

    def verify(self, requests: Iterable[Request], on_progress: OnProgress | None = None) -> list[Verdict]:
        """A verdict for each request, in their order. What is the same for two requests is judged once.

        Raises:
            DataError: two requests have the same key, a gold answer is empty, or there is no problem for a scorer or
                function.
            SettingsError: scorers or function cannot be used.
            HacpoError: no worker process can be started.
        """
        requests = list(requests)
        verdicts: dict[str, Verdict] = {}
        waiting: dict[Question, list[str]] = {}
        look = _FunctionCalls() if self._settings.is_function else self._first_look
        for request in requests:
            if request.key in verdicts:
                raise DataError("two responses have the same key", where=request.key)
            verdict, question = look(request)
            verdicts[request.key] = verdict
            if question is not None:
                waiting.setdefault(question, []).append(request.key)
        undecided = sum(map(len, waiting.values()))
        if on_progress:
            on_progress(len(requests) - undecided, len(requests))

        def decided(question: Question, judgement: Judgement) -> None:
            nonlocal undecided
            for key in waiting[question]:
                verdicts[key] = _verdict(judgement, verdicts[key].extracted)
            undecided -= len(waiting[question])
            if on_progress:
                on_progress(len(requests) - undecided, len(requests))

        if waiting:
            with self._lock:
                self._pool.ask_all(list(waiting), decided)
        return [verdicts[request.key] for request in requests]

    def _first_look(self, request: Request) -> tuple[Verdict, Question | None]:
        """The verdict where neither mathematics nor a scorer is needed; else a provisional `error` and the question."""
        settings = self._settings
        if not request.answer.strip():
            raise DataError("the gold answer is empty", where=request.key, remedy="leave the problem out")
        cut = request.finish_reason == "length"
        if cut and settings.truncated == "wrong":
            return Verdict(0.0, "truncated", None), None
        gold = request.answer if settings.is_gym else _out_of_its_box(request.answer.strip())
        whole = max(settings.max_characters, len(gold))
        answer = extract_answer(request.text, whole)
        if not answer:
            return Verdict(0.0, "truncated" if cut else "no_answer", None), None
        extracted = shortened(answer, settings.max_extracted)
        # Before anything is compared: what is longer than `whole` has been cut, and its beginning is not the answer.
        same = len(answer) <= whole and answer == gold
        if not same and max(len(answer), len(gold)) > settings.max_characters:
            return _verdict(failure(f"an answer of more than {settings.max_characters} characters"), extracted), None
        if settings.is_gym:
            partial = "partial" if settings.partial_scores else ""
            return _verdict(_UNDECIDED, extracted), (_scorer(request), gold, answer, partial)
        return self._compared(answer, gold, extracted, same=same)

    def _compared(self, answer: str, gold: str, extracted: str, *, same: bool) -> tuple[Verdict, Question | None]:
        """`_first_look` at two answers that are not too long; `same`: they are the same characters."""
        plain = same or plain_verdict(answer, gold)
        if plain is not None:
            return Verdict(float(plain), "correct" if plain else "wrong", extracted), None
        if max(nesting(answer), nesting(gold)) > self._settings.max_nesting:
            return _verdict(failure(f"brackets nest deeper than {self._settings.max_nesting}"), extracted), None
        return _verdict(_UNDECIDED, extracted), (answer, gold)


def _arguments(settings: VerificationSettings, root: Path | None) -> tuple[str, ...]:
    """Of a worker's command line."""
    if settings.is_function:
        return settings.reward, str((root or Path()).resolve())
    return (settings.reward,) if settings.is_gym else ()


def _out_of_its_box(gold: str) -> str:
    return (extract_answer(gold, len(gold)) or gold) if r"\boxed" in gold else gold


def _scorer(request: Request) -> str:
    """What the problem's scorer is given beside the answers."""
    scorer = None if request.problem is None else request.problem.scorer
    if scorer is None:
        raise DataError(
            "verification.reward: reasoning_gym scores its own problems alone, and this one has no scorer",
            where=request.key,
            remedy="use sets of task reasoning_gym, or such that `hacpo import reasoning_gym` wrote",
        )
    return scorer


_UNDECIDED = failure("not judged")


class _FunctionCalls:
    """Turns requests into calls of the user's function, each problem's row written out once."""

    def __init__(self) -> None:
        self._rows: dict[int, str] = {}

    def __call__(self, request: Request) -> tuple[Verdict, Question | None]:
        problem = request.problem
        if problem is None:
            raise DataError("a reward function needs the problem's row, and none was given", where=request.key)
        if id(problem) not in self._rows:  # rows stay alive with their requests
            self._rows[id(problem)] = json.dumps(vars(problem), sort_keys=True)
        return _verdict(_UNDECIDED, None), (self._rows[id(problem)], request.text, request.finish_reason)


def _verdict(judgement: Judgement, extracted: str | None) -> Verdict:
    return Verdict(judgement.reward, judgement.verdict, extracted, judgement.message)


VERDICT = tuple(field.name for field in fields(Verdict))
"""Columns of a table that a verdict stands in."""


def verdicts_in(table: pa.Table) -> list[Verdict]:
    """The verdicts of a table's rows, which has the columns `VERDICT`."""
    return [Verdict(*row) for row in zip(*(table[name].to_pylist() for name in VERDICT), strict=True)]


def check_error_rate(verdicts: Sequence[Verdict], settings: VerificationSettings, *, where: object) -> None:
    """Refuse verdicts of which more than `verification.max_error_rate` are `error` or `timeout`.

    Args:
        where: the table that holds them.

    Raises:
        RewardError: there are more.
    """
    failed = [verdict for verdict in verdicts if verdict.verdict in GAVE_UP]
    limit = settings.error_limit
    if len(failed) > limit * len(verdicts):
        share = f"{len(failed)} of {len(verdicts)} ({100 * len(failed) / len(verdicts):.3g} %)"
        suspect = settings.reward if settings.is_function else "the gold answers"
        raise RewardError(
            "too many responses could not be judged (verdict `error` or `timeout`)",
            where=where,
            expected=f"at most {100 * limit:.3g} % by verification.max_error_rate",
            found=f"{share}, the first: {failed[0].message}",
            remedy=f"the table is there to look at; correct {suspect} and repeat the command",
        )
