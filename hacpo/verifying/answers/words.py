r"""Answers that are words: names, days, `odd`, `no solution`, and the letter of a choice.

Words are compared as words, ignoring case, fonts and punctuation, and never as products of variables, which is how a
mathematics library reads them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*|[0-9]+")
_CHOICE = re.compile(r"\(?([A-J])\)?\s*[.)]\s*\S")
_CHOICES = re.compile(r"(?:[\s,;.()]|and|or|[A-J](?![a-zA-Z]))+")
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_SETS = {"all real numbers": r"\mathbb{R}", "all reals": r"\mathbb{R}", "empty set": r"\emptyset"}
_LABELS = {"option", "choice", "answer"}


@dataclass(frozen=True)
class Words:
    """What an answer of words says."""

    spoken: tuple[str, ...]
    certain: bool
    """False for bare letters such as `xy`, which may be a product as well."""


def words(text: str) -> Words | None:
    """The words of an answer that is nothing but words (`June 20` is, `20 days` and `x + y` are not); else None."""
    bare = _TEXT.sub(r" \1 ", text).replace("~", " ").strip(" (){}.!")
    if not re.match(r"[^\W\d_]", bare) or text.endswith("'") or re.search(r"[\\=+*/^_<>|&%$,;:\[\]]", bare):
        return None
    spoken = [word.casefold() for word in _WORD.findall(bare)]
    if len(spoken) == 2 and spoken[0] in _LABELS and len(spoken[1]) == 1:
        spoken = spoken[1:]  # Option A
    unwrapped = _TEXT.sub("", text).strip(" (){}.!")
    wrapped = unwrapped == ""
    if unwrapped != text.strip(" (){}.!") and re.search(r"[0-9]", unwrapped):
        return None  # a unit before a number
    if not wrapped and (re.search(r"[()-]", bare) or any(word.isdigit() for word in spoken[:1])):
        return None  # f(x), a-b
    sentence = len(spoken) > 1 and sum(len(word) > 2 and word.isalpha() for word in spoken) > 0
    if not wrapped and len(spoken) > 1 and not sentence:
        return None  # a b
    return Words(tuple(spoken), wrapped or sentence)


def same_words(answer: str, gold: str) -> bool | None:
    """Whether two answers say the same words; None when words do not decide."""
    ours, theirs = words(answer), words(gold)
    if ours and theirs and ours.spoken == theirs.spoken:
        return True
    if theirs and len(theirs.spoken) == 1 and len(theirs.spoken[0]) == 1:
        plain = _TEXT.sub(r"\1", answer).strip()
        choice = _CHOICE.match(plain)
        if choice and not _CHOICES.fullmatch(plain):  # (C) 15 where C is asked for, not (C)(D)
            return choice[1].casefold() == theirs.spoken[0]
    if (ours and ours.certain) or (theirs and theirs.certain):
        return False
    return None


def as_symbol(text: str) -> str:
    r"""`\text{four}` as 4, `all real numbers` as \mathbb{R}; anything else as it is."""
    phrase = " ".join(_TEXT.sub(r"\1", text).casefold().removeprefix("the ").split())
    return str(_NUMBERS.index(phrase)) if phrase in _NUMBERS else _SETS.get(phrase, text)
