"""A dvc.lock as text: one stage's entry put in the place of its last, without the others being parsed and printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_HEAD = "schema: '2.0'\nstages:\n"
_ENTRY = re.compile(r"  (?P<name>[\w@.-]+):\n(?:(?:    .*)?\n)+")
"""A stage of a name that YAML needs no quotes for, and the lines below it, as DVC prints them."""


def with_stage(text: str, name: str, entry: Any, place: Callable[[str], int], where: str) -> str:
    """The text of a lock with a stage's entry, as DVC would print it, the stages in the order of their `place`.

    Args:
        text: of the lock as it is; empty if there is none.
        entry: what `dvc.stage.serialize.to_lockfile` says of the stage.
        where: the lock, for DVC's own error where it is no YAML.
    """
    from dvc.utils.serialize import dumps_yaml

    entries = _entries(text or _HEAD)
    if entries is None:
        return _printed_anew(text, name, entry, place, where)
    entries[name] = dumps_yaml({"stages": {name: entry}}).removeprefix("stages:\n")
    return _HEAD + "".join(entries[stage] for stage in sorted(entries, key=place))


def _entries(text: str) -> dict[str, str] | None:
    """Name of a stage -> its lines; None of a text that is not wholly of that form."""
    if not text.startswith(_HEAD):
        return None
    entries: dict[str, str] = {}
    at = len(_HEAD)
    while at < len(text):
        entry = _ENTRY.match(text, at)
        if entry is None or entry["name"] in entries:
            return None
        entries[entry["name"]], at = entry[0], entry.end()
    return entries


def _printed_anew(text: str, name: str, entry: Any, place: Callable[[str], int], where: str) -> str:
    from dvc.utils.serialize import dumps_yaml, parse_yaml_for_update

    content: Any = parse_yaml_for_update(text, where) if text else {}
    content.setdefault("schema", "2.0")
    entries = {**content.get("stages", {}), name: entry}
    content["stages"] = dict(sorted(entries.items(), key=lambda item: place(item[0])))
    printed: str = dumps_yaml(content)
    return printed
