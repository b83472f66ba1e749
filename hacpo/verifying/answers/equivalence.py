r"""Whether an answer says the same as the gold answer: the rules on top of the mathematics library.

`equivalent` takes answers apart as far as their form has a meaning that the library does not know or gets wrong:
lists, sets and tuples, names (`x = 5`), chains of equations; `words`, `units` and `notations` know
more. What is left are single values, which `algebra` compares. docs/verification.md gives each rule's reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from hacpo.verifying.answers.algebra import equal
from hacpo.verifying.answers.notations import in_decimal, same_numeral, same_ratio, upwards
from hacpo.verifying.answers.spelling import enclosing, same_characters, split, squeezed, tidy
from hacpo.verifying.answers.units import Quantity, quantity
from hacpo.verifying.answers.words import as_symbol, same_words, words

_T = TypeVar("_T")

_GROUPED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
_DECIMAL_COMMA = re.compile(r"([+-]?[0-9]+),([0-9]+)")
_SET_BUILDER = re.compile(r"\\\{\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\{R\})?\s*(?:\\mid|\||:)(.*)\\\}", re.DOTALL)
_MODULUS = re.compile(r"\\pmod\s*(\{[^{}]*\}|[0-9]+)|\(\s*\\?b?mod\s*([^()]*)\)")
_PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])")
_MINUS_PLUS = re.compile(r"\\mp(?![a-zA-Z])")
_SOLUTION_SET = re.compile(r"<|>|\\(?:le|ge|ne|cup|cap|setminus|mathbb)(?![a-zA-Z])")
_NAME = re.compile(r"(?:\\[a-zA-Z]+|[a-zA-Z|/:,'{}()\s]|\^\\circ)+")
_NO_NAME = re.compile(
    r"\\(?:sqrt|log|ln|exp|pi|infty|times|cdot|cup|cap|binom|sum|prod|int|lim|begin|mathbb|neg|lnot|not)(?![a-zA-Z])"
)
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")
"""Control characters that are no white space: the library does not see them."""
_BRACKETS = re.compile(r"[\[({,;]|\\begin")
_EVALUATED = re.compile(r"\\(?:lim|sum|prod|int)(?![a-zA-Z])")


def equivalent(answer: str, gold: str) -> bool:
    """Whether `answer` (the content of a box) is the gold answer.

    Raises:
        UnreadableError: nobody can tell, because the gold answer itself cannot be read.
        TooLargeError: nobody can tell, because a number is too large to be computed with.
    """
    if answer.strip() == gold.strip():  # even where there is nothing to compare: layout alone, or a full stop
        return bool(gold.strip())
    if _CONTROL.search(answer):
        return False
    answer, gold = tidy(answer), tidy(gold)
    if _nests_lists(answer) and not _BRACKETS.search(gold):
        return False
    return any(_same(ours, theirs) for theirs in _readings(gold, answer) for ours in _readings(answer, gold))


def _nests_lists(text: str) -> bool:
    """Whether all of a text is a list or set of nothing but a list or set."""
    outer = enclosing(text)
    inner = enclosing(outer[1]) if outer else None
    return outer is not None and inner is not None and {outer[0], inner[0]} <= {"[", r"\{"}


def _is_grouped(text: str) -> bool:
    return bool(_GROUPED.search(text)) and not re.search(r"[(\[]|\\\{", text)


def _readings(text: str, other: str) -> list[str]:
    """`1,234` may be one number or two (not where both sides have such), `1,5` a decimal if the other side is one."""
    readings = [text]
    if _is_grouped(text):
        number = _GROUPED.sub(lambda digits: digits[0].replace(",", ""), text)
        readings = [number] if _is_grouped(other) or ",0" in text else [number, text]
    decimal = _DECIMAL_COMMA.fullmatch(text)
    if decimal and "." in other and (len(decimal[2]) != 3 or decimal[1].strip("+-") == "0"):
        readings.append(f"{decimal[1]}.{decimal[2]}")
    return readings


# --- forms: one value, list, set, tuple ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
    """Items, and the kind of what encloses them: "" one value, "," a bare list, "{}" a set, "()" "[)" and so on."""

    kind: str
    items: tuple[str, ...]

    @property
    def text(self) -> str:
        if self.kind in ("", ","):
            return ",".join(self.items)
        return self.kind[0].replace("{", r"\{") + ",".join(self.items) + self.kind[1].replace("}", r"\}")

    def unrepeated(self) -> _Form:
        """Without repeated items, unless their names tell them apart."""
        if len({name for name, _ in _with_names(self.items)}) > 1:
            return self
        return _Form(self.kind, tuple({squeezed(item): item for item in self.items}.values()))


def _same(answer: str, gold: str) -> bool:
    answer, gold = _peeled(answer), _peeled(gold)
    if same_characters(answer, gold):
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
    if wrapped and len(listed := re.split(r",|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])", wrapped[1])) > 1:
        return ",".join(rf"\text{{{words.strip()}}}" for words in listed if words.strip())
    return as_symbol(text)


def _forms(text: str) -> list[_Form]:
    """The ways to read a text as one value or several; two for groups such as `p=5,q=2;p=7,q=2`."""
    if brackets := enclosing(text):
        kind = (brackets[0] + brackets[2]).replace(r"\langle", "(").replace(r"\rangle", ")").replace("\\", "")
        items = _expanded(split(brackets[1], ",;"))
        if kind in ("{}", "()") or (kind in ("[]", "[)", "(]") and len(items) == 2):
            return [_Form(kind, items)]
        if kind == "[]" and len(items) > 2:
            return [_Form(",", items)]
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
        return all(
            _same(_named(ours)[1], _named(theirs)[1]) for ours, theirs in zip(answer.items, gold.items, strict=True)
        )
    return False


def _same_single_and_several(answer: _Form, gold: _Form) -> bool:
    """`(p, q) = (3, 2)` and `3, 2`; `3 < x < 5` and `(3, 5)`; units after a tuple."""
    single, several = (answer, gold) if answer.kind == "" else (gold, answer)
    reduced = quantity(_named(single.text)[1]).value
    if reduced != single.text:
        return _same(reduced, gold.text) if single is answer else _same(answer.text, reduced)
    is_solution_set = several.kind not in (",", "{}") and bool(_SOLUTION_SET.search(single.text))
    return is_solution_set and equal(upwards(answer.text), upwards(gold.text))


def _same_collection(answer: Sequence[str], gold: Sequence[str]) -> bool:
    """Lists and sets: in any order, except where the order alone says which is which."""
    ours, theirs = _with_names(answer), _with_names(gold)
    our_names, their_names = {name for name, _ in ours}, {name for name, _ in theirs}
    if len(our_names) > 1 and len(their_names) > 1:
        return _paired(ours, theirs, lambda item, wanted: _same_name(item[0], wanted[0]) and _same(item[1], wanted[1]))
    if not _same_name(*(next(iter(names)) if len(names) == 1 else None for names in (our_names, their_names))):
        return False
    if len(our_names) > 1 or len(their_names) > 1 or all(_is_word(value) for _, value in theirs):
        return all(_same(item[1], wanted[1]) for item, wanted in zip(ours, theirs, strict=True))
    return _paired(ours, theirs, lambda item, wanted: _same(item[1], wanted[1]))


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


# --- one item: names and equations -----------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
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
    r"""Whether a left-hand side only names a quantity: `x`, `f(2)`, `|AB|`, `\angle A`, `(x, y)`; not `2x`, `x + y`."""
    if _NO_NAME.search(text) or re.search(r"\\text\{[^{}]*(?<![a-zA-Z])(?:not|never|no)(?![a-zA-Z])", text):
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
    return one is None or other is None or squeezed(one).casefold() == squeezed(other).casefold()


def _is_equation(text: str) -> bool:
    return len(split(text, ("=", r"\equiv"))) > 1


def _same_item(answer: str, gold: str) -> bool:  # noqa: PLR0911 (a list of cases)
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
    ours, theirs = (re.fullmatch(r"([a-zA-Z])\(([a-zA-Z])\)", squeezed(text)) for text in (name, gold_name))
    if not ours or not theirs or ours[1] != theirs[1]:
        return None
    return re.sub(r"\\[a-zA-Z]+|" + ours[2], lambda found: theirs[2] if found[0] == ours[2] else found[0], value)


# --- one value -------------------------------------------------------------------------------------------------------


def _same_value(answer: str, gold: str) -> bool:
    moduli = {squeezed((modulus[1] or modulus[2]).strip("{}")) for modulus in _MODULUS.finditer(f"{answer} {gold}")}
    if moduli:
        return len(moduli) == 1 and _same(_MODULUS.sub("", answer).strip(), _MODULUS.sub("", gold).strip())
    verdict = same_numeral(answer, gold)
    answer = in_decimal(answer)
    if verdict is not None or not answer:
        return bool(verdict)
    ours, theirs = quantity(answer), quantity(gold)
    if (ours.value, theirs.value) != (answer, gold):
        return _same_quantity(ours, theirs)
    verdict = same_ratio(answer, gold)
    return equal(upwards(answer), upwards(gold)) if verdict is None else verdict


def _same_quantity(answer: Quantity, gold: Quantity) -> bool:
    """Equal values whose units do not contradict each other; a percentage is its number and its hundredth part."""
    if answer.unit and gold.unit and answer.unit != gold.unit:
        return False
    if _same(answer.value, gold.value):
        return True
    if answer.unit == gold.unit or "percent" not in (answer.unit, gold.unit):
        return False
    of_one = [rf"\frac{{{side.value}}}{{100}}" if side.unit == "percent" else side.value for side in (answer, gold)]
    return equal(*of_one)
