"""What the import rules in pyproject.toml do not see: circles within a folder, imports within functions, and stems."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def modules() -> dict[str, Path]:
    """Dotted name -> file, of the package and its stages."""
    files = [*(ROOT / "hacpo").rglob("*.py"), *(ROOT / "stages").glob("*.py")]
    named = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    return {f"hacpo.{name}" if name.startswith("stages") else name: file for name, file in named.items()}


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported(node: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """Modules that code imports when it runs, within functions too."""
    for inner in ast.iter_child_nodes(node):
        if is_for_types(inner):
            continue
        if isinstance(inner, ast.Import):
            yield from (alias.name for alias in inner.names if alias.name in known)
        elif isinstance(inner, ast.ImportFrom) and inner.module:
            for alias in inner.names:
                whole = f"{inner.module}.{alias.name}"
                yield from [name for name in (whole, inner.module) if name in known][:1]
        else:
            yield from imported(inner, known)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a ring; empty where there are none."""
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def test_a_ring_within_functions_is_seen() -> None:
    known = {"a": Path(), "b": Path(), "c.d": Path()}
    graph = {
        "a": set(imported(ast.parse("def f():\n    import b"), known)),
        "b": set(imported(ast.parse("if x:\n    from c import d"), known)),
        "c.d": set(imported(ast.parse("def f():\n    def g():\n        from a import h"), known)),
    }
    assert graph == {"a": {"b"}, "b": {"c.d"}, "c.d": {"a"}}
    assert set(circle(graph)) == {"a", "b", "c.d"}
    assert not circle(graph | {"c.d": set(imported(ast.parse("if TYPE_CHECKING:\n    import a"), known))})


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules()
    graph = {name: set(imported(ast.parse(file.read_text(encoding="utf-8")), known)) for name, file in known.items()}
    del graph["hacpo"]  # its names are taken from their modules when they are asked for
    ring = circle({name: uses - {"hacpo"} for name, uses in graph.items()})
    assert not ring, " -> ".join(ring)


@pytest.mark.parametrize("folder", ["hacpo"])
def test_no_stem_stands_for_two_modules(folder: str) -> None:
    files = [file for name, file in modules().items() if not name.startswith("hacpo.stages")]
    stems = Counter(file.stem for file in files if file.stem != "__init__" and "commands" not in file.parts)
    assert [stem for stem, count in stems.items() if count > 1] == []
