"""What nobody foresaw ends in one line and a file; what a line says never steers a terminal."""

from __future__ import annotations

import json
import os
import resource
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
    assert path.stat().st_mode & 0o077 == 0


def test_a_panic_in_rust_is_one_line_and_a_file(cli: Cli, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyo3 raises it as no Exception: https://pyo3.rs, "Error handling"."""
    panic = type("PanicException", (BaseException,), {})

    def broken(*_: object) -> None:
        raise panic("PyObject pointer is null")

    monkeypatch.setattr(Pipeline, "open", broken)
    result = cli("status", RUN)
    assert result.code == 70
    assert "an unforeseen error, PanicException: PyObject pointer is null" in result.error


def test_words_of_the_settings_are_no_secrets(
    cli: Cli, project: Path, monkeypatch: pytest.MonkeyPatch, fault: None
) -> None:
    """`TOKENIZERS_PARALLELISM=false` is in the environment of every command."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("OPENAI_APIKEY", "hunter2")  # the beginning of another
    params = project / RUN / "params.yaml"
    params.write_text(params.read_text() + "\nevaluation: {prompt: false, key: hunter2hunter2}\n")
    Path("artifacts").mkdir(exist_ok=True)
    assert cli("status", RUN).code == 70
    (path,) = Path("artifacts/.crashes").iterdir()
    assert "{prompt: false, key: <SOME_TOKEN>}" in path.read_text()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DB_PASS", "hunter2"),
        ("DB_PWD", "hunter2"),
        ("AUTH", "Bearer hunter2"),
        ("AWS_ACCESS_KEY_ID", "AKIAhunter2"),
        ("MY_SECRET", 'it\'s "hunter2"'),
        ("MY_SECRET", "first\nhunter2"),
        ("MY_SECRET", "back\\slash hunter2 \x1b"),
    ],
)
def test_secrets_are_found_however_they_are_spelled(
    cli: Cli, project: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)

    def broken(*_: object) -> None:
        raise RuntimeError(f"{value} or {value!r} or {[value, chr(34), chr(39)]} or {json.dumps(value)}")

    monkeypatch.setattr(Pipeline, "open", broken)
    Path("artifacts").mkdir(exist_ok=True)
    result = cli("status", RUN)
    (path,) = Path("artifacts/.crashes").iterdir()
    assert "hunter2" not in path.read_text() + result.err
    assert f"<{name}>" in path.read_text()


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://u:hun@ter2@h/x", "http://***@h/x"),
        ("http://u:hun/ter2@h/x", "http://***@h/x"),
        ("http://hunter2@h", "http://***@h"),
        ("hf://datasets/a/b@main/x", "hf://datasets/a/b@main/x"),
        ("http://h:80/x and a@b", "http://h:80/x and a@b"),
    ],
)
def test_users_of_addresses_are_left_out(
    cli: Cli, project: Path, monkeypatch: pytest.MonkeyPatch, address: str, shown: str
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError(f"no way to {address}")

    monkeypatch.setattr(Pipeline, "open", broken)
    Path("artifacts").mkdir(exist_ok=True)
    assert f"RuntimeError: no way to {shown}. What" in cli("status", RUN).error
    (path,) = Path("artifacts/.crashes").iterdir()
    assert f"no way to {shown}\n" in path.read_text()


def test_a_link_in_a_shared_folder_is_not_followed(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("time.strftime", lambda _: "20260101-000000")
    mine = tmp_path / "mine"
    mine.write_text("kept")
    (tmp_path / f"hacpo-crash-20260101-000000-{os.getpid()}.txt").symlink_to(mine)
    assert "could not be written down" in cli("status", RUN).error
    assert mine.read_text() == "kept"


def test_a_fault_that_hinders_the_record_too_is_one_line(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", None)  # not yet looked for
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def broken(*_: object) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        raise RuntimeError("no way on")

    monkeypatch.setattr(Pipeline, "open", broken)
    try:
        result = cli("status", RUN)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert result.code == 70
    assert "RuntimeError: no way on, and it could not be written down" in result.error


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
