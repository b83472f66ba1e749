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

from hacpo.artifacts.text_files import load_json
from hacpo.errors import ArtifactError

STARTED_FROM = "started_from.json"
"""In every checkpoint of an agent that started from the hub: `{"hub": owner/name, "commit": 40 hexadecimal digits}`."""

COMMIT = re.compile(r"[0-9a-f]{40}")

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
    owner = model.partition("/")[0]
    return None if owner in _FOLDERS or (root / owner).is_dir() else model


def missing_folder(model: str, root: Path) -> str:
    """What to say of a `model` that is a folder and not there."""
    owner = model.partition("/")[0]
    if _REPOSITORY.fullmatch(model) and owner not in _FOLDERS and (root / owner).is_dir():
        return f"the model folder is missing, and the hub is not asked because there is a folder {owner!r} here"
    return "the model folder is missing"


def write_started_from(folder: Path, repository: str, commit: str) -> None:
    """Write into a checkpoint what it was downloaded from."""
    text = json.dumps({"hub": repository, "commit": commit}, indent=2, sort_keys=True)
    (folder / STARTED_FROM).write_text(text + "\n", encoding="utf-8")


def read_started_from(folder: Path) -> tuple[str, str] | None:
    """(repository, commit) that a checkpoint's agent was downloaded from; None where it was not.

    Raises:
        ArtifactError: the file says neither.
    """
    path = folder / STARTED_FROM
    if not path.is_file():
        return None
    try:
        content: Any = load_json(path)
        repository, commit = content["hub"], content["commit"]
        if not isinstance(repository, str) or not isinstance(commit, str) or not COMMIT.fullmatch(commit):
            raise TypeError("no names")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        # Raised in here, it is told from a disk that does not let the file be read (`made_plain`).
        raise ArtifactError("names no hub repository and commit", where=path) from None
    return repository, commit
