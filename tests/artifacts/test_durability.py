"""What is on the disk before a name counts: files, their folders, the rename, the folder that holds the name."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from conftest import PARAMS, Cli
from hacpo.artifacts import durability, storage
from hacpo.errors import StorageError

RUN = "pipelines/small"
UNFLUSHED = re.compile(r"\.tmp|\.lease\.|/rwlock$|/\.locks/[^/]*$|/repo/[0-9a-f]{32}/hacpo/")
"""Names that mean nothing after a power cut: of unfinished files, of processes, and of notes on finished steps, which
are not read unless they are whole (`hacpo.pipeline.records.seen`)."""


def signature(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, 0 if path.is_dir() else status.st_size


class Recorder:
    """Sees every fsync and rename of this process, and whether what got a name was on the disk as it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fsyncs = 0
        self.named: list[str] = []
        self.problems: list[str] = []
        self.flushed: set[tuple[int, int, int]] = set()
        self._pending: dict[Path, str] = {}
        """Folder -> a name in it that a power cut could take away."""
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self._renaming(getattr(os, name)))
        monkeypatch.setattr(os, "fsync", self._fsyncing(os.fsync))

    def _fsyncing(self, fsync: Callable[[int], None]) -> Callable[[int], None]:
        def recorded(opened: int) -> None:
            fsync(opened)
            self.fsyncs += 1
            path = Path(f"/proc/self/fd/{opened}").resolve()
            self.flushed.add(signature(path))
            self._pending.pop(path, None)

        return recorded

    def _renaming(self, rename: Callable[..., None]) -> Callable[..., None]:
        def recorded(source: str, target: str, **options: int) -> None:
            path = Path(target).absolute()
            if not UNFLUSHED.search(str(path)):
                self._look(Path(source), path)
            rename(source, target, **options)

        return recorded

    def _look(self, source: Path, path: Path) -> None:
        inside = [source, *source.rglob("*")] if source.is_dir() else [source]
        for one in inside:
            mode = one.lstat().st_mode
            if (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) and signature(one) not in self.flushed:
                self.problems.append(f"{path}: {one.name} was not flushed")
        if path.name == "dvc.lock":
            self.problems += [f"{path} before {name}" for name in self._unflushed()]
        self.named.append(str(path))
        if "/.dvc/cache/runs/" not in str(path):  # an entry that is not there is only not found
            self._pending[path.parent.resolve()] = str(path)

    def _unflushed(self) -> list[str]:
        """Names that a power cut could take away; one that has been removed again is nothing to lose."""
        return [name for name in self._pending.values() if os.path.lexists(name)]

    def check(self, *kinds: str) -> None:
        """All was on the disk, and something of each kind was named."""
        assert not self.problems
        assert not self._unflushed()
        for kind in kinds:
            assert any(re.search(kind, name) for name in self.named), (kind, self.named)


@pytest.fixture(autouse=True)
def _flushing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(durability.SWITCH)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


@pytest.mark.slow
def test_a_run_names_only_what_is_on_the_disk(
    project: Path, cli: Cli, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    MemoryFileSystem().pipe_file("/of the user", b"1")
    result = cli("run", RUN, "--jobs", "1", "--until", "1")
    assert result.code == 0, result.err
    outputs = ("settings.json", "data", "rollouts", "verdicts", "pool", "advantages", "updates", "checkpoints")
    recorder.check(
        *(f"artifacts/small/{name}" for name in (*outputs, "metrics", ".saved")),
        "small/dvc.yaml",
        "dvc.lock",
        ".dvc/cache/files/md5",
        ".dvc/cache/runs",
    )
    assert list(MemoryFileSystem.store) == ["/of the user"]  # not what DVC would look through again and again
    shutil.rmtree("artifacts/small/verdicts")
    recorder.named.clear()
    result = cli("run", RUN, "--jobs", "1", "--until", "1")
    assert result.code == 0, result.err
    recorder.check("artifacts/small/verdicts/step=0001/agent=ada", "dvc.lock")


@pytest.mark.slow
def test_the_setting_flushes_nothing_and_runs_nothing_again(project: Path, cli: Cli, recorder: Recorder) -> None:
    params = Path(RUN, "params.yaml")
    params.write_text(PARAMS + "disk: {fsync: false}\n")
    assert cli("run", RUN, "--jobs", "1", "--until", "1").code == 0
    assert recorder.fsyncs < 10  # of the DVC files, which are stamped before, and of DVC's own
    made = {path: path.stat().st_mtime_ns for path in Path("artifacts/small").rglob("*.parquet")}
    params.write_text(PARAMS)
    result = cli("run", RUN, "--jobs", "1", "--until", "1")
    assert result.code == 0, result.err
    assert {path: path.stat().st_mtime_ns for path in Path("artifacts/small").rglob("*.parquet")} == made


@pytest.mark.parametrize("way", ["put_file", "link", "reflink", "mv"])
def test_what_dvc_puts_in_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorder: Recorder, way: str
) -> None:
    """Where the filesystem cannot link, nothing is left of the try."""
    from dvc_objects.fs.local import localfs

    from hacpo.pipeline.records.flushing import flushed_copies

    source, target = tmp_path / "table", tmp_path / "cache" / "object"
    source.write_text("content")
    target.parent.mkdir()
    with flushed_copies() as folders:
        with contextlib.suppress(OSError):
            getattr(localfs.fs, way)(str(source), str(target))
        there = [path.name for path in target.parent.iterdir()]
    assert there == ["object"] or (way == "reflink" and not there)
    assert folders == ({target.parent} if there else set())
    durability.flush_names(folders, tmp_path, set())
    recorder.check()
    assert not there or signature(target) in recorder.flushed


