"""What a disk or the system refuses is one line with exit code 8, whoever met it, and costs nothing that was there."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Cli, contents, environment
from hacpo.artifacts.storage import made_plain, refusal, refused
from hacpo.artifacts.weights import ADAPTER_BASE, base_of
from hacpo.errors import ArtifactError, RewardError, StorageError
from hacpo.pipeline.locking.leases import Holder, lease
from hacpo.pipeline.records.bookkeeping import Books
from hacpo.settings.model_source import STARTED_FROM, read_started_from
from soak import shim
from soak.frame import SkippedError

RUN = "pipelines/small"
STEP = ["--step", "1"]
ADA = [*STEP, "--agent", "ada"]


def full() -> Exception:
    return OSError(errno.ENOSPC, "No space left on device", "there")


def of_sqlite() -> Exception:
    try:
        sqlite3.connect("/dev/null/none")
    except sqlite3.Error as error:
        return error
    raise AssertionError("a database below a device")


def taken_for_damage() -> Exception:
    try:
        try:
            raise OSError(errno.EMFILE, "Too many open files", "weights")
        except OSError as error:
            raise ArtifactError(f"damaged: {error}", where="table", remedy="make it again") from None
    except ArtifactError as error:
        return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (full(), "no space left on device"),
        (Exception("No space left on device (os error 28)"), "no space left on device"),  # tokenizers
        (of_sqlite(), "unable to open database file"),
        (taken_for_damage(), "too many open files"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "there"), "file name too long"),
        (FileNotFoundError(errno.ENOENT, "No such file", "there"), None),
        (ValueError("line 28"), None),
    ],
)
def test_what_was_refused_is_known_whoever_met_it(error: Exception, reason: str | None) -> None:
    found = refusal(error)
    assert (None if found is None else found.reason) == reason


def test_an_error_that_the_machine_caused_says_so_and_another_stays_as_it_is() -> None:
    plain = made_plain(taken_for_damage())
    assert str(plain) == (
        "weights: the system refuses it: too many open files. "
        "Allow more open files (`ulimit -n`), then repeat the command"
    )
    assert plain is not None
    assert plain.exit_code == 8
    mistake = RewardError("too many")
    assert made_plain(mistake) is mistake
    assert made_plain(ValueError("a fault of ours")) is None
    assert "there: cannot be written: disk quota exceeded. Nothing was changed; make room, then" in str(
        refused(Path("there"), "disk quota exceeded")
    )


@pytest.mark.parametrize(("reader", "name"), [(base_of, ADAPTER_BASE), (read_started_from, STARTED_FROM)])
def test_a_file_that_could_not_be_opened_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Callable[[Path], object], name: str
) -> None:
    (tmp_path / name).write_text('{"folder": "a", "policy": "b", "hub": "c/d", "commit": 5}')
    real = os.open

    def no_more(path: str, flags: int, *rest: int) -> int:
        if Path(path).name == name:
            raise OSError(errno.EMFILE, "Too many open files", path)
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", no_more)
    with pytest.raises(ArtifactError) as refusing:
        reader(tmp_path)
    plain = made_plain(refusing.value)
    assert plain is not None
    assert "too many open files" in str(plain)


@pytest.mark.parametrize("command", [["verify", RUN, *ADA], ["run", RUN, "--jobs", "1"], ["audit", RUN]])
def test_no_more_open_files_is_one_line(finished_copy: Path, cli: Cli, command: list[str]) -> None:
    before = contents(finished_copy)
    assert cli(*command).code == 0  # everything is imported
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, hard))
    try:
        result = cli(*command)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(last)
    assert result.code == 8
    assert "too many open files. Allow more open files (`ulimit -n`)" in result.error
    assert contents(finished_copy) == before


# --- faults at one call, by the library of `make soak` ---------------------------------------------------------------


@pytest.fixture
def failing(finished_copy: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command of which one call fails."""
    try:
        library = shim.library()
    except SkippedError as reason:
        pytest.skip(str(reason))

    def run(fault: shim.Fault, *command: str) -> subprocess.CompletedProcess[str]:
        steering = shim.environment(finished_copy, names="ada,bo", fault=fault, spent=tmp_path / "spent")
        done = subprocess.run(
            [sys.executable, "-m", *command],
            capture_output=True,
            text=True,
            env={**environment(), **steering, "LD_PRELOAD": str(library)},
            check=False,
        )
        assert (tmp_path / "spent").exists(), "the call was never made"
        return done

    return run


