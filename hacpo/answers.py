r"""Final answers as text: where one stands in a response, one spelling for each notation, and the plain cases.

Everything here is string work that costs microseconds and imports no mathematics library. `extract_answer` takes the
answer out of a response, `tidy` maps the many spellings of one thing (`\dfrac`, `½`, `5\,000`, `x ≤ 3`) to one, and
`plain_verdict` decides the pairs that need no mathematics. What a mathematics library has to decide is in
`hacpo.equivalence`. docs/verification.md states the policy.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BRACKET = re.compile(r"\\[a-zA-Z]+|\\.|[()\[\]{}]", re.DOTALL)
_OPENING = {"(", "[", "{", r"\{", r"\begin", r"\langle", r"\lfloor", r"\lceil"}
_CLOSING = {")", "]", "}", r"\}", r"\end", r"\rangle", r"\rfloor", r"\rceil"}
_INTEGER = re.compile(r"[+-]?\d+")
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+")
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)")


def extract_answer(text: str, max_characters: int = 2000) -> str | None:
    r"""The content of the last `\boxed{...}` (or `\fbox{...}`), stripped; None without one or when it is not closed.

    Escaped braces (`\{`, `\}`) are content and do not count. The work and the result are bounded: of a box with more than
    `max_characters` the first `max_characters + 1` are returned, which is how a caller sees that it is too long.
    """
    last = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    box = _BOX.match(text, last) if last >= 0 else None
    if box is None:
        return None
    start = box.end()
    depth = 1
    for brace in _BRACE.finditer(text, start):
        if brace.start() - start > max_characters:
            return text[start : start + max_characters + 1]
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return text[start : brace.start()].strip()
    return None


def nesting(text: str) -> int:
    """How deep brackets of any kind nest; what is closed without having been opened counts as zero."""
    depth = deepest = 0
    for bracket in _BRACKET.finditer(text):
        depth = max(0, depth + (bracket[0] in _OPENING) - (bracket[0] in _CLOSING))
        deepest = max(deepest, depth)
    return deepest


def plain_verdict(answer: str, gold: str) -> bool | None:
    """Equal or not where no mathematics is needed, else None: the same characters, or two plain numbers.

    Two numbers of equal value are equal (`1,000` and `1000.0`); two integers without separators that differ are not.
    Decimals that differ are left to the rules on rounding.
    """
    answer, gold = answer.strip(), gold.strip()
    if answer == gold:
        return True if gold else None
    integers = _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(gold)
    values = [_number(text) for text in (answer, gold)]
    if None not in values and values[0] == values[1]:
        return True
    return False if integers else None


def _number(text: str) -> Decimal | None:
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    return Decimal(text) if _DECIMAL.fullmatch(text) and text.isascii() else None


# --- one spelling for each notation --------------------------------------------------------------------------------------

_SCRIPTS = {
    **{ord(c): f"^{d}" for c, d in zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True)},
    **{ord(c): f"_{d}" for c, d in zip("₀₁₂₃₄₅₆₇₈₉₊₋ₙ", "0123456789+-n", strict=True)},
}
_SYMBOLS = {
    **dict.fromkeys("−–—‐‑‒―", "-"),
    **dict.fromkeys("·⋅∙", r"\cdot "),
    **dict.fromkeys("′’‘`´", "'"),
    **dict.fromkeys("“”\"\u200b\u200c\u200d\u2060\ufeff", ""),
    **{"×": r"\times ", "÷": r"\div ", "∗": "*", "√": r"\sqrt ", "∞": r"\infty ", "°": r"^\circ ", "º": r"^\circ "},
    **{"≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp "},
    **{"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}"},
    **{"€": r"\text{euros}", "£": r"\text{pounds}", "¥": r"\text{yen}", "₹": r"\text{rupees}"},
}
_GREEK = {
    chr(code): "\\" + name.split()[-1].lower() + " "
    for code in range(0x3B1, 0x3CA)
    if "FINAL" not in (name := unicodedata.name(chr(code)))
}
_TABLE = str.maketrans({**_SYMBOLS, **_GREEK})

_TEXT = r"\\(?:text(?:rm|bf|it|sf|tt|normal|up)?|math(?:rm|bf|it|sf|tt)|mbox|hbox|bm|boldsymbol)\s*"
_ATOM = r"(\\[a-zA-Z]+|[0-9a-zA-Z])"
_REWRITES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        # Layout that carries no meaning.
        (r"[\x00-\x1f\x7f]", " "),
        (r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits)(?![a-zA-Z])", " "),
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?", ""),
        (r"\\[hv]?phantom\s*(?:\{[^{}]*\}|\S)", " "),
        (r"\\(?:hspace|vspace|label|tag)\*?\s*\{[^{}]*\}", " "),
        (r"\\(?:lbrace|rbrace)(?![a-zA-Z])", lambda_brace := r"\\\g<0>"),
        # Text and its fonts.
        (r"\{\s*\\(?:rm|bf|it|tt|sf)\s+([^{}]*)\}", r"\\text{\1}"),
        (_TEXT + r"(?=\{)", r"\\text"),
        (_TEXT + r"([0-9a-zA-Z])", r"\\text{\1}"),
    ]
    if pattern != "never"
]
