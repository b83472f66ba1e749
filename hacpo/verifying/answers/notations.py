"""Notations that the mathematics library reads as other things: numerals with a base, ratios, times, reversed chains.

It ignores a base, reads a colon as a division, and does not turn a chain of inequalities round.
"""

from __future__ import annotations

import re

from hacpo.verifying.answers.algebra import equal
from hacpo.verifying.answers.spelling import split, squeezed, tokens

_NUMERAL = re.compile(r"(-?)\(?(?:\\text\{)?([0-9A-Z]*[0-9][0-9A-Z]*)\}?\)?_\{?(?:\\text\{)?([0-9]{1,2})\}*")
_CLOCK = re.compile(r"[0-9]{1,2}(?::[0-5][0-9]){1,2}")
_COMPARISONS = {"<", ">", r"\le", r"\ge"}


def same_numeral(answer: str, gold: str) -> bool | None:
    """Whether an answer is the gold numeral with a base; None where the gold answer is none.

    Digits and base have to agree, but the response need not repeat the base.
    """
    ours, theirs = _numeral(answer), _numeral(gold)
    if theirs is None:
        return None
    return ours == theirs if ours else squeezed(answer).lstrip("0") == theirs[0]


def in_decimal(text: str) -> str:
    """`204_5` as 54; a text that is no numeral with a base as it is, one with digits that its base lacks as nothing."""
    numeral = _numeral(text)
    if numeral is None:
        return text
    try:
        return str(int(*numeral))
    except ValueError:
        return ""


def _numeral(text: str) -> tuple[str, int] | None:
    match = _NUMERAL.fullmatch(squeezed(text))
    return (match[1] + match[2].lstrip("0"), int(match[3])) if match else None


def same_ratio(answer: str, gold: str) -> bool | None:
    """Ratios in proportion; times part by part; neither is its quotient."""
    ours, theirs = split(answer, ":"), split(gold, ":")
    if len(ours) == len(theirs) == 1:
        return None
    if len(ours) != len(theirs) or not all(ours) or not all(theirs):
        return False
    if all(equal(part, wanted) for part, wanted in zip(ours, theirs, strict=True)):
        return True
    if _CLOCK.fullmatch(squeezed(answer)) and _CLOCK.fullmatch(squeezed(gold)):
        return False
    return all(
        equal(rf"({theirs[0]})\cdot({part})", rf"({ours[0]})\cdot({wanted})")
        for part, wanted in zip(ours, theirs, strict=True)
    )


def upwards(text: str) -> str:
    """A chain of > or >= read from its other end, so that all chains of inequalities point the same way."""
    used = [token for token in tokens(text) if token in _COMPARISONS]
    parts = split(text, _COMPARISONS)
    if not used or not {*used} <= {">", r"\ge"} or len(parts) != len(used) + 1:
        return text
    signs = [r" \le " if token == r"\ge" else " < " for token in used]
    result = parts[-1]
    for sign, part in zip(reversed(signs), reversed(parts[:-1]), strict=True):
        result += sign + part
    return result
