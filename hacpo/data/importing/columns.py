"""From the columns of a file to those of the problems table: given by the user, known for the set, or guessed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hacpo.artifacts.problem_rows import Problem
from hacpo.data.importing.cells import LONGEST_PROBLEM, bare_answer, digest, final_answer, level_of, plain_text
from hacpo.errors import DataError, SettingsError

GUESSES = {
    "problem": ("problem", "question", "prompt", "query", "problem_text", "instruction", "input"),
    "answer": (
        "answer",
        "final_answer",
        "ground_truth",
        "expected_answer",
        "gold",
        "target",
        "reward_model.ground_truth",
    ),
    "solution": ("solution", "worked_solution", "rationale", "explanation", "reasoning"),
    "subject": ("subject", "type", "subfield", "category", "topic", "domain"),
    "level": ("level", "difficulty"),
    "problem_id": ("problem_id", "unique_id", "uid", "question_id", "id"),
    "source": ("source", "data_source", "url"),
}
"""Column of the problems table -> what files call it, the likeliest first; `a.b` is field b of the column a."""


def parse_map(texts: Sequence[str]) -> dict[str, str]:
    """`["problem=question,answer=final"]` -> {"problem": "question", "answer": "final"}; `level=` takes no column.

    Raises:
        SettingsError: not of that form, an unknown column of the problems table, or one twice.
    """
    mapping: dict[str, str] = {}
    for item in (item for text in texts for item in text.split(",")):
        name, sign, column = (part.strip() for part in item.partition("="))
        if not sign or name not in GUESSES:
            raise SettingsError(
                "not of the form column=column",
                where=f"--map {item}",
                expected=f"one of {', '.join(GUESSES)} on the left",
            )
        if name in mapping:
            raise SettingsError(f"{name} is mapped twice", where=f"--map {item}")
        mapping[name] = column
    return mapping


def choose_columns(rows: Sequence[Mapping[str, Any]], given: Mapping[str, str], where: object) -> dict[str, str]:
    """Column of the problems table -> column of the file, for those that the file has.

    Args:
        given: what the user said; wins over every guess. An empty column: none.

    Raises:
        DataError: a given column is not there, or nothing can be the problem or the answer.
    """
    present = {name: None for row in rows[:1000] for name in row}
    chosen: dict[str, str] = {}
    for name, guesses in GUESSES.items():
        if name in given:
            if given[name] and not _somewhere(rows, given[name]):
                raise DataError(
                    f"there is no column {given[name]!r} for {name}", where=where, found=", ".join(map(str, present))
                )
            if given[name]:
                chosen[name] = given[name]
            continue
        spelled = {str(column).casefold(): str(column) for column in present}
        for guess in guesses:
            column = guess if "." in guess else spelled.get(guess)
            if column is not None and column not in chosen.values() and _somewhere(rows, column):
                chosen[name] = column
                break
    _check_enough(chosen, present, where)
    return chosen


def _check_enough(chosen: Mapping[str, str], present: Mapping[str, None], where: object) -> None:
    found = ", ".join(map(str, present))
    if "problem" not in chosen:
        raise DataError("which column is the problem?", where=where, found=found, remedy="say --map problem=COLUMN")
    if "answer" not in chosen and "solution" not in chosen:
        raise DataError("which column is the answer?", where=where, found=found, remedy="say --map answer=COLUMN")


def _somewhere(rows: Sequence[Mapping[str, Any]], column: str) -> bool:
    return any(cell(row, column) is not None for row in rows)


def cell(row: Mapping[str, Any], column: str) -> Any:
    """The content of a column; of a nested one, `reward_model.ground_truth` or `prompt.0.content`; None without it."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def convert(
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    *,
    name: str,
    sources: Sequence[str],
    name_row: Callable[[Mapping[str, Any], int], str] | None = None,
    answers: Mapping[str, str] | None = None,
) -> list[Problem]:
    """The rows as problems; nothing is left out, and empty texts stay empty for the checks to find.

    Args:
        columns: from `choose_columns`.
        name: `<set>/<split>`, the first part of a problem_id that is made.
        sources: for each row where it came from, used where no column says it.
        name_row, answers: see `known.KnownSet`.

    Raises:
        DataError: a problem is no text, or longer than `LONGEST_PROBLEM`.
    """
    times: Counter[str] = Counter()
    problems = []
    for number, (row, source) in enumerate(zip(rows, sources, strict=True)):
        values = {target: cell(row, column) for target, column in columns.items()}
        text = values.get("problem")
        if text is not None and not isinstance(text, str):
            raise DataError(
                "the problem is no text",
                where=source,
                expected="a string",
                found=type(text).__name__,
                remedy=f"name the text inside it, such as --map problem={columns['problem']}.0.content",
            )
        text = text or ""
        if len(text) > LONGEST_PROBLEM:
            raise DataError(
                f"a problem of {len(text)} characters",
                where=source,
                expected=f"at most {LONGEST_PROBLEM}",
                remedy="shorten it or leave it out",
            )
        answer, solution = _answer_and_solution(values)
        if name_row is not None:
            label = f"{name}/{name_row(row, number)}"
        elif values.get("problem_id") not in (None, ""):
            label = str(values["problem_id"])
        else:
            short = digest(text)
            times[short] += 1
            label = f"{name}/{short}" + (f"-{times[short]}" if times[short] > 1 else "")
        problems.append(
            Problem(
                problem_id=label,
                problem=text,
                answer=answer or (answers or {}).get(digest(text), ""),
                solution=solution,
                subject=plain_text(values.get("subject")) or None,
                level=level_of(values.get("level")),
                source=plain_text(values.get("source")) or source,
            )
        )
    return problems


def _answer_and_solution(values: Mapping[str, Any]) -> tuple[str, str | None]:
    """The answer's column, else the end of the solution. A worked answer (`... #### 5`) is the solution too."""
    solution = plain_text(values.get("solution")) or None
    written = values.get("answer")
    if isinstance(written, str) and solution is None and "####" in written:
        solution = written
    if plain_text(written) is not None and str(written).strip():
        return bare_answer(written), solution
    return final_answer(solution or "") or "", solution
