"""docs/artifacts.md lists what the catalogue has: every artifact, every column, who writes and who reads it."""

from __future__ import annotations

import pytest

from conftest import ROOT
from hacpo.artifacts.tables import TABLES
from hacpo.pipeline.tables_page import with_tables

PAGE = (ROOT / "docs/artifacts.md").read_text("utf-8")


def test_the_page_is_as_the_catalogue_has_it() -> None:
    assert with_tables(PAGE) == PAGE, "run `python -m hacpo.pipeline.tables_page docs/artifacts.md`"


def test_a_column_says_its_note_and_whether_it_may_be_null() -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| `verdicts/step/agent` |")]
    path, writers, readers, key, columns = (cell.strip() for cell in row.strip("|").split(" | "))
    assert (path, writers, key) == ("`verdicts/step/agent`", "verify", "rollout_id")
    assert readers == "pool, advantage, report"
    assert columns.startswith("rollout_id, reward, verdict (`correct`, `wrong`, ")
    assert columns.endswith("sample, message? (why nobody can tell: `error`, `timeout`)")


def test_what_has_gone_from_the_page_comes_back() -> None:
    rows = [line for line in PAGE.splitlines(keepends=True) if not line.startswith("| `pool/")]
    assert with_tables("".join(rows)) == PAGE


def test_notes_are_of_columns_that_there_are() -> None:
    for table in TABLES.values():
        assert set(table.notes) <= set(table.schema.names), table.name


def test_a_page_without_a_place_for_it_is_refused() -> None:
    with pytest.raises(ValueError, match="the page lacks <!-- to here -->"):
        with_tables(PAGE.replace("<!-- to here -->\n", ""))
