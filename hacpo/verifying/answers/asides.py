"""Words after a value: whether they may be dropped, or make another number of it.

`5 apples`, `5 times as many` and `5 sixth graders` are 5; `5 million`, `5 thirds`, `5 squared`, `5 is wrong` are not.
The data sets ask how many quarters, dozens, billions or half-gallons there are, so what is counted in these is taken as
counted, though `5 quarters` could be 5/4.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_ANYWHERE = {
    *("not", "no", "or", "and", "more", "less", "fewer", "than", "least", "most", "if", "when", "where", "for", "with"),
    *("remainder", "i", "e", "minus", "otherwise", "else", "mod", "modulo", "isn", "wasn", "doesn", "never", "nothing"),
    *("halves", "tens", "dozen", "hundred", "hundreds", "thousand", "thousands", "million", "billion", "trillion"),
    *("lakh", "lakhs", "crore", "crores", "k", "mio", "mln", "mn", "bn", "mrd", "tn", "kilo", "mega", "giga"),
}
"""Words that make another number of the one before them, or say that it is not the answer."""

_ALONE = {
    *("negative", "inverse", "plus", "below", "incorrect", "wrong", "false", "factorial", "reciprocal"),
    *(
        "doubled",
        "tripled",
        "halved",
        "double",
        "triple",
        "twice",
        "thrice",
        "half",
        "quarter",
        "ten",
        "score",
        "gross",
    ),
}
"""The same, but not where they say what is counted: `4 incorrect answers`, `50 half-gallons`."""

_OPERATORS = {"times", "root", "base"}
"""The same, but only in front of a number or `of`."""

_NUMBERS = {
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty", "thirty", "forty"),
    *("fifty", "sixty", "seventy", "eighty", "ninety", "hundred", "thousand"),
}
_VERBS = {"is", "are", "was", "were"}
_ORDINAL = re.compile(
    r"(?:third|fourth|fifth|sixth|seventh|eighth|ninth"
    r"|\w+(?:teenth|tieth|enth|elfth|ndth|sandth|dredth|lionth))(s?)"
)


def may_change_the_value(words: Sequence[str]) -> bool:
    """Whether words after a number, in lower case, may make another number of it, or deny it."""
    if words[:1] in (["squared"], ["cubed"]) or _ANYWHERE & set(words):
        return True  # of the number itself: `5 cm squared` is another thing
    denies = bool(_VERBS & set(words))
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        ends = after in ("", "of", "part", "parts") or after in _NUMBERS
        ordinal = _ORDINAL.fullmatch(word)
        if ordinal and ordinal[1]:
            if before != "one":  # thirds; `14 one-thirds` are counted
                return True
        elif (word in _ALONE or ordinal) and (ends or denies):
            return True
        if word in _OPERATORS and (after == "of" or after in _NUMBERS):
            return True
    return False
