"""Problems that ask for the largest of three numbers: `max(4,17,9)=?`."""

from __future__ import annotations

import random
from itertools import product

from hacpo.artifacts.problem_rows import Problem
from hacpo.data.tasks import Split, boxed, is_held_out
from hacpo.errors import DataError


def problems(split: Split, count: int, seed: int) -> list[Problem]:
    """Distinct problems of one split; no problem is in both.

    Args:
        split: `train`, or `heldout` for the fifth that training never sees.
        count: how many problems.
        seed: which ones, and in which order.

    Raises:
        DataError: there are fewer.
    """
    every = [
        numbers
        for numbers in product(range(2, 20), repeat=3)
        if is_held_out(_problem(*numbers)) == (split == "heldout")
    ]
    if count > len(every):
        raise DataError(
            f"there are not enough {split} problems of maxima", expected=f"at most {len(every)}", found=count
        )
    return [
        Problem(
            problem_id="maxima-" + "-".join(map(str, numbers)),
            problem=_problem(*numbers),
            answer=str(max(numbers)),
            solution=boxed(max(numbers)),
            subject="maxima",
            level=1,
            source="maxima",
        )
        for numbers in random.Random(f"maxima/{seed}/{split}").sample(every, count)
    ]


def _problem(first: int, second: int, third: int) -> str:
    return f"max({first},{second},{third})=?"
