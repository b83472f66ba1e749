"""Taking the answer out of a response, one spelling for each notation, and the pairs that need no mathematics."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hacpo.verifying.answers.equivalence import equivalent
from hacpo.verifying.answers.spelling import enclosing, extract_answer, nesting, plain_verdict, split, squeezed, tidy


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed {42}", "42"),
        (r"\fbox{42}", "42"),
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{1 \right.}", r"\left\{1 \right."),  # escaped braces are content
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{x = \boxed{3}}", "3"),
        (r"\boxed{  }", ""),
        (r"\boxed{1} and then \boxed{2", None),  # the last box counts, and it is cut off
        (r"\boxed{1} \boxed", None),
        (r"\boxed 5", None),
        ("the answer is 42", None),
        ("", None),
    ],
)
def test_the_content_of_the_last_box(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_a_long_box_is_cut_one_character_after_the_limit() -> None:
    assert extract_answer(r"\boxed{" + "1" * 10 + "}", max_characters=10) == "1" * 10
    assert extract_answer(r"\boxed{" + "1" * 11 + "}", max_characters=10) == "1" * 11
    assert extract_answer(r"\boxed{" + "1" * 99999 + "}", max_characters=10) == "1" * 11
    assert extract_answer(r"\boxed{" + "1" * 99999, max_characters=10) == "1" * 11


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ("", 0),
        ("5", 0),
        (r"\frac{1}{2}", 1),
        (r"\sqrt{\frac{1}{2}}", 2),
        (r"(\{[{1}]\})", 4),
        ("))))((", 2),
        ("(" * 999, 999),
    ],
)
def test_nesting(text: str, depth: int) -> None:
    assert nesting(text) == depth


@pytest.mark.parametrize(
    ("answer", "gold", "verdict"),
    [
        ("42", " 42 ", True),
        ("042", "42", True),
        ("+7", "7", True),
        ("-0", "0", True),
        ("42.0", "42", True),
        (".5", "0.50", True),
        ("1,000", "1000.0", True),
        ("x+1", "x+1", True),
        ("42", "43", False),
        ("-42", "42", False),
        ("9" * 900, "9" * 899 + "8", False),
        ("1,000", "1001", None),  # 1,000 may be two numbers
        ("0.33", "0.34", None),  # there is a rule on rounding
        ("1/2", "0.5", None),
        ("٤٢", "42", None),
        ("", "", None),
    ],
)
def test_plain_pairs(answer: str, gold: str, verdict: bool | None) -> None:
    assert plain_verdict(answer, gold) is verdict


def test_split_and_enclosing_respect_brackets() -> None:
    assert split("a, (b, c), {d, e}", ",") == ["a", "(b, c)", "{d, e}"]
    assert split(r"x \in [0, 1) = y", ("=", r"\in")) == ["x", "[0, 1)", "y"]
    assert enclosing("[1, (2))") == ("[", "1, (2)", ")")
    assert enclosing("(1)(2)") is None
    assert enclosing(r"\begin{pmatrix}1\end{pmatrix}") is None
    assert squeezed("1 000 + x y") == "1 000+xy"


@pytest.mark.parametrize(
    ("text", "tidied"),
    [
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\frac\pi 2", r"\frac{\pi}{2}"),
        ("2½", r"2\frac{1}{2}"),
        ("x² ≤ 3", r"x^{2} \le 3"),
        (r"5\,000", "5000"),
        ("32, 349", "32, 349"),
        (r"11,\! 111", "11111"),
        (r"\left[0,1\right)", "[0,1)"),
        (r"6, 8\text{, and }10", "6, 8,10"),
        (r"1e-5", r"1\times 10^{-5}"),
        (r"0.1\overline{6}", r"\frac{15}{90}"),
        (r"\approx 8.24 \text{ mph}", r"8.24 \text{ mph}"),
        (r"\left[\begin{array}{cc}1&2\\3&4\end{array}\right]", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\mathbf{A}", r"\text{A}"),
        ("28 percent", "28 %"),
        ("\x00 **5** ", "5"),
    ],
)
def test_one_spelling(text: str, tidied: str) -> None:
    assert tidy(text) == tidied
    assert tidy(tidied) == tidied


PIECES = [*"\\{}[]()$^_&%,;=<>|0123456789.abx +-*/\n\ud800½", r"\frac", r"\boxed{", r"\text{"]


@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_text_can_be_looked_at(text: str) -> None:
    answer = extract_answer(text, max_characters=30)
    assert answer is None or len(answer) <= 31
    assert nesting(text) <= len(text)
    assert plain_verdict(text, "5") in (True, False, None)
    tidy(text)


SIGNS = st.sampled_from(["", "+", "-"])
DIGITS = st.text("0123456789", max_size=8)
NUMBERS = st.one_of(
    st.builds("{}{}.{}".format, SIGNS, DIGITS, DIGITS),
    st.builds("{}{:,}".format, SIGNS, st.integers(0, 10**10)),
    st.builds("{}{}".format, SIGNS, st.text("0123456789", min_size=1, max_size=40)),
    st.builds(
        lambda value, spelling: spelling.format(value, value / 8),  # few values, so that pairs are often equal
        st.integers(-1200, 1200),
        st.sampled_from(["{0}", "{0:,}", "{0}.0", "{0}.", "{0:+d}", "{0:06d}", " {0} ", "{1}", "{1:.4f}", "{1:.0f}"]),
    ),
)


@settings(max_examples=600, deadline=None)
@given(st.one_of(st.tuples(NUMBERS, NUMBERS), NUMBERS.map(lambda text: (text, text.strip().lstrip("+0,") or "0"))))
def test_plain_verdicts_are_what_the_rules_and_the_library_say(pair: tuple[str, str]) -> None:
    plain = plain_verdict(*pair)
    assert plain is None or equivalent(*pair) is plain


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_the_same_characters_are_the_same_answer_by_the_rules_too(text: str) -> None:
    plain = plain_verdict(text, text)
    assert plain is None or equivalent(text, text) is plain
