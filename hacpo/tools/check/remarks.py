"""What a check says about a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """How much a remark matters."""

    ERROR = "error"
    """The run would fail, or is not what it says."""
    WARNING = "warning"
    """The run works, and perhaps not as meant."""
    TO_DO = "to do"
    """Something to fetch, start or install first; nothing is wrong."""


@dataclass(frozen=True)
class Remark:
    """One thing about one pipeline, in one line."""

    kind: Kind
    what: str


def error(what: object) -> Remark:
    """The run would fail."""
    return Remark(Kind.ERROR, str(what))


def warning(what: object) -> Remark:
    """The run works, and perhaps not as meant."""
    return Remark(Kind.WARNING, str(what))


def to_do(what: object) -> Remark:
    """Something comes first."""
    return Remark(Kind.TO_DO, str(what))
