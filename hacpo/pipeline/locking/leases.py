"""Who works on a run, as files say it: locks that hold where the filesystem's own do nothing, and between hosts.

A lease is a row of numbered files, `<name>.lease.<n>`; whoever made the last one has it. A process takes it by making
the next number, which only one can, once the last is given back, or its holder is gone. The last file is never removed,
so a number is never made twice: two that both found a dead holder cannot both have its place. Linking a written file
under a new name is atomic on network filesystems too (open(2), O_EXCL).

Whether a holder is gone: on the same system its process says at once (number and time of start). Another host's holder
counts as there until its file has not been touched for a while, by the clock of the filesystem.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn

from hacpo.artifacts.text_files import parse_json, read_bytes
from hacpo.errors import ArtifactError, BusyError, harmless

BEAT_SECONDS = 5.0
"""How often a holder touches its file."""
EXPIRES_SECONDS = 60.0
"""After so long without that, a holder on another host counts as gone."""
_POLL_SECONDS, _FAR_POLL_SECONDS = 0.05, 0.5
_LAST = 10**9 - 1
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_ahead: dict[tuple[str, float], float] = {}
"""Files with times to come that may not be touched, and these times -> when this process first met them."""
_mine: set[str] = set()
"""Files of the leases that this process has: what was given back may still look held, for the disk was full."""


@dataclass(frozen=True)
class Holder:
    """A process that has a lease, or had."""

    command: str
    host: str
    system: str
    """Where process numbers mean the same: host, boot, and the container's numbering."""
    process: int
    started: str
    released: bool = False

    @classmethod
    def here(cls, command: str) -> Holder:
        """This process."""
        return cls(command, platform.node(), _system(), os.getpid(), _started(os.getpid()) or "")


@dataclass(frozen=True)
class LeaseState:
    """The last file of a lease, as it was looked at."""

    number: int
    holder: Holder | None
    """None: being written, or not readable."""
    beat: float
    """When it was last touched, by the clock of the filesystem."""
    local: bool
    """Whether its process can be asked for."""
    gone: bool
    """Given back, or its process is gone. Another host's: only given back."""

    def __str__(self) -> str:
        """`hacpo run, process 12`, and the host if it is another."""
        if self.holder is None:
            return "another process"
        words = f"{self.holder.command}, process {self.holder.process}{'' if self.local else f' on {self.holder.host}'}"
        return harmless(words)


def look(folder: Path, name: str) -> LeaseState | None:
    """The lease as it is; None if nobody ever took it."""
    while (number := _last(folder, name)) is not None:
        with contextlib.suppress(FileNotFoundError):  # there is a later one
            return _read(_path(folder, name, number))
    return None


def _read(path: Path) -> LeaseState:
    content, beat, number = read_bytes(path), path.stat().st_mtime, _number(path)
    try:
        holder = Holder(**parse_json(content.decode()))
        types = (*[str] * 3, int, str, bool)
        if any(type(value) is not kind for value, kind in zip(asdict(holder).values(), types, strict=True)):
            raise TypeError
    except (ValueError, TypeError):
        return LeaseState(number, None, beat, local=False, gone=False)
    local = holder.system == _system() and not _is_hidden(holder.process)
    alive = not local or (bool(holder.started) and _started(holder.process) == holder.started)
    if local and holder.process == os.getpid():
        alive = alive and os.path.realpath(path) in _mine
    return LeaseState(number, holder, beat, local, gone=holder.released or not alive)


def is_held(folder: Path, name: str) -> LeaseState | None:
    """Who has a lease; None if nobody."""
    return _if_held(folder, name, look(folder, name))


def held(folder: Path) -> dict[str, LeaseState]:
    """Every lease that somebody has, by name. The folder may hold one of every stage of a run: it is listed once."""
    last: dict[str, int] = {}
    for path in folder.glob("*.lease.*"):
        name = path.name.rpartition(".lease.")[0]
        last[name] = max(_number(path), last.get(name, -1))
    states: dict[str, LeaseState | None] = {}
    for name, number in last.items():
        try:
            states[name] = _if_held(folder, name, _read(_path(folder, name, number)))
        except FileNotFoundError:  # there is a later one, or it is no lease's
            states[name] = is_held(folder, name)
    return {name: state for name, state in states.items() if state is not None}