@pytest.mark.parametrize(
    ("site", "number", "command", "says"),
    [
        (
            "write artifacts/small/metrics/verify/step=#/.A.json.tmp-#",
            errno.EIO,
            ["stages.verify", RUN, *ADA],
            "small/metrics/verify/step=0001/ada.json: cannot be written: input/output error. Nothing was changed",
        ),
        (
            "open-new artifacts/small/verdicts/step=#/.agent=A.tmp-#/part-#.parquet",
            errno.EMFILE,
            ["stages.verify", RUN, *ADA],
            "verdicts/step=0001/agent=ada: cannot be written: too many open files",
        ),
        (
            "open-read artifacts/small/verdicts/step=#/agent=A/part-#.parquet",
            errno.EIO,
            ["stages.advantage", RUN, *STEP],
            "the system refuses it: input/output error. Look after the disk",
        ),
        (  # safetensors says of every file that the system does not open that there is none
            "open-read artifacts/small/checkpoints/step=#/agent=A/trainer/optimizer.safetensors",
            errno.EMFILE,
            ["stages.update", RUN, "--step", "2", "--agent", "ada"],
            "the system refuses it: too many open files. Allow more open files",
        ),
        (
            "open-read artifacts/small/checkpoints/step=#/.agent=A.tmp-#/model.safetensors",
            errno.EMFILE,
            ["stages.warmup", RUN, "--agent", "ada"],
            "the system refuses it: too many open files. Allow more open files",
        ),
        (
            "rename artifacts/small/capability/step=#",
            errno.ENOSPC,
            ["stages.advantage", RUN, *STEP],
            "small/capability/step=0001: cannot be written: no space left on device. Nothing was changed",
        ),
    ],
)
def test_a_call_that_fails_is_one_line_and_what_was_there_stays(
    finished_copy: Path,
    failing: Callable[..., subprocess.CompletedProcess[str]],
    site: str,
    number: int,
    command: list[str],
    says: str,
) -> None:
    """The last one fails when the folder that is to be replaced has just been renamed aside."""
    before = contents(finished_copy)
    operation, path = site.split(" ")
    done = failing(shim.Fault(shim.Site(operation, path), number), *command)
    assert done.returncode == 8, done.stderr
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert contents(finished_copy) == before
    assert not list((finished_copy / "artifacts").rglob(".*.tmp-*"))


def test_a_lock_of_dvc_that_cannot_be_opened_is_not_waited_for(
    finished_copy: Path, failing: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    site = shim.Site("open-write", ".dvc/tmp/lock")
    done = failing(shim.Fault(site, errno.EROFS, lasting=True), "hacpo.commands.run", RUN, "--jobs", "1")
    assert done.returncode == 8, done.stderr
    assert "read-only file system. " in done.stderr  # and not, after ten minutes, that another command holds it
    assert len([line for line in done.stderr.splitlines() if "error: " in line]) == 1


def test_a_database_of_dvc_that_cannot_be_written_is_not_tried_for_ever(finished_copy: Path) -> None:
    def too_long(*_: object) -> None:
        raise TimeoutError("it goes on for ever")

    books = Books(finished_copy)
    links = books.repo.state.links
    links._sql("PRAGMA query_only = 1")  # as a disk does: every transaction that would write fails as it begins
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(20)
    try:
        with (
            pytest.raises(StorageError, match="a database of DVC: cannot be written: read-only file system"),
            books.open(),
        ):
            books.repo.state.set_link(str(finished_copy / "params.yaml"), "1", "1")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        links._sql("PRAGMA query_only = 0")


def test_a_disk_that_fills_while_dvc_copies_is_named(finished_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DVC itself says that there is no possible way to link, and not why."""

    def no_room(*_: object, **__: object) -> None:
        raise full()

    books = Books(finished_copy)
    stage = books.stages(finished_copy / RUN / "dvc.yaml")[0]
    monkeypatch.setattr("dvc_objects.fs.local.copyfile", no_room)
    monkeypatch.setattr("dvc_objects.fs.system.reflink", no_room)
    with pytest.raises(StorageError, match="there: cannot be written: no space left on device. Nothing was changed"):
        books.finish(stage)


def test_a_lease_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hacpo.pipeline.locking.leases.json.dump", refuse)
    with pytest.raises(OSError, match="No space"), lease(tmp_path, "driver", "x", wait_seconds=0, busy="{}"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_half_a_lease_where_there_are_no_links_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []

    def once(path: Path, holder: Holder) -> None:
        written.append(path)
        path.write_text('{"command"')
        if len(written) == 2:  # the temporary file first, then the lease itself
            raise OSError(errno.ENOSPC, "No space left on device")

    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("hacpo.pipeline.locking.leases._write_new", once)
    monkeypatch.setattr("hacpo.pipeline.locking.leases.os.link", no_links)
    with pytest.raises(OSError, match="No space"), lease(tmp_path, "driver", "x", wait_seconds=0, busy="{}"):
        pass
    assert len(written) == 2
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_ours_keeps_its_kind() -> None:
    """A file without read permission may be the user's mistake: the reader's own words stay."""
    with pytest.raises(ArtifactError) as found:
        try:
            raise PermissionError(errno.EACCES, "Permission denied", "table")
        except OSError:
            raise ArtifactError("cannot be read", where="table") from None
    assert made_plain(found.value) is found.value


@pytest.mark.parametrize("lost", [True, False])
def test_a_disk_that_fails_where_dvc_puts_an_output_back_is_named(
    finished_copy: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Of several outputs DVC says at the end that no kind of link is possible, and forgets why."""
    import dvc_data.hashfile.checkout as dvc

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "artifacts/small/report/index.html")

    report = Path("artifacts/small/report/index.html")
    if lost:
        report.unlink()
    else:
        Path("artifacts/small/report/curves.csv").write_text("something else\n")
    monkeypatch.setattr(dvc, "transfer", fails)
    result = cli("run", RUN, "--jobs", "1")
    assert result.code == 8, result.err
    assert "input/output error" in result.error
    assert "link types" not in result.err
    monkeypatch.undo()
