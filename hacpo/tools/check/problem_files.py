"""Problem files and the reward function: there and usable, or how to get them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hacpo.artifacts.problem_rows import Problem
from hacpo.data import problems
from hacpo.data.importing.known import KNOWN
from hacpo.data.oracle_table import read_oracle, refuse_gaps
from hacpo.errors import HacpoError
from hacpo.pipeline.project import Pipeline
from hacpo.settings.root import DataSet
from hacpo.settings.verification import VerificationSettings
from hacpo.tools.check.remarks import Remark, error, to_do, warning
from hacpo.verifying.function import module_file
from hacpo.verifying.judgement import GAVE_UP
from hacpo.verifying.verifier import Request, Verifier

_WRONG = "I do not know."
"""A response that answers nothing."""


class Files:
    """Problem sets, each read once however many pipelines use it."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, Path], tuple[int, Problem] | HacpoError] = {}

    def count(self, name: str, source: DataSet, root: Path) -> int:
        """How many problems a set has.

        Raises:
            HacpoError: it cannot be used.
        """
        return self._look(name, source, root)[0]

    def first(self, name: str, source: DataSet, root: Path) -> Problem:
        """Its first problem; errors as for `count`."""
        return self._look(name, source, root)[1]

    def _look(self, name: str, source: DataSet, root: Path) -> tuple[int, Problem]:
        key = source.model_dump_json(), root.resolve()
        if key not in self._found:
            try:
                rows = problems.load(name, source, root)
                self._found[key] = len(rows), rows[0]
            except HacpoError as refusal:
                self._found[key] = refusal
        known = self._found[key]
        if isinstance(known, HacpoError):
            raise known
        return known


def check_data(pipeline: Pipeline, files: Files) -> Iterator[Remark]:
    """Every data set, and whether there are enough problems for a step."""
    settings, commands = pipeline.settings, dict[str, None]()
    for name, source in settings.data.sets.items():
        path = None if source.path is None else pipeline.root / source.path
        if path is not None and path.exists() and not path.is_file():
            yield error(f"data.sets.{name}: {source.path} is no regular file; put a file in its place")
            continue
        if source.path is not None and path is not None and not path.is_file():
            command = _import_command(name, source.path)
            if command is not None:
                commands[command] = None
            else:
                what, _, split = name.partition("/")
                yield error(
                    f"data.sets.{name}: there is no file {source.path}; put it there, or import one with "
                    f"`hacpo import {what} --split {split} --from FILE`"
                )
            continue
        try:
            count = files.count(name, source, pipeline.root)
        except HacpoError as refusal:
            yield error(f"data.sets.{name}: {refusal}")
            continue
        if name == settings.data.train and count < settings.batch.prompts:
            yield error(
                f"batch.prompts: a step takes {settings.batch.prompts} prompts, and {name} has {count} problems; lower "
                f"it, or give it more problems (data.sets.{name})"
            )
    yield from map(to_do, commands)


def check_oracle(pipeline: Pipeline) -> Iterator[Remark]:
    """The table of capabilities that are given: there, usable, and complete."""
    settings = pipeline.settings
    given = settings.algorithm.capability.oracle_table
    if given is None:
        return
    path = pipeline.root / given
    try:
        refuse_gaps(path, read_oracle(path).keys(), range(1, settings.steps + 1), list(settings.agents))
    except HacpoError as refusal:
        yield error(f"algorithm.capability.oracle_table: {refusal}")


def _import_command(name: str, path: str) -> str | None:
    """The command that makes a file, where it is one of the sets that `hacpo import` knows, under its usual name."""
    known, _, split = name.partition("/")
    usual = f"data/{known}/{split}.parquet" == Path(path).as_posix()
    return f"`hacpo import {known}`" if usual and known in KNOWN and split in KNOWN[known].files else None


def check_reward(pipeline: Pipeline, files: Files, tried: dict[str, Remark | None]) -> Iterator[Remark]:
    """Scorers or reward function: imported and called as the run does it, in a process that can be killed.

    Args:
        tried: what was found before, by all that it follows from; added to.
    """
    settings, verification = pipeline.settings, pipeline.settings.verification
    if verification.is_math:
        return
    if verification.is_function:
        try:
            module_file(verification.reward, pipeline.root)
        except HacpoError as refusal:
            yield error(refusal)
            return
    problem: Problem | None = None
    with contextlib.suppress(HacpoError):  # which another remark says
        problem = files.first(settings.data.train, settings.data.sets[settings.data.train], pipeline.root)
    key = repr((verification.model_dump_json(), pipeline.root.resolve(), problem))
    if key not in tried:
        tried[key] = _try_reward(verification, pipeline.root, problem)
    remark = tried[key]
    if remark is not None:
        yield remark


def _try_reward(settings: VerificationSettings, root: Path, problem: Problem | None) -> Remark | None:
    """What is wrong with a reward function, called with the gold answer in a box and with an answer that is none."""
    responses = [] if problem is None else [f"\\boxed{{{problem.answer}}}", _WRONG]
    requests = [Request(text, text, "stop", problem.answer, problem) for text in responses if problem is not None]
    try:
        with Verifier(settings.model_copy(update={"workers": 1}), root) as verifier:
            verdicts = verifier.verify(requests)
    except HacpoError as refusal:
        return error(refusal)
    failed = [
        (request.text, verdict.message)
        for request, verdict in zip(requests, verdicts, strict=True)
        if verdict.verdict in GAVE_UP
    ]
    if not failed or problem is None:
        return None
    number = f"{len(failed)} of {len(requests)} responses that were tried on problem {problem.problem_id!r}"
    line = f"verification.reward: {settings.reward} cannot judge {number}, the first {failed[0][0]!r}: {failed[0][1]}"
    return error(line) if len(failed) == len(requests) else warning(line)
