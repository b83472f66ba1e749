"""Locks where the filesystem's own do nothing, and between hosts."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from conftest import Cli, environment
from hacpo.artifacts.layout import Layout
from hacpo.errors import ArtifactError, BusyError
from hacpo.pipeline.locking import leases
from hacpo.pipeline.locking.leases import Holder, is_held, lease, look
from hacpo.pipeline.locking.locks import driver_lock, stage_lock

NO_LOCKS = {
    "refused": "import errno, fcntl\ndef flock(*_): raise OSError(errno.ENOLCK, 'No locks available')\n",
    "unsupported": "import errno, fcntl\ndef flock(*_): raise OSError(errno.EOPNOTSUPP, 'Operation not supported')\n",
    "ignored": "import fcntl\ndef flock(*_): pass\n",
}
"""What a filesystem without working locks does: the kernel says so, or does nothing."""


def far(command: str = "hacpo run") -> Holder:
    """A process of another host."""
    return Holder(command, "elsewhere", "elsewhere 7e0c pid:[1]", 12, "345")


def put(folder: Path, name: str, holder: Holder, number: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.lease.{number}"
    path.write_text(json.dumps(asdict(holder)))
    return path


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts expire within a second."""
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", 0.6)
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(leases, "_FAR_POLL_SECONDS", 0.05)


