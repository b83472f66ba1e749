"""What can be wrong with problems before anybody trains on them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hacpo.artifacts.parquet import read_given
from hacpo.artifacts.problem_rows import Problem
from hacpo.callbacks import OnProgress
from hacpo.data.importing.cells import LONGEST_PROBLEM, normalised
from hacpo.errors import DataError, NotParquetError
from hacpo.settings.verification import VerificationSettings
from hacpo.verifying.verifier import Request, Verifier

_ANOTHER_ANSWER = r"\boxed{-987654321}"
"""In no known set the answer to anything."""

Spelling = Callable[[str], str]
"""A problem's text -> what is compared of it."""

_FIRST = 3
"""How many examples a message names."""


@dataclass(frozen=True)
class Doubt:
    """An answer that correct responses may not be rewarded for."""

    problem_id: str
    answer: str
    reason: str


@dataclass(frozen=True)
class Overlap:
    """Problems whose text also occurs in the set `other`: (id here, id there)."""

    other: str
    pairs: tuple[tuple[str, str], ...]


def refuse_unusable(problems: Sequence[Problem], where: object) -> None:
    """Refuse what `hacpo prepare` would refuse.

    Raises:
        DataError: a problem or an answer is empty, or a problem_id occurs twice.
    """
    for column in ("problem", "answer"):
        empty = [row for row in problems if not getattr(row, column).strip()]
        if empty:
            raise DataError(
                f"{len(empty)} of {len(problems)} rows have no {column}",
                where=where,
                found=f"first: {', '.join(f'{row.problem_id} from {row.source}' for row in empty[:_FIRST])}",
                remedy=f"mend or remove these rows, or name another column with --map {column}=COLUMN",
            )
    twice = [name for name, count in Counter(row.problem_id for row in problems).items() if count > 1]
    if twice:
        raise DataError(
            f"{len(twice)} problem_ids occur more than once",
            where=where,
            found=f"first: {', '.join(twice[:_FIRST])}",
            remedy="name another column with --map problem_id=COLUMN, or have ids made with --map problem_id=",
        )


def same_texts(problems: Iterable[Problem], spelled: Spelling = normalised) -> list[tuple[str, ...]]:
    """Groups of problem_ids whose texts are the same, by default but for case, spaces and punctuation."""
    groups: dict[str, list[str]] = defaultdict(list)
    for row in problems:
        groups[spelled(row.problem)].append(row.problem_id)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def doubtful_answers(
    problems: Sequence[Problem], settings: VerificationSettings, on_progress: OnProgress | None = None
) -> list[Doubt]:
    """Answers that a response cannot be compared with.

    Each is judged as a response would be, twice: boxed itself, it must be correct; and against another number the
    verifier must be able to say that it is wrong, or else only a response with the very same characters is rewarded.
    """
    itself = [Request(f"= {row.problem_id}", rf"\boxed{{{row.answer}}}", "stop", row.answer, row) for row in problems]
    another = [Request(f"! {row.problem_id}", _ANOTHER_ANSWER, "stop", row.answer, row) for row in problems]
    with Verifier(settings) as verifier:
        verdicts = verifier.verify([*itself, *another], on_progress)
    doubts = []
    for row, same, other in zip(problems, verdicts, verdicts[len(problems) :], strict=False):
        if same.verdict != "correct":
            doubts.append(Doubt(row.problem_id, row.answer, f"boxed, it is judged {same.verdict} against itself"))
        elif other.verdict == "error":
            doubts.append(Doubt(row.problem_id, row.answer, f"only the same characters match: {other.message}"))
    return doubts


def overlaps(
    problems: Sequence[Problem], others: Mapping[str, Sequence[tuple[str, str]]], spelled: Spelling = normalised
) -> list[Overlap]:
    """Which other sets share problems with these.

    Args:
        others: name of a set -> (problem_id, problem) of its rows.
        spelled: what makes two texts the same.
    """
    here = {spelled(row.problem): row.problem_id for row in reversed(problems)}
    overlapping = []
    for name, rows in others.items():
        pairs = [
            (here[text], other)
            for other, text in ((other, spelled(text)) for other, text in rows if len(text) <= LONGEST_PROBLEM)
            if text in here
        ]
        if pairs:
            overlapping.append(Overlap(name, tuple(pairs)))
    return overlapping


def texts_of(file: Path) -> list[tuple[str, str]] | None:
    """(problem_id, problem) of a problem file's rows; None where it is no problem file."""
    try:
        table = read_given(file, ["problem_id", "problem"])
    except NotParquetError:
        return None
    columns = (map(str, table[name].to_pylist()) for name in ("problem_id", "problem"))
    return list(zip(*columns, strict=True))


def counts(values: Iterable[object]) -> Mapping[str, int]:
    """How often each value occurs, in the order of the values; `none` last."""
    found = Counter(values)
    ordered = sorted((value for value in found if value is not None), key=lambda value: (str(type(value)), value))
    return {str(value): found[value] for value in ordered} | ({"none": found[None]} if found[None] else {})