def _if_held(folder: Path, name: str, state: LeaseState | None) -> LeaseState | None:
    if state is None or state.gone:
        return None
    if state.local:
        return state
    now = _now(folder)
    if state.beat > now + BEAT_SECONDS:
        return _of_time_to_come(_path(folder, name, state.number), state)
    return None if now - state.beat > EXPIRES_SECONDS else state


def _of_time_to_come(path: Path, state: LeaseState) -> LeaseState | None:
    """A lease that was touched later than it is, for a clock was set back or the file came from elsewhere: it would
    not expire before that. So it is touched, and expires from here on unless its holder does that too. Whoever may not
    touch it watches it for as long."""
    try:
        os.utime(path)
        return replace(state, beat=path.stat().st_mtime)
    except FileNotFoundError:
        return state  # there is a later one
    except OSError:
        first = _ahead.setdefault((os.path.realpath(path), state.beat), time.monotonic())
        return None if time.monotonic() - first > EXPIRES_SECONDS else state


@contextlib.contextmanager
def lease(
    folder: Path, name: str, command: str, *, wait_seconds: float, busy: str, waiting: str = ""
) -> Iterator[None]:
    """Have a lease while the block runs.

    A holder on another host that is not heard of is waited for until it expires, or is heard of again.

    Args:
        folder: where its files are.
        wait_seconds: for a holder that is there.
        busy: the message when it stays; `{}` is the holder.
        waiting: said on standard error after a second.

    Raises:
        BusyError: it is held.
    """
    path = _take(folder, name, command, wait_seconds, busy, waiting)
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, name, ended), daemon=True)
    beat.start()
    place = os.path.realpath(path)
    _mine.add(place)
    try:
        yield
    finally:
        ended.set()
        beat.join()
        _mine.remove(place)
        with contextlib.suppress(OSError):  # on a full disk it ends for others with this process
            _write(path, Holder(**{**asdict(Holder.here(command)), "released": True}))


