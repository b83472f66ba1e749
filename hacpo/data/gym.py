"""Problems of reasoning-gym's tasks, in mixtures: which ones a set holds depends on its settings alone.

Every entry of a task is made from a number; a set takes entries by ascending number, beginning where its seed says,
until it has as many as the task's share asks for. What no two sets of different splits can share is a question's words,
in whatever order and whatever single letters are called: a hash of these says which split it belongs to, whatever the
seed, the options and the task. So no split has `gcd 12, 30` where another has `gcd 30, 12`, nor `3*x = 6` beside
`3*y = 6`.

| split     | share | for                                       |
|-----------|-------|-------------------------------------------|
| `train`   | 3/5   | training                                  |
| `heldout` | 1/5   | curves, and whatever is chosen by them    |
| `final`   | 1/5   | a study's result, looked at once          |
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Literal

from hacpo.artifacts.problem_rows import Problem
from hacpo.data.gym_solutions import solution
from hacpo.errors import DataError, SettingsError, first_line
from hacpo.seeds import derive_seed
from hacpo.settings.gym_tasks import SCORED_WITH, VERSION, GymTask
from hacpo.verifying.answers.spelling import extract_answer
from hacpo.verifying.gym_scores import NotInstalledError, require

Split = Literal["train", "heldout", "final"]

_PARTS: tuple[Split, ...] = ("heldout", "final", "train", "train", "train")
"""A fifth of all questions each."""

_WORD = re.compile(r"\w+|[^\w\s]")

_IN_VAIN = 3000
"""Entries in a row that are not new to the set, after which a task is taken to have no more."""


def split_of(question: str) -> Split:
    """The split that a question belongs to; depends on nothing but its words."""
    words = sorted("x" if len(word) == 1 and word.isalpha() else word for word in _WORD.findall(question))
    return _PARTS[int.from_bytes(_digest(" ".join(words))[:8], "big") % len(_PARTS)]


def problems(mixture: Mapping[str, GymTask], split: Split, count: int, seed: int) -> list[Problem]:
    """Distinct problems of one split, of each task as many as its weight says, shuffled.

    Args:
        mixture: task -> its weight and options.
        split: whose side of the hash split.
        count: how many problems.
        seed: which ones, and in which order.

    Raises:
        SettingsError: reasoning-gym is not installed, or a task does not take its options.
        DataError: a task has fewer different problems than its share.
    """
    try:
        require()
    except NotInstalledError as error:
        raise SettingsError(str(error), where="data.sets: task reasoning_gym") from None
    shares = _shares({name: task.weight for name, task in mixture.items()}, count)
    made = [
        problem
        for name, task in mixture.items()
        for problem in _problems_of(name, task.options, split, shares[name], seed)
    ]
    random.Random(derive_seed(seed, "reasoning_gym", split)).shuffle(made)
    return made


def _shares(weights: Mapping[str, float], count: int) -> dict[str, int]:
    """Whole numbers that sum to `count`, in proportion; what rounding leaves goes to the largest remainders."""
    total = sum(weights.values())
    exact = {name: count * weight / total for name, weight in weights.items()}
    shares = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(weights, key=lambda name: shares[name] - exact[name])  # a stable sort: ties as written
    for name in by_remainder[: count - sum(shares.values())]:
        shares[name] += 1
    return shares


def _problems_of(task: str, options: Mapping[str, Any], split: Split, count: int, seed: int) -> list[Problem]:
    drawn: dict[str, Problem] = {}
    since = 0
    entries = _entries(task, options, derive_seed(seed, "reasoning_gym", task))
    while len(drawn) < count:
        entry = next(entries)
        since += 1
        question = entry["question"]
        if split_of(question) == split and question not in drawn and _fits_a_box(entry["answer"]):
            drawn[question], since = _problem(task, options, entry), 0
        if since > _IN_VAIN:
            raise DataError(
                f"there are not enough different {split} problems of reasoning_gym's task {task!r}",
                expected=count,
                found=len(drawn),
                remedy="ask for fewer, give the task a smaller weight, or options with more to choose from",
            )
    return list(drawn.values())


def _entries(task: str, options: Mapping[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """A task's entries from a seed on, without end.

    Raises:
        SettingsError: the task does not take its options.
    """
    from reasoning_gym.factory import DATASETS

    where = f"mixture.{task}"
    dataset, config = DATASETS[task]
    known = sorted({field.name for field in fields(config)} - {"seed", "size"})
    for name in options:
        if name not in known:
            raise SettingsError(f"{where}.{name}: reasoning_gym's task has no such option", expected=", ".join(known))
    try:
        # Below 2^31, and so that adding an entry's number leaves it there: some tasks hand it to NumPy.
        made = dataset(config(**options, seed=seed % 2**30, size=2**30))
        number = 0
        while True:
            yield made[number]
            number += 1
    except Exception as error:  # whatever a generator makes of options that do not fit
        raise SettingsError(f"{where}: the task does not work with these options: {first_line(error)}") from None


def _problem(task: str, options: Mapping[str, Any], entry: Mapping[str, Any]) -> Problem:
    question, metadata = entry["question"], entry["metadata"]
    scorer = {"metadata": {key: metadata[key] for key in SCORED_WITH[task]}, "options": options, "task": task}
    return Problem(
        problem_id=f"{task}-{_digest(question)[:6].hex()}",
        problem=question,
        answer=entry["answer"],
        solution=solution(task, entry),
        subject=task,
        level=None,
        source=f"reasoning-gym {VERSION}",
        scorer=json.dumps(scorer, sort_keys=True),
    )


def _fits_a_box(answer: str) -> bool:
    """Whether a response can give this answer: some are empty, or have braces without their partners."""
    return bool(answer) and extract_answer(f"\\boxed{{{answer}}}", len(answer)) == answer


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8")).digest()
