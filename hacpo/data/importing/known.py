"""The sets that `hacpo import` knows by name: where each is on the Hugging Face hub, at which commit, in which files.

A commit is what makes an import repeatable: the same command gives the same table. `source` repeats it for every row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

RawRow = Mapping[str, Any]
"""A row as the file has it."""

_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)


@dataclass(frozen=True)
class KnownSet:
    """One set on the hub.

    Attributes:
        repository: `owner/name` of the dataset.
        revision: the commit that is imported unless the user names another revision.
        files: split -> its files, in order.
        problems: split -> rows of all its files together, as published; another number is reported.
        columns: column of the problems table -> column of the files.
        terms: whose the problems are, where a dataset card may say less.
        name_row: (row, its number in the split from 0) -> last part of the problem_id; None: from the problem's text.
        answers: `cells.digest` of a problem -> its answer, where the source has forgotten it.
    """

    repository: str
    revision: str
    files: Mapping[str, tuple[str, ...]]
    problems: Mapping[str, int]
    columns: Mapping[str, str]
    terms: str
    name_row: Callable[[RawRow, int], str] | None = None
    answers: Mapping[str, str] = field(default_factory=dict)


def _numbered(width: int) -> Callable[[RawRow, int], str]:
    return lambda _, number: f"{number + 1:0{width}d}"


def _as_in_math(row: RawRow, _: int) -> str:
    """`test/precalculus/807.json` -> `precalculus/0807`."""
    subject, number = re.fullmatch(r"\w+/(\w+)/(\d+)\.json", row["unique_id"]).groups()  # type: ignore[union-attr]
    return f"{subject}/{int(number):04d}"


KNOWN = {
    "math": KnownSet(
        repository="EleutherAI/hendrycks_math",
        revision="21a5633873b6a120296cce3e2df9d5550074f4a3",
        files={
            split: tuple(f"{subject}/{split}-00000-of-00001.parquet" for subject in _SUBJECTS)
            for split in ("train", "test")
        },
        problems={"train": 7500, "test": 5000},
        columns={"problem": "problem", "solution": "solution", "subject": "type", "level": "level"},
        terms="MATH (Hendrycks et al. 2021) is under the MIT licence",
        # Two training solutions (number_theory/7115 and 7117) end in an empty box; both ask for a number that is 0.
        answers={"09485fcfa467": "0", "09633bf89d91": "0"},
    ),
    "gsm8k": KnownSet(
        repository="openai/gsm8k",
        revision="740312add88f781978c0658806c59bc2815b9866",
        files={split: (f"main/{split}-00000-of-00001.parquet",) for split in ("train", "test")},
        problems={"train": 7473, "test": 1319},
        columns={"problem": "question", "answer": "answer"},
        terms="GSM8K (Cobbe et al. 2021) is under the MIT licence",
        name_row=_numbered(4),
    ),
    "math500": KnownSet(
        repository="HuggingFaceH4/MATH-500",
        revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        files={"test": ("test.jsonl",)},
        problems={"test": 500},
        columns={name: name for name in ("problem", "answer", "solution", "subject", "level")},
        terms="500 problems of MATH's test split (Lightman et al. 2023); MATH and PRM800K are under the MIT licence",
        name_row=_as_in_math,
    ),
    "aime2025": KnownSet(
        repository="math-ai/aime25",
        revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
        files={"test": ("test.jsonl",)},
        problems={"test": 30},
        columns={"problem": "problem", "answer": "answer"},
        terms="the problems are the Mathematical Association of America's",
        name_row=lambda _, number: f"{'I' if number < 15 else 'II'}-{number % 15 + 1:02d}",
    ),
    "amc2023": KnownSet(
        repository="math-ai/amc23",
        revision="80815d37005feb82cd7f8fbc6901d5d3eff43057",
        files={"test": ("test-00000-of-00001.parquet",)},
        problems={"test": 40},
        columns={"problem": "question", "answer": "answer"},
        terms="the problems are the Mathematical Association of America's, reworded to ask for a number",
        name_row=_numbered(2),
    ),
    "minerva": KnownSet(
        repository="math-ai/minervamath",
        revision="ee46ddc498933b1977577953250ca5c66be64f96",
        files={"test": ("test.jsonl",)},
        problems={"test": 272},
        columns={"problem": "question", "answer": "answer"},
        terms="the problems are from MIT OpenCourseWare, whose own terms are CC BY-NC-SA",
        name_row=_numbered(3),
    ),
    "olympiadbench": KnownSet(
        repository="Hothan/OlympiadBench",
        revision="91184b52131e7fc9455fef848035173aea8cc01a",
        files={"test": ("OlympiadBench/OE_TO_maths_en_COMP/OE_TO_maths_en_COMP.parquet",)},
        problems={"test": 674},
        columns={"problem": "question", "answer": "final_answer", "solution": "solution", "subject": "subfield"},
        terms="OlympiadBench (He et al. 2024): open-ended, text only, English, mathematics",
        name_row=lambda row, _: str(row["id"]),
    ),
}
"""Name -> set."""
