"""The journal of file operations that `python -m tests.soak powercut` cuts: it finds what is not flushed."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import environment
from soak.disk import Disk, Record, Way, read_journal, violations
from soak.frame import SkippedError
from soak.powercut import build, is_output, is_promised, variables

WRITING = """
import shutil, sys
from pathlib import Path
from hacpo.artifacts import storage
for number in range(2):
    with storage.atomic(Path("artifacts/run/rollouts/agent=ada")) as scratch:
        (scratch / "inner").mkdir(parents=True)
        for name in "abc":
            (scratch / "inner" / name).write_text(f"{name} {number}" * 1000)
    storage.write_json(Path("artifacts/run/settings.json"), number)
"""

IN_PLACE = """
import os
from pathlib import Path
from hacpo.artifacts import storage
run = Path("artifacts/run")
storage.write_json(run / "settings.json", 1)
storage.write_json(run / "pruned.json", 1)
(run / ".locks").mkdir()
(run / ".locks" / "driver.lock").write_text("12")
(run / "schedule.parquet").write_text("begun under its own name")
(run / "settings.json").write_text("written over")
os.link(run / "pruned.json", run / ".pruned.json.tmp-12")
(run / ".pruned.json.tmp-12").write_text("written over by another name")
(run / "rollouts" / "agent=ada").mkdir(parents=True)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build(tmp_path_factory.mktemp("shim"))
    except SkippedError as reason:
        pytest.skip(str(reason))


def journal(shim: Path, folder: Path, *, fsync: bool, writing: str = WRITING) -> tuple[Disk, list[Record], Path]:
    """What some writes do below an empty folder."""
    root = folder / "project"
    root.mkdir()
    before = Disk.of(root)
    command = [sys.executable, "-c", writing]
    variable = variables(shim, root, folder / "journal", fsync)
    subprocess.run(command, cwd=root, check=True, env=environment() | variable)
    return before, read_journal(folder / "journal", root), root


def found(disk: Disk, records: list[Record]) -> set[str]:
    """Names that stand for something else than what was put there, after some cut."""
    problems = violations(disk, records, random.Random(1), is_promised, is_output)
    return {problem.partition(" is not whole")[0] for problem in problems}


def test_nothing_is_half_after_any_cut(shim: Path, tmp_path: Path) -> None:
    disk, records, _ = journal(shim, tmp_path, fsync=True)
    assert found(disk, records) == set()


def test_without_flushing_names_stand_for_empty_files(shim: Path, tmp_path: Path) -> None:
    disk, records, _ = journal(shim, tmp_path, fsync=False)
    assert found(disk, records) == {"artifacts/run/rollouts/agent=ada", "artifacts/run/settings.json"}


def test_what_is_written_under_its_own_name_is_found(shim: Path, tmp_path: Path) -> None:
    disk, records, _ = journal(shim, tmp_path, fsync=True, writing=IN_PLACE)
    wrong = ("pruned.json", "rollouts/agent=ada", "schedule.parquet", "settings.json")
    assert found(disk, records) == {f"artifacts/run/{name}" for name in wrong}


def test_the_journal_has_everything(shim: Path, tmp_path: Path) -> None:
    disk, records, root = journal(shim, tmp_path, fsync=True)
    for record in records:
        disk.apply(record)
    disk.write(tmp_path / "copy", Way.NAMES, random.Random(1))
    there, copied = (
        {str(path.relative_to(base)): path.read_bytes() for path in base.rglob("*") if path.is_file()}
        for base in (root, tmp_path / "copy")
    )
    assert there == copied
    assert len(there) == 4


def test_a_disk_is_made_with_its_hard_links(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "one").write_text("content")
    (tmp_path / "here" / "another").hardlink_to(tmp_path / "here" / "one")
    (tmp_path / "here" / "alike").write_text("content")
    Disk.of(tmp_path / "here").write(tmp_path / "there", Way.LEAST, random.Random(0))
    links = {path.name: path.stat().st_nlink for path in (tmp_path / "there").iterdir()}
    assert links == {"one": 2, "another": 2, "alike": 1}


def test_a_disk_after_a_cut_by_hand() -> None:
    """A file is written, flushed, and written again; its folder is flushed before it is renamed."""
    disk = Disk()
    for kind, path, second, content in (
        ("C", "new", "", b""),
        ("S", "new", "", b"one"),
        ("W", "new", "", b"two"),
    ):
        disk.apply(Record(kind, 7, path, second, content))
    disk.root.flush()
    disk.apply(Record("R", 0, "new", "name", b""))
    dice = random.Random(0)
    assert disk.after(Way.LEAST, dice) == {"new": b"one"}
    assert disk.after(Way.NAMES, dice) == {"name": b"one"}
    possible = {tuple(sorted(disk.after(Way.SOME, dice).items())) for _ in range(500)}
    contents = (b"one", b"two", bytes(3))
    names = ((), ("new",), ("name",), ("name", "new"))  # the old name gone or not, the new one there or not
    assert possible == {tuple((name, content) for name in held) for held in names for content in contents}
