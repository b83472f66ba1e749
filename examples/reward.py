"""A reward of one's own: half for the right answer, half for working that is true.

Name it in a run's params.yaml, and `verify` and `evaluate` call it for every response (docs/verification.md):

    verification: {reward: "examples.reward:score"}

To see what it would have made of a finished run, without touching that run:

    hacpo verify pipelines/smoke --step 2 --agent ada --out /tmp/try --set verification.reward=examples.reward:score
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

_STEP = re.compile(r"(\d+)([-+/%])(\d+)=(\d+)")
_BOX = re.compile(r"\\boxed\{(\d{1,9})\}")
_OPERATORS = {"+": operator.add, "-": operator.sub, "/": operator.truediv, "%": operator.mod}


def score(problem: Mapping[str, Any], response: str, finish_reason: str) -> tuple[float, str]:
    """Reward and verdict of a response to one of the arithmetic problems (`task: arithmetic`).

    Args:
        problem: the problem's row of the problems table.
        response: what the agent wrote.
        finish_reason: `stop`, or `length` where the limit on new tokens cut it off.

    Returns:
        1.0 for the right answer after true steps (`2+7=9 9-2=7 \\boxed{7}`), 0.5 for the right answer alone, else 0.0.
    """
    if finish_reason == "length":
        return 0.0, "truncated"
    boxes = _BOX.findall(response)
    if not boxes:
        return 0.0, "no_answer"
    if boxes[-1] != problem["answer"]:
        return 0.0, "wrong"
    steps = _STEP.findall(response)
    return (1.0 if steps and all(map(_is_true, steps)) else 0.5), "correct"


def _is_true(step: tuple[str, str, str, str]) -> bool:
    """Whether `left sign right = result` holds; digits of a model's text may be many."""
    left, sign, right, result = step
    if max(map(len, (left, right, result))) > 9 or (sign in "/%" and int(right) == 0):
        return False
    return bool(_OPERATORS[sign](int(left), int(right)) == int(result))
