r"""Whether two single values are mathematically equal: math-verify, and the guards around it.

The only module that imports math-verify, its LaTeX reader latex2sympy2_extended and SymPy. It is for worker processes,
because a comparison may take any time and memory. Texts are as `spelling.tidy` leaves them.

The reader takes some texts for other values than they have: juxtaposed integers are added (`2(3)` is 5), letters lose
their case (`R - r` is 0), `\operatorname` runs functions of SymPy. The guards below rewrite or refuse these. The
comparison rounds to six decimals, which makes all small numbers equal; a relative bound repairs that.
"""

from __future__ import annotations

import cmath
import logging
import math
import re
from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped]
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from math_verify.grader import verify
from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]

from hacpo.verifying.answers.numeric import LARGEST, SMALLEST, apart, coordinate, same_value
from hacpo.verifying.answers.spelling import same_characters

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that time limits are off; ours are outside

RELATIVE_TOLERANCE = 1e-4
"""Largest relative difference of two values that agree to six decimals; matters below 0.01 only."""

_UNREADABLE = re.compile(
    r"[0-9]\s+[0-9]"  # 2 3 would be 5
    r"|[0-9]\.[0-9]+\.[0-9]"  # 1.2.3 would be a product
    r"|[0-9]\s*\{|^\{[^{}]*\}\s*\{"  # 5{6} would be 11
    r"|%|\?|__|\\operatorname"
)
_NAMED_NUMBER = re.compile(r"[0-9]\s*_\s*\{?\s*[a-zA-Z]")
_GROUPING = [
    (re.compile(r"(?<![_^0-9.A-Za-z\\])([0-9]+(?:\.[0-9]+)?)\s*(?=\()"), r"\1\\cdot "),
    (re.compile(r"\)\s*(?=[0-9a-zA-Z(]|\\(?:frac|sqrt|pi|sin|cos|tan|log|ln)(?![a-zA-Z]))"), r")\\cdot "),
    (re.compile(r"(?<![A-Za-z\\])([Ee])(?=\s*_)"), r"\\mathcal{\1}"),
]
_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*\^\\circ")
_IMAGINARY = re.compile(r"(?<![A-Za-z\\_])(?<!_\{)i(?![A-Za-z])|\\text\{i\}")
_COMMAND = re.compile(r"\\[a-zA-Z]+(?:\{[a-zA-Z ]+\})?")
_EVALUATED_WHEN_READ = re.compile(r"\\binom\s*\{[^{}]*(?:[0-9]{5}|[!^])|\\[gG]amma\s*\(|(?:!\s*){3}")
MAX_DIGITS = 10_000
"""Longest whole number that a comparison may have to write out."""


class UnreadableError(Exception):
    """The library cannot read a text, so nothing is known about its value."""


class TooLargeError(Exception):
    """A number in a text is too large to be computed with."""


def equal(answer: str, gold: str) -> bool:  # noqa: PLR0911 (a list of cases)
    """Whether two values, equations, inequalities, unions or matrices are equal, math-verify's way.

    An answer that cannot be read is equal to a gold answer of the same characters only.

    Raises:
        UnreadableError: the gold answer cannot be read, and the two are not the same characters.
        TooLargeError: a number is too large to be computed with, such as 9^{9^9}.
    """
    if same_characters(answer, gold):
        return True
    # The library drops primes, and what stands below a number.
    if answer.count("'") != gold.count("'") or (_NAMED_NUMBER.search(answer) and not _NAMED_NUMBER.search(gold)):
        return False
    told = same_value(answer, gold)
    if told is not None:
        return told
    both = _without_commands(answer) + " " + _without_commands(gold)
    lowercase = not any(letter.isupper() and letter.lower() in both for letter in both)
    indexed = re.search(r"\\(?:sum|prod)", answer + gold)  # there, i is an index
    imaginary = not indexed and bool(_IMAGINARY.search(answer) or _IMAGINARY.search(gold))
    expected = _read(gold, lowercase, imaginary)
    try:
        given = _read(answer, lowercase, imaginary)
    except UnreadableError:
        return False
    # Of values that differ, the library would simplify the difference.
    if _differ_at_a_point(given, expected) or not verify(
        expected, given, allow_set_relation_comp=True, timeout_seconds=None
    ):
        return False
    if isinstance(given, sympy.Eq) and isinstance(expected, sympy.Eq):
        return _same_equation(given, expected)
    return _relatively_close(given, expected)


def _without_commands(text: str) -> str:
    return _COMMAND.sub(" ", text)


def _prepared(text: str, imaginary: bool) -> str:
    text = re.sub(r"(?<![A-Za-z\\])I(?![A-Za-z])", r"\\mathcal{I}", text)  # the reader takes I for the imaginary unit
    if imaginary:
        text = re.sub(r"I(?=\s*\^)", "(I)", _IMAGINARY.sub("I", text))  # it also drops an exponent of I
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    text = text.replace("^\\circ", "")
    for pattern, replacement in _GROUPING:
        text = pattern.sub(replacement, text)
    return text


