"""docs/settings.md, generated from the settings model: `python -m hacpo.settings_doc > docs/settings.md`."""

from __future__ import annotations

import json
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hacpo.config import INHERITED, RECIPES, Section, Settings

_INTRODUCTION = """# Settings

Generated from `hacpo/config.py` (`python -m hacpo.settings_doc > docs/settings.md`).

`pipelines/<run>/params.yaml` describes a run. Unknown keys are refused. A key without a default must be given; keys of
the `algorithm` block default to their recipe's value (table at the end). `hacpo resolve pipelines/<run>` writes every
resolved value to `artifacts/<run>/settings.json`, and each table repeats in its metadata (`hacpo.settings`) what its
stage read. Equations are those of the HACPO paper (arXiv 2603.02604).

`extends: ../base.yaml`, relative to the file that says it, takes everything from another file first. Mappings are
merged key by key, anything else replaces, and `key: null` leaves out what the other file says there. Runs may be
grouped in folders: `pipelines/tables/size/hacpo/params.yaml` is the run `tables/size/hacpo`.
"""


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
            mapped = str(field.annotation).startswith("dict")
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
    annotation = field.annotation
    options = [value for value in get_args(annotation) if isinstance(value, str)]
    if options:
        return ", ".join(f"`{value}`" for value in options)
    nested = _section_in(annotation)
    if nested is not None:
        return "block" if not str(annotation).startswith("dict") else "name -> block"
    text = str(getattr(annotation, "__name__", annotation)) if not get_args(annotation) else str(annotation)
    for python, plain in (("<class '", ""), ("'>", ""), ("int", "integer"), ("str", "text"), ("bool", "true/false")):
        text = text.replace(python, plain)
    text = text.replace("tuple[text, ...]", "list of texts")
    return text.replace("None", "null").replace(" | ", " or ").replace("float", "number")


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
