"""docs/settings.md, generated from the settings model: `python -m hacpo.settings.document > docs/settings.md`."""

from __future__ import annotations

import json
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hacpo.settings.agents import INHERITED
from hacpo.settings.base import Section
from hacpo.settings.recipes import RECIPES
from hacpo.settings.root import Settings

_INTRODUCTION = """# Settings

Generated from `hacpo/settings/` (`python -m hacpo.settings.document > docs/settings.md`).

`pipelines/<run>/params.yaml` describes a run. Unknown keys are refused. A key without a default must be given; keys of
the `algorithm` block default to their recipe's value (table at the end). `hacpo resolve pipelines/<run>` writes every
resolved value to `artifacts/<run>/settings.json`, and each table repeats in its metadata (`hacpo.settings`) what its
stage read. Equations are those of the HACPO paper (arXiv 2603.02604).

`extends: ../base.yaml`, relative to the file that says it, takes everything from another file first. Mappings are
merged key by key, anything else replaces, and `key: null` leaves out what the other file says there. Runs may be
grouped in folders: `pipelines/tiny/size/hacpo/params.yaml` is the run `tiny/size/hacpo`.
"""

_WORDS = {int: "integer", float: "number", str: "text", bool: "true/false", NoneType: "null"}


def document() -> str:
    """The whole page as Markdown."""
    parts = [_INTRODUCTION]
    parts += _block("", Settings, "The top level.")
    parts.append("## Recipes\n")
    parts.append("What `algorithm.recipe` fills in; empty where it agrees with `hacpo`.\n")
    keys = [f"{block}.{key}" for block, values in RECIPES["hacpo"].items() for key in values]
    names = list(RECIPES)
    parts.append("| key | " + " | ".join(f"`{name}`" for name in names) + " |")
    parts.append("|---|" + "---|" * len(names))
    for key in keys:
        block, leaf = key.split(".")
        base = RECIPES["hacpo"][block][leaf]
        cells = [
            _value(RECIPES[name][block][leaf]) if name == "hacpo" or RECIPES[name][block][leaf] != base else ""
            for name in names
        ]
        parts.append(f"| `{key}` | " + " | ".join(cells) + " |")
    return "\n".join(parts) + "\n"


def _block(prefix: str, model: type[BaseModel], title: str) -> list[str]:
    lines = [f"## `{prefix}`\n" if prefix else "## Top level\n", f"{title}\n"]
    lines += ["| key | type | default | meaning | unit | source |", "|---|---|---|---|---|---|"]
    inner: list[str] = []
    for name, field in model.model_fields.items():
        path = f"{prefix}.{name}" if prefix else name
        nested = _section_in(field.annotation)
        if nested is not None:
            mapped = get_origin(field.annotation) is dict
            inner += _block(f"{path}.<name>" if mapped else path, nested, (nested.__doc__ or "").splitlines()[0])
        extra: dict[str, Any] = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        meaning = field.description or f"See `{path}` below."
        cells = [
            f"`{name}`",
            _type(field),
            _default(field, prefix, path),
            meaning,
            extra.get("unit", ""),
            extra.get("source", ""),
        ]
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return [*lines, "", *inner]


def _section_in(annotation: Any) -> type[Section] | None:
    kinds = [annotation, *get_args(annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def _type(field: FieldInfo) -> str:
    nested = _section_in(field.annotation)
    if nested is not None:
        return "name -> block" if get_origin(field.annotation) is dict else "block"
    return _in_words(field.annotation, _bounds(field))


def _in_words(annotation: Any, bounds: str = "") -> str:
    """A type as a person writes its values: `text or null`, `number from 0 to 1`, `list of texts`.

    Args:
        bounds: what `_bounds` says of its numbers.

    Raises:
        TypeError: no words are known for it.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(_value(value) for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_in_words(argument, bounds) for argument in arguments)
    if origin is dict and arguments[0] is str:
        return f"name -> {_in_words(arguments[1])}"
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        return f"list of {_in_words(arguments[0])}{'s' if arguments[0] in _WORDS else ''}"
    if annotation in (int, float):
        return f"{_WORDS[annotation]}{bounds}"
    if annotation not in _WORDS:
        raise TypeError(f"docs/settings.md has no words for the type {annotation}")
    return _WORDS[annotation]


def _bounds(field: FieldInfo) -> str:
    """What values of a number are allowed: ` from 0 to 1`, ` above 0 and at most 1`, ` from 1`; empty if all are."""
    found = {
        name: getattr(one, name) for name in ("ge", "gt", "le", "lt") for one in field.metadata if hasattr(one, name)
    }
    words = {"ge": "from", "gt": "above", "le": "to" if "ge" in found else "and at most", "lt": "and below"}
    return "".join(f" {words[name]} {value:g}" for name, value in found.items())


def _default(field: FieldInfo, prefix: str, path: str) -> str:
    if path.startswith(tuple(f"agents.<name>.{block}" for block in INHERITED)):
        return "the run's"
    if field.is_required():
        return "recipe" if prefix.startswith("algorithm.") else "required" if prefix != "algorithm" else "hacpo's"
    value = field.get_default(call_default_factory=True)
    return "" if isinstance(value, BaseModel) else _value(value)


def _value(value: object) -> str:
    if value is None or isinstance(value, bool | dict | tuple):
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value:g}"
    return f"`{value}`" if isinstance(value, str) else str(value)


if __name__ == "__main__":
    print(document(), end="")
