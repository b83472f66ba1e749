"""What is followed over steps, by name: metrics of benchmarks and their average (`evaluation.metrics` has the sums)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

AVERAGE = "average"
"""Name of the series that is the mean over benchmarks; no benchmark is called so."""

_WRITTEN = re.compile(r"(avg|pass|best|maj)(?:@([1-9][0-9]{0,5}))?")


@dataclass(frozen=True)
class Metric:
    """One of the metrics of `hacpo.evaluation.metrics`; `k` is n for all but `pass`."""

    kind: Literal["avg", "pass", "best", "maj"]
    k: int

    @classmethod
    def parse(cls, text: str, samples: int) -> Metric:
        """`avg`, `best` and `maj`, with @n or without, or `pass@k`, of a benchmark with so many samples.

        Raises:
            ValueError: it is none, or needs another number of samples; the message is one line.
        """
        match = _WRITTEN.fullmatch(text)
        if match is None or (match[1] == "pass" and match[2] is None):
            raise ValueError(f"{text!r} is no metric (expected avg, best, maj or pass@k)")
        kind, k = match[1], int(match[2] or samples)
        if kind == "pass" and k > samples:
            raise ValueError(f"{text!r} needs at least {k} responses per problem, but samples is {samples}")
        if kind != "pass" and k != samples:
            raise ValueError(f"{text!r} is taken over all responses to a problem, but samples is {samples}")
        return cls(kind, k)  # type: ignore[arg-type]  # the pattern has no other kinds

    @property
    def label(self) -> str:
        """`best@30`."""
        return f"{self.kind}@{self.k}"

    def fits(self, responses: int) -> bool:
        """Whether it can be taken over so many responses to a problem under this label; avg takes whatever is there."""
        return {"avg": responses > 0, "pass": responses >= self.k}.get(self.kind, responses == self.k)


@dataclass(frozen=True)
class Series:
    """A number that is followed over steps: one metric of one benchmark, or the plain mean of several.

    Attributes:
        name: in files: `math500` (its headline), `math500.maj@4` (beside the headline), `average`.
        title: for readers: `math500`, `aime2025 best@30`, `average of 7 benchmarks`.
        parts: (benchmark, metric); more than one for the average.
    """

    name: str
    title: str
    parts: tuple[tuple[str, Metric], ...]


def leading(series: Sequence[Series]) -> Series | None:
    """The one number where there is room for one: the average, else the first."""
    return next((each for each in series if each.name == AVERAGE), series[0] if series else None)
