"""Where a command may write what its user names: nothing that it has not written itself is replaced."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from hacpo.artifacts.links import leads_to_object
from hacpo.errors import SettingsError

_REMEDY = "name another file"


def check_file(target: Path, is_ours: Callable[[Path], bool], *, what: str) -> None:
    """Refuse a place for a file that is none, or holds something else than what is to be written.

    Args:
        is_ours: whether a regular file that is there is of the kind that the command writes, and may be replaced.
        what: such a file, in words.

    Raises:
        SettingsError: it lies among the files that DVC, git or hacpo keep of a run; a folder, a link that is not
            DVC's, a pipe, a device, or a file of another kind is there.
    """
    check_outside_kept(target, remedy=_REMEDY)
    try:
        # DVC's own links are replaced, and not written through.
        mode = (target.stat() if leads_to_object(target) else target.lstat()).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise SettingsError(f"cannot be looked at: {error.strerror}", where=target, remedy=_REMEDY) from None
    if not stat.S_ISREG(mode):
        raise SettingsError("is there and is not replaced", where=target, found=_kind(mode), remedy=_REMEDY)
    if not is_ours(target):
        raise SettingsError(
            f"is there, is no {what}, and is not replaced", where=target, remedy=f"{_REMEDY}, or remove it yourself"
        )


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISLNK: "a link", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    return next((name for holds, name in kinds.items() if holds(mode)), "a device")


def check_outside_kept(target: Path, *, remedy: str) -> None:
    """Refuse a place within what a program keeps for itself: DVC, git, or hacpo beside a params.yaml.

    Raises:
        SettingsError: it is.
    """
    whole = Path(os.path.realpath(target))
    kept = next((folder for folder in (whole, *whole.parents) if _is_kept(folder)), None)
    if kept is not None:
        raise SettingsError(f"must lie outside {kept}", where=target, remedy=remedy)


def _is_kept(folder: Path) -> bool:
    if folder.name in (".dvc", ".git"):
        return True
    return folder.name in ("steps", ".keys") and (folder.parent / "params.yaml").is_file()
