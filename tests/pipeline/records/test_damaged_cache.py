"""Objects of DVC's cache that have become something else are never restored."""

from __future__ import annotations

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
