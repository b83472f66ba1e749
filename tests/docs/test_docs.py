"""Pages: the tutorial prints what it says, links lead somewhere, and files, names and commands that they name exist."""

from __future__ import annotations

import importlib
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import pages
from conftest import ROOT

PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("[!.]*/README.md"))]
CODE = ("hacpo", "stages", "tests", "benchmarks", "examples", "pipelines")
NO_MODULES = {"schema", "run", "partition", "shard", "settings"}
"""Keys of the tables' metadata (`hacpo.schema`), which docs/artifacts.md lists."""

MADE = ("pipelines/mine", "hacpo/params.yaml")
"""Names of a reader's own files, and of files below a folder that the page has named."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.mark.slow
def test_the_tutorial_prints_what_it_says(tmp_path: Path) -> None:
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc" / "config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
    shutil.copy(ROOT / ".dvcignore", tmp_path)
    (tmp_path / "pipelines/smoke").mkdir(parents=True)
    shutil.copy(ROOT / "pipelines/smoke/params.yaml", tmp_path / "pipelines/smoke")
    results = pages.run((ROOT / "docs/tutorial.md").read_text("utf-8"), tmp_path)
    assert len(results) > 60
    assert not pages.differences(results), "\n\n".join(pages.differences(results))


PAGE = """
```pycon
>>> "{digest}"
'{digest}'
>>> {said}
{printed}
```
"""


@pytest.mark.parametrize(
    ("said", "printed", "same_bits", "agrees"),
    [
        ("(1, 'a')", "(1, 'a')", True, True),
        ("(1, 'a')", "(2, 'a')", True, False),
        ("(1, 'a')", "(2, 'b')", False, True),
        ("[1, 2]", "[1, 2, 3]", False, True),
        ("{'x': 1.5e-3}", "{'x': -2}", False, True),
        ("{'x': 1}", "{'y': 1}", False, False),
        ("(1, 2) == (1, 2)", "True", False, True),
        ("1 == 2", "True", False, False),
        ("(1, True)", "(1, False)", False, True),
    ],
)
def test_what_a_page_prints_is_compared_as_far_as_machines_agree(
    said: str, printed: str, same_bits: bool, agrees: bool, tmp_path: Path
) -> None:
    page = PAGE.format(digest="a" * 64, said=said, printed=printed)
    if not same_bits:
        page = page.replace("'" + "a" * 64, "'" + "b" * 64)
    assert (not pages.differences(pages.run(page, tmp_path))) == agrees


def test_a_page_is_recorded_with_what_its_commands_print(tmp_path: Path) -> None:
    loop = ">>> for x in (1, 2):\n...     print(x)\n"
    page = f"```sh\ntouch here\n```\n\n```console\n$ ls\n```\n\n```pycon\n{loop}>>> x\n```\n"
    written = pages.recorded(page, pages.run(page, tmp_path))
    assert "$ ls\nhere\n```" in written
    assert ">>> for x in (1, 2):\n...     print(x)\n1\n2\n>>> x\n2\n```" in written
    assert pages.recorded(written, pages.run(written, tmp_path)) == written


@each_page
def test_links_lead_to_a_page_and_a_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!\w+://)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text("utf-8")):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in set(headings(file)), f"{page.name} links to {target}#{anchor}"


def headings(page: Path) -> Iterator[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    for title in re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


@each_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    named = [path for path in re.findall(rf"`((?:{'|'.join(CODE)})/[^`\s<>]*)`", text) if not path.startswith(MADE)]
    missing = [path for path in named if not list(ROOT.glob(path.rstrip("/").partition(":")[0]))]
    assert not missing


@each_page
def test_functions_that_a_page_names_are_in_the_file_it_names(page: Path) -> None:
    for path, names in re.findall(
        r"`((?:hacpo|stages)/[\w/]+\.py)`(?::|,) ((?:`\w[\w.]*`(?:, | and )?)+)", page.read_text("utf-8")
    ):
        code = (ROOT / path).read_text("utf-8")
        for name in re.findall(r"(\w+)`", names):
            assert re.search(rf"(def|class) {name}\b|^\s*{name}\b", code, re.MULTILINE), f"{page.name}: {path}, {name}"


@each_page
def test_names_in_the_code_that_a_page_names_exist(page: Path) -> None:
    assert not [name for name in re.findall(r"\bhacpo(?:\.\w+)+", page.read_text("utf-8")) if not exists(name)]


def exists(name: str) -> bool:
    """Whether a dotted name is something in the code (or a key of the tables' metadata)."""
    parts = name.split(".")
    if parts[1] in NO_MODULES and len(parts) == 2:
        return True
    found = importlib.import_module("hacpo")
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:number]))
            except ModuleNotFoundError:
                return False
        found = getattr(found, part)
    return True


