"""How long prompts and responses are: at most, and on average, assumed or measured on the run's own finished steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median_low

import pyarrow as pa

from hacpo.artifacts.layout import Layout
from hacpo.artifacts.parquet import read_given
from hacpo.data.importing.known import KNOWN
from hacpo.data.problems import TASKS
from hacpo.data.tasks import Split
from hacpo.errors import DataError, NotParquetError, first_line
from hacpo.pipeline.catalogue import EVALUATE, GENERATE, PIPELINE, StageSpec
from hacpo.pipeline.noted import numbers
from hacpo.settings.agents import PromptSettings
from hacpo.settings.root import DataSet, Settings

BYTES_PER_TOKEN = 2.8
"""UTF-8 bytes a token of MATH's training problems in Qwen3's vocabulary: 2.79 on average, 2.61 for the longest."""

SMALL_VOCABULARY = 1_000
"""Below it a token is taken for a single byte, which is what most are in the vocabularies made for tiny agents."""

TEMPLATE_TOKENS = {True: 2, False: 16}
"""What a chat template adds, for small vocabularies and for real ones (Qwen3: 8, Llama 3: 11 and a date)."""

PROBLEM_BYTES = (210.0, 4_309)
"""Mean and longest problem of MATH's training split: stands in for a file that is not there."""

ASSUMED_SHARE = 0.5
"""Mean response as a share of the longest, where nothing else is known: on the safe side for models that stop early."""


_TIMED = ("sampling_seconds", "scoring_seconds", "train_seconds")
"""What stages time by themselves: without the loading of libraries, models and files."""


@dataclass(frozen=True)
class Problems:
    """One `<set>/<split>`: how many problems (None: the file is not there, nor is its size known), and their UTF-8
    bytes on average and at most (`there`: theirs, else MATH's)."""

    count: int | None
    mean_bytes: float
    most_bytes: int
    there: bool = True


@dataclass(frozen=True)
class Lengths:
    """Tokens of one agent's prompts and responses, over some set of problems.

    Attributes:
        most_prompt, most_response: at most.
        prompt, response: on average.
        measured: steps that `prompt` and `response` were measured on; 0 where they are assumed.
    """

    most_prompt: int
    most_response: int
    prompt: float
    response: float
    measured: int = 0

    @property
    def most(self) -> int:
        """Longest prompt plus response."""
        return self.most_prompt + self.most_response


def look_at(name: str, source: DataSet, root: Path) -> Problems:
    """Number and size of a set's problems: drawn, read from its file, or as published.

    Raises:
        DataError: a file that is there is no problem table.
    """
    if source.task is not None:
        assert source.split is not None
        assert source.problems is not None
        return _drawn(source.task, source.split, source.problems, source.seed)
    assert source.path is not None
    path = root / source.path
    if path.is_file():
        return _in_file(path)
    known, _, split = name.partition("/")
    count = KNOWN[known].problems.get(split) if known in KNOWN else None
    return Problems(count, *PROBLEM_BYTES, there=False)


@cache
def _drawn(task: str, split: Split, count: int, seed: int) -> Problems:
    return _summary([len(problem.problem.encode()) for problem in TASKS[task](split, count, seed)])


def _in_file(path: Path) -> Problems:
    try:
        column = read_given(path, ["problem"])["problem"].cast(pa.string())
    except (NotParquetError, pa.ArrowException) as error:
        reason = error.reason if isinstance(error, NotParquetError) else first_line(error)
        raise DataError(f"is no table of problems: {reason}", where=path) from None
    sizes = pa.compute.binary_length(column.drop_null()).to_pylist()
    return _summary(sizes)


def _summary(sizes: Sequence[int]) -> Problems:
    return Problems(len(sizes), sum(sizes) / len(sizes) if sizes else 0.0, max(sizes, default=0))


def prompt_tokens(problems: Problems, prompt: PromptSettings, vocabulary: int) -> tuple[float, int]:
    """Tokens of a prompt on average and at most, from its bytes."""
    small = vocabulary < SMALL_VOCABULARY
    around = len(prompt.user.replace("{problem}", "").encode()) + len((prompt.system or "").encode())
    per_token = 1.0 if small else BYTES_PER_TOKEN
    mean, most = (
        (size + around) / per_token + TEMPLATE_TOKENS[small] for size in (problems.mean_bytes, problems.most_bytes)
    )
    return mean, round(most)


@dataclass(frozen=True)
class Measured:
    """Means over a run's finished steps.

    Attributes:
        steps: how many steps they are from; 0: there is none.
        prompt, response: tokens.
        benchmarks: benchmark -> mean response in tokens.
        seconds: stage -> seconds of one step (or of one evaluation), of those that each agent has in a step.
    """

    steps: int
    prompt: float
    response: float
    benchmarks: dict[str, float]
    seconds: dict[StageSpec, float]


def measure(layout: Layout, settings: Settings, agent: str, answered: dict[str, int]) -> Measured:
    """What an agent's metrics say about the steps that are done.

    Args:
        answered: benchmark -> responses of one evaluation.
    """
    sampled = list(_metrics(layout, GENERATE, agent, settings.steps, "rollouts", "prompt_tokens", "tokens"))
    evaluated = list(_metrics(layout, EVALUATE, agent, settings.steps))
    rollouts = sum(step["rollouts"] for step in sampled)
    seconds = {
        stage: _seconds(steps)
        for stage in PIPELINE
        if stage.per != "run" and stage.at in ("step", "evaluation")
        if (steps := list(_metrics(layout, stage, agent, settings.steps)))
    }
    return Measured(
        len(sampled) if rollouts else 0,
        sum(step["prompt_tokens"] for step in sampled) / rollouts if rollouts else 0.0,
        sum(step["tokens"] for step in sampled) / rollouts if rollouts else 0.0,
        {
            name: sum(tokens) / len(tokens) / responses
            for name, responses in answered.items()
            if responses and (tokens := [step[f"{name}.tokens"] for step in evaluated if f"{name}.tokens" in step])
        },
        seconds,
    )


def _seconds(steps: Sequence[Mapping[str, float]]) -> float:
    """Seconds of a stage in one step: the mean of the work that it has timed by itself, and of all else (reading,
    writing, and where its process is cold the loading of libraries, tens of seconds) the lower median."""
    work = [sum(step.get(part, 0.0) for part in _TIMED) for step in steps]
    rest = median_low(max(step["seconds"] - own, 0.0) for step, own in zip(steps, work, strict=True))
    return sum(work) / len(work) + rest


def _metrics(layout: Layout, stage: StageSpec, agent: str, steps: int, *counts: str) -> Iterator[dict[str, float]]:
    """Of the steps that are done, those that say seconds and these counts; a damaged file is the audit's business."""
    for step in range(steps + 1):
        values = numbers(layout, stage, step, agent)
        if all(values.get(key, -1) >= 0 for key in ("seconds", *counts)):
            yield values
