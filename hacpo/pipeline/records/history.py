"""Where DVC's objects are named: in files of the project, and in git's commits, which such an object brings back."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

MD5 = re.compile(rb"\b[0-9a-f]{32}\b")
"""What DVC's files call an object."""
_NOBODYS = (".git", ".dvc", ".venv")
_MISSING = re.compile(rb"^[0-9a-f]{40,64} missing$", re.MULTILINE)
_STASHES = ("-c", "log.showSignature=false", "stash", "list", "--format=%H")
_RECORDS = (":(top,glob)**/dvc.lock", ":(top,glob)**/*.dvc")
_AT_ONCE = 500
_SECONDS = 600.0


def dvc_records(root: Path) -> Iterator[Path]:
    """All locks of a project, and what `dvc add` has written beside folders and files."""
    for folder, inner, names in os.walk(root):
        here = Path(folder)
        inner[:] = [] if here == root / "artifacts" else [name for name in inner if name not in _NOBODYS]
        yield from (here / name for name in names if name == "dvc.lock" or name.endswith(".dvc"))


class History:
    """All commits that a branch, a tag, a stash or a work tree of the repository around a project leads to."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tips: set[bytes] = set()
        self._seen: set[bytes] = set()
        """Versions of DVC's files that have been read."""
        self._named: set[str] = set()

    def named(self) -> set[str] | None:
        """The MD5 hashes that some version of a `dvc.lock` or `.dvc` file names, of folders without `.dir`; empty
        without a repository, None where git does not tell. Commits made between two calls are found."""
        if not any((at / ".git").exists() for at in (self._root.resolve(), *self._root.resolve().parents)):
            return set()
        try:
            # Of all work trees, as `git log --all` has it; all stashes but the newest are in a reflog alone.
            tips = {*self._git("rev-list", "--no-walk", "--all").split(), *self._git(*_STASHES).split()}
            if tips - self._tips:
                self._read(tips)
                self._tips = tips
        except (OSError, subprocess.SubprocessError):
            return None
        return self._named

    def _read(self, tips: Iterable[bytes]) -> None:
        # Without --full-history, git leaves out branches of which a merge took nothing. `rev-list --objects` takes no
        # patterns of paths.
        changes = self._git(
            *("-c", "log.showRoot=true", "log", "--stdin", "--full-history", "-m", "--raw", "--no-abbrev"),
            *("--no-renames", "--no-show-signature", "--format=", "--", *_RECORDS),
            stdin=b"".join(tip + b"\n" for tip in tips),
        )
        files = {version for line in changes.splitlines() for version in _files(line)}
        new = sorted(files - self._seen)
        for first in range(0, len(new), _AT_ONCE):
            some = new[first : first + _AT_ONCE]
            content = self._git("cat-file", "--batch", stdin=b"\n".join(some) + b"\n")
            if _MISSING.search(content):
                raise subprocess.SubprocessError("a partial clone lacks what is asked for")
            self._named.update(digest.decode() for digest in MD5.findall(content))
            self._seen.update(some)

    def _git(self, *words: str, stdin: bytes = b"") -> bytes:
        return subprocess.run(
            ["git", *words],
            cwd=self._root,
            input=stdin,
            capture_output=True,
            timeout=_SECONDS,
            check=True,
            env={**os.environ, "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"},
        ).stdout


def _files(line: bytes) -> list[bytes]:
    """The versions of a file in a line of `git log --raw`, `:<mode> <mode> <before> <after> <letter><tab><path>`; those
    of links, submodules and nothing are none."""
    words = line.partition(b"\t")[0].lstrip(b":").split(b" ")
    return [version for mode, version in zip(words[:2], words[2:4], strict=True) if mode.startswith(b"100")]