def test_pages_files_and_names_that_the_code_names_exist() -> None:
    for file in [path for folder in CODE for path in ROOT.glob(f"{folder}/**/*.py")]:
        code = file.read_text("utf-8")
        paths = re.findall(r"\b(?:docs/\w+\.md|(?:hacpo|stages)/[\w/]+\.py)\b", code)
        assert not [path for path in paths if not (ROOT / path).exists()], file
        assert not [name for name in re.findall(r"`(hacpo(?:\.\w+)+)`", code) if not exists(name)], file


def test_classes_that_the_code_names_by_their_module_exist() -> None:
    modules: dict[str, str] = {}
    for file in ROOT.glob("hacpo/**/*.py"):
        modules[file.stem] = modules.get(file.stem, "") + file.read_text("utf-8")
    for file in [path for folder in CODE for path in ROOT.glob(f"{folder}/**/*.py")]:
        for module, name in re.findall(r"`(\w+)\.([A-Z]\w*)`", file.read_text("utf-8")):
            defined = re.search(rf"^(class )?{name}\b", modules.get(module, ""), re.MULTILINE)
            assert defined or is_known(module, name), f"{file.relative_to(ROOT)}: `{module}.{name}`"


def is_known(module: str, name: str) -> bool:
    """Whether a module outside the project has a name."""
    try:
        return hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return False


PROGRAMS = [file for folder in ("hacpo", "examples", "benchmarks") for file in sorted(ROOT.glob(f"{folder}/**/*.py"))]


def test_commands_and_options_that_pages_and_programs_name_exist() -> None:
    from hacpo.cli import app

    known = {
        name: {
            "--help",
            *(option for one in app.get_command(None, name).params for option in (*one.opts, *one.secondary_opts)),
        }
        for name in app.list_commands(None)
    }
    named = [(file, *command) for file in [*PAGES, *PROGRAMS] for command in commands(file.read_text("utf-8"))]
    assert len(named) > 200
    assert not [(file, name) for file, name, _ in named if name not in known]
    assert not [(file, name, options) for file, name, options in named if not known[name].issuperset(options)]


COMMAND = re.compile(r"^\s*(?:\$ )?(?:[A-Z_]+=\S* )*hacpo ([a-z][\w-]*)([^#|;&]*)", re.MULTILINE)


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Name and options of every `hacpo` command in a text: between backticks, or a line of a fenced block."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    for part in [*fenced, *spans]:
        for name, rest in COMMAND.findall(part.replace("\\\n", " ")):
            yield name, re.findall(r"(?<!\S)--[a-z][\w-]*", rest)


def test_commands_are_found_in_backticks_and_in_blocks() -> None:
    page = "`hacpo run x --until 0`, `$ hacpo plan`\n```sh\nA=b hacpo copy a \\\n  --new  # --old\nls --all\n```\n"
    assert sorted(commands(page)) == [("copy", ["--new"]), ("plan", []), ("run", ["--until"])]


def test_the_index_names_every_page_once() -> None:
    index = (ROOT / "docs/index.md").read_text("utf-8")
    linked = re.findall(r"^(?:\| |- |\d+\. )\[[^\]]*\]\(([\w]+\.md)\)", index, re.MULTILINE)
    assert sorted(linked) == sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "index.md")


def test_the_report_and_the_glossary_explain_words_alike() -> None:
    report = ROOT / "hacpo/tools/report"
    template = (report / "template.html").read_text("utf-8")
    words = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", template)
    reward = tomllib.loads((report / "captions.toml").read_text("utf-8"))["reward"]
    graded = reward["graded"].removeprefix("What the run's reward function gives an answer: ")
    said = {"{{ reward_meaning|safe }}": f"{reward['plain']} With a reward function of the user's own: {graded}"}
    glossary = (ROOT / "docs/glossary.md").read_text("utf-8")
    assert len(words) >= 10
    for term, meaning in words:
        plain = re.sub(r"</?em>", "*", re.sub(r"</?code>", "`", said.get(meaning, meaning)))
        assert f"**{term}**: {plain}" in glossary


def test_columns_tables_and_settings_of_the_glossary_exist() -> None:
    from hacpo.artifacts.tables import TABLES
    from hacpo.settings.params import leaves, load

    glossary = (ROOT / "docs/glossary.md").read_text("utf-8")
    settings = load(ROOT / "pipelines/smoke/params.yaml").model_dump()
    known = {
        "Table": set(TABLES),
        "Column": {"learner", *(name for table in TABLES.values() for name in table.schema.names)},
        "Setting": set(leaves(settings)),
    }
    for kind, names in re.findall(r"(Table|Column|Setting)s?: ((?:`[\w.]+`(?:, )?)+)", glossary):
        assert not set(re.findall(r"`([\w.]+)`", names)) - known[kind], kind
