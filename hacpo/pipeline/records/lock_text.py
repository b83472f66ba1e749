"""A dvc.lock as text: one stage's entry put in the place of its last, without the others being parsed and printed."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

_HEAD = "schema: '2.0'\nstages:\n"
_ENTRY = re.compile(r"  (?P<name>[\w@.-]+):\n(?:(?:    .*)?\n)+")
"""A stage of a name that YAML needs no quotes for, and the lines below it, as DVC prints them."""
_COMMAND = re.compile(r"hacpo( [\w./=@-]+)+", re.ASCII)
_PATH = re.compile(r"(?!(?i:true|false|null)$)[A-Za-z][\w./=@-]{3,}", re.ASCII)
_HASH = re.compile(r"md5")
_MD5 = re.compile(r"(?=.*[acdf])[0-9a-f]{32}(\.dir)?")
"""These mean to YAML what they are: no number, no truth value, and nothing in them begins anything."""
_OBJECT = re.compile(r"\b[0-9a-f]{32}(?:\.dir)?\b")
_WIDTH = 80
"""Longer lines are folded."""


def with_stage(text: str, name: str, entry: Any, place: Callable[[str], int], where: str) -> str:
    """The text of a lock with a stage's entry, as DVC would print it, the stages in the order of their `place`.

    Args:
        text: of the lock as it is; empty if there is none.
        entry: what `dvc.stage.serialize.to_lockfile` says of the stage.
        where: the lock, for DVC's own error where it is no YAML.
    """
    known = entries(text or _HEAD)
    if known is None:
        return _printed_anew(text, name, entry, place, where)
    known[name] = _printed_stage(name, entry)
    return _HEAD + "".join(known[stage] for stage in sorted(known, key=place))


def says(text: str, name: str, entry: Mapping[str, Any]) -> bool:
    """Whether a lock has just this entry of a stage; False also where that cannot be seen without parsing it."""
    return (entries(text) or {}).get(name) == _printed_stage(name, entry)


def entries(text: str) -> dict[str, str] | None:
    """Name of a stage -> its lines; None of a text that is not wholly of that form."""
    if not text.startswith(_HEAD):
        return None
    stages: dict[str, str] = {}
    at = len(_HEAD)
    while at < len(text):
        entry = _ENTRY.match(text, at)
        if entry is None or entry["name"] in stages:
            return None
        stages[entry["name"]], at = entry[0], entry.end()
    return stages


def output_md5(text: str, path: str) -> str:
    """The hash that a lock has of an output of any stage; empty where that cannot be seen."""
    made = rf"^    outs:\n(?:    [- ] .*\n)*?    - path: {re.escape(path)}\n      hash: md5\n      md5: (.+)\n"
    recorded = re.search(made, text, re.MULTILINE)
    return recorded[1] if recorded else ""


def made_objects(text: str) -> set[str]:
    """The objects that a lock names as its stages' outputs, of folders with `.dir`."""
    section, made = "", set[str]()
    for line in text.splitlines():
        if line.startswith("    ") and line[4:5].isalpha():
            section = line.strip()
        elif section == "outs:":
            made |= named_objects(line)
    return made


def named_objects(text: str) -> set[str]:
    """The objects that one of DVC's files names, of folders with `.dir`."""
    return set(_OBJECT.findall(text))


def _printed_stage(name: str, entry: Any) -> str:
    from dvc.utils.serialize import dumps_yaml

    quick = printed(entry, 4) if _PATH.fullmatch(name) else None
    if quick is not None:
        return f"  {name}:\n{quick}"
    text: str = dumps_yaml({"stages": {name: entry}})
    return text.removeprefix("stages:\n")


def _printed_anew(text: str, name: str, entry: Any, place: Callable[[str], int], where: str) -> str:
    from dvc.utils.serialize import dumps_yaml, parse_yaml_for_update

    content: Any = parse_yaml_for_update(text, where) if text else {}
    content.setdefault("schema", "2.0")
    entries = {**content.get("stages", {}), name: entry}
    content["stages"] = dict(sorted(entries.items(), key=lambda item: place(item[0])))
    printed: str = dumps_yaml(content)
    return printed


def printed(entry: Mapping[str, Any], indent: int) -> str | None:
    """A stage's entry as DVC's YAML library prints it, in a tenth of the time; None where that takes the library.

    The settings that a stage reads are printed by it, but once: they stay from step to step.

    Args:
        entry: what `dvc.stage.serialize.to_single_stage_lockfile` says of the stage.
        indent: the columns before it.
    """
    if not entry.keys() <= {"cmd", "deps", "params", "outs"} or not _COMMAND.fullmatch(entry.get("cmd", "")):
        return None
    margin, text = " " * indent, ""
    for key, content in entry.items():
        if key == "params":
            try:
                text += _settings(json.dumps(content), indent)
            except TypeError:  # a date, of somebody's own stage
                return None
            continue
        lines = [f"cmd: {content}"] if key == "cmd" else [f"{key}:"]
        for item in () if key == "cmd" else content:
            if not all(_is_plain(name, value) for name, value in item.items()):
                return None
            lines += [f"{'  ' if at else '- '}{name}: {value}" for at, (name, value) in enumerate(item.items())]
        if any(indent + len(line) > _WIDTH for line in lines):
            return None
        text += "".join(f"{margin}{line}\n" for line in lines)
    return text


def _is_plain(name: str, value: Any) -> bool:
    """Whether a file's path, hash or size stands in YAML as it is."""
    if name in ("size", "nfiles"):
        return type(value) is int
    kind = {"path": _PATH, "hash": _HASH, "md5": _MD5}.get(name)
    return kind is not None and isinstance(value, str) and kind.fullmatch(value) is not None


@functools.lru_cache(maxsize=256)
def _settings(content: str, indent: int) -> str:
    """The settings that a stage reads, printed by DVC's library at that indent."""
    from dvc.utils.serialize import dumps_yaml

    nested: Any = {"params": json.loads(content)}
    for _ in range(indent // 2):
        nested = {"x": nested}
    text: str = dumps_yaml(nested)
    return "".join(text.splitlines(keepends=True)[indent // 2 :])
