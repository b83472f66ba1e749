"""Text of a stranger's: nested without end, in another encoding, behind a pipe. One line, whatever it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Cli, make_project
from hacpo.artifacts.text_files import YamlError, load_json, parse_json, parse_yaml, read_text

LAUGHS = "\n".join(
    [
        "a0: &a0 {x: 1, y: 2}",
        *(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 10)),
    ]
)
"""9**9 times two values: 775 million, of 300 bytes."""

MERGES = LAUGHS.replace("[", "{<<: [").replace("]", "]}")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose models nobody asks for."""
    root = make_project(tmp_path / "project", tmp_path)
    monkeypatch.chdir(root)
    return root


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"agents: " + b"[" * 5000, "params.yaml:1: not valid YAML: nested more than 100 levels deep"),
        (b"{" * 5000, "params.yaml:1: not valid YAML: nested more than 100 levels deep"),
        (b"- " * 5000, "params.yaml:1: not valid YAML: nested more than 100 levels deep"),
        (b"? - " * 5000, "params.yaml:1: not valid YAML: nested more than 100 levels deep"),
        (
            b"\n".join(b" " * depth + b"a:" for depth in range(3000)),
            "params.yaml:100: not valid YAML: nested more than 100 levels deep",
        ),
        (b"- " * 5000, "nested more than 100 levels deep"),
        (LAUGHS.encode(), "params.yaml:6: not valid YAML: its aliases stand for more than 100000 values"),
        (MERGES.encode(), "its aliases stand for more than 100000 values"),
        (b"agents: &all [*all]", "an alias stands for what it is a part of"),
        (b"seed: " + b"9" * 5000, "params.yaml: not valid YAML: Exceeds the limit"),
        *[
            (name + b": 0x" + b"f" * 6000, "params.yaml:1: not valid YAML: a number of more than 1023 bits")
            for name in (b"steps", b"learning_rate", b"- recipe")
        ],
        (b"steps: 0o" + b"7" * 20_000, "params.yaml:1: not valid YAML: a number of more than 1023 bits"),
        (rb'extends: "a\0b"', "params.yaml:1: not valid YAML: a text with a null character"),
        (rb'"\0": 1', "params.yaml:1: not valid YAML: a text with a null character"),
        (rb'extends: "\ud800"', "params.yaml:1: not valid YAML: a text with half a character"),
        (b"seed: 2024-99-99", "params.yaml: not valid YAML: month must be in 1..12"),
        ("seed: 1\nsteps: 2 # né".encode("latin-1"), "params.yaml:2: not valid YAML: no UTF-8 text"),
        ("seed: 1".encode("utf-16"), "params.yaml:1: not valid YAML: no UTF-8 text"),
        (b"seed: \0", "params.yaml: not valid YAML: unacceptable character #x0000"),
        (b"seed: !!python/object/apply:os.system [id]", "could not determine a constructor"),
    ],
)
def test_settings_that_are_no_settings_are_one_line(bare: Path, cli: Cli, content: bytes, says: str) -> None:
    (bare / "pipelines/small/params.yaml").write_bytes(content)
    for command in ("status", "plan"):
        refused = cli(command, "pipelines/small")
        assert refused.code == 2
        assert says in refused.error
    assert not (bare / "artifacts").exists()


def test_the_other_places_where_yaml_is_read(bare: Path, cli: Cli) -> None:
    deep = "[" * 5000
    assert "--set" in cli("prepare", "pipelines/small", "--out", "x", "--set", f"seed={deep}").error
    (bare / "rates.yaml").write_text(deep)
    assert (
        "rates.yaml:1: not valid YAML: nested" in cli("estimate", "pipelines/small", "--throughput", "rates.yaml").error
    )


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (as_fifo, "not a regular file"),
        (as_folder, "Is a directory"),
        (as_loop, "Too many levels of symbolic links"),
        (Path.unlink, "No such file or directory"),
    ],
)
def test_a_path_that_is_no_file_is_not_waited_for(tmp_path: Path, spoil: Callable[[Path], None], why: str) -> None:
    path = tmp_path / "settings.json"
    path.write_text("{}")
    assert load_json(path) == {}
    spoil(path)
    with pytest.raises(OSError, match=why):
        read_text(path)


def test_what_is_within_the_bounds_is_read() -> None:
    assert parse_yaml("a: &x {b: 1}\nc: {<<: *x, d: 2}\ne: [*x, *x]") == {
        "a": {"b": 1},
        "c": {"b": 1, "d": 2},
        "e": [{"b": 1}, {"b": 1}],
    }
    # 100 levels: the mapping itself and 98 lists, with a number in the last.
    assert parse_yaml("a: " + "[" * 98 + "1" + "]" * 98)
    with pytest.raises(YamlError) as refused:
        parse_yaml("\n\na: " + "[" * 99 + "1" + "]" * 99)
    assert parse_yaml(hex(2**1023 - 1)) == 2**1023 - 1
    assert refused.value.line == 3
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)
