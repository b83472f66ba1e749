"""What held-out responses say as a number: avg@n, pass@k, best@n, maj@n, and how far to trust it.

A benchmark asks an agent each of its problems n times (`samples`). A metric gives every problem one value, made of the
problem's n responses in the order of their sample numbers; a benchmark's number is the mean of these values.

| metric | value of a problem with n responses, c of them correct |
|---|---|
| avg@n | mean of the n rewards (with 0/1 rewards c / n) |
| pass@k | 1 - C(n - c, k) / C(n, k): the chance that k of the n, drawn without replacement, hold a correct one |
| best@n | 1 if c > 0, else 0; the same as pass@n |
| maj@n | 1 if the answer that most responses give is correct, else 0 |

A response is correct when its verdict is `correct`: with the math verifier where its reward is 1, with a reward
function where the function says so (a number alone says so above 0). avg alone looks at rewards, so it alone sees
grades.

pass@k is the unbiased estimator of Chen et al. (2021), "Evaluating Large Language Models Trained on Code", eq. 1 (arXiv
2107.03374). Majority voting is Wang et al. (2022), "Self-Consistency" (arXiv 2203.11171). Errors are standard errors
over problems ("clustered" by them: Miller (2024), "Adding Error Bars to Evals", arXiv 2411.00640). docs/evaluation.md
shows each with an example.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hacpo.settings.series import Metric, Series
from hacpo.verifying.answers.spelling import normal_form


class Judged(Protocol):
    """A response as its verdict describes it: `hacpo.verifying.verifier.Verdict`, or a row of the evaluations table."""

    @property
    def reward(self) -> float:
        """A finite number."""

    @property
    def verdict(self) -> str:
        """`correct`, or how it is not."""

    @property
    def extracted(self) -> str | None:
        """The answer in the response, None where there is none."""


# --- one problem -----------------------------------------------------------------------------------------------------


def pass_at_k(responses: int, correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that k of n responses, drawn without replacement, hold a correct one.

    Binomials are whole numbers of any size here, and their quotient is rounded once: no product of small factors, no
    loss for large n.

    Raises:
        ValueError: not 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= correct <= responses and 1 <= k <= responses):
        raise ValueError(f"no pass@{k} of {responses} responses, {correct} of them correct")
    every = math.comb(responses, k)
    return (every - math.comb(responses - correct, k)) / every


def majority(responses: Sequence[Judged]) -> float:
    """1 if the answer that most responses give is correct, else 0.

    Answers are the same that have one `spelling.normal_form`, so the vote needs no mathematics and does not look at the
    gold answer. A response without an answer does not vote; without any vote the value is 0. Of several answers with as
    many votes the one that was given first wins (samples are exchangeable, so this favours none). The winner is correct
    if the first response that gives it is.

    Args:
        responses: of one problem, by sample number.
    """
    votes: dict[str, list[Judged]] = {}
    for response in responses:
        if response.extracted is not None:
            votes.setdefault(normal_form(response.extracted), []).append(response)
    if not votes:
        return 0.0
    return float(max(votes.values(), key=len)[0].verdict == "correct")  # max keeps the first of equals


def of_problem(metric: Metric, responses: Sequence[Judged]) -> float:
    """The value of one problem.

    Raises:
        ValueError: the metric does not fit so many responses.
    """
    if not metric.fits(len(responses)):
        raise ValueError(f"no {metric.label} of {len(responses)} responses")
    if metric.kind == "avg":
        return math.fsum(response.reward for response in responses) / len(responses)
    if metric.kind == "maj":
        return majority(responses)
    correct = sum(response.verdict == "correct" for response in responses)
    return pass_at_k(len(responses), correct, metric.k)


def summary(problems: Sequence[Sequence[Judged]], *, votes: bool) -> dict[str, float]:
    """A benchmark's numbers for its metrics file, the same whichever of them are reported.

    Args:
        problems: the responses to each problem, as many to each.
        votes: whether responses have answers to vote on (not so with a reward function).

    Returns:
        `accuracy` (avg@n); with n > 1 also `pass@k` for k = 2, 4, 8, ... below n, `best@n`, and `maj@n` with `votes`.
    """
    samples = len(problems[0])
    powers = [2**power for power in range(1, samples.bit_length()) if 2**power < samples]
    metrics = [Metric("pass", k) for k in powers] + [Metric("best", samples)]
    metrics += [Metric("maj", samples)] if votes else []
    rewards = [response.reward for responses in problems for response in responses]
    numbers = {"accuracy": math.fsum(rewards) / len(rewards)}
    for metric in metrics if samples > 1 else []:
        numbers[metric.label] = math.fsum(of_problem(metric, responses) for responses in problems) / len(problems)
    return numbers


def summarised(series: Series, numbers: Mapping[str, float]) -> float | None:
    """The series as metrics files say it; None where they do not (another k of pass@k, one response per problem).

    Args:
        numbers: `<benchmark>.<name>` -> number, the names those of `summary`.
    """
    named = ((name, "accuracy" if metric.kind == "avg" else metric.label) for name, metric in series.parts)
    parts = [numbers.get(f"{benchmark}.{name}") for benchmark, name in named]
    known = [part for part in parts if part is not None]
    return math.fsum(known) / len(known) if len(known) == len(parts) else None


# --- estimates -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A mean over problems.

    Responses to one problem resemble each other (an easy problem is easy every time), so they are no independent
    observations; problems are. Every error is taken over the problems' values. With one response per problem this is
    the usual standard error of a share.

    Attributes:
        mean: the mean over problems of each problem's value.
        error: its standard error; None with a single problem, where nothing can be said.
        problems: how many problems it is taken over.
    """

    mean: float
    error: float | None
    problems: int

    @property
    def interval(self) -> tuple[float, float]:
        """Mean minus and plus one standard error (the mean twice where the error is unknown)."""
        error = self.error or 0.0
        return self.mean - error, self.mean + error


def over_problems(values: Sequence[float]) -> Estimate:
    """The mean of one value per problem, with s / sqrt(problems) as its standard error (s with ddof = 1).

    Raises:
        ValueError: no value.
    """
    count = len(values)
    if not count:
        raise ValueError("an estimate needs at least one problem")
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, math.sqrt(variance / count), count)


def paired_change(before: Mapping[str, float], after: Mapping[str, float]) -> Estimate | None:
    """after - before over the problems that both have, the error taken over the differences; None without such a
    problem.

    The same problems are asked both times, so the difference is known better than two separate errors would say.
    """
    both = sorted(before.keys() & after.keys())
    return over_problems([after[key] - before[key] for key in both]) if both else None


def plain_mean(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of several benchmarks, each counting once however many problems it has (the paper's AVG).

    Its standard error is sqrt(sum of squared errors) / benchmarks, as for benchmarks without common problems; None
    where one is unknown.

    Raises:
        ValueError: no estimate.
    """
    if not estimates:
        raise ValueError("a mean needs at least one benchmark")
    count, errors = len(estimates), [estimate.error for estimate in estimates]
    known = [error for error in errors if error is not None]
    error = math.hypot(*known) / count if len(known) == count else None
    mean = math.fsum(estimate.mean for estimate in estimates) / count
    return Estimate(mean, error, sum(estimate.problems for estimate in estimates))
