"""Short arithmetic in four families: the problems on which agents of a hundred thousand weights can learn.

Each family is finite: every prompt it can have is listed once, with a worked solution of two steps and a boxed answer.
A fifth of all prompts, chosen by a hash of the prompt's text alone, is held out; so whatever the seed and the count, no
held-out prompt is ever among the training problems.

| family  | problem                      | solution                  |
|---------|------------------------------|---------------------------|
| chains  | `7+3-2=?`                    | `7+3=10 10-2=8 \\boxed{8}`  |
| linear  | `4x+3=27?`                   | `27-3=24 24/4=6 \\boxed{6}` |
| modular | `(8+7)%6=?`                  | `8+7=15 15%6=3 \\boxed{3}`  |
| words   | `Ann has 7, gets 3, eats 2?` | `7+3=10 10-2=8 \\boxed{8}`  |
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, product, zip_longest
from typing import Literal

from hacpo.artifacts.problem_rows import Problem
from hacpo.errors import DataError

Split = Literal["train", "heldout"]

FAMILIES = ("chains", "linear", "modular", "words")
"""Names of the families, in the order in which `problems` deals them out."""

WORDS = ("Ann", "Ben", "Eve", "Tom", "has", "gets", "eats")
"""Every word that a problem can contain."""

SOURCE = "arithmetic"
"""The `source` of every problem made here."""

_NAMES = WORDS[:4]
_HELD_OUT_ONE_IN = 5


@dataclass(frozen=True)
class Step:
    """One step of a solution, `7+3=10`.

    Attributes:
        expression: the left side, as written.
        result: the right side, an integer.
    """

    expression: str
    result: int

    def __str__(self) -> str:
        return f"{self.expression}={self.result}"


def boxed(answer: object) -> str:
    """The last part of every solution: the answer in a box."""
    return f"\\boxed{{{answer}}}"


def worked(steps: Sequence[Step], answer: object) -> str:
    """A solution's text: its steps, then the answer in a box."""
    return " ".join([*map(str, steps), boxed(answer)])


def steps_of(problem: Problem) -> tuple[Step, ...]:
    """The steps of a problem's solution (`worked`): of these families two, of others also none."""
    expressions = (part.split("=") for part in (problem.solution or "").split(" ")[:-1])
    return tuple(Step(expression, int(result)) for expression, result in expressions)


def is_held_out(problem: str) -> bool:
    """Whether a prompt belongs to the held-out fifth; depends on nothing but its text."""
    return int.from_bytes(_digest(problem)[:8], "big") % _HELD_OUT_ONE_IN == 0


@cache
def family_problems(family: str, split: Split) -> tuple[Problem, ...]:
    """Every problem of a family on one side of the split, in the order of the family's numbers.

    A problem's id is the family and a hash of the prompt, the same in every set that contains it; its answer an integer
    between 0 and 27; its subject the family; its level 1 if the first step's result has one digit, 2 if it is below 20,
    3 from 20 on.

    Raises:
        DataError: no such family or split.
    """
    if split not in ("train", "heldout"):
        raise DataError("no such split", where=split, expected="train or heldout")
    if family not in _PROMPTS:
        raise DataError("no such task family", where=family, expected=" or ".join(FAMILIES))
    held_out = split == "heldout"
    return tuple(
        Problem(
            problem_id=f"{family}-{_digest(text)[:5].hex()}",
            problem=text,
            answer=str(second.result),
            solution=worked([first, second], second.result),
            subject=family,
            level=1 if first.result < 10 else 2 if first.result < 20 else 3,
            source=SOURCE,
        )
        for text, first, second in _PROMPTS[family]()
        if is_held_out(text) == held_out
    )


def problems(split: Split, count: int, seed: int) -> list[Problem]:
    """Distinct problems of one split, the families in turn (each a quarter of them, the first ones get the remainder).

    Args:
        split: `train`, or `heldout` for the fifth that training never sees.
        count: how many problems.
        seed: which of a family's problems are drawn, and in which order.

    Raises:
        DataError: a family has fewer problems than asked for.
    """
    shares = [count // len(FAMILIES) + (index < count % len(FAMILIES)) for index in range(len(FAMILIES))]
    drawn = []
    for family, share in zip(FAMILIES, shares, strict=True):
        every = family_problems(family, split)
        if share > len(every):
            most = min(len(family_problems(name, split)) for name in FAMILIES)
            raise DataError(
                f"there are not enough {split} problems of family {family!r}",
                expected=f"at most {most * len(FAMILIES)} problems",
                found=count,
                remedy="ask for fewer problems",
            )
        drawn.append(random.Random(f"{seed}/{split}/{family}").sample(every, share))
    in_turn = chain.from_iterable(zip_longest(*drawn))
    return [problem for problem in in_turn if problem is not None]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8")).digest()


def _add(left: int, right: int) -> Step:
    return Step(f"{left}+{right}", left + right)


def _subtract(left: int, right: int) -> Step:
    return Step(f"{left}-{right}", left - right)


def _chains() -> Iterator[tuple[str, Step, Step]]:
    digits = range(2, 10)
    for a, b, c in product(digits, digits, digits):
        for first, second_sign in product((_add(a, b), _subtract(a, b)), "+-"):
            second = (_add if second_sign == "+" else _subtract)(first.result, c)
            if first.result >= 0 and second.result >= 0:
                yield f"{first.expression}{second_sign}{c}=?", first, second


def _linear() -> Iterator[tuple[str, Step, Step]]:
    for a, x, b in product(range(2, 10), range(2, 10), range(1, 13)):
        total = a * x + b
        yield f"{a}x+{b}={total}?", _subtract(total, b), Step(f"{a * x}/{a}", x)


def _modular() -> Iterator[tuple[str, Step, Step]]:
    for a, b, m in product(range(2, 13), range(2, 13), range(3, 10)):
        yield f"({a}+{b})%{m}=?", _add(a, b), Step(f"{a + b}%{m}", (a + b) % m)


def _words() -> Iterator[tuple[str, Step, Step]]:
    # The name follows from the numbers, so that no two prompts differ in the name alone.
    digits = range(2, 10)
    for a, b, c in product(digits, digits, digits):
        name = _NAMES[(a + b + c) % len(_NAMES)]
        if a + b >= c:
            yield f"{name} has {a}, gets {b}, eats {c}?", _add(a, b), _subtract(a + b, c)
        if a >= b:
            yield f"{name} has {a}, eats {b}, gets {c}?", _subtract(a, b), _add(a - b, c)


_PROMPTS = {"chains": _chains, "linear": _linear, "modular": _modular, "words": _words}
