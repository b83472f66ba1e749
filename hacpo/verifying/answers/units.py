r"""What stands around a value and is not part of it: units, currencies, percent signs, words.

`quantity` takes them off. A unit is never needed, but two units that are both known and differ make two answers differ:
`5\text{ cm}` is 5 and 5 cm and 5 centimetres, but not 5 m. Nothing is converted: an hour is not 60 minutes here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from hacpo.verifying.answers.asides import may_change_the_value

_NAMES = {
    "meter": "m metre",
    "kilometer": "km kilometre",
    "centimeter": "cm centimetre",
    "millimeter": "mm millimetre",
    "micrometer": "micron micrometre",
    "nanometer": "nm nanometre",
    "inch": "in inches",
    "foot": "ft feet",
    "yard": "yd",
    "mile": "mi",
    "gram": "g gm",
    "kilogram": "kg kgs kilo",
    "milligram": "mg",
    "pound": "lb lbs",
    "ounce": "oz",
    "ton": "tonne",
    "second": "s sec secs",
    "minute": "min mins",
    "hour": "h hr hrs",
    "day": "",
    "week": "",
    "month": "",
    "year": "yr yrs",
    "liter": "L l litre",
    "milliliter": "ml mL millilitre",
    "gallon": "gal",
    "acre": "",
    "hectare": "ha",
    "degree": "deg degs",
    "radian": "rad rads",
    "celsius": "C",
    "fahrenheit": "F",
    "kelvin": "K",
    "dollar": "$ usd",
    "cent": "",
    "euro": "",
    "rupee": "rs",
    "yen": "",
    "newton": "N",
    "joule": "J",
    "watt": "W",
    "volt": "V",
    "hertz": "Hz",
    "a.m.": "am a.m",
    "p.m.": "pm p.m",
    "mile/hour": "mph",
    "kilometer/hour": "kmh kmph kph",
}
_UNITS = {spelling: unit for unit, others in _NAMES.items() for spelling in (unit, unit + "s", *others.split())}
_WORDS = {*_UNITS, "unit", "units", "square", "sq", "squared", "cubic", "cu", "cubed", "per"}
_CLEAR = {"cm", "km", "mm", "kg", "ft", "am", "pm"}
"""Units of two letters that are one even where they touch the number."""

_CURRENCY = re.compile(r"^([+-]?\s*)(?:\$|\\text\{\s*(euros|pounds|yen|rupees)\s*\}|(?:Rs\.?|USD)\s*(?=[0-9]))\s*")
_POWER = r"(?:\^\s*(?:\{\s*(-?[0-9])\s*\}|([0-9])))?"
_TEXT_UNIT = re.compile(r"^(.*[0-9a-zA-Z)}|!'%])\s*\\text\{([^{}]*)\}\s*" + _POWER + "$", re.DOTALL)
_BARE_WORD = r"[a-zA-Z]+\.?(?:[a-zA-Z]\.?)?(?:\^-?[0-9](?=\s*[/a-zA-Z]))?[\s/]*"
_BARE_UNIT = re.compile(rf"^(.*?[0-9)}}%])(\s*)((?:{_BARE_WORD})+)" + _POWER + "$", re.DOTALL)
_DEGREE = re.compile(r"^(.*[0-9a-zA-Z)}])\s*\^\\circ\s*(?:\\text\{\s*([CF])\s*\}|([CF]))?$", re.DOTALL)
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")


@dataclass(frozen=True)
class Quantity:
    """A value and what was taken off it."""

    value: str
    unit: str | None = None
    """In one spelling (`square cm` and `sq. centimeters` are `centimeter^2`); None without one that is known."""


def quantity(text: str) -> Quantity:
    """The value of `text` (as `spelling.tidy` gives it) without unit, currency, trailing words and percent sign."""
    units: list[str | None] = []
    for _ in range(4):  # each round takes one thing off; `\\$5 \\text{ per hour}` has two
        before = text
        if currency := _CURRENCY.match(text):
            text = currency[1].strip() + text[currency.end() :]
            units.append(_canonical(currency[2] or "$", ""))
        elif text.endswith("$"):
            text = text[:-1].strip()
            units.append("dollar")
        elif text.endswith("%"):
            text = text[:-1].strip()
            units.append("percent")
        elif (degree := _DEGREE.match(text)) and not _TRIGONOMETRY.search(text):
            text = degree[1]
            units.append(_UNITS.get(degree[2] or degree[3] or "degree"))
        elif (words := _TEXT_UNIT.match(text)) and _is_remark(words[2]):
            text = words[1]
            units.append(_canonical(words[2], words[3] or words[4] or ""))
        elif (words := _BARE_UNIT.match(text)) and _is_bare_unit(words[3], bool(words[2])):
            text = words[1]
            units.append(_canonical(words[3], words[4] or words[5] or ""))
        if text == before:
            break
    known = [unit for unit in units if unit]
    return Quantity(text.strip(), known[0] if len(known) == len(units) == 1 else None)


def _spelled(words: str) -> list[str]:
    """The words in lower case, but single letters and abbreviations whose case matters as they are."""
    found = re.findall(r"[a-zA-Z$]+(?:\.[a-zA-Z]\.?)?|/|\^-?[0-9]", words.replace("~", " "))
    return [word if word in _UNITS or len(word) == 1 else word.lower().rstrip(".") for word in found]


def _is_remark(words: str) -> bool:
    """Text after a value that may be dropped: a few words, none of which can change the value."""
    spelled = _spelled(words)
    if len(spelled) == 1 and len(spelled[0]) == 1:
        return spelled[0] in _UNITS
    unpowered = re.sub(r"\^-?[0-9]", "", words)
    return 0 < len(spelled) <= 6 and not re.search(r"[0-9=<>\\+^]", unpowered) and not may_change_the_value(spelled)


def _is_bare_unit(words: str, spaced: bool) -> bool:
    """Letters after a value that are no variables but a unit or a remark: `5 cm`, `5 m/s`, `5 apples`; not `5 m`."""
    spelled = [word for word in _spelled(words) if word[0] not in "/^"]
    if spaced and min(map(len, spelled), default=0) > 2:
        return _is_remark(words)
    if not spelled or spelled[0] in ("squared", "cubed") or not all(word in _WORDS for word in spelled):
        return False
    first = spelled[0]
    return len(first) > 2 or (len(first) == 2 and (spaced or first in _CLEAR)) or (spaced and "/" in words)


@lru_cache(maxsize=512)
def _canonical(words: str, power: str) -> str | None:
    """`square cm` -> `centimeter^2`; None when a word is not a unit that is known."""
    result: list[str] = []
    pending = ""
    for word in _spelled(words):
        if word in ("square", "sq", "cubic", "cu"):
            pending = "^2" if word in ("square", "sq") else "^3"
        elif word in ("squared", "cubed") and result:
            result[-1] += "^2" if word == "squared" else "^3"
        elif word[0] == "^" and result:
            result[-1] += word
        elif word in ("per", "/") and result:
            result.append("/")
        elif word in _UNITS:
            result.append(_UNITS[word] + pending)
            pending = ""
        else:
            return None
    if not result or pending:
        return None
    return "".join(result) + (f"^{power}" if power not in ("", "1") else "")