def test_the_list_of_a_checkpoint_in_the_cache(finished_copy: Path, cli: Cli, recorder: Recorder) -> None:
    lists = [path for path in Path(".dvc/cache/files/md5").glob("*/*.dir") if ".safetensors" in path.read_text()]
    assert lists
    for path in lists:
        path.unlink()
    result = cli("run", RUN, "--jobs", "1")
    assert result.code == 0, result.err
    recorder.check(*(f"/{path}$" for path in lists))


def test_an_output_in_a_new_folder(tmp_path: Path, recorder: Recorder) -> None:
    folder = tmp_path / "a" / "b" / "table"
    with storage.atomic(folder) as scratch:
        (scratch / "inner").mkdir(parents=True)
        for number in range(5):
            (scratch / "inner" / str(number)).write_text("content")
        (scratch / "link").symlink_to("inner/0")
    recorder.check("a/b/table$")
    # a and b for each other's name, 5 files, inner and table, and b for the name of table: 1 + 1 + 5 + 2 + 1
    assert recorder.fsyncs == 10


def test_saved_responses_do_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hacpo.engines.response_store import remove_saved

    flushed = []
    monkeypatch.setattr(os, "fsync", lambda opened: flushed.append(os.readlink(f"/proc/self/fd/{opened}")))
    saved = tmp_path / ".saved" / "rollouts" / "step=0001"
    for agent in ("ada", "bo"):
        (saved / f"agent={agent}").mkdir(parents=True)
    for agent in ("ada", "bo"):
        remove_saved(saved / f"agent={agent}")
    assert flushed == [str(saved), str(tmp_path)]  # the first that is still there


def test_what_was_there_goes_only_when_the_new_name_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, order = tmp_path / "table", []
    with storage.atomic(folder) as scratch:
        scratch.mkdir()
    fsync, rmtree = os.fsync, shutil.rmtree

    def flushed(opened: int) -> None:
        order.append(os.readlink(f"/proc/self/fd/{opened}"))
        fsync(opened)

    def removed(path: Path, **options: bool) -> None:
        order.append(f"removed {Path(path).name}")
        rmtree(path, **options)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(shutil, "rmtree", removed)
    with storage.atomic(folder) as scratch:
        scratch.mkdir()
    pid = os.getpid()
    assert order == [f"{folder.with_name(f'.table.tmp-{pid}')}", str(tmp_path), f"removed .table.tmp-{pid}-old"]


@pytest.mark.parametrize("failing", ["file", "scratch", "parent"])
def test_a_refused_flush_is_one_line(project: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    for command in (["plan", RUN], ["resolve", RUN]):
        assert cli(*command).code == 0
    fsync = os.fsync

    def refusing(opened: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{opened}"))
        kind = "file" if path.is_file() else "parent" if path.name == "small" else "scratch"
        if kind == failing and (failing != "parent" or Path("artifacts/small/data").exists()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(opened)

    monkeypatch.setattr(os, "fsync", refusing)
    result = cli("prepare", RUN)
    assert result.code == 8
    assert "artifacts/small/data: cannot be written: input/output error" in result.error
    assert not list(Path("artifacts/small").glob("*data*"))


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_filesystem_without_fsync_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def unsupported(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", unsupported)
    storage.write_json(tmp_path / "file.json", 1)
    assert (tmp_path / "file.json").read_text() == "1\n"


def test_a_replaced_file_stays_when_its_name_is_not_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    storage.write_json(path, "old")

    def refusing(opened: int) -> None:
        if os.readlink(f"/proc/self/fd/{opened}") == str(tmp_path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refusing)
    with pytest.raises(StorageError, match="input/output error"):
        storage.write_json(path, "new")
    assert path.read_text() == '"new"\n'  # whole; the old one is gone


def test_the_environment_turns_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    monkeypatch.setenv(durability.SWITCH, "0")
    storage.write_json(tmp_path / "file.json", 1)
    assert recorder.fsyncs == 0
