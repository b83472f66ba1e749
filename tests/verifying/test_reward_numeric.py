r"""What arithmetic tells of two answers without the library, and that the library would say the same.

A point gives every variable a number of 1/2 to 3/2, so `x^2` and `2x` differ there, `(x+1)^2` and `x^2+2x+1` do not.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
import sympy
from sympy.core.function import AppliedUndef

from hacpo.verifying.answers import algebra
from hacpo.verifying.answers.algebra import TooLargeError, UnreadableError, equal
from hacpo.verifying.answers.equivalence import equivalent
from hacpo.verifying.answers.numeric import coordinate, same_value, value_at_point
from hacpo.verifying.answers.spelling import tidy

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SETS = ("math/test", "math500/test", "minerva/test", "olympiadbench/test")


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"2\frac{1}{2}", "5/2", True),  # 2 + 1/2
        (r"-(2)^{-2}", "-0.25", True),  # - 1/4
        (r"\frac{1}{3}+\frac{1}{6}", "0.5", True),  # 2/6 + 1/6
        (r"\frac{2}{3}", r"\frac{3}{4}", False),
        (r"2\sqrt{3}", "3.5", False),  # 3.4641
        (r"\frac{\pi}{4}", "0.78", False),  # 0.7854
        ("x^2", "2x", False),
        (r"e^{-t} \cos (2t)", r"e^{-t} \sin (2t)", False),
        (r"\omega_{0} t", r"\omega_{1} t", False),
        ("u(t)", "t", False),
        (r"\sqrt{8}", r"2\sqrt{2}", None),
        ("(x+1)^2", "x^2+2x+1", None),
        ("0.333333", r"\frac{1}{3}", None),  # rounded: the library's to decide
        ("1.00002", "1", None),
        ("x_1", "X_{1}", None),
        # What follows an exponent of one token is no part of it, and 2\frac{1}{x} is a product.
        (r"x^3\frac{1}{3}+C", r"\frac{x^3}{3}+C", None),
        (r"\pi^2\frac{1}{6}", r"\frac{\pi^2}{6}", None),
        (r"2^n(3)", r"3\cdot 2^n", None),
        (r"3\frac{1}{2x}", r"\frac{3}{2x}", None),
        (r"5\frac{1}{2^3}", r"\frac{5}{8}", None),
        (r"2\frac{3}{4+1}", r"\frac{13}{5}", None),
        ("mu", r"\mu", None),  # the library's to decide
    ],
)
def test_values(answer: str, gold: str, same: bool | None) -> None:
    assert same_value(answer, gold) is same


@pytest.mark.parametrize(
    "text",
    [
        "2 3",  # no number
        "1/2x",  # 1/(2x)
        r"\sin 2x",  # sin(2x)
        r"\sin{x}y",  # sin(xy)
        "x^2(y)",  # a function's square
        "x^{T}",  # transposed
        "dx",
        "e",
        "2i",
        r"\sqrt{-2}",  # the sign depends on a branch cut
        r"(-8)^{1/3}",
        r"\ln(0)",
        r"\frac{1}{x-x}",
        "2^{3}^{2}",
        r"2^{\sqrt{2}}",
        "9^{9999}",
        "1.0001^{9999}",
        "10^{61}",
        "0.0000001x",
        "x" * 201,
        r"f'",
        r"\gamma",
        r"5\%",
        "(x",
        r"\frac{1}",
        "",
    ],
)
def test_what_is_left_to_the_library(text: str) -> None:
    assert value_at_point(text) is None


_READ = [
    r"-\frac{3}{4}x^{2}+2x-1",
    r"2\frac{1}{2}",
    r"\frac{a+b}{2}h",
    "2xy^2",
    r"n(n+1)/2",
    r"(x+1)(x-1)^{3}",
    r"\pi r^2h",
    r"x_0 \cos (\omega_{n} t)",
    r"\sin \theta",
    r"3\sin{2t}",
    r"\exp(-k t/2)",
    r"[x+1]^{1/2}",
    r"2^{-1}\cdot 3\times 4\div 5",
    "e^{-x^2}",
    r"e^{-at} u(t)",
    r"a/b/c",
    r"-2^2",
    r"\tan(\frac{\pi}{8})",
    r"\ln(2)+10^{3}",
]


@pytest.mark.parametrize("text", _READ)
@pytest.mark.parametrize("lowercase", [True, False])
def test_a_text_has_the_value_that_the_library_reads(text: str, lowercase: bool) -> None:
    read = value_at_point(tidy(text))
    assert read is not None
    assert float(read[0]) == pytest.approx(_by_the_library(tidy(text), lowercase), rel=1e-9)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="the data sets in ../shared/data are missing")
def test_gold_answers_have_the_values_that_the_library_reads() -> None:
    golds = {tidy(gold) for name in SETS for gold in pl.read_parquet(DATA / f"{name}.parquet")["answer"]}
    read = {text: value for text in golds if (value := value_at_point(text)) is not None and not text.isdigit()}
    assert len(read) > 800
    for text, (value, size) in read.items():
        assert float(value) == pytest.approx(_by_the_library(text, True), abs=1e-6 * size), text


def _by_the_library(text: str, lowercase: bool) -> float:
    value = algebra._read(text, lowercase, False).doit()
    value = value.subs({call: sympy.Symbol(str(call)) for call in value.atoms(AppliedUndef)})
    return float(value.subs({symbol: coordinate(symbol.name) for symbol in value.free_symbols}).evalf(20))


def test_plain_arithmetic_never_reaches_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algebra, "latex2sympy", _unexpected)
    assert equivalent(r"\frac{2}{4}", "0.5")
    assert not equivalent(r"\frac{17}{4}\pi", r"4\sqrt{7} \text{ cm}")
    assert not equivalent("x^{2} + 17", r"\frac{19}{3}")
    assert not equivalent(r"\{\frac{17}{4}, 2\}", r"\{1, 2\}")


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"\frac{e^{2 i t}}{2+2 i}+Ce^{-2 t}", r"\cos (t-\pi / 4)"),
        (r"m c^{2}(x^{2}-1) \sin ^{2} \theta", "17.5"),
        (r"17+4i", "17-4i"),
        (r"\log_{2} (x+17)", "2x"),
    ],
)
def test_different_expressions_are_not_simplified(answer: str, gold: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algebra, "verify", _unexpected)
    assert not equal(answer, gold)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("(x+i)(x-i)", "x^2+1"),
        (r"\sin ^{2} x + \cos ^{2} x", "1"),
        (r"\log_{2} 8", "3"),
        (r"\alpha", "alpha"),
        ("0.333333", r"\frac{1}{3}"),
        (r"\sqrt{-4}", "2i"),
        (r"x^{2}\cdot x^{-2} + 4", "5"),
    ],
)
def test_equal_expressions_stay_equal(answer: str, gold: str) -> None:
    assert equivalent(answer, gold)


def test_a_gold_answer_that_is_refused_stays_refused() -> None:
    with pytest.raises(TooLargeError):
        equal("5", "9^{9^9}")
    with pytest.raises(TooLargeError):
        equal("5", "1.0001^{99999}")
    with pytest.raises(UnreadableError):
        equal("5", r"2\frac{1}{")


def _unexpected(*arguments: object, **settings: object) -> object:
    raise AssertionError(arguments)
