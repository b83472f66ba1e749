"""What a kill leaves in DVC's own files: `hacpo repair`, and the commands that mend it by themselves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Cli, contents, environment

TEMPORARY = ".3vN0w-_h6XkzJ9qPTbYcQA.tmp"
"""A name as DVC's `tmp_fname` makes them."""


def repro() -> subprocess.CompletedProcess[str]:
    """One stage alone: whatever DVC stumbles over here, it stumbles over in every command."""
    command = [sys.executable, "-m", "dvc", "repro", "--single-item", "pipelines/small/dvc.yaml:resolve"]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)


def forget_settings(root: Path) -> Path:
    """Make DVC ask its run cache for the first stage, `resolve`, and leave there what a kill between mkdir and rename
    does; returns the empty folder."""
    lock = root / "pipelines" / "small" / "dvc.lock"
    lock.unlink()
    entry = next(
        path
        for path in (root / ".dvc" / "cache" / "runs").rglob("*")
        if path.is_file() and "cmd: hacpo resolve" in path.read_text()
    )
    entry.unlink()
    return entry.parent


@pytest.mark.parametrize("way", ["run", "repair and repro"])
def test_an_empty_folder_in_the_run_cache_is_removed(finished_copy: Path, cli: Cli, way: str) -> None:
    expected, folder = contents(finished_copy), forget_settings(finished_copy)
    if way == "run":
        result = cli("run", "pipelines/small", "--jobs", "1")
        assert result.code == 0
        assert "mended what a kill left: removed 1 empty folder of DVC's run cache" in result.err
    else:
        refused = repro()
        assert refused.returncode != 0, "DVC does not need this any more"
        assert "NoneType" in refused.stderr
        assert cli("repair", "pipelines/small").out.splitlines() == [
            "small: mended what a kill left: removed 1 empty folder of DVC's run cache"
        ]
        assert not folder.exists()
        again = repro()
        assert again.returncode == 0, again.stderr
    assert contents(finished_copy) == expected


def test_half_an_entry_of_the_run_cache_is_removed_with_its_folder(finished_copy: Path, cli: Cli) -> None:
    folder = forget_settings(finished_copy)
    (folder / TEMPORARY).write_text("cmd: hac")
    said = cli("repair", "pipelines/small").out
    assert "removed 1 empty folder of DVC's run cache; removed 1 temporary file of DVC" in said
    assert not folder.exists()


def test_an_empty_folder_in_a_shared_cache_is_removed(finished_copy: Path, cli: Cli, tmp_path: Path) -> None:
    """Another project may just be filling it, but not for long: nobody has to come back in an hour."""
    cache, shared = finished_copy / ".dvc" / "cache", tmp_path / "shared cache"
    shutil.move(cache, shared)
    cache.symlink_to(shared)
    folder = forget_settings(finished_copy)
    large = shared / "files" / "md5" / TEMPORARY
    large.write_text("half of what another project is copying")
    lock = finished_copy / "pipelines" / "small" / "steps" / "0001" / "dvc.lock"
    lock.write_bytes(lock.read_bytes() + b"  ")
    said = cli("status", "pipelines/small").out
    assert "left alone what a kill left in" in said
    assert "outside the project: 2 file(s) or folder(s), which `hacpo repair` removes" in said
    assert folder.is_dir()
    assert cli("repair", "pipelines/small").out.splitlines() == [
        "small: mended what a kill left: removed 1 empty folder of DVC's run cache"
    ]
    assert not folder.exists()
    assert large.exists()


def private_files(home: Path) -> dict[Path, bytes]:
    """Somebody's own files, at every depth at which DVC has something; all look cut off to one who takes them for
    DVC's."""
    for name in (
        "notes",
        "a/notes",
        "a/b/notes",
        "aa/notes",
        f"aa/{'b' * 64}/notes",
        "files/md5/aa/notes",
        "runs/a/b/c",
    ):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("")
    (home / "a" / "empty").mkdir()
    return contents(home)


@pytest.mark.parametrize("command", ["status", "repair"])
@pytest.mark.parametrize("way", ["runs", "files", "cache.dir", "artifacts"])
def test_no_file_of_the_user_is_taken_for_a_leftover(
    finished_copy: Path, cli: Cli, tmp_path: Path, command: str, way: str
) -> None:
    """A run's folder that a stranger made: links and DVC's own setting lead to somebody's home."""
    home = tmp_path / "home"
    expected, cache = private_files(home), finished_copy / ".dvc" / "cache"
    if way == "cache.dir":
        (finished_copy / ".dvc" / "config").write_text(f"[core]\n    no_scm = true\n[cache]\n    dir = {home}\n")
    elif way == "artifacts":
        (home / TEMPORARY).write_text("half")
        expected = contents(home)
        rollouts = finished_copy / "artifacts" / "small" / "rollouts"
        shutil.rmtree(rollouts)
        rollouts.symlink_to(home)
    else:
        linked = cache / "runs" if way == "runs" else cache / "files" / "md5"
        shutil.rmtree(linked)
        linked.symlink_to(home)
    lock = finished_copy / "pipelines" / "small" / "dvc.lock"
    lock.write_bytes(lock.read_bytes()[:-1])  # something looks wrong
    cli(command, "pipelines/small")
    there = contents(home)
    assert {path: there.get(path) for path in expected} == expected
    assert (home / "a" / "empty").is_dir()


