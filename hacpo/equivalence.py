r"""Whether an answer says the same as the gold answer: the rules on top of the mathematics library.

`equivalent` takes answers apart as far as their form has a meaning that the library does not know or gets wrong: lists,
sets and tuples, names (`x = 5`), chains of equations, units and percent, words and choices, numerals with a base, ratios
and times. What is left are single values, which `hacpo.algebra` compares. docs/verification.md gives each rule's reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hacpo.algebra import equal
from hacpo.answers import enclosing, split, tidy
from hacpo.units import quantity
from hacpo.words import as_number, same_words, words

_T = TypeVar("_T")

_GROUPED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
_DECIMAL_COMMA = re.compile(r"([+-]?[0-9]+),([0-9]+)")
_SET_BUILDER = re.compile(r"\\\{\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\{R\})?\s*(?:\\mid|\||:)(.*)\\\}", re.DOTALL)
_NUMERAL = re.compile(r"(-?)\(?(?:\\text\{)?([0-9A-Z]*[0-9][0-9A-Z]*)\}?\)?_\{?(?:\\text\{)?([0-9]{1,2})\}*")
_CLOCK = re.compile(r"[0-9]{1,2}(?::[0-5][0-9]){1,2}")
_MODULUS = re.compile(r"\\pmod\s*(\{[^{}]*\}|[0-9]+)|\(\s*\\?b?mod\s*([^()]*)\)")
_PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])")
_MINUS_PLUS = re.compile(r"\\mp(?![a-zA-Z])")
_COMPARISONS = {"<", ">", r"\le", r"\ge"}
_SOLUTION_SET = re.compile(r"<|>|\\(?:le|ge|ne|cup|cap|setminus)(?![a-zA-Z])")
_NAME = re.compile(r"(?:\\[a-zA-Z]+|[a-zA-Z|/:,'{}()\s]|\^\\circ)+")
_NO_NAME = re.compile(
    r"\\(?:sqrt|log|ln|exp|pi|infty|times|cdot|cup|cap|binom|sum|prod|int|lim|begin|mathbb)(?![a-zA-Z])"
)
_EVALUATED = re.compile(r"\\(?:lim|sum|prod|int)(?![a-zA-Z])")


def equivalent(answer: str, gold: str) -> bool:
    """Whether `answer` (the content of a box) is the gold answer.

    Raises:
        UnreadableError: nobody can tell, because the gold answer itself cannot be read.
    """
    answer, gold = tidy(answer), tidy(gold)
    return any(_same(one, other) for other in _readings(gold, answer) for one in _readings(answer, gold))


def _readings(text: str, other: str) -> list[str]:
    """`1,234` may be one number or two, `1,5` a decimal if the other side is one."""
    readings = [text]
    if _GROUPED.search(text) and not re.search(r"[(\[]|\\\{", text):
        readings.insert(0, _GROUPED.sub(lambda number: number[0].replace(",", ""), text))
    decimal = _DECIMAL_COMMA.fullmatch(text)
    if decimal and "." in other and (len(decimal[2]) != 3 or decimal[1].strip("+-") == "0"):
        readings.append(f"{decimal[1]}.{decimal[2]}")
    return readings


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


# --- forms: one value, list, set, tuple ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
    """Items and what encloses them: `` one value, `,` a bare list, `{}` a set, `()` a tuple, `[)` and so on an interval."""

    kind: str
    items: tuple[str, ...]

    @property
    def text(self) -> str:
        if self.kind in ("", ","):
            return ",".join(self.items)
        return self.kind[0].replace("{", r"\{") + ",".join(self.items) + self.kind[1].replace("}", r"\}")

    def unrepeated(self) -> _Form:
        return _Form(self.kind, tuple({_squeezed(item): item for item in self.items}.values()))


def _same(answer: str, gold: str) -> bool:
    answer, gold = _peeled(answer), _peeled(gold)
    if _squeezed(answer) == _squeezed(gold):
        return bool(gold)
    verdict = same_words(answer, gold)
    if verdict is not None:
        return verdict
    return any(_same_form(one, other) for other in _forms(gold) for one in _forms(answer))


def _peeled(text: str) -> str:
    """Without braces around everything, and without parentheses around a single value."""
    while brackets := enclosing(text):
        opening, content, closing = brackets
        if opening + closing != "{}" and (opening + closing != "()" or len(split(content, ",;")) > 1):
            break
        text = content
    if builder := _SET_BUILDER.fullmatch(text):
        return builder[1].strip()
    wrapped = re.fullmatch(r"\\text\{([^{}]*)\}", text)
    if wrapped and re.match(r"\s*[0-9]", wrapped[1]):
        return wrapped[1].strip()
    if wrapped and "," in wrapped[1]:
        return ",".join(rf"\text{{{word.strip()}}}" for word in wrapped[1].split(","))
    return as_number(text)


def _forms(text: str) -> list[_Form]:
    """The ways to read a text as one value or several; two for groups such as `p=5,q=2;p=7,q=2`."""
    if brackets := enclosing(text):
        kind = (brackets[0] + brackets[2]).replace(r"\langle", "(").replace(r"\rangle", ")").replace("\\", "")
        items = _expanded(split(brackets[1], ",;"))
        if kind in ("{}", "()") or (kind in ("[]", "[)", "(]") and len(items) == 2):
            return [_Form(kind, items)]
    items = _expanded(split(text, ",;"))
    if len(items) == 1:
        return [_Form("", items)]
    groups = [split(group, ",") for group in split(text, ";")]
    if len(groups) > 1 and all(len(group) > 1 for group in groups):
        tuples = tuple(_Form("()", tuple(_named(item)[1] for item in group)).text for group in groups)
        return [_Form(",", tuples), _Form(",", items)]
    return [_Form(",", items)]


def _expanded(items: Sequence[str]) -> tuple[str, ...]:
    r"""Without empty items; one with `\pm` becomes two."""
    result: list[str] = []
    for item in filter(None, items):
        if _PLUS_MINUS.search(item):
            plus = _MINUS_PLUS.sub("-", _PLUS_MINUS.sub("+", item))
            result.append(re.sub(r"(^|[=({,])\s*\+", r"\1", plus))
            result.append(_MINUS_PLUS.sub("+", _PLUS_MINUS.sub("-", item)))
        else:
            result.append(item)
    return tuple(result)


def _same_form(answer: _Form, gold: _Form) -> bool:
    kinds = {answer.kind, gold.kind}
    if kinds <= {"", ",", "{}"}:
        answer, gold = answer.unrepeated(), gold.unrepeated()
    if "" in kinds and len(answer.items) == len(gold.items) == 1:
        return _same_item(answer.items[0], gold.items[0])  # one value each, or {5} and 5
    if "" in kinds:
        return _same_single_and_several(answer, gold)
    if len(answer.items) != len(gold.items):
        return False
    if kinds <= {",", "{}"}:
        return _same_collection(answer.items, gold.items)
    if len(kinds) == 1 or kinds == {",", "()"}:
        return all(_same(_named(one)[1], _named(other)[1]) for one, other in zip(answer.items, gold.items, strict=True))
    return False


def _same_single_and_several(answer: _Form, gold: _Form) -> bool:
    """`(p, q) = (3, 2)` and `3, 2`; `3 < x < 5` and `(3, 5)`; units after a tuple."""
    sides = [answer.text, gold.text]
    single = sides[0] if answer.kind == "" else sides[1]
    reduced = [quantity(_named(side)[1]).value if side is single else side for side in sides]
    if reduced != sides:
        return _same(*reduced)
    several = gold if answer.kind == "" else answer
    return several.kind not in (",", "{}") and bool(_SOLUTION_SET.search(single)) and equal(*map(_upwards, sides))


def _same_collection(answer: Sequence[str], gold: Sequence[str]) -> bool:
    """Lists and sets: in any order, except where the order alone says which is which."""
    ours, theirs = _with_names(answer), _with_names(gold)
    our_names, their_names = {name for name, _ in ours}, {name for name, _ in theirs}
    if len(our_names) > 1 and len(their_names) > 1:
        return _paired(ours, theirs, lambda one, other: _same_name(one[0], other[0]) and _same(one[1], other[1]))
    if not _same_name(*(next(iter(names)) if len(names) == 1 else None for names in (our_names, their_names))):
        return False
    if len(our_names) > 1 or len(their_names) > 1 or all(_is_word(value) for _, value in theirs):
        return all(_same(one[1], other[1]) for one, other in zip(ours, theirs, strict=True))
    return _paired(ours, theirs, lambda one, other: _same(one[1], other[1]))


def _with_names(items: Sequence[str]) -> list[tuple[str | None, str]]:
    """(name, value) of each item; a name holds for the bare items after it (`n = 1, 2, 3`)."""
    result: list[tuple[str | None, str]] = []
    for item in items:
        name, value = _named(item)
        result.append((result[-1][0] if name is None and result else name, value))
    return result


def _is_word(text: str) -> bool:
    said = words(text)
    return said is not None and len("".join(said.spoken)) > 1


def _paired(ours: Sequence[_T], theirs: Sequence[_T], same: Callable[[_T, _T], bool]) -> bool:
    """Whether the items pair off; being the same is transitive but for rounding, so the first partner will do."""
    left = list(theirs)
    for one in ours:
        partner = next((index for index, other in enumerate(left) if same(one, other)), None)
        if partner is None:
            return False
        del left[partner]
    return True


# --- one item: names and equations -----------------------------------------------------------------------------------------


def _named(item: str) -> tuple[str | None, str]:
    r"""(`x`, `5`) of `x = 5`, (None, `2`) of `\sqrt 4 = 2`; (None, item) of what is no named value.

    The value of a chain is its last part before any approximation, provided that the parts without variables agree.
    """
    exact, *approximations = split(item, (r"\approx",))
    parts = split(exact, ("=", r"\in", r"\equiv"))
    if len(parts) == 1 and approximations and _is_name(exact):
        parts.append(approximations[0])
    if len(parts) == 1:
        return None, exact
    name = parts[0] if _is_name(parts[0]) else None
    values = parts[1:] if name else parts
    value = values[-1]
    if not all(_same(part, value) for part in values[:-1] if _is_closed(part)):
        return None, item
    return (name, value) if name or _is_closed(values[0]) else (None, item)


def _is_name(text: str) -> bool:
    r"""Whether a left-hand side only names a quantity: `x`, `f(2)`, `|AB|`, `\angle ABC`, `(x, y)`, not `2x` or `x + y`."""
    if _NO_NAME.search(text):
        return False
    text = re.sub(r"\\text\{[^{}0-9]*\}", "t", text)
    text = re.sub(r"_\s*(?:\{[^{}]*\}|.)", "", text)
    text = re.sub(r"([a-zA-Z]'*)\s*\([^()]*\)", r"\1", text)
    return _NAME.fullmatch(text) is not None and bool(re.search(r"[a-zA-Z]", text))


def _is_closed(text: str) -> bool:
    """Whether a text has a value of its own, without free variables."""
    letters = re.sub(r"\\text\{[^{}]*\}|\\[a-zA-Z]+(?:\{[a-z]+\})?", " ", text)
    return bool(_EVALUATED.search(text)) or not re.search(r"[a-df-hj-zA-Z]", letters)


def _same_name(one: str | None, other: str | None) -> bool:
    return one is None or other is None or _squeezed(one).casefold() == _squeezed(other).casefold()


def _is_equation(text: str) -> bool:
    return len(split(text, ("=", r"\equiv"))) > 1


def _same_item(answer: str, gold: str) -> bool:
    (name, value), (gold_name, gold_value) = _named(answer), _named(gold)
    if gold_name and not name and _is_equation(value) and not _is_closed(gold_value):
        return equal(value, gold)  # 2x - y + 1 = 0 for y = 2x + 1
    if _is_equation(gold_value):
        return _is_equation(answer) and equal(answer, gold_value)
    if _is_equation(value):
        return False  # an equation is not its right-hand side
    if name and gold_name and not _same_name(name, gold_name):
        renamed = _in_variable_of(name, value, gold_name)
        if renamed is not None:
            return _same(renamed, gold_value)
        return not _is_closed(value) and not _is_closed(gold_value) and equal(answer, gold)  # x = y + 1 and y = x - 1
    if (value, gold_value) != (answer, gold):
        return _same(value, gold_value)
    return _same_value(value, gold_value)


def _in_variable_of(name: str, value: str, gold_name: str) -> str | None:
    """`f(n) = n + 1` where the gold answer is about f(x): x + 1."""
    ours, theirs = (re.fullmatch(r"([a-zA-Z])\(([a-zA-Z])\)", _squeezed(text)) for text in (name, gold_name))
    if not ours or not theirs or ours[1] != theirs[1]:
        return None
    return re.sub(r"\\[a-zA-Z]+|" + ours[2], lambda found: theirs[2] if found[0] == ours[2] else found[0], value)


# --- one value -------------------------------------------------------------------------------------------------------------


def _same_value(answer: str, gold: str) -> bool:
    moduli = {_squeezed((found[1] or found[2]).strip("{}")) for found in _MODULUS.finditer(f"{answer} {gold}")}
    if moduli:
        return len(moduli) == 1 and _same(_MODULUS.sub("", answer).strip(), _MODULUS.sub("", gold).strip())
    verdict = _same_numeral(answer, gold)
    if verdict is not None:
        return verdict
    ours, theirs = quantity(answer), quantity(gold)
    if ours.unit and theirs.unit and ours.unit != theirs.unit:
        return False
    if (ours.value, theirs.value) != (answer, gold):
        if "percent" in (ours.unit, theirs.unit) and ours.unit != theirs.unit:
            hundredth = [
                rf"\frac{{{side.value}}}{{100}}" if side.unit == "percent" else side.value for side in (ours, theirs)
            ]
            return _same(ours.value, theirs.value) or equal(*hundredth)
        return _same(ours.value, theirs.value)
    verdict = _same_ratio(answer, gold)
    return equal(_upwards(answer), _upwards(gold)) if verdict is None else verdict


def _same_numeral(answer: str, gold: str) -> bool | None:
    """Numerals with a base: digits and base agree; the problem's base need not be repeated, a bare gold is decimal."""
    ours, theirs = (_NUMERAL.fullmatch(_squeezed(text)) for text in (answer, gold))
    if not ours and not theirs:
        return None
    if theirs:
        expected = theirs[1] + theirs[2].lstrip("0")
        return (ours[1] + ours[2].lstrip("0") if ours else _squeezed(answer)) == expected and (
            not ours or ours[3] == theirs[3]
        )
    assert ours is not None
    try:
        return equal(ours[1] + str(int(ours[2], int(ours[3]))), gold)
    except ValueError:
        return False  # no such base, or digits that it does not have


