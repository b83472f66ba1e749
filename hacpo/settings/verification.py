"""Which responses are right, and how long it may take to find out."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import model_validator

from hacpo.settings.base import Section, knob

_FUNCTION = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""`package.module:function`."""


class VerificationSettings(Section):
    """How responses are rewarded, and how far hostile text gets."""

    reward: str = knob(
        "math",
        doc="`math`: 1 where the last box holds the gold answer, else 0. `reasoning_gym`: what the scorer of the "
        "problem's task says of the last box. `package.module:function`: what this function of yours returns "
        "(docs/verification.md).",
    )
    partial_scores: bool = knob(
        False,
        doc="With `reasoning_gym`: whether a score between 0 and 1 is the reward as it is. false: only a score of 1 "
        "earns anything, as with `math`.",
    )
    truncated: Literal["wrong", "boxed"] = knob(
        "wrong",
        doc="What `math` and `reasoning_gym` make of a response that the limit on new tokens cut: `wrong`, no reward "
        "whatever it contains; `boxed`, its last box is judged like any other (without one: no reward).",
        source="`boxed`: verl",
    )
    max_error_rate: float | None = knob(
        None,
        doc="Largest share of `error` and `timeout` among the responses of one table; with more, the stage writes the "
        "table and fails. null: 0.1 with a function, 1 else.",
        ge=0,
        le=1,
    )
    timeout_seconds: float = knob(
        5.0, doc="Longest time for one response; then its verdict is `timeout`.", unit="s", gt=0
    )
    patience_seconds: float = knob(
        60.0,
        doc="Worker time that timeouts may cost one batch of responses; after it the others' limit is a tenth.",
        unit="s",
        ge=0,
    )
    memory_mib: int = knob(
        1024,
        doc="Memory a verification worker may add to its start size; then the verdict is `error`.",
        unit="MiB",
        ge=64,
    )
    workers: int = knob(1, doc="Verification processes.", unit="processes", ge=1)
    max_characters: int = knob(
        1000,
        doc="Longest boxed answer that is parsed; the verdict on a longer one is `error`.",
        unit="characters",
        ge=1,
    )
    max_nesting: int = knob(
        10,
        doc="Deepest nesting of brackets that is parsed (parsing time grows exponentially with it).",
        unit="levels",
        ge=1,
    )
    max_extracted: int = knob(
        200,
        doc="Longest `extracted` kept in a table; of a longer one a digest takes the place of the rest.",
        unit="characters",
        ge=1,
    )

    @property
    def is_math(self) -> bool:
        """Whether answers are compared with the gold answer; nothing else of the problem is needed."""
        return self.reward == "math"

    @property
    def is_gym(self) -> bool:
        """Whether scorers of reasoning-gym judge the answers."""
        return self.reward == "reasoning_gym"

    @property
    def is_function(self) -> bool:
        """Whether a function of the user's own is given whole responses: no answer is taken out of them."""
        return not (self.is_math or self.is_gym)

    @property
    def is_binary(self) -> bool:
        """Whether rewards are 1 for `correct` and 0 for all else, so that their mean is an accuracy."""
        return self.is_math or (self.is_gym and not self.partial_scores)

    @property
    def error_limit(self) -> float:
        """`max_error_rate`, or its default: errors come from the code with a function, else from the text."""
        if self.max_error_rate is not None:
            return self.max_error_rate
        return 0.1 if self.is_function else 1.0

    @model_validator(mode="after")
    def _names_a_function(self) -> VerificationSettings:
        if self.is_function and not _FUNCTION.fullmatch(self.reward):
            raise ValueError(
                f"reward must be `math`, `reasoning_gym` or `package.module:function`, found {self.reward!r}"
            )
        if self.is_function and self.truncated != "wrong":
            raise ValueError(
                "truncated is for reward `math` and `reasoning_gym`; a function is given the finish reason and decides "
                "itself"
            )
        if self.partial_scores and not self.is_gym:
            raise ValueError("partial_scores is for reward `reasoning_gym`")
        return self
