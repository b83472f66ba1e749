"""Notations that the mathematics library reads as other things: numerals with a base, ratios, times, reversed chains.

It ignores a base, reads a colon as a division, and does not turn a chain of inequalities round.
"""

from __future__ import annotations

import re

from hacpo.algebra import equal
from hacpo.answers import split, squeezed, tokens

_NUMERAL = re.compile(r"(-?)\(?(?:\\text\{)?([0-9A-Z]*[0-9][0-9A-Z]*)\}?\)?_\{?(?:\\text\{)?([0-9]{1,2})\}*")
_CLOCK = re.compile(r"[0-9]{1,2}(?::[0-5][0-9]){1,2}")
_COMPARISONS = {"<", ">", r"\le", r"\ge"}


def same_numeral(answer: str, gold: str) -> bool | None:
    """Numerals with a base: digits and base agree; the problem's base need not be repeated, a bare gold is decimal."""
    ours, theirs = (_NUMERAL.fullmatch(squeezed(text)) for text in (answer, gold))
    if not ours and not theirs:
        return None
    if theirs and ours:
        return ours[1] + ours[2].lstrip("0") == theirs[1] + theirs[2].lstrip("0") and ours[3] == theirs[3]
    if theirs:
        return squeezed(answer) == theirs[1] + theirs[2]
    assert ours is not None
    try:
        return equal(ours[1] + str(int(ours[2], int(ours[3]))), gold)
    except ValueError:
        return False  # no such base, or digits that it does not have


def same_ratio(answer: str, gold: str) -> bool | None:
    """Ratios in proportion; times part by part; neither is its quotient."""
    ours, theirs = split(answer, ":"), split(gold, ":")
    if len(ours) == len(theirs) == 1:
        return None
    if len(ours) != len(theirs) or not all(ours) or not all(theirs):
        return False
    if all(equal(one, other) for one, other in zip(ours, theirs, strict=True)):
        return True
    if _CLOCK.fullmatch(squeezed(answer)) and _CLOCK.fullmatch(squeezed(gold)):
        return False
    return all(
        equal(rf"({theirs[0]})\cdot({one})", rf"({ours[0]})\cdot({other})")
        for one, other in zip(ours, theirs, strict=True)
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
