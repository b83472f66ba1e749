"""Text, JSON and YAML of files that may be anything: pipes, folders, other encodings, nesting without end.

Every function here raises OSError where a path cannot be read, and ValueError where its content is not what it should
be; the message fits behind `cannot be read: ` or `not valid YAML: `.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from functools import cache
from pathlib import Path
from typing import Any

from hacpo.errors import first_line

DEEPEST = 100
"""Levels of lists and mappings within each other; nothing here needs ten."""

MOST_REPEATED = 100_000
"""Values that the aliases of a YAML file may stand for in all: nine lines of nine aliases make 400 million of one."""

MOST_BITS = 1023
"""Of a whole number in YAML: what is as large as any float, and far from what Python refuses to spell in digits."""

LARGEST = 1e300
"""Of a number that is computed with: a million of them add up to one that is finite still."""

_DEEP = re.compile(rf"^[ \t?:-]{{{DEEPEST}}}", re.MULTILINE)
"""A line that may begin more lists and mappings than any file here."""

_HALF = re.compile("[\ud800-\udfff]")
"""What Python holds, and no UTF-8 text does."""


class YamlError(ValueError):
    """Text that is no YAML, or more than a file of settings is.

    Attributes:
        line: where, counted from 1; None if that is not known.
    """

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line


def read_bytes(path: Path, most: int = -1) -> bytes:
    """A regular file's content; a pipe or a device, which could be waited for without end, is refused.

    Args:
        most: as many bytes of it, from the start; -1: all.

    Raises:
        OSError: it cannot be read; `strerror` says why.
    """
    # Opening a pipe without O_NONBLOCK waits for somebody to write to it.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read(most)


def check_regular(path: Path) -> None:
    """Refuse what a library would wait for, a pipe or a device, and what the system does not open, which libraries in
    Rust call a missing file whatever the reason.

    Raises:
        OSError: it is one, or cannot be opened.
    """
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    finally:
        os.close(opened)


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """A regular file's text.

    Raises:
        OSError: it cannot be read.
        UnicodeDecodeError: it is no text of this encoding.
    """
    return read_bytes(path).decode(encoding)


def load_json(path: Path) -> Any:
    """A JSON file's content.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no UTF-8, or no JSON.
    """
    return parse_json(read_text(path))


def parse_json(text: str | bytes, deepest: int | None = DEEPEST) -> Any:
    """The value that JSON text stands for.

    Args:
        deepest: levels of lists and mappings within each other that it may have, so that whoever goes through them
            comes back; None: as many as Python reads.

    Raises:
        ValueError: it is no JSON, or nested more deeply.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if deepest is not None and is_deeper(value, deepest):
        raise ValueError("nested too deeply")
    return value


def load_yaml(path: Path) -> Any:
    """A YAML file's content.

    Raises:
        OSError: it cannot be read.
        YamlError: it is no UTF-8, or no YAML.
    """
    try:
        text = read_text(path)
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise YamlError(f"no UTF-8 text ({error.reason})", line) from None
    return parse_yaml(text)


def parse_yaml(text: str) -> Any:
    """The value that YAML 1.2 text stands for: numbers, texts, lists and mappings, no other objects.

    Raises:
        YamlError: it is no YAML, is nested more than `DEEPEST` levels, holds a number of more than `MOST_BITS` or a
            text that no file name or UTF-8 file can hold, or its aliases stand for more than `MOST_REPEATED` values or
            for themselves.
    """
    from ruamel.yaml import YAML

    if _is_plain(text):
        with contextlib.suppress(Exception):  # what is wrong with it, the other reader says
            yaml = YAML(typ="safe")
            yaml.Constructor = _bounded_constructor()
            value = yaml.load(text)
            if not is_deeper(value, DEEPEST - 1):
                return value
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _bounded_constructor()
    yaml.Composer = _bounded_composer()
    try:
        return yaml.load(text)
    except Exception as error:  # beside its own errors, those of int() and datetime() over a stranger's numbers
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or first_line(error)
        raise YamlError(str(reason), None if mark is None else mark.line + 1) from None


def _is_plain(text: str) -> bool:
    """Whether nothing can be repeated, and little nested, so that libyaml may read it: it is fast, and its recursion
    ends the process."""
    return "&" not in text and text.count("[") + text.count("{") < DEEPEST and not _DEEP.search(text)


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and mappings lie within each other on more levels."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if levels <= 0:
        return levels < 0 or bool(inner)
    return any(is_deeper(item, levels - 1) for item in inner if isinstance(item, dict | list))


@cache
def _bounded_constructor() -> Any:
    """ruamel's constructor of plain values, without those that stop whoever spells or opens them."""
    from ruamel.yaml.constructor import ConstructorError, SafeConstructor

    class Bounded(SafeConstructor):
        def construct_bounded_number(self, node: Any) -> int:
            value = int(self.construct_yaml_int(node))
            if value.bit_length() > MOST_BITS:
                raise ConstructorError(None, None, f"a number of more than {MOST_BITS} bits", node.start_mark)
            return value

        def construct_bounded_text(self, node: Any) -> str:
            text = str(self.construct_yaml_str(node))
            if "\0" in text or _HALF.search(text):
                what = "a null character" if "\0" in text else "half a character (a lone surrogate)"
                raise ConstructorError(None, None, f"a text with {what}", node.start_mark)
            return text

    Bounded.add_constructor("tag:yaml.org,2002:int", Bounded.construct_bounded_number)
    Bounded.add_constructor("tag:yaml.org,2002:str", Bounded.construct_bounded_text)
    return Bounded


def _bounded_composer() -> Any:
    """ruamel's composer, which counts: all is bounded before a value is made, merge keys included."""
    from ruamel.yaml.composer import Composer, ComposerError
    from ruamel.yaml.events import AliasEvent

    class Bounded(Composer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._depth = self._nodes = self._repeated = 0
            self._sizes: dict[int, int] = {}
            """Values below every node that is complete."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.parser.peek_event()
            before = self._nodes
            self._depth += 1
            if self._depth > DEEPEST:
                raise ComposerError(None, None, f"nested more than {DEEPEST} levels deep", event.start_mark)
            node = super().compose_node(parent, index)
            self._depth -= 1
            if isinstance(event, AliasEvent):
                if id(node) not in self._sizes:
                    raise ComposerError(None, None, "an alias stands for what it is a part of", event.start_mark)
                self._nodes += self._sizes[id(node)]
                self._repeated += self._sizes[id(node)]
                if self._repeated > MOST_REPEATED:
                    problem = f"its aliases stand for more than {MOST_REPEATED} values"
                    raise ComposerError(None, None, problem, event.start_mark)
            else:
                self._nodes += 1
                self._sizes[id(node)] = self._nodes - before
            return node

    return Bounded
