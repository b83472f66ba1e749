"""Problem files and the reward function: there and usable, or how to get them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from hacpo import problems
from hacpo.check.remarks import Remark, error, to_do
from hacpo.config import DataSet
from hacpo.errors import HacpoError
from hacpo.importing.known import KNOWN
from hacpo.pipeline.project import Pipeline
from hacpo.reward_function import module_file

_PATIENCE = 180
"""Seconds that importing a reward function's module may take."""


class Files:
    """Problem files, each read once however many pipelines use it."""

    def __init__(self) -> None:
        self._counts: dict[Path, int | HacpoError] = {}

    def count(self, name: str, source: DataSet, root: Path) -> int:
        """How many problems a set has.

        Raises:
            HacpoError: its file cannot be used.
        """
        if source.path is None:
            return source.problems or 0
        path = (root / source.path).resolve()
        if path not in self._counts:
            try:
                self._counts[path] = len(problems.load(name, source, root))
            except HacpoError as refusal:
                self._counts[path] = refusal
        found = self._counts[path]
        if isinstance(found, HacpoError):
            raise found
        return found


def check_data(pipeline: Pipeline, files: Files) -> Iterator[Remark]:
    """Every data set, and whether there are enough problems for a step."""
    settings, commands = pipeline.settings, dict[str, None]()
    for name, source in settings.data.sets.items():
        if source.path is not None and not (pipeline.root / source.path).is_file():
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
                f"batch.prompts: a step takes {settings.batch.prompts} prompts, and {name} has {count} problems"
            )
    yield from map(to_do, commands)


def _import_command(name: str, path: str) -> str | None:
    """The command that makes a file, where it is one of the sets that `hacpo import` knows, under its usual name."""
    known, _, split = name.partition("/")
    usual = f"data/{known}/{split}.parquet" == Path(path).as_posix()
    return f"`hacpo import {known}`" if usual and known in KNOWN and split in KNOWN[known].files else None


def check_reward(pipeline: Pipeline, refusals: dict[tuple[str, Path], str | None]) -> Iterator[Remark]:
    """The reward function, imported by a process of its own.

    Args:
        refusals: what was found before, by function and project; added to.
    """
    verification = pipeline.settings.verification
    if verification.is_math:
        return
    try:
        module_file(verification.reward, pipeline.root)
    except HacpoError as refusal:
        yield error(refusal)
        return
    key = verification.reward, pipeline.root.resolve()
    if key not in refusals:
        refusals[key] = _refusal(*key)
    if refusals[key] is not None:
        yield error(f"verification.reward: {refusals[key]}")


def _refusal(function: str, root: Path) -> str | None:
    """Why verification could not use a function; None if it can."""
    command = [sys.executable, "-m", "hacpo.verification_worker", function, str(root)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
        said = json.loads(done.stdout.splitlines()[0])
    except subprocess.TimeoutExpired:
        return f"importing {function.partition(':')[0]} takes more than {_PATIENCE} s"
    except (IndexError, ValueError):
        return f"importing {function.partition(':')[0]} ends the process"
    refused = said.get("refused")
    return None if refused is None else str(refused)
