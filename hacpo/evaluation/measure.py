"""What results are called: an accuracy with the math verifier, a mean reward with a function that grades."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hacpo.settings.root import Settings
    from hacpo.settings.series import Series
    from hacpo.settings.verification import VerificationSettings


def measure(verification: VerificationSettings) -> str:
    """The name of a mean of rewards: `accuracy` with the math verifier, whose rewards are 0 and 1, and `mean reward`
    with a reward function, whose rewards may be any number."""
    return "accuracy" if verification.is_binary else "mean reward"


def is_share(series: Series, verification: VerificationSettings) -> bool:
    """Whether a series lies between 0 and 1 whatever the responses: pass@k, best@n and maj@n count verdicts, avg@n
    takes the mean of rewards."""
    return verification.is_binary or all(metric.kind != "avg" for _, metric in series.parts)


def measured(series: Series, verification: VerificationSettings) -> str:
    """What one series is: `accuracy` with the math verifier; with a reward function `mean reward`, or `result` where it
    is, or averages with others, a metric that counts verdicts."""
    if verification.is_binary or all(metric.kind == "avg" for _, metric in series.parts):
        return measure(verification)
    return "result"


def described(series: Series, settings: Settings) -> str:
    """A series for the heading of a table: `heldout (greedy)`; with a reward function `heldout, mean reward (greedy)`,
    where its title names no other metric."""
    word = measured(series, settings.verification)
    named = f"{series.title}, {word}" if word == "mean reward" else series.title
    benchmark = settings.evaluation.benchmarks.get(series.name)  # of a headline
    return named if benchmark is None else f"{named} ({benchmark.drawn})"