@pytest.fixture(params=sorted(NO_LOCKS))
def lockless(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem without working locks, for this process and those that it starts."""
    folder = tmp_path / "lockless"
    folder.mkdir()
    code = NO_LOCKS[request.param]
    (folder / "sitecustomize.py").write_text(f"{code}fcntl.flock = flock\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    known: dict[str, object] = {}
    exec(code, known)
    monkeypatch.setattr("fcntl.flock", known["flock"])


def test_two_runs_are_refused_without_working_locks(finished_copy: Path, cli: Cli, lockless: None) -> None:
    """As users meet it: a run in another process, which is then killed; the next goes on at once."""
    code = (
        "import time; from pathlib import Path; from hacpo.artifacts.layout import Layout; "
        "from hacpo.pipeline.locking.locks import driver_lock\n"
        "with driver_lock(Layout(Path('artifacts/small'))): print('ready', flush=True); time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        for command in (("run", "pipelines/small"), ("advantage", "pipelines/small", "--step", 1)):
            result = cli(*command)
            assert result.code == 7
            assert f"another run works on this pipeline (hacpo run, process {other.pid})" in result.error
    finally:
        other.kill()
        other.communicate()
    assert cli("run", "pipelines/small").code == 0


def test_a_stage_is_seen_by_a_run_without_working_locks(tmp_path: Path, lockless: None) -> None:
    layout = Layout(tmp_path)
    with stage_lock(layout, "advantage-0001"):
        with pytest.raises(BusyError, match="a stage works on this pipeline"), driver_lock(layout, wait_seconds=0.2):
            pass
        with pytest.raises(BusyError, match="already running"), stage_lock(layout, "advantage-0001", wait_seconds=0.2):
            pass
        with stage_lock(layout, "advantage-0002"):
            pass
    with driver_lock(layout):
        pass


def test_only_one_of_many_has_it(tmp_path: Path) -> None:
    """Five processes add one to a number in a file, thirty times each; nothing is lost, though some die with it."""
    count = tmp_path / "count"
    count.write_text("0")
    code = (
        "import os, signal, sys, time; from pathlib import Path; from hacpo.pipeline.locking.leases import lease\n"
        "folder, count, dies = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == '0'\n"
        "for turn in range(30):\n"
        "    with lease(folder, 'driver', 'test', wait_seconds=300, busy='{}'):\n"
        "        number = int(count.read_text()); time.sleep(0.0005); count.write_text(str(number + 1))\n"
        "        if dies and turn == 9: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    commands = [[sys.executable, "-c", code, str(tmp_path / ".locks"), str(count), str(n)] for n in range(5)]
    processes = [subprocess.Popen(command, env=environment()) for command in commands]
    assert [process.wait() for process in processes] == [-signal.SIGKILL, 0, 0, 0, 0]
    assert count.read_text() == str(4 * 30 + 10)
    assert len(list((tmp_path / ".locks").glob("driver.lease.*"))) == 1


def test_a_holder_of_this_system_is_judged_at_once(tmp_path: Path) -> None:
    """Its process is gone, or another process has its number by now."""
    mine = Holder.here("hacpo run")
    for gone in (replace(mine, started="1"), replace(mine, process=2**22 + 1), replace(mine, released=True)):
        folder = tmp_path / str(gone.process) / gone.started / str(gone.released)
        put(folder, "driver", gone)
        assert is_held(folder, "driver") is None
    zombie = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment())
    started = leases._started(zombie.pid)
    assert started is not None
    put(tmp_path, "driver", replace(mine, process=zombie.pid, started=started))
    assert str(is_held(tmp_path, "driver")) == f"hacpo run, process {zombie.pid}"
    assert zombie.stdin is not None
    zombie.stdin.close()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert is_held(tmp_path, "driver") is None
    zombie.wait()


def test_a_process_that_may_not_be_looked_at_counts_while_it_is_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's, where /proc is mounted with hidepid: there is no saying whether it is gone."""

    def kill(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    path = put(tmp_path, "driver", replace(Holder.here("hacpo run"), process=2**22 + 1))
    assert is_held(tmp_path, "driver") is None
    monkeypatch.setattr(os, "kill", kill)
    assert is_held(tmp_path, "driver") is not None
    os.utime(path, (0, 0))
    assert is_held(tmp_path, "driver") is None


def test_another_host_counts_while_it_is_heard_of(finished_copy: Path, cli: Cli, impatient: None) -> None:
    folder = finished_copy / "artifacts" / "small" / ".locks"
    path = put(folder, "driver", far(), number=1000)
    ended = threading.Event()
    beats = itertools.count(time.time() + 3600)  # ahead of time: however slow this machine is, it does not expire

    def beat() -> None:
        while not ended.wait(0.05):
            os.utime(path, (0, next(beats)))

    os.utime(path, (0, next(beats)))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        for command in (("run", "pipelines/small"), ("advantage", "pipelines/small", "--step", 1)):
            result = cli(*command)
            assert result.code == 7
            assert "another run works on this pipeline (hacpo run, process 12 on elsewhere)" in result.error
    finally:
        ended.set()
        thread.join()
    os.utime(path)
    assert cli("run", "pipelines/small").code == 0  # it expires while this waits
    found = look(folder, "driver")
    assert found is not None
    assert found.number == 1001
    assert found.gone


def put_in_a_year(folder: Path) -> Path:
    """A lease of another host that was touched later than it is, as after its clock was set back."""
    path = put(folder, "driver", far())
    os.utime(path, (time.time() + 3e7, time.time() + 3e7))
    return path


def expires(folder: Path) -> bool:
    """Whether somebody who looks again and again finds the lease free at last."""
    return any(is_held(folder, "driver") is None or time.sleep(0.05) for _ in range(200))


@pytest.mark.parametrize("may_touch", [True, False])
def test_a_lease_of_a_time_to_come_expires_unless_it_changes(
    tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch, may_touch: bool
) -> None:
    path = put_in_a_year(tmp_path)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "not its owner")

    if not may_touch:
        monkeypatch.setattr(os, "utime", refuse)
    assert str(is_held(tmp_path, "driver")) == "hacpo run, process 12 on elsewhere"
    assert expires(tmp_path)
    assert path.exists()


def test_who_touches_a_lease_with_a_time_to_come_is_there(tmp_path: Path, impatient: None) -> None:
    """Its clock is ahead of the reader's."""
    path, ended = put_in_a_year(tmp_path / ".locks"), threading.Event()

    def work() -> None:
        for later in itertools.count():
            if ended.wait(0.02):
                return
            os.utime(path, (time.time() + 3e7 + later, time.time() + 3e7 + later))

    holder = threading.Thread(target=work)
    holder.start()
    try:
        with pytest.raises(BusyError, match="on elsewhere"), driver_lock(Layout(tmp_path), 0.5):
            pytest.fail("two at work")
    finally:
        ended.set()
        holder.join()


@pytest.mark.parametrize("number", ["\u00b2", "\u0663", "07", "0", "-1", "9" * 200])
def test_a_name_that_no_lease_has_is_none(tmp_path: Path, number: str) -> None:
    (tmp_path / ".locks").mkdir()
    (tmp_path / ".locks" / f"driver.lease.{number}").touch()
    with driver_lock(Layout(tmp_path), 0.5):
        assert (tmp_path / ".locks" / "driver.lease.1").exists()


def test_a_number_after_which_there_is_none_is_refused(tmp_path: Path) -> None:
    path = put(tmp_path / ".locks", "driver", replace(far(), released=True), 10**9 - 1)
    with (
        pytest.raises(ArtifactError, match=rf"{path.name}: is no number that a lease comes to\. Remove the file"),
        driver_lock(Layout(tmp_path), 0.5),
    ):
        pytest.fail("the next number would be seen by nobody")


def test_a_stage_of_another_host_is_waited_for(tmp_path: Path, impatient: None) -> None:
    folder = tmp_path / ".locks"
    path = put(folder, "update-0001-ada", far("hacpo update-0001-ada"))
    os.utime(path, (0, time.time() + 3600))
    with (
        pytest.raises(BusyError, match=r"does not end \(hacpo update-0001-ada, process 12 on elsewhere\)"),
        driver_lock(Layout(tmp_path), wait_seconds=0.1),
    ):
        pass
    os.utime(path)
    with driver_lock(Layout(tmp_path), wait_seconds=60):
        pass


def test_a_run_lists_the_leases_of_its_stages_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run by `dvc repro` leaves thousands, and listing the folder takes longer the more there are."""
    folder, listed = tmp_path / ".locks", []
    for step in range(40):
        put(folder, f"update-{step:04d}-ada", replace(far(), released=True))
    working = put(folder, "update-0040-ada", far())
    os.utime(working, (0, time.time() + 3600))
    (folder / ".update-0041-ada.lease.1.tmp-0123").touch()
    assert list(leases.held(folder)) == ["update-0040-ada"]
    put(folder, "update-0040-ada", replace(far(), released=True), number=2)
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: listed.append(pattern) or glob(path, pattern))
    with driver_lock(Layout(tmp_path)):
        pass
    assert len(listed) < 20


def test_a_lease_that_a_full_disk_did_not_let_give_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that had it takes it again, once there is room, and does not wait for itself."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, lease(tmp_path, "dvc", "hacpo", wait_seconds=0, busy="{}"):
        assert is_held(tmp_path, "dvc") is not None
        patch.setattr(leases, "_write_new", full)
    with lease(tmp_path, "dvc", "hacpo", wait_seconds=0, busy="{}"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["dvc.lease.2"]


def test_time_is_the_filesystems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose clock is an hour off neither takes a lease nor waits for ever."""
    path = put(tmp_path, "driver", far())
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert is_held(tmp_path, "driver") is not None
    beat = path.stat().st_mtime - leases.EXPIRES_SECONDS - 1
    os.utime(path, (beat, beat))
    assert is_held(tmp_path, "driver") is None


def test_half_a_file_counts_until_it_expires(tmp_path: Path) -> None:
    path = put(tmp_path, "driver", far())
    path.write_text("{")
    assert str(is_held(tmp_path, "driver")) == "another process"
    os.utime(path, (0, 0))
    assert is_held(tmp_path, "driver") is None


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    for _ in range(2):
        with (
            lease(tmp_path, "driver", "first", wait_seconds=0, busy="held by {}"),
            pytest.raises(BusyError, match=f"held by first, process {os.getpid()}"),
            lease(tmp_path, "driver", "second", wait_seconds=0, busy="held by {}"),
        ):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["driver.lease.2"]


def test_who_was_taken_for_gone_writes_no_more(tmp_path: Path) -> None:
    """A process that slept for too long ends in one line when it wakes up and another host works."""
    code = (
        "import sys, time; from pathlib import Path; from hacpo.pipeline.locking import leases\n"
        "leases.BEAT_SECONDS = 0.05\n"
        "with leases.lease(Path(sys.argv[1]), 'driver', 'hacpo run', wait_seconds=0, busy='{}'):\n"
        "    print('ready', flush=True); time.sleep(600)"
    )
    folder = tmp_path / ".locks"
    command = [sys.executable, "-c", code, str(folder)]
    sleeper = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert sleeper.stdout is not None
    assert sleeper.stdout.readline() == "ready\n"
    sleeper.send_signal(signal.SIGSTOP)
    put(folder, "driver", far(), number=2)
    (folder / "driver.lease.1").unlink()
    sleeper.send_signal(signal.SIGCONT)
    _, said = sleeper.communicate(timeout=60)
    assert sleeper.returncode == 7
    assert said.splitlines() == [
        f"hacpo: error: {tmp_path}: hacpo run, process 12 on elsewhere has taken over, because this process was not "
        "heard of for too long"
    ]


REFUSING = """
import errno, os, sys, threading, time
from pathlib import Path
from hacpo.pipeline.locking import leases

leases.BEAT_SECONDS, leases.EXPIRES_SECONDS = 0.05, float(sys.argv[3])
touch, read, refusals = os.utime, leases.read_bytes, int(sys.argv[2])
touched = threading.Event()

def utime(path):
    global refusals
    if refusals:
        refusals -= 1
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    touch(path)
    touched.set()

def read_bytes(path):
    if threading.current_thread() is not threading.main_thread():
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return read(path)

os.utime, leases.read_bytes = utime, read_bytes
with leases.lease(Path(sys.argv[1]), "driver", "hacpo run", wait_seconds=0, busy="{}"):
    assert touched.wait(60)
"""
"""Holds a lease on a disk that refuses the first so many beats, and whoever looks after the lease then."""


@pytest.mark.parametrize(
    ("refusals", "expires", "code", "says"), [(2, 3600, 0, ""), (-1, 1, 7, "cannot say that it is there")]
)
def test_a_disk_that_refuses_a_while_is_asked_again_but_not_until_the_lease_expires(
    tmp_path: Path, refusals: int, expires: float, code: int, says: str
) -> None:
    command = [sys.executable, "-c", REFUSING, str(tmp_path / ".locks"), str(refusals), str(expires)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    line = f"hacpo: error: {tmp_path}: this process {says} (Input/output error), so another may take over\n"
    assert done.stderr == (line if says else "")


@pytest.mark.parametrize(
    "changed", [{"command": "\x1b[2J"}, {"command": ["hacpo"]}, {"process": "12"}, {"released": {}}, {"host": None}]
)
def test_a_holder_that_a_stranger_wrote_steers_nothing(tmp_path: Path, changed: dict[str, object]) -> None:
    path = put(tmp_path, "driver", far())
    path.write_text(json.dumps(asdict(far()) | changed))
    found = look(tmp_path, "driver")
    assert found is not None
    assert "\x1b" not in str(found)
    assert (found.holder is None) == (changed != {"command": "\x1b[2J"})
