"""Locks between processes: the kernel's (flock), which a killed process cannot leave behind, and beside them leases
(`hacpo.pipeline.locking.leases`), which hold where a filesystem's flock does nothing, and against other hosts."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hacpo.artifacts.layout import Layout
from hacpo.artifacts.storage import refused
from hacpo.errors import BusyError
from hacpo.pipeline.locking.leases import LeaseState, held, is_held, lease

_BUSY = "another run works on this pipeline ({})"
_DRIVER = "driver"
_PATIENCE_SECONDS = 0.5
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@contextlib.contextmanager
def _flock(path: Path, kind: int, wait_seconds: float, busy: str, waiting: str = "") -> Iterator[None]:
    """Hold a lock on a file; without one where the filesystem has none."""
    with path.open("a+", encoding="utf-8") as file:
        deadline = time.monotonic() + wait_seconds
        told = not waiting
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BusyError(busy, where=path.parent.parent, remedy="wait for it to end, or stop it") from None
                if not told and time.monotonic() >= deadline - wait_seconds + 1:
                    print(f"{path.parent.parent}: {waiting}", file=sys.stderr)
                    told = True
                time.sleep(0.05)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                break
        yield


@contextlib.contextmanager
def only_one(path: Path, busy: str) -> Iterator[None]:
    """Hold a file's lock while the block runs; nothing is held where the filesystem has none.

    Raises:
        BusyError: another process, or another block of this one, holds it; `busy` is the message.
        StorageError: the disk refuses.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_flock(path, fcntl.LOCK_EX, 0.0, busy))
        except OSError as error:
            raise refused(path, error) from None
        yield


def has_flock(folder: Path) -> bool:
    """Whether the filesystem of a folder takes locks at all; some take them and do nothing."""
    with (folder / "flock").open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in _UNSUPPORTED
    return True


@contextlib.contextmanager
def _folder(layout: Layout) -> Iterator[Path]:
    """Where the locks of a run are.

    Raises:
        StorageError: the disk refuses.
    """
    folder = layout.locks
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        raise refused(folder, error) from None


def _driver(folder: Path) -> LeaseState | str:
    return is_held(folder, _DRIVER) or "another process"


def refuse_beside_run(layout: Layout) -> None:
    """Before a run is entered in DVC's list, which keeps the one that works from recording: refuse beside a process of
    this system that holds the run. `driver_lock` decides of all others.

    Raises:
        BusyError: another `hacpo run` works on the pipeline.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    with _folder(layout) as folder:
        while (driver := is_held(folder, _DRIVER)) is not None and driver.local:
            if time.monotonic() >= deadline:
                raise BusyError(_BUSY.format(driver), where=folder.parent, remedy="wait for it to end, or stop it")
            time.sleep(0.05)


@contextlib.contextmanager
def driver_lock(layout: Layout, wait_seconds: float = 600.0, command: str = "hacpo run") -> Iterator[None]:
    """Held by `hacpo run` for its whole life: one run at a time on one pipeline, and no single stage beside it. Other
    commands that change checkpoints hold it too.

    A stage that outlived a killed parent is waited for, up to `wait_seconds`.

    Raises:
        BusyError: another `hacpo run` works on the pipeline, or a single stage does not end.
    """
    with contextlib.ExitStack() as stack:
        with _folder(layout) as folder:
            busy = _BUSY.format(_driver(folder))
            stack.enter_context(_flock(folder / "driver.lock", fcntl.LOCK_EX, _PATIENCE_SECONDS, busy))
            stack.enter_context(lease(folder, _DRIVER, command, wait_seconds=_PATIENCE_SECONDS, busy=_BUSY))
            busy, waiting = "a stage works on this pipeline and does not end", "waiting for a stage that still runs"
            stack.enter_context(_flock(folder / "stages.lock", fcntl.LOCK_EX, wait_seconds, busy, waiting))
            _wait_for_stages(folder, wait_seconds, busy)
        yield


def _wait_for_stages(folder: Path, wait_seconds: float, busy: str) -> None:
    """Wait until no stage has a lease: those that begin from here on see the driver's."""
    deadline = time.monotonic() + wait_seconds
    stages = {name: found for name, found in held(folder).items() if name != _DRIVER}
    while stages:
        if time.monotonic() >= deadline:
            first = next(iter(stages.values()))
            raise BusyError(f"{busy} ({first})", where=folder.parent, remedy="wait for it to end, or stop it")
        time.sleep(0.05)
        stages = {name: found for name in stages if (found := is_held(folder, name))}


@contextlib.contextmanager
def stage_lock(layout: Layout, name: str, wait_seconds: float = 600.0) -> Iterator[None]:
    """Held while one stage writes its outputs.

    Different stages may run side by side; the same stage twice waits, for instance for a process that outlived its
    killed parent, so that two never write one output.

    Raises:
        BusyError: `hacpo run` works on this pipeline, or the same stage does not end.
    """
    with contextlib.ExitStack() as stack:
        with _folder(layout) as folder:
            busy, waiting = f"{name} is already running", f"waiting for {name}"
            of_driver = _BUSY.format(_driver(folder))
            stack.enter_context(_flock(folder / "stages.lock", fcntl.LOCK_SH, _PATIENCE_SECONDS, of_driver))
            stack.enter_context(_flock(folder / f"{name}.lock", fcntl.LOCK_EX, wait_seconds, busy, waiting))
            stack.enter_context(
                lease(folder, name, f"hacpo {name}", wait_seconds=wait_seconds, busy=busy, waiting=waiting)
            )
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while driver := is_held(folder, _DRIVER):  # only after taking one's own: a driver looks for it
                if time.monotonic() >= deadline:
                    raise BusyError(_BUSY.format(driver), where=folder.parent, remedy="wait for it to end, or stop it")
                time.sleep(0.05)
        yield
