"""What a response is judged to be: the words of the verdicts table, and reasons short enough for a row of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

Given = Literal["correct", "wrong", "no_answer", "truncated"]
"""What a verifier or a reward function calls a response."""

Outcome = Literal[Given, "timeout", "error"]
"""The last two are said of the verifier: nobody could tell."""

GAVE_UP: tuple[Outcome, ...] = tuple(name for name in get_args(Outcome) if name not in get_args(Given))
"""Those two: their reward of 0 says nothing."""

MAX_MESSAGE = 300
"""Characters of a reason that a table keeps. A reply with it fits into one atomic write to a pipe (4096 bytes)."""

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


@dataclass(frozen=True)
class Judgement:
    """A response's reward, its verdict, and for `error` and `timeout` the reason."""

    reward: float
    verdict: Outcome
    message: str | None = None


def failure(message: str, verdict: Outcome = "error") -> Judgement:
    """Nobody can tell, so there is no reward."""
    return Judgement(0.0, verdict, shortened(message))


def shortened(message: str) -> str:
    """One line of at most `MAX_MESSAGE` characters, without what differs from run to run (memory addresses)."""
    line = " ".join(_ADDRESS.sub("0x...", message).split()).encode("utf-8", "replace").decode("utf-8")
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 3] + "..."
