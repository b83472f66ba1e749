"""What the import rules in pyproject.toml do not see: circles within a folder, imports within functions, and stems."""

from __future__ import annotations

import ast
import subprocess
import sys
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


OPENS_FILES = {"pathlib", "os", "io", "shutil", "tempfile", "glob", "pyarrow.parquet", "pyarrow.fs", "pyarrow.dataset"}
"""Modules by which files are read or written; of `hacpo.artifacts`, what is not of these names."""
OF_NO_FILE = {"hacpo.artifacts.tables", "hacpo.artifacts.problem_rows", "hacpo.artifacts.list_columns"}
OPENING = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "read_table", "write_table", "load", "save"}


def opened(source: str) -> Iterator[str]:
    """What in a module's code could open a file: modules that are there for it, and calls of such names."""
    for node in ast.walk(ast.parse(source)):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            yield from {name} & OPENING
        yield from {module for module in modules if module in OPENS_FILES}
        within = {module for module in modules if module.startswith("hacpo.artifacts.")}
        if within and not within & OF_NO_FILE:
            yield min(within)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("import pyarrow.parquet as pq", "pyarrow.parquet"),
        ("from pyarrow import parquet", "pyarrow.parquet"),
        ("def f():\n    from pathlib import Path", "pathlib"),
        ("from hacpo.artifacts import storage", "hacpo.artifacts.storage"),
        ("from hacpo.artifacts.parquet import read_given", "hacpo.artifacts.parquet"),
        ("open(x)", "open"),
        ("x.read_text()", "read_text"),
        ("from hacpo.artifacts.tables import POOL\nfrom hacpo.artifacts import problem_rows\nimport pyarrow as pa", ""),
    ],
)
def test_what_opens_a_file_is_seen(line: str, what: str) -> None:
    assert list(opened(line)) == [what] * bool(what)


def test_the_algorithm_opens_no_file() -> None:
    files = [path for name, path in modules().items() if name.startswith("hacpo.algorithm.")]
    assert len(files) > 10
    odd = [f"{path.name}: {what}" for path in files for what in opened(path.read_text(encoding="utf-8"))]
    assert not odd, ", ".join(odd)


HEAVY = {"numpy", "pyarrow", "pydantic", "dvc", "torch", "transformers", "sympy", "polars"}


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["--help"], set()),
        (["pool", "--help"], {"pydantic", "pyarrow", "numpy"}),
        (["verify", "--help"], {"pydantic", "pyarrow", "numpy"}),
        (["advantage", "--help"], {"pydantic", "pyarrow", "numpy"}),
        (["run", "--help"], {"pydantic"}),
    ],
)
def test_a_command_loads_no_library_that_it_does_not_need(words: list[str], needed: set[str]) -> None:
    told = (
        "import sys; from hacpo.cli import app, run_app\nrun_app(app, sys.argv[1:])\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", told, *words], capture_output=True, text=True, check=True)
    assert "Usage" in run.stdout
    assert HEAVY & set(run.stderr.split()) <= needed


def test_who_asks_where_a_table_lies_loads_nothing_to_read_it() -> None:
    told = (
        "import sys, hacpo.evaluation.values, hacpo.artifacts.run_files, hacpo.pipeline.running.driver\n"
        "print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert HEAVY & set(run.stdout.split()) <= {"pydantic"}


def test_what_a_command_has_loaded_is_not_searched_for_garbage() -> None:
    told = (
        "import gc; passes = []; gc.callbacks.append(lambda phase, of: passes.append(of['generation']))\n"
        "from hacpo.cli import app, run_app; before = len(passes)\n"
        "app.get_command(None, 'verify')\n"
        "print(gc.isenabled(), passes.count(2), gc.get_freeze_count() > 10_000)"
    )
    run = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "0", "True"]


def test_the_help_says_of_every_command_what_its_function_says() -> None:
    from hacpo import cli

    for name, place in cli._PLACES.items():
        assert cli._summary(place).split() == (cli.app.get_command(None, name).help or "").split()