def _same_ratio(answer: str, gold: str) -> bool | None:
    """Ratios in proportion; times part by part; neither is its quotient."""
    ours, theirs = split(answer, ":"), split(gold, ":")
    if len(ours) == len(theirs) == 1:
        return None
    if len(ours) != len(theirs) or not all(ours) or not all(theirs):
        return False
    if all(equal(one, other) for one, other in zip(ours, theirs, strict=True)):
        return True
    if _CLOCK.fullmatch(_squeezed(answer)) and _CLOCK.fullmatch(_squeezed(gold)):
        return False
    return all(
        equal(rf"({theirs[0]})\cdot({one})", rf"({ours[0]})\cdot({other})")
        for one, other in zip(ours, theirs, strict=True)
    )


def _upwards(text: str) -> str:
    """A chain of > or >= read from its other end, so that all chains of inequalities point the same way."""
    tokens = re.findall(r"\\[a-zA-Z]+|\\.|.", text, re.DOTALL)
    used = {token for token in tokens if token in _COMPARISONS}
    if not used or not used <= {">", r"\ge"}:
        return text
    parts = split(text, tuple(_COMPARISONS))
    signs = [r" \le " if token == r"\ge" else " < " for token in tokens if token in used]
    if len(parts) != len(signs) + 1:
        return text
    result = parts[-1]
    for sign, part in zip(reversed(signs), reversed(parts[:-1]), strict=True):
        result += sign + part
    return result
