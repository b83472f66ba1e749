r"""What the files of published sets write in their cells, as the problems table wants it.

An answer comes as `\boxed{5}`, as `$5$`, as `5.0`, as a list, or at the end of a worked solution after `####`.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata

from hacpo.verifying.answers.spelling import extract_answer

_DIGEST_DIGITS = 12
_LONGEST_BOX = 1_000_000
LONGEST_PROBLEM = 200_000
"""Characters of a problem that is imported: what no model here is asked, and to normalise a text may make it 18 times
as long."""
_UNBRACED = re.compile(r"\\boxed\s+(\\[a-zA-Z]+|[^\s{\\])")
"""`\\boxed 2`: without braces TeX boxes one token."""
_LEVEL = re.compile(r"(?:level\s*)?([0-9]+)(?:\.0)?", re.IGNORECASE)
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")


def normalised(text: str) -> str:
    """Letters and digits alone, in one case: two problems with the same such text say the same."""
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFKC", text).casefold())


def digest(text: str) -> str:
    """12 hexadecimal digits of the SHA-256 of the normalised text."""
    return hashlib.sha256(normalised(text).encode()).hexdigest()[:_DIGEST_DIGITS]


def plain_text(value: object) -> str | None:
    """A cell as text: None stays None, the parts of a list stand one below the other."""
    if value is None:
        return None
    if isinstance(value, list):
        return "\n\n".join(str(part) for part in value) or None
    return str(value)


def bare_answer(value: object) -> str:
    """An answer's cell without anything around it: the end of a worked solution (`final_answer`), else its text.

    `$` around it and a full stop behind it are left out.
    The parts of a list are separated by commas; a float without a fraction is an integer.
    """
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(filter(None, map(bare_answer, value)))
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value)
    final = final_answer(text)
    if final is not None:
        return final
    text = re.sub(r"(?<!\\)\$", "", text).strip()
    return re.sub(r"(?<=[^.\\])\.$", "", text).strip()


def final_answer(solution: str) -> str | None:
    """Where a worked solution ends: what follows its last `####` (a number loses its thousands commas), or the content
    of its last box, with braces or without; None without one."""
    if "####" in solution:
        answer = solution.rsplit("####", 1)[1].strip()
        return answer.replace(",", "") if _GROUPED.fullmatch(answer) else answer
    unbraced = _UNBRACED.search(solution, max(solution.rfind(r"\boxed"), 0))
    return unbraced[1] if unbraced else extract_answer(solution, _LONGEST_BOX)


def level_of(value: object) -> int | None:
    """`Level 5`, `5` and 5 are 5; anything else (`Level ?`, `hard`) is no level."""
    if value is None or isinstance(value, bool):
        return None
    found = _LEVEL.fullmatch(str(value).strip())
    return int(found[1]) if found and int(found[1]) < 2**31 else None
