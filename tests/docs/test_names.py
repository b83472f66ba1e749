"""Names in the code say what they hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAYS_NOTHING = {"found", "one", "said", "there"}
"""In a long function a reader cannot see any more what was found, which one, or who said it."""
LONG = 10
"""Lines of a function, its signature and docstring included, up to which such a name is in sight of what it means."""


def bound_names(node: ast.AST) -> Iterator[str]:
    """Names that a node itself binds: assignments and loops of any kind, arguments, `as`, patterns."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            yield name
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
        case ast.MatchMapping(rest=str(name)) | ast.alias(asname=str(name)):
            yield name


def empty_names(source: str) -> set[tuple[str, str]]:
    """(function, name) of every name in a long function that says nothing."""
    return {
        (function.name, name)
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        and (function.end_lineno or 0) - function.lineno >= LONG
        for node in ast.walk(function)
        for name in bound_names(node)
        if name in SAYS_NOTHING
    }


@pytest.mark.parametrize(
    "line",
    [
        "found = 1",
        "a, (*found, b) = c",
        "for found in a: pass",
        "b = [found for found in a]",
        "b = lambda found: 1",
        "if found := 1: pass",
        "with a as found: pass",
        "from a import b as found",
        "def inner(*, found=1): pass",
    ],
)
def test_every_way_to_bind_a_name_is_seen(line: str) -> None:
    def function(lines: int) -> str:  # `def` is the first line of so many
        return "def long():\n" + "".join(f"    {text}\n" for text in [line, *["pass"] * (lines - 2)])

    assert empty_names(function(LONG + 1)) == {("long", "found")}
    assert not empty_names(function(LONG))
    assert not empty_names(function(LONG + 1).replace("found", "checkpoint"))
    assert not empty_names(function(LONG + 1).replace(line, "a(found=b, c=found)"))  # used, not bound


def test_no_name_in_a_long_function_says_nothing() -> None:
    files = [path.relative_to(ROOT).as_posix() for top in ("hacpo", "stages") for path in (ROOT / top).rglob("*.py")]
    assert len(files) > 150
    empty = {(file, *where) for file in files for where in empty_names((ROOT / file).read_text(encoding="utf-8"))}
    assert not empty, "say what was found: " + ", ".join(f"{name} in {file}:{of}" for file, of, name in sorted(empty))