@lru_cache(maxsize=1024)
def _read(text: str, lowercase: bool, imaginary: bool) -> Any:
    prepared = _prepared(text, imaginary)
    if _UNREADABLE.search(prepared):
        raise UnreadableError(text)
    if _EVALUATED_WHEN_READ.search(prepared):
        raise TooLargeError(text)
    try:
        value = latex2sympy(
            prepared,
            is_real=not imaginary,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=lowercase),
        )
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # the reader raises bare Exceptions, and others from deep inside
        raise UnreadableError(text) from error
    if _digits(value) > MAX_DIGITS:
        raise TooLargeError(text)
    return value


def _digits(node: Any) -> float:
    """An upper estimate of the digits of the largest number in an expression that is not evaluated yet."""
    if isinstance(node, sympy.Rational):
        return math.log10(max(abs(node.p), node.q)) if node.is_finite else 1.0
    parts = node if isinstance(node, sympy.MatrixBase) else getattr(node, "args", ())
    sizes = [_digits(part) for part in parts]
    if isinstance(node, (sympy.Pow, sympy.exp)) and sizes and node.exp.is_number:
        return max(1.0, sizes[0]) * _magnitude(node.exp)
    if isinstance(node, sympy.factorial) and node.args[0].is_number:
        return max(1.0, sizes[0]) * _magnitude(node.args[0])
    return sum(sizes) if isinstance(node, sympy.Mul) else max(sizes, default=1.0)


def _magnitude(node: Any) -> float:
    return abs(float(node)) if isinstance(node, sympy.Float) else 10 ** min(_digits(node), 300.0)


def _differ_at_a_point(given: Any, expected: Any) -> bool:
    """Whether two expressions have values that are apart where each variable has a number; False where nobody knows."""
    if not all(isinstance(side, sympy.Expr) and not isinstance(side, sympy.Symbol) for side in (given, expected)):
        return False  # symbols' names are compared by letters
    sizes = [1.0]
    try:
        value, gold = _value(given, sizes), _value(expected, sizes)
    except (_NoValueError, ArithmeticError, ValueError, RecursionError):
        return False
    return apart(value, gold, max(sizes))


class _NoValueError(Exception):
    """An expression that is not evaluated here."""


_ENTIRE = {sympy.exp: cmath.exp, sympy.sin: cmath.sin, sympy.cos: cmath.cos, sympy.tan: cmath.tan}


def _value(node: Any, sizes: list[float]) -> complex:
    """A value at the point of `arithmetic.coordinate`; appends its size and those of its parts.

    Raises:
        _NoValueError: a part has no value that does not depend on a branch cut, or one of a size that tells nothing.
    """
    if node.is_Symbol or isinstance(node, AppliedUndef):
        return coordinate(str(node))
    parts = [_value(part, sizes) for part in node.args]
    if node.is_Number or node.is_NumberSymbol:
        value = complex(node)
    elif node is sympy.I:
        value = 1j
    elif node.is_Add:
        value = sum(parts)
    elif node.is_Mul:
        value = math.prod(parts)
    elif node.func in _ENTIRE:
        value = _ENTIRE[node.func](*parts)
    elif node.is_Pow and (node.exp.is_Integer or _is_positive(parts[0])):
        value = parts[0] ** (int(node.exp) if node.exp.is_Integer else parts[1])
    elif node.func is sympy.log and all(map(_is_positive, parts)):
        value = cmath.log(*parts)
    else:
        raise _NoValueError
    if value != 0 and not SMALLEST <= abs(value) <= LARGEST:
        raise _NoValueError
    sizes.append(abs(value))
    return value


def _is_positive(value: complex) -> bool:
    return value.imag == 0 and value.real > 0


def _same_equation(given: Any, expected: Any) -> bool:
    """Whether two equations that the library calls equal are: it says so of any two without solutions."""
    ratio = sympy.simplify((given.lhs - given.rhs) / (expected.lhs - expected.rhs))
    return bool(ratio.is_number) or bool(sympy.solve(expected))


def _relatively_close(given: Any, expected: Any) -> bool:
    """Whether two numbers agree relatively too; true of all that are not two numbers."""
    if not (isinstance(given, sympy.Expr) and isinstance(expected, sympy.Expr)):
        return True
    if given.free_symbols or expected.free_symbols or (given.is_Integer and expected.is_Integer):
        return True
    value, gold = given.doit().evalf(15), expected.doit().evalf(15)
    if not value.is_finite or not gold.is_finite:
        return True
    larger = max(sympy.Abs(value).evalf(15), sympy.Abs(gold).evalf(15))
    return bool(sympy.Abs(value - gold).evalf(15) <= RELATIVE_TOLERANCE * larger)
