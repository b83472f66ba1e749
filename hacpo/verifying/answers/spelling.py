r"""Final answers as text: where one stands in a response, one spelling for each notation, and the plain cases.

Everything here is string work that takes microseconds and imports no mathematics library. `extract_answer` takes
the answer out of a response, `plain_verdict` decides the pairs that need no mathematics, `tidy` maps the many
spellings of one thing (`\dfrac12`, `½`, `5\,000`, `x ≤ 3`) to one, and `split` cuts at what stands outside all
brackets. What needs a mathematics library is decided in `equivalence`; docs/verification.md states the policy.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Container
from decimal import Decimal
from fractions import Fraction
from functools import cache, lru_cache

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_OPENING = {"(", "[", "{", r"\{", r"\begin", r"\langle", r"\lfloor", r"\lceil"}
_CLOSING = {")", "]", "}", r"\}", r"\end", r"\rangle", r"\rfloor", r"\rceil"}
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)
_INTEGER = re.compile(r"[+-]?[0-9]+")
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)")
_QUOTIENT = re.compile(r"(-?)\\frac\{([0-9]+)\}\{([0-9]+)\}|(-?)([0-9]+)/([0-9]+)")
_WORDING = re.compile(r"\\text\{([^{}]*)\}")
_LONGEST_TIDIED = 1000
"""Characters. `tidy` takes milliseconds for any text of this length, and more than proportionally longer for more."""


def extract_answer(text: str, max_characters: int = 2000) -> str | None:
    r"""The content of the last `\boxed{...}` (or `\fbox{...}`), stripped; None without one or when it is not closed.

    Escaped braces (`\{`, `\}`) are content and do not count. The work and the result are bounded: of a box with more
    than `max_characters` the first `max_characters + 1` are returned, which is how a caller sees that it is too long.
    """
    last = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    box = _BOX.match(text, last) if last >= 0 else None
    if box is None:
        return None
    start, depth = box.end(), 1
    for brace in _BRACE.finditer(text, start, start + max_characters + 2):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return text[start : brace.start()].strip()
    return text[start : start + max_characters + 1] if len(text) - start > max_characters else None


def shortened(answer: str, most: int) -> str:
    """An answer as tables keep it: of more than `most` characters the first ones, `…` and a digest of all of it.

    The digest keeps answers apart that only differ further on (a vote counts them), and shows that more was said.
    """
    whole = answer.encode("utf-8", "replace")
    if len(answer) <= most:
        return whole.decode("utf-8")
    return answer[:most].encode("utf-8", "replace").decode("utf-8") + "…" + hashlib.sha256(whole).hexdigest()[:12]


def nesting(text: str) -> int:
    """How deep brackets of any kind nest; what is closed without having been opened counts as zero."""
    depth = deepest = 0
    for token in tokens(text):
        depth = max(0, depth + (token in _OPENING) - (token in _CLOSING))
        deepest = max(deepest, depth)
    return deepest


def plain_verdict(answer: str, gold: str) -> bool | None:
    """Equal or not where no mathematics is needed, else None: the same characters, or two plain numbers.

    Two numbers of one value are equal (`1,000` and `1000.0`); two integers without separators that differ are not.
    Decimals that differ are left to the rule on rounding.
    """
    answer, gold = answer.strip(), gold.strip()
    if answer == gold:
        return True if gold else None
    value, gold_value = _number(answer), _number(gold)
    if value is not None and value == gold_value:
        return True
    return False if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(gold) else None


def _number(text: str) -> Decimal | None:
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    return Decimal(text) if _DECIMAL.fullmatch(text) else None


@lru_cache(maxsize=65536)
def normal_form(text: str) -> str:
    r"""One text for the spellings of an answer that need no mathematics to be seen as one: what a vote counts by.

    Numbers and fractions of whole numbers by their value (`0.50`, `\frac{1}{2}` and `2/4` are `1/2`), all else as
    `tidy` spells it, without spaces. Two answers with the same form are the same; two that are equal by mathematics
    only (`x = 5` and `5`, `\sqrt{8}` and `2\sqrt{2}`) may have different ones. Bounded: a text of more than 1000
    characters is its own form.
    """
    text = text.strip()
    if len(text) > _LONGEST_TIDIED:
        return text
    tidied = text if _number(text) is not None else tidy(text)
    if wording := _WORDING.fullmatch(tidied):
        tidied = wording[1].strip()
    number = _number(tidied)  # before spaces go: `32, 349` is a list
    if number is not None:
        return str(Fraction(number))
    tidied = squeezed(tidied)
    quotient = _QUOTIENT.fullmatch(tidied)
    if quotient is None:
        return tidied
    sign, above, below = quotient.group(1, 2, 3) if quotient[2] else quotient.group(4, 5, 6)
    return str(Fraction(int(f"{sign}{above}"), int(below))) if int(below) else tidied


def tokens(text: str) -> list[str]:
    """LaTeX commands, escaped characters and characters."""
    return _TOKEN.findall(text)


def squeezed(text: str) -> str:
    """Without spaces, except between digits."""
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text)


def same_characters(one: str, other: str) -> bool:
    """Whether two texts differ in spaces at most."""
    return squeezed(one) == squeezed(other)


def split(text: str, separators: Container[str]) -> list[str]:
    """The stripped parts of `text` between `separators` (characters, LaTeX commands) outside all brackets."""
    parts, depth, start, position = [], 0, 0, 0
    for token in tokens(text):
        if depth == 0 and token in separators:
            parts.append(text[start:position].strip())
            start = position + len(token)
        depth = max(0, depth + (token in _OPENING) - (token in _CLOSING))
        position += len(token)
    return [*parts, text[start:].strip()]


def enclosing(text: str) -> tuple[str, str, str] | None:
    """(opening bracket, content, closing bracket) when one pair of brackets encloses all of `text`."""
    opening, *content = tokens(text) or [""]
    if not content or opening not in _OPENING or content[-1] not in _CLOSING or opening == r"\begin":
        return None
    depth = 1
    for index, token in enumerate(content):
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0 and index < len(content) - 1:
            return None
    return (opening, "".join(content[:-1]).strip(), content[-1]) if depth == 0 else None


# --- one spelling for each notation ----------------------------------------------------------------------------------

_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋ₙ", "0123456789+-n")
_CHARACTERS = {
    **dict.fromkeys("−–—‐‑‒―", "-"),
    **dict.fromkeys("·⋅∙", r"\cdot "),
    **dict.fromkeys("′’‘`´", "'"),
    **dict.fromkeys('“”"\u200b\u200c\u200d\u2060\ufeff', ""),
    **{"×": r"\times ", "÷": r"\div ", "∗": "*", "√": r"\sqrt ", "∞": r"\infty ", "°": r"^\circ ", "º": r"^\circ "},
    **{
        "≤": r"\le ",
        "⩽": r"\le ",
        "≥": r"\ge ",
        "⩾": r"\ge ",
        "≠": r"\ne ",
        "≈": r"\approx ",
        "±": r"\pm ",
        "∓": r"\mp ",
    },
    **{
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "ℝ": r"\mathbb{R}",
        "ℤ": r"\mathbb{Z}",
        "∠": r"\angle ",
    },
    **{"€": r"\text{euros}", "£": r"\text{pounds}", "¥": r"\text{yen}", "₹": r"\text{rupees}"},
    **{
        chr(code): "\\" + unicodedata.name(chr(code)).split()[-1].lower() + " "
        for code in [*range(0x3B1, 0x3CA), 0x393, 0x394, 0x398, 0x39B, 0x3A3, 0x3A6, 0x3A8, 0x3A9]
        if code != 0x3C2  # the final sigma
    },
}
_TABLE = str.maketrans(_CHARACTERS)


def _repeating(match: re.Match[str]) -> str:
    """0.1\\overline{6} as the fraction it is: (16 - 1) / 90."""
    whole, once, again = match.groups()
    numerator = int(whole + once + again) - int((whole + once) or "0")
    return rf"\frac{{{numerator}}}{{{10 ** len(once) * (10 ** len(again) - 1)}}}"


_TEXT = r"\\(?:text(?:rm|bf|it|sf|tt|normal|up)?|math(?:rm|bf|it|sf|tt)|mbox|hbox|boldsymbol)(?![a-zA-Z])\s*"
_ARGUMENT = r"(\\[a-zA-Z]+|[0-9a-zA-Z])"
_REWRITES: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    # Layout without meaning.
    (r"[\x00-\x1f\x7f]", " "),
    (r"^\s*\*\*(.*?)\*\*\s*$", r"\1"),
    (r"(?<!\\)\$|(?<!\\)\\[()\[\]]", ""),
    (r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits)(?![a-zA-Z])", " "),
    (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?", ""),
    (r"\\[hv]?phantom\s*(?:\{[^{}]*\}|.)", " "),
    (r"\\[hv]space\*?\s*\{[^{}]*\}", " "),
    # Synonyms of commands and signs.
    (r"\\lbrace(?![a-zA-Z])", r"\\{"),
    (r"\\rbrace(?![a-zA-Z])", r"\\}"),
    (r"\\[lr]?vert(?![a-zA-Z])", "|"),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
    (r"\\(?:leqslant|leqq|leq|le)(?![a-zA-Z])|<=|=<", r"\\le "),
    (r"\\(?:geqslant|geqq|geq|ge)(?![a-zA-Z])|>=", r"\\ge "),
    (r"\\(?:neq|ne)(?![a-zA-Z])|!=", r"\\ne "),
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (r"\\(?:approx|simeq|thickapprox)(?![a-zA-Z])|~=|\\sim(?![a-zA-Z])", r"\\approx "),
    (r":=|==", "="),
    (r"\*\*", "^"),
    (r"\\(?:varnothing|emptyset)(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"\\imath(?![a-zA-Z])", "i"),
    (r"\\bmod(?![a-zA-Z])", r"\\mod "),
    (r"\^\s*\{?\s*(?:\\circ|\\degree|o(?=\}))\s*\}?|\\degrees?(?![a-zA-Z])", r"^\\circ "),
    (r"\^\s*\{?\s*\\prime\s*\}?", "'"),
    (r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"(?<![a-zA-Z\\])(sqrt|frac|infty|pi|alpha|beta|gamma|theta|lambda|sigma|phi|omega)(?![a-zA-Z])", r"\\\1 "),
    (r"(?<![a-zA-Z\\])(?:infinity|inf)(?![a-zA-Z])", r"\\infty "),
    # Text: one command for all fonts.
    (r"\{\s*\\(?:rm|bf|it|tt|sf)\s+([^{}]*)\}", r"\\text{\1}"),
    (_TEXT + r"(?=\{)", r"\\text"),
    (_TEXT + r"([0-9a-zA-Z])", r"\\text{\1}"),
    (r"_\s*\{\s*\\text\{([^{}]*)\}\s*\}", r"_{\1}"),
    (r"_\s*\{\s*\\(max|min|odot|oplus|ast|star)\s*\}", r"_{\1}"),
    (r"\\text\{\s*([-+]?[0-9][0-9.,]*)\s*\}", r"\1"),
    (r"\\text\{\s*\}", " "),
    (r"\\%|\\text\{\s*(?:percent(?:age)?|per cent|pct)\s*\}|(?<![a-zA-Z])(?:percent(?:age)?|pct)(?![a-zA-Z])", "%"),
    (r"\\\$|\\text\{\s*(?:USD|US\$|\\\$)\s*\}", "$"),
    (r"(?<=[0-9])\s*(?:\^\s*)?\{?\s*(?:\\text\{\s*)?(?:st|nd|rd|th)(?![a-zA-Z])\s*\}*", ""),
    # Digits: separators that can be nothing else, exponents, periods, mixed numbers.
    (r"(?<=[0-9])(?:\{,\}|,?\\[!],?)\s*(?=[0-9])", ""),
    (r"(?<![0-9.,])[0-9]{1,3}(?:(?:\\[,;: ]|~|\s)[0-9]{3})+(?![0-9])", lambda m: re.sub(r"[^0-9]", "", m[0])),
    (r"(?:(?<!\\)\\[,;:!> ]|~|\\q?quad(?![a-zA-Z])|\\enspace|\\thinspace|\s)+", " "),
    (r"(?<![A-Za-z\\}0-9.])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]+)(?![A-Za-z0-9.])", r"\1\\times 10^{\2}"),
    (r"(?<![0-9.])([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*\{?([0-9]+)\}?", _repeating),
    (r"(?<=[0-9])\.(?=\s*(?:[-/*+^)},]|$))", ""),
    (r"(?<![0-9.])([0-9]+) +([0-9]+) ?/ ?([0-9]+)(?![0-9.])", r"\1\\frac{\2}{\3}"),
    (r"(?<![0-9])\.(?=[0-9])", "0."),
    # Arguments without braces.
    (r"\^\s*\(([^()]*)\)", r"^{\1}"),
    (r"\\log_\s*([0-9])", r"\\log_{\1}"),
    (r"\^\s*([+-][0-9]+)", r"^{\1}"),
    (r"\\(frac|binom)\s*" + _ARGUMENT + r"\s*" + _ARGUMENT, r"\\\1{\2}{\3}"),
    (r"\\frac\s*" + _ARGUMENT + r"\s*(?=\{)", r"\\frac{\1}"),
    (r"\\frac\s*(\{[^{}]*\})\s*([0-9a-zA-Z])", r"\\frac\1{\2}"),
    (r"\\sqrt\s*(\[[^\[\]]*\])?\s*\(([^()]*)\)", r"\\sqrt\1{\2}"),
    (r"\\sqrt\s*(\[[^\[\]]*\])?\s*([0-9]+(?:\.[0-9]+)?|[a-zA-Z])", r"\\sqrt\1{\2}"),
    (r"\\begin\s*\{array\}\s*\{[^{}]*\}(.*?)\\end\s*\{array\}", r"\\begin{matrix}\1\\end{matrix}"),
    (
        r"[\[(]\s*\\begin\s*\{(?:small)?matrix\}(.*?)\\end\s*\{(?:small)?matrix\}\s*[\])]",
        r"\\begin{pmatrix}\1\\end{pmatrix}",
    ),
    (r"\\(begin|end)\s*\{[bB]matrix\}", r"\\\1{pmatrix}"),
    (r"(?:\\\\)\s*(\\end)", r" \1"),
    # Lists: `and`, `or` are commas; what text there is around them stays text.
    (r"\\text\{\s*,?\s*(?:and|or)\s*,?\s*\}", ","),
    (r"(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])(?![^{}]*\})", ","),
    (r",(?:\s*,)+", ","),
    # What stands around an answer.
    (r"^[\s*,:;']*(?:(?:=|\\approx|\\text\{\s*(?:approximately|approx|about|around)\.?\s*\})\s*)*", ""),
    (r"[\s*,:;.?]+$|\\+$", ""),
    (r"\s+", " "),
]


@cache
def _rewrites() -> list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]]:
    """Compiled when first needed: in a process that verifies plain numbers, never."""
    return [(re.compile(pattern, re.DOTALL), replacement) for pattern, replacement in _REWRITES]


def tidy(text: str) -> str:
    """The same answer in one spelling: LaTeX commands for signs, one command of several synonyms, no layout."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda run: f"^{{{run[0].translate(_RAISED)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉₊₋ₙ]+", lambda run: f"_{{{run[0].translate(_LOWERED)}}}", text)
    text = re.sub(
        "[¼-¾⅐-⅞]", lambda sign: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", sign[0]).split("⁄")), text
    )
    text = unicodedata.normalize("NFKC", text.translate(_TABLE)).translate(_TABLE)
    if r"\begin" not in text:
        text = re.sub(r"\\\\(?=[a-zA-Z])", r"\\", text)  # commands escaped once too often, as JSON does
    for pattern, replacement in _rewrites():
        text = pattern.sub(replacement, text)
    return text.strip()
