"""What an undisturbed run leaves, and how another one's files differ from it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML, YAMLError

_YAML = YAML(typ="safe", pure=True)
_MEASURED = ("seconds", "peak_memory_mib", "sampling_seconds", "scoring_seconds", "train_seconds")
"""Keys of metrics files that say how long something took on this machine, or how much memory."""
_UNLIKE = ("report/",)
"""Files that show such numbers: they must be there, their bytes differ."""


@dataclass
class Golden:
    """An undisturbed run: digests of its files by path, and what DVC says of it."""

    digests: dict[str, str] = field(default_factory=dict)
    status: str = ""

    @classmethod
    def of(cls, root: Path, run: str, status: str) -> Golden:
        """Of the project at `root`."""
        return cls(dict(_digests(root, run)), status)

    def differences(self, root: Path, run: str) -> Iterator[tuple[str, str]]:
        """(kind of problem, what) for every file that is missing, other, or too many."""
        found = dict(_digests(root, run))
        for path in sorted(self.digests.keys() | found.keys()):
            if path not in found:
                yield "wrong bytes", f"{path} is missing"
            elif path not in self.digests:
                yield "leftover", path
            elif found[path] != self.digests[path]:
                yield "wrong bytes", f"{path} differs"


def _digests(root: Path, run: str) -> Iterator[tuple[str, str]]:
    """Of a run's artifacts (folders too: an empty one is a leftover) and its pipeline folder."""
    artifacts, pipeline = root / "artifacts" / run, root / "pipelines" / run
    for base in (artifacts, pipeline):
        for path in sorted(base.rglob("*")):
            inner = path.relative_to(base)
            if inner.parts[0] != ".locks":
                yield str(path.relative_to(root)), "folder" if path.is_dir() else digest(path, inner)


def digest(path: Path, inner: Path) -> str:
    """Of what of a file is the same whenever it is made; `inner`: its path in the artifacts or pipeline of its run."""
    if path.is_symlink() and ".dvc/cache/files/" not in str(path.resolve()):  # `cache.type symlink`: as its object
        return f"link to {path.readlink()}"
    if str(inner).startswith(_UNLIKE):
        return "file"
    content = path.read_bytes()
    with contextlib.suppress(ValueError, YAMLError, KeyError, TypeError, AttributeError):  # damaged: by its bytes
        if path.name == "dvc.lock":
            return _hash(json.dumps(_without_measured(_YAML.load(content)), sort_keys=True).encode())
        if inner.parts[0] == "metrics":
            metrics = json.loads(content)
            return _hash(json.dumps({key: metrics[key] for key in sorted(metrics.keys() - set(_MEASURED))}).encode())
    return _hash(content)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _without_measured(lock: Any) -> Any:
    """A lock without hashes of what holds timings: metrics files, and the report that shows them."""
    for stage in lock["stages"].values():
        for kind in ("deps", "outs"):
            for item in stage.get(kind, []):
                if "/metrics" in item["path"] or "/report/" in item["path"]:
                    for key in ("md5", "size"):
                        item.pop(key, None)
    return lock