def test_what_a_stranger_wrote_cannot_steer_the_terminal(finished_copy: Path, cli: Cli) -> None:
    settings = finished_copy / "artifacts" / "small" / "settings.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"\x1b[2J\n[/red]": 1}))
    (finished_copy / "artifacts" / "small" / "[bold]").mkdir()
    (finished_copy / "artifacts" / "small" / "[bold]" / "large").write_bytes(bytes(1 << 24))
    result = cli("status", "pipelines/small")
    assert result.code == 0, result.err
    assert "\x1b[2J" not in result.out
    assert r"\x1b[2J\n[/red]" in result.out
    assert "[bold] 16.0" in result.out


def test_pipes_are_not_waited_for(finished_copy: Path, cli: Cli) -> None:
    entry = next((finished_copy / ".dvc" / "cache" / "runs").glob("*/*"))
    os.mkfifo(entry / ("c" * 64))
    os.mkfifo(finished_copy / "artifacts" / "small" / TEMPORARY)
    result = cli("repair", "pipelines/small")
    assert result.code == 0, result.err
    os.mkfifo(finished_copy / "pipelines" / "small" / "steps" / "dvc.lock")
    result = cli("status", "pipelines/small")
    assert "small: what a kill left is not mended: " in result.out
    assert "not a regular file" in result.out
    assert cli("repair", "pipelines/small").error.endswith("steps/dvc.lock: cannot be read: not a regular file")


@pytest.mark.parametrize("command", ["run", "repair"])
def test_a_lock_with_conflicts_of_a_merge_is_no_leftover(finished_copy: Path, cli: Cli, command: str) -> None:
    lock = finished_copy / "pipelines" / "small" / "steps" / "0001" / "dvc.lock"
    text = lock.read_text()
    merged = text.replace("stages:\n", "<<<<<<< HEAD\nstages:\n=======\nstages: {}\n>>>>>>> other\n", 1)
    lock.write_text(merged)
    result = cli(command, "pipelines/small")
    assert result.code == 4
    assert "steps/0001/dvc.lock: holds conflicts of a merge" in result.error
    assert lock.read_text() == merged


@pytest.mark.parametrize("cut", ["", '{"read": {"/a": [', '{"write": {"/a": 1}}'])
def test_dvc_repro_works_again_after_repair_of_its_rwlock(finished_copy: Path, cli: Cli, cut: str) -> None:
    rwlock = finished_copy / ".dvc" / "tmp" / "rwlock"
    rwlock.write_text(cut)
    assert repro().returncode != 0
    said = cli("repair", "pipelines/small").out
    assert said.splitlines() == ["small: mended what a kill left: .dvc/tmp/rwlock begun anew"]
    again = repro()
    assert again.returncode == 0, again.stderr
    assert "nothing to mend" in cli("repair", "pipelines/small").out


@pytest.mark.parametrize("command", ["status", "audit", "plan", "repair"])
def test_commands_say_what_they_mended_and_leave_nothing(finished_copy: Path, cli: Cli, command: str) -> None:
    """All that a kill leaves at once; DVC works again afterwards, and the files are the same."""
    expected = contents(finished_copy)
    lock = finished_copy / "pipelines" / "small" / "steps" / "0002" / "dvc.lock"
    lock.write_text("")
    (finished_copy / ".dvc" / "tmp" / "rwlock").write_text("")
    beside = [
        finished_copy / "artifacts" / "small" / "rollouts" / "step=0001" / "agent=ada" / TEMPORARY,
        finished_copy / "artifacts" / "small" / f"schedule.parquet{TEMPORARY}",
        finished_copy / ".dvc" / "cache" / "files" / "md5" / TEMPORARY,
        finished_copy / "pipelines" / "small" / ".dvc.lock.tmp-12",  # DVC wrote that lock since
        finished_copy / "pipelines" / "small" / "steps" / "0001" / ".dvc.lock.tmp-345",
    ]
    small = finished_copy / "artifacts" / "small"
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    # Set aside by a process that was killed before it could remove it; what was there came back from DVC's cache.
    aside = small / "rollouts" / "step=0001" / f".agent=ada.tmp-{ended.pid}-removed"
    beside += [aside / "part-00000.parquet", small / f".report.tmp-{ended.pid}" / "index.html"]
    mine = [finished_copy / "pipelines" / "small" / ".notes.tmp-12"]
    if command != "audit":  # which names whatever no run has
        mine += [small / folder / f".agent=ada.tmp-{ended.pid}" for folder in ("notes", "_rollouts")]
    for path in (*mine, *beside):
        path.parent.mkdir(exist_ok=True)
        path.write_text("half")
    result = cli(command, "pipelines/small")
    assert result.code == 0, result.err
    said = [line for line in (result.out + result.err).splitlines() if "mended" in line]
    assert said == [
        f"small: mended what a kill left: removed {lock.relative_to(finished_copy)}, which it had cut off; "
        "its stages are restored or run again; .dvc/tmp/rwlock begun anew; removed 7 temporary files of DVC or hacpo"
    ]
    assert all(path.exists() for path in mine)
    for folder in ("notes", "_rollouts"):
        shutil.rmtree(small / folder, ignore_errors=True)
    mine[0].unlink()
    assert not [path for path in (*beside, aside) if path.exists()]
    assert contents(finished_copy) == expected
    assert "mended" not in cli(command, "pipelines/small").out
    again = repro()
    assert again.returncode == 0, again.stderr


def test_what_another_process_writes_is_left_alone(finished_copy: Path, cli: Cli) -> None:
    """A DVC command at work holds DVC's lock: its temporary files are no leftovers."""
    from dvc.repo import Repo

    path = finished_copy / "artifacts" / "small" / "rollouts" / "step=0001" / "agent=ada" / TEMPORARY
    path.write_text("half")
    with Repo(str(finished_copy)).lock:
        assert "mended" not in cli("status", "pipelines/small").out
    assert path.exists()


def test_entries_of_zombies_and_of_later_processes_do_not_block(finished_copy: Path, cli: Cli) -> None:
    """DVC asks only whether a process of that number exists, which after a restart of a container it often does."""
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    rwlock = finished_copy / ".dvc" / "tmp" / "rwlock"
    written = str(finished_copy / "artifacts" / "small" / "settings.json")
    other = {"pid": os.getpid(), "cmd": "/somewhere/dvc repro before the restart"}
    for entry in ({"pid": zombie.pid, "cmd": "/somewhere/dvc repro"}, other):
        rwlock.write_text(json.dumps({"write": {written: entry}}))
        os.utime(rwlock, (1e9, 1e9))  # long before this process began
        result = cli("run", "pipelines/small", "--jobs", "1")
        assert result.code == 0, result.err
    zombie.wait()


def test_what_dvc_writes_within_a_run_is_put_in_place_whole(finished_copy: Path) -> None:
    """DVC would empty its list of readers and writers and fill it again, twice for every question about a stage."""
    import dvc.rwlock

    from hacpo.pipeline.records.bookkeeping import Books

    books, path = Books(finished_copy), finished_copy / ".dvc" / "tmp" / "rwlock"
    with books.open(), dvc.rwlock.rwlock(str(path.parent), books.repo.fs, "test", ["/read"], ["/written"], False):
        entered, handle = path.read_text(), path.open()
    with handle:
        assert handle.read() == entered  # the file that was there is untouched: another has its name
    assert "/written" in entered
    assert "/written" not in path.read_text()


@pytest.mark.parametrize("content", [b"", bytes(200)])
def test_what_a_power_cut_leaves_of_files_that_dvc_did_not_flush(finished_copy: Path, cli: Cli, content: bytes) -> None:
    """Empty or zeros, under their final names: a copy of a table in the cache, an entry of the run cache, a lock."""
    expected, cache = contents(finished_copy), Path(".dvc/cache")
    table = next(Path("artifacts/small/verdicts/step=0001").rglob("*.parquet"))
    (copy,) = [
        path for path in (cache / "files").rglob("*") if path.is_file() and path.read_bytes() == table.read_bytes()
    ]
    entry = next(path for path in (cache / "runs").rglob("*") if path.is_file() and "hacpo pool" in path.read_text())
    for path in (copy, entry, Path("pipelines/small/dvc.lock")):
        path.chmod(0o644)
        path.write_bytes(content)
    copy.chmod(0o444)  # DVC asks nothing more of it
    made = {path: path.stat().st_mtime_ns for path in Path("artifacts/small/verdicts").rglob("*.parquet")}
    assert cli("repair", "pipelines/small").out.splitlines() == [
        "small: mended what a kill left: removed pipelines/small/dvc.lock, which it had cut off; its stages are "
        "restored or run again; removed 1 empty folder of DVC's run cache; removed 1 cut-off entry of DVC's run cache; "
        "removed 1 empty object of DVC's cache"
    ]
    result = cli("run", "pipelines/small", "--jobs", "1")
    assert result.code == 0, result.err
    assert contents(finished_copy) == expected
    assert copy.read_bytes() == table.read_bytes()
    # What was whole was recorded, not made again.
    assert {path: path.stat().st_mtime_ns for path in Path("artifacts/small/verdicts").rglob("*.parquet")} == made
