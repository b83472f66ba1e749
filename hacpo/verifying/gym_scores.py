"""Scores of answers to reasoning-gym's problems, by its own scorers (`verification.reward: reasoning_gym`).

Runs in a verification worker (`verifying.worker`), which bounds time and memory. `settings.gym_tasks` says whose
scorers are called at all.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from functools import lru_cache
from typing import Any

from hacpo.settings.gym_tasks import SCORED_WITH, VERSION
from hacpo.verifying.judgement import Judgement, failure

_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")


class NotInstalledError(Exception):
    """reasoning-gym is missing, or of another version; the message is one line."""


def require() -> None:
    """Make sure that reasoning-gym is there, of the version whose scorers were read.

    Raises:
        NotInstalledError: it is not.
    """
    try:
        installed = importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        raise NotInstalledError("reasoning-gym is not installed; run `pip install 'hacpo[gym]'`") from None
    if installed != VERSION:
        raise NotInstalledError(
            f"reasoning-gym {installed} is installed, and the scorers of {VERSION} were read; "
            "run `pip install 'hacpo[gym]'`"
        )


def load() -> None:
    """Import reasoning-gym and everything that its scorers use."""
    require()
    import reasoning_gym  # noqa: F401


def judge(scorer: str, gold: str, answer: str, *, partial: bool) -> Judgement:
    """What the scorer of a problem's task says of an answer.

    Args:
        scorer: the problem's `scorer`: JSON of the task, its options and what its scorer reads of the entry.
        gold: the problem's answer.
        answer: of the response, not empty.
        partial: whether a score between 0 and 1 is the reward as it is, rather than 0.

    Returns:
        `correct` with the reward 1 for a score of 1, else `wrong`; `error` where the scorer says nothing.
    """
    try:
        parts = json.loads(scorer)
        task, options, metadata = str(parts["task"]), parts["options"], parts["metadata"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return failure("the problem's scorer is not readable")
    if task not in SCORED_WITH:  # whatever a problem file says: others evaluate the answer
        return failure(f"{task!r} is no task of reasoning_gym that is allowed")
    try:
        dataset = _dataset(task, json.dumps(options))
        score = float(dataset.score_answer(answer, {"answer": gold, "metadata": metadata}))
    except Exception as error:  # options and metadata come from a file
        return failure(f"reasoning_gym's scorer of {task} raised {type(error).__name__}")
    if score == 1.0:  # a sum of parts that is beyond it is a fault of the scorer
        return Judgement(1.0, "correct") if _says_as_much(answer, gold) else Judgement(0.0, "wrong")
    return Judgement(_float32(score) if partial and 0.0 < score < 1.0 else 0.0, "wrong")


def _says_as_much(answer: str, gold: str) -> bool:
    """Whether an answer has the form of the gold one, where a scorer that is content does not look: some count the
    places of a list that agree, and see no more than the gold list has; some leave all commas out of a number."""
    if _NUMBER.fullmatch(gold):
        return not re.search("[,_]", answer) or _THOUSANDS.fullmatch(answer.strip()) is not None
    return answer.count(",") == gold.count(",")


@lru_cache(maxsize=64)
def _dataset(task: str, options: str) -> Any:
    """What has the task's scorer."""
    from reasoning_gym.factory import DATASETS

    dataset, config = DATASETS[task]
    return dataset(config(**json.loads(options), seed=0, size=1))


def _float32(value: float) -> float:
    """As tables hold it."""
    import struct

    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)
