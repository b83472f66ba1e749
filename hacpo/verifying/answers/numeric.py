r"""Two values told apart by arithmetic, in a small part of LaTeX that every reader reads alike.

Reading two answers with the mathematics library and simplifying their difference takes milliseconds to a second; that
they differ shows in microseconds at one point, where every variable has a number (identity testing by evaluation:
Schwartz 1980, https://doi.org/10.1145/322217.322225). `same_value` says so where the difference is beyond every
rounding, and compares exactly where both are rational numbers. All else is None, left to `algebra`: other notations,
close values, and whatever `algebra` refuses for its size.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

Number = Fraction | float
"""A Fraction without variables and roots; else the value at the point."""

_MAX_CHARACTERS = 200
_MAX_WRITTEN_OUT = 10_000
"""Bound on characters times exponents: `algebra.MAX_DIGITS` lies above what such a text may have to write out."""
LARGEST, SMALLEST = 1e60, 1e-6
"""Sizes of all intermediate values but zero. `algebra` takes tiny coefficients for zero."""
_APART, _APART_RELATIVELY = 1e-4, 1e-6
"""Differences above both are none of rounding: not to the six decimals that `algebra` compares, nor of floats."""

_GREEK = "alpha|beta|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|chi|psi|omega"
_FUNCTIONS: dict[str, Callable[[float], float]] = {
    r"\sin": math.sin,
    r"\cos": math.cos,
    r"\tan": math.tan,
    r"\ln": math.log,
    r"\exp": math.exp,
}
_SYMBOL = rf"(?:[a-zA-Z]|\\(?:{_GREEK})(?![a-zA-Z]))(?:\s*_\s*(?:[0-9]|\{{\s*[0-9a-zA-Z]\s*\}}|\{{[0-9]+\}}))?"
_TOKEN = re.compile(rf"\s*({_SYMBOL}|\\[a-zA-Z]+|[0-9]+\.[0-9]+|[0-9]+|[-+*/^(){{}}[\]])")
_VARIABLE = re.compile(rf"(?![deEiI](?![a-z])){_SYMBOL}")
"""Not differentials, Euler's number and the imaginary unit."""
_CLOSING = {"(": ")", "{": "}", "[": "]"}
_ENDS = {"", "+", "-", *_CLOSING.values()}
"""What ends an argument without parentheses: in `\\sin 2x` the reader takes all factors for the argument."""


class _Unread(Exception):  # noqa: N818 (says that nothing is known, not that anything is wrong)
    """A text is not in the part of LaTeX that is read here, or too large for it."""


def same_value(answer: str, gold: str) -> bool | None:
    """Whether two texts, as `spelling.tidy` leaves them, have one value; None where that takes more than arithmetic."""
    if _letters(answer) == _letters(gold) and answer != gold:
        return None  # mu and \\mu
    ours, theirs = value_at_point(answer), value_at_point(gold)
    if ours is None or theirs is None:
        return None
    (value, size), (gold_value, gold_size) = ours, theirs
    if isinstance(value, Fraction) and isinstance(gold_value, Fraction) and value == gold_value:
        return True
    return False if apart(value, gold_value, max(size, gold_size)) else None


def apart(one: complex | Fraction, other: complex | Fraction, size: float) -> bool:
    """Whether two values differ by more than any rounding; `size` is the largest that was met on the way to them."""
    return abs(complex(one) - complex(other)) > max(_APART, _APART_RELATIVELY * size)


@lru_cache(maxsize=4096)
def value_at_point(text: str) -> tuple[Number, float] | None:
    """The value, and the largest size that was met on the way to it; None for a text that is not read."""
    if len(text) > _MAX_CHARACTERS:
        return None
    try:
        reader = _Reader(text)
        value = reader.whole()
    except (_Unread, ArithmeticError, ValueError):  # the last two are of functions outside their domain
        return None
    return value, reader.size


