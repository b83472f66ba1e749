"""Where an agent's first weights come from: a model folder of this machine, or a repository on the Hugging Face hub.

`agents.<name>.model` names either. A folder that is there always wins, so a cluster without a network can hold a copy
under the name that the hub has. What was downloaded is written down in the checkpoint (`STARTED_FROM`), because a
branch of the hub moves.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hacpo.artifacts.model_folder import GGUF
from hacpo.artifacts.text_files import load_json
from hacpo.errors import ArtifactError

STARTED_FROM = "started_from.json"
"""In every checkpoint of an agent that started from the hub: `{"hub": owner/name, "commit": 40 hexadecimal digits}`;
of one that started from a GGUF file: `{"gguf": its name, "sha256": 64 hexadecimal digits}`."""

COMMIT = re.compile(r"[0-9a-f]{40}")

SHA256 = re.compile(r"[0-9a-f]{64}")

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_FOLDERS = {"artifacts", "checkpoints", "data", "models", "pipelines"}
"""First parts of a name that are meant as folders, whether they are there or not."""


def hub_repository(model: str | None, root: Path) -> str | None:
    """The hub's repository that `model` names; None where it is a folder, there or missing.

    Args:
        model: `agents.<name>.model`; None where the agent is made from scratch.
        root: the project's root, which folders are relative to.
    """
    if model is None or not _REPOSITORY.fullmatch(model) or "--" in model or ".." in model:  # the hub has none such
        return None
    if model.endswith(GGUF):
        return None
    owner = model.partition("/")[0]
    return None if owner in _FOLDERS or (root / owner).is_dir() else model


def missing_folder(model: str, root: Path) -> str:
    """What to say of a `model` that is a folder and not there."""
    if model.endswith(GGUF):
        return "the GGUF file is missing"
    owner = model.partition("/")[0]
    if _REPOSITORY.fullmatch(model) and owner not in _FOLDERS and (root / owner).is_dir():
        return f"the model folder is missing, and the hub is not asked because there is a folder {owner!r} here"
    return "the model folder is missing"


def write_started_from(folder: Path, **facts: str) -> None:
    """Write into a checkpoint what it was downloaded from, or unpacked from."""
    text = json.dumps(facts, indent=2, sort_keys=True)
    (folder / STARTED_FROM).write_text(text + "\n", encoding="utf-8")


def read_started_from(folder: Path) -> tuple[str, str] | None:
    """(repository, commit) that a checkpoint's agent was downloaded from; None where it was not.

    Raises:
        ArtifactError: the file says neither.
    """
    return _started_from(folder)[0]


def read_unpacked_from(folder: Path) -> tuple[str, str] | None:
    """(name, SHA-256) of the GGUF file that a checkpoint's agent was unpacked from; None where it was not.

    Raises:
        ArtifactError: as of `read_started_from`.
    """
    return _started_from(folder)[1]


def _started_from(folder: Path) -> tuple[tuple[str, str] | None, tuple[str, str] | None]:
    path = folder / STARTED_FROM
    if not path.is_file():
        return None, None
    try:
        content: Any = load_json(path)
        if "gguf" in content:
            return None, _pair(content["gguf"], content["sha256"], SHA256)
        return _pair(content["hub"], content["commit"], COMMIT), None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        # Raised in here, it is told from a disk that does not let the file be read (`made_plain`).
        raise ArtifactError("names neither a hub repository and commit nor a GGUF file", where=path) from None


def _pair(name: Any, version: Any, pattern: re.Pattern[str]) -> tuple[str, str]:
    if not isinstance(name, str) or not isinstance(version, str) or not pattern.fullmatch(version):
        raise TypeError("no names")
    return name, version
