"""Objects of DVC's cache that have become something else are never restored."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from conftest import Cli, contents

RUN = "pipelines/small"


def flip(path: Path) -> None:
    """Change one bit in the middle of a file, which keeps its size, its permissions and its time."""
    import os

    status = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    path.chmod(status.st_mode)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("lost", ["metrics/verify", "verdicts", "advantages"])
def test_a_damaged_object_counts_as_missing(finished_copy: Path, cli: Cli, lost: str) -> None:
    before = contents(finished_copy)
    for path in Path(".dvc/cache/files").rglob("*"):
        if path.is_file() and not path.name.endswith(".dir"):
            flip(path)
    shutil.rmtree(Path("artifacts/small", lost))
    result = cli("run", RUN, "--jobs", "1")
    assert result.code == 0, result.err
    assert contents(finished_copy) == before
    audit = cli("audit", RUN)
    assert audit.code == 0, audit.out


def test_what_was_restored_damaged_is_mended_as_the_audit_says(finished_copy: Path, cli: Cli) -> None:
    """DVC's own checkout restores a damaged object and calls it current."""
    before = contents(finished_copy)
    table = next(Path("artifacts/small/verdicts/step=0001").rglob("*.parquet"))
    (damaged,) = [
        path
        for path in Path(".dvc/cache/files").rglob("*")
        if path.is_file() and path.read_bytes() == table.read_bytes()
    ]
    flip(damaged)
    shutil.copy2(damaged, table)
    audit = cli("audit", RUN)
    assert audit.code != 0
    assert "remove the files that are named and run once more" in " ".join(audit.out.split())
    table.unlink()
    assert cli("run", RUN, "--jobs", "1").code == 0
    assert contents(finished_copy) == before
    assert cli("audit", RUN).code == 0


def test_the_list_of_a_checkpoint_is_mended(finished_copy: Path, cli: Cli) -> None:
    """Damaged so that it is JSON still, and so that it is none."""
    before = contents(finished_copy)
    lists = [path for path in Path(".dvc/cache/files").rglob("*.dir") if b"model.safetensors" in path.read_bytes()]
    assert len(lists) >= 2
    for number, path in enumerate(lists):
        path.chmod(0o644)
        path.write_bytes(path.read_bytes().replace(b"model.", b"mpdel." if number % 2 else b'"model.'))
    shutil.rmtree("artifacts/small/checkpoints")
    assert cli("run", RUN, "--jobs", "1", "--yes").code == 0
    assert contents(finished_copy) == before
    for path in lists:
        assert not path.exists() or hashlib.md5(path.read_bytes()).hexdigest() == path.parent.name + path.stem, path


def test_a_damaged_entry_of_the_run_cache_is_mended(finished_copy: Path, cli: Cli) -> None:
    entries = {path: path.read_bytes() for path in Path(".dvc/cache/runs").rglob("*") if path.is_file()}
    for path, content in entries.items():
        path.write_bytes(content.replace(b"artifacts/", b"artifabts/"))
    for path in Path("artifacts/small").iterdir():
        if path.name != ".locks":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = contents(finished_copy)
    assert cli("run", RUN, "--jobs", "1", "--yes").code == 0
    assert before.keys() < contents(finished_copy).keys()
    for path, content in entries.items():
        if b"hacpo report" not in content:  # whose entry has another key where stages have run again, in other seconds
            assert path.read_bytes() == content, path
    assert not Path("artifabts").exists()
