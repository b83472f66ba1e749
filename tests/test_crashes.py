"""What nobody foresaw ends in one line and a file; what a line says never steers a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Cli
from hacpo.errors import DataError
from hacpo.pipeline.project import Pipeline

RUN = "pipelines/small"


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in our own code that meets a password."""
    monkeypatch.setenv("SOME_TOKEN", "hunter2hunter2")

    def broken(*_: object) -> None:
        raise RuntimeError("no way to https://me:hunter2@example.com with hunter2hunter2")

    monkeypatch.setattr(Pipeline, "open", broken)


def test_an_unforeseen_error_is_one_line_and_a_file(cli: Cli, project: Path, fault: None) -> None:
    Path("artifacts").mkdir(exist_ok=True)
    result = cli("status", RUN)
    assert result.code == 70
    assert "an unforeseen error, RuntimeError: no way to" in result.error
    (path,) = Path("artifacts/.crashes").iterdir()
    assert str(path) in result.error
    written = path.read_text()
    for expected in ("Traceback", "in broken", "command: hacpo status pipelines/small", "torch 2.", "group_size: 4"):
        assert expected in written
    assert "hunter2" not in written + result.err


def test_without_a_project_the_file_is_in_the_temporary_folder(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cli("status", RUN).code == 70
    assert [path.name.startswith("hacpo-crash-") for path in tmp_path.iterdir()] == [True]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    assert "could not be written down" in cli("status", RUN).error


def test_a_line_steers_no_terminal(cli: Cli, finished_copy: Path) -> None:
    """A file's text in a message: escape sequences, a line break, an override of the writing direction."""
    line = str(DataError("odd", where="a\x1b[2J\x07\nb", found="\u202egnp.exe\x9b31m"))
    assert line == r"a\x1b[2J\x07 b: odd (found \u202egnp.exe\x9b31m)"
    result = cli("show", RUN, "--step", 1, "--problem", "\x1b[2Jx")
    assert result.code != 0
    assert "\x1b" not in result.err
    assert "\x1b" not in cli("\x1b[31mrun", RUN).err