def _take(folder: Path, name: str, command: str, wait_seconds: float, busy: str, waiting: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    begun, told, first = time.monotonic(), False, None
    while True:
        holder = is_held(folder, name)
        if holder is None:
            if (path := _make_next(folder, name, command)) is not None:
                return path
            continue
        waited = time.monotonic() - begun
        first = first or holder
        silent = not holder.local and (holder.number, holder.beat) == (first.number, first.beat)
        if waited >= wait_seconds and not silent:
            raise BusyError(busy.format(holder), where=folder.parent, remedy="wait for it to end, or stop it")
        if not told and waited >= 1:
            told = True
            if text := f"waiting to hear of {holder}" if silent else waiting:
                print(f"{folder.parent}: {text}", file=sys.stderr)
        time.sleep(_POLL_SECONDS if holder.local else _FAR_POLL_SECONDS)


def _make_next(folder: Path, name: str, command: str) -> Path | None:
    """Make the lease's next file; None if another process was quicker."""
    last = look(folder, name)
    if last is not None and is_held(folder, name) is not None:
        return None
    number = 1 if last is None else last.number + 1
    if number > _LAST:
        raise ArtifactError(
            "is no number that a lease comes to", where=_path(folder, name, number - 1), remedy="remove the file"
        )
    path = _path(folder, name, number)
    scratch = _scratch(path)
    try:
        _write_new(scratch, Holder.here(command))
        try:
            os.link(scratch, path)
        except FileExistsError:
            return None
        except OSError:  # no hard links here
            try:
                _write_new(path, Holder.here(command))
            except FileExistsError:
                return None
            except OSError:  # half of it would be taken for another's until it expires
                path.unlink(missing_ok=True)
                raise
    finally:
        scratch.unlink(missing_ok=True)
    if _last(folder, name) != number:  # it was made while this process slept, used, and removed
        path.unlink(missing_ok=True)
        return None
    _clean(folder, name, path)
    return path


def _clean(folder: Path, name: str, path: Path) -> None:
    """Remove the files before the one just made, and what killed processes were writing."""
    for old in folder.glob(f"{name}.lease.*"):
        if _number(old) < _number(path):
            old.unlink(missing_ok=True)
    for scratch in (found for found in folder.glob(".*.tmp-*") if _SCRATCH.fullmatch(found.name)):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime - scratch.stat().st_mtime > EXPIRES_SECONDS:
                scratch.unlink()


def _beat(path: Path, name: str, ended: threading.Event) -> None:
    """Touch a lease's file until it is given back; a disk that refuses is asked again. Whoever lost the lease, having
    slept for too long, must not write on, nor who is about to lose it."""
    number, heard = _number(path), time.monotonic()
    while not ended.wait(BEAT_SECONDS):
        now, latest = time.monotonic(), None
        try:
            os.utime(path)
        except OSError as error:
            reason = error.strerror
        else:
            heard = now
            continue
        with contextlib.suppress(OSError, ValueError):
            latest = look(path.parent, name)
        if ended.is_set():
            return
        if latest is not None and latest.number > number:
            _end(path, f"{latest} has taken over, because this process was not heard of for too long")
        if now - heard > EXPIRES_SECONDS - 2 * BEAT_SECONDS:
            _end(path, f"this process cannot say that it is there ({reason}), so another may take over")


def _end(path: Path, line: str) -> NoReturn:
    print(f"hacpo: error: {path.parent.parent}: {line}", file=sys.stderr, flush=True)
    os._exit(BusyError.exit_code)


def _path(folder: Path, name: str, number: int) -> Path:
    return folder / f"{name}.lease.{number}"


def _number(path: Path) -> int:
    """The number of a lease's file; -1 of any other, also of one that spells a number as no lease does (`07`, `²`)."""
    suffix = path.name.rpartition(".")[2]
    return int(suffix) if _NUMBER.fullmatch(suffix) else -1


def _last(folder: Path, name: str) -> int | None:
    last = max((_number(path) for path in folder.glob(f"{name}.lease.*")), default=-1)
    return None if last < 0 else last


_SCRATCH = re.compile(r"\.(.+\.lease\.\d+|clock)\.tmp-[0-9a-f]{16}")
"""Names that `_scratch` gives: the folder may be a link to one with other files in it."""


def _scratch(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")


def _write_new(path: Path, holder: Holder) -> None:
    with path.open("x", encoding="utf-8") as file:
        json.dump(asdict(holder), file)


def _write(path: Path, holder: Holder) -> None:
    """Replace a file's content at once."""
    scratch = _scratch(path)
    try:
        _write_new(scratch, holder)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _now(folder: Path) -> float:
    """The filesystem's own time: hosts' clocks differ."""
    clock = _scratch(folder / "clock")
    clock.touch()
    try:
        return clock.stat().st_mtime
    finally:
        clock.unlink()


def _system() -> str:
    """What two processes have in common that see each other's numbers."""
    words = [platform.node()]
    for path, read in (("/proc/sys/kernel/random/boot_id", _text), ("/proc/self/ns/pid", os.readlink)):
        with contextlib.suppress(OSError):
            words.append(read(path))
    return " ".join(words)


def _text(path: str) -> str:
    return Path(path).read_text(encoding="ascii").strip()


def _is_hidden(process: int) -> bool:
    """Whether a process is there that nothing can be learned of: another user's, under `hidepid` or on macOS."""
    try:
        os.kill(process, 0)
    except PermissionError:
        return _started(process) is None
    except OSError:
        return False
    return False


def _started(process: int) -> str | None:
    """When a process began, in the system's own words; None if there is none, or only its remains."""
    if os.path.exists("/proc/self/stat"):
        try:
            text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        state, *fields = text.rpartition(")")[2].split()
        return None if state in "ZX" else fields[18]  # the 22nd of proc(5): ticks since the boot
    import psutil

    try:
        return str(psutil.Process(process).create_time())
    except psutil.Error:
        return None