class _Reader:
    """Reads a text from left to right and evaluates it."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        position, text = 0, text.strip()
        while position < len(text):
            token = _TOKEN.match(text, position)
            if token is None:
                raise _Unread
            self._tokens.append(token[1])
            position = token.end()
        self._tokens.append("")
        self._at = 0
        self._written_out = float(len(text))
        self._variables = 0
        self.size = 1.0

    def whole(self) -> Number:
        value = self._sum()
        if self._next() != "":
            raise _Unread
        return value

    def _next(self) -> str:
        return self._tokens[self._at]

    def _take(self, expected: str | None = None) -> str:
        token = self._tokens[self._at]
        if expected is not None and token != expected:
            raise _Unread
        self._at += 1
        return token

    def _kept(self, value: Number) -> Number:
        """A value of a size that tells something."""
        size = abs(float(value))
        if not (size == 0 or SMALLEST <= size <= LARGEST):
            raise _Unread
        self.size = max(self.size, size)
        return value

    def _sum(self) -> Number:
        sign = self._take() if self._next() in ("+", "-") else "+"
        value = self._product() if sign == "+" else -self._product()
        while self._next() in ("+", "-"):
            sign, term = self._take(), self._product()
            value = self._kept(value + term if sign == "+" else value - term)
        return value

    def _product(self) -> Number:
        value = self._factor()
        while True:
            token = self._next()
            if token in ("*", r"\cdot", r"\times"):
                self._take()
                value = self._kept(value * self._factor())
            elif token in ("/", r"\div"):
                self._take()
                value = self._kept(value / self._factor())
                if _begins_a_factor(self._next()):
                    raise _Unread  # 1/2x
            elif _begins_a_factor(token) and not token[0].isdigit():
                if self._is_argument():
                    raise _Unread  # x^2(y) is a function's square
                value = self._kept(value * self._factor())
            else:
                return value

    def _is_argument(self) -> bool:
        """Whether a number or variable in parentheses follows, which makes a function of a variable before it."""
        return self._next() in ("(", "[") and self._tokens[self._at + 2 : self._at + 3] == [_CLOSING[self._next()]]

    def _factor(self) -> Number:
        token = self._take()
        if token == r"\frac":
            value = self._kept(self._group("{") / self._group("{"))
        elif token == r"\sqrt":
            value = self._kept(math.sqrt(self._group("{")))
        elif token in _FUNCTIONS:
            value = self._kept(_FUNCTIONS[token](float(self._argument())))
        else:
            return self._power(token)
        if self._next() == "^":
            raise _Unread
        return value

    def _argument(self) -> Number:
        if self._next() == "(":
            return self._group("(")
        value = self._group("{") if self._next() == "{" else self._base(self._take())
        if self._next() not in _ENDS:
            raise _Unread
        return value

    def _power(self, token: str) -> Number:
        base = self._base(token)
        if self._next() != "^":
            if token == "e":
                raise _Unread  # a name, or Euler's number
            return base
        self._take()
        variables = self._variables
        exponent = self._exponent()
        if isinstance(exponent, Fraction):
            self._written_out *= max(1, abs(exponent.numerator), exponent.denominator)
        elif self._variables == variables:
            raise _Unread  # 2^{\sqrt 2}
        if self._written_out > _MAX_WRITTEN_OUT:
            raise _Unread
        if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
            return self._kept(base**exponent.numerator)
        return self._kept(math.pow(base, exponent))

    def _exponent(self) -> Number:
        first, second = self._tokens[self._at : self._at + 2]
        if "T" in (first, second):
            raise _Unread  # transposed
        if first == "{":
            value = self._group("{")
        elif (
            len(first) == 1 and first.isalnum() and second not in (r"\frac", "(", "[", "{") and not second[:1].isdigit()
        ):
            value = self._base(self._take())  # of one token: what follows it is no part of it
        else:
            raise _Unread
        if self._next() == "^":
            raise _Unread
        return value

    def _base(self, token: str) -> Number:
        if token[:1].isdigit():
            return self._number(token)
        if token in ("(", "["):
            self._at -= 1
            return self._group(token)
        if token in (r"\pi", "e"):
            return math.pi if token == r"\pi" else math.e
        if not _VARIABLE.fullmatch(token):
            raise _Unread
        if self._next() == "[":
            raise _Unread
        if self._is_argument():  # u(t): a variable, as far as anybody knows
            token += "".join(self._tokens[self._at : self._at + 3])
            self._at += 3
        self._variables += 1
        return coordinate(token)

    def _number(self, token: str) -> Fraction:
        """A number, or `2\\frac{1}{2}`."""
        value = Fraction(token)
        if self._next() == r"\frac":
            ahead = self._tokens[self._at + 1 : self._at + 7]
            whole = [part for part in (token, *ahead) if part.isdigit()]
            if len(whole) != 3 or [part for part in ahead if part not in whole] != ["{", "}", "{", "}"]:
                raise _Unread  # with anything else in it, a product
            self._take()
            value += Fraction(self._group("{")) / Fraction(self._group("{"))
            if self._next() == "^" or _begins_a_factor(self._next()):
                raise _Unread
        if self._next() == "{" or self._next()[:1].isdigit():
            raise _Unread
        self._kept(value)
        return value

    def _group(self, opening: str) -> Number:
        self._take(opening)
        value = self._sum()
        self._take(_CLOSING[opening])
        return value


def _letters(text: str) -> str:
    """A text as it would be without the signs that make a name of Greek letters."""
    return text.replace("\\", "").replace(" ", "")


def _begins_a_factor(token: str) -> bool:
    return (
        token[:1].isalnum()
        or token in ("(", "[", r"\frac", r"\sqrt", r"\pi", *_FUNCTIONS)
        or bool(_VARIABLE.fullmatch(token))
    )


def coordinate(variable: str) -> float:
    """The variable's number at the point, of 1/2 to 3/2: the same for `x_1` and `X_{1}`."""
    name = re.sub(r"[{}\\ ]", "", variable).lower()
    return 0.5 + zlib.crc32(name.encode()) / 2**32
