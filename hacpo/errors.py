"""The errors a user can cause or meet, each one clear line: what, where, expected, found, remedy.

The command line turns any `HacpoError` into that line on standard error and its `exit_code`; anything else is a fault
of ours, whose traceback goes to a file (`hacpo.pipeline.execution.crashes`). Parts of a line come from files and
models.
"""

from __future__ import annotations

import re

_USER_OF_URL = re.compile(r"""://(?:[^/\s"'<>]{1,1000}|[^/@\s"'<>]{0,1000}:[^\s"'<>]{0,1000})@""")
"""Up to the last @ of what has no slash, or of what follows a colon: a password may hold both."""


class HacpoError(Exception):
    """Base of everything hacpo raises on purpose.

    Args:
        what: what is wrong, in plain words.
        where: file, row, column, setting or agent.
        expected: what would have been right.
        found: what is there instead.
        remedy: what to do, preferably a command.
    """

    exit_code = 1

    def __init__(
        self, what: str, *, where: object = None, expected: object = None, found: object = None, remedy: str = ""
    ) -> None:
        super().__init__(_line(what, where, {"expected": expected, "found": found}, remedy))
        self.where = where


def _line(what: str, where: object, facts: dict[str, object], remedy: str) -> str:
    """`where: what (expected ..., found ...). Remedy`, of what there is to say."""
    line = f"{where}: {what}" if where is not None else what
    known = [f"{name} {value}" for name, value in facts.items() if value is not None]
    if known:
        line += f" ({', '.join(known)})"
    if remedy:
        line = f"{line.rstrip('.')}. {remedy[:1].upper()}{remedy[1:]}"
    return harmless(without_passwords(" ".join(line.split())))


def without_passwords(text: str) -> str:
    """Text whose addresses name no users."""
    return _USER_OF_URL.sub("://***@", text)


def first_line(error: BaseException, most: int = 120) -> str:
    """What another library's error says, on one line: its first, or its name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def harmless(text: str) -> str:
    """Text of one line without characters that could steer a terminal or hide what is said: they are spelled out."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text
    )


class SettingsError(HacpoError):
    """params.yaml or an option is not usable."""

    exit_code = 2


class MissingInputError(HacpoError):
    """A stage's input is not there yet."""

    exit_code = 3


class ArtifactError(HacpoError):
    """A file exists but is damaged, or belongs to another run, step or agent."""

    exit_code = 4


class DataError(HacpoError):
    """Problems, prompts or answers that cannot be used."""

    exit_code = 5


class TemplateError(DataError):
    """A chat template refuses messages. `reason` is the template's word for it."""

    def __init__(self, what: str, *, where: object, reason: str) -> None:
        super().__init__(f"{what}: {reason}", where=where)
        self.reason = reason


class NotParquetError(DataError):
    """A file that somebody gave is no Parquet file, or lacks a column. `reason` is the reader's word for it."""

    def __init__(self, *, where: object, reason: str) -> None:
        super().__init__(f"not readable as Parquet: {reason}", where=where)
        self.reason = reason


class ModelError(HacpoError):
    """A model folder or tokenizer that cannot be used."""

    exit_code = 6


class BusyError(HacpoError):
    """Another process works on the same pipeline."""

    exit_code = 7


class RewardError(HacpoError):
    """Too many responses could not be judged."""

    exit_code = 9


class RemakeError(HacpoError):
    """Finished training steps would be made again and their checkpoints overwritten, and nobody has agreed to it."""

    exit_code = 10


class StorageError(HacpoError):
    """The disk, or the system, refused a file; nothing was left half-written. `reason` is the system's word for it."""

    exit_code = 8

    def __init__(self, what: str, *, where: object, remedy: str, reason: str) -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.reason = reason
