"""Small finished runs, and copies of them in which a command is to fail."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.small_project import PARAMS, RUN, changed, make_models, make_project

from .forks import Done, Forks
from .sandbox import copy_tree

PIPELINE = f"pipelines/{RUN}"
NAMES = "ada,bo,cy"
TWO = changed(
    PARAMS,
    """
steps: 1
agents:
  bo: null
  cy: {model: models/ada, adapter: {rank: 2, alpha: 4}}
algorithm: {importance: null, clip: null}
data:
  sets:
    arithmetic/train: {problems: 16}
    arithmetic/heldout: {problems: 4}
sampling: {group_size: 2, max_new_tokens: 12}
batch: {prompts: 4}
optimizer: {micro_batch_size: null}
storage: null
evaluation:
  benchmarks:
    heldout: {samples: 1}
""",
)
"""One step of two agents: weights trained in full, and an adapter."""
THREE = changed(
    TWO,
    """
steps: 2
agents:
  bo:
    tiny: {architecture: llama, layers: 1, hidden: 16, heads: 2, vocabulary: numbers_words, warmup: {steps: 20}}
""",
)
"""Two steps, and a third agent that is made from scratch."""


def variables(folder: Path) -> dict[str, str]:
    """What keeps everything that a command writes below one folder."""
    return {
        "DVC_SITE_CACHE_DIR": str(folder / "site"),
        "TMPDIR": str(folder / "tmp"),
        "HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
    }


def make_begun(folder: Path, params: str) -> None:
    """A project with a run that has not begun, below a folder that holds all that commands write."""
    for name in ("tmp", "site", "home"):
        (folder / name).mkdir(parents=True)
    root = make_project(folder / "project", None, params)
    make_models(root / "models", ["ada"], hidden=16, steps=40)


@dataclass(frozen=True)
class Golden:
    """An undisturbed run, and the same project before it."""

    finished: Path
    fresh: Path

    @classmethod
    def make(cls, folder: Path, forks: Forks, params: str) -> Golden:
        """Train it."""
        fresh, finished = folder / "fresh", folder / "finished"
        make_begun(fresh, params)
        copy_tree(fresh, finished)
        for _ in range(2):  # a start may have come into DVC's cache since, as the equal weights of a later step
            done = hacpo(forks, finished, "run", PIPELINE, "--jobs", "1")
            assert done.code == 0, done.err
        return cls(finished, fresh)


def hacpo(forks: Forks, folder: Path, *arguments: object, **steering: str) -> Done:
    """A command of hacpo in a copy of the project."""
    return forks.run(["hacpo", *arguments], folder / "project", {**variables(folder), **steering})


# --- what must hold --------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of the run that must be the same bytes however it was made."""
    base = folder / "project" / "artifacts" / RUN
    return {
        str(path.relative_to(base)): path.read_bytes()
        for path in sorted(base.rglob("*"))
        if path.is_file() and path.relative_to(base).parts[0] not in ("metrics", "report", ".locks")
    }


def leftovers(folder: Path, *, at_rest: bool = True) -> list[str]:
    """Temporary files and folders of ours, of DVC and of the libraries, anywhere below the folder.

    Args:
        at_rest: what saves work for the next try counts too.
    """
    kept = (".crashes", *((".saved",) if at_rest else ()))
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.name
        temporary = ".tmp" in name or name in (".merged", *kept) or name.endswith((".restoring", "-old"))
        below = path.parent.name == "tmp" and path.parent.parent == folder
        if temporary or below:
            found.append(str(path.relative_to(folder)))
    return found


def half_written(folder: Path, golden: dict[str, bytes]) -> list[str]:
    """Files of the run that are there under their own name and are not whole, and folders that lack some of theirs."""
    found = []
    there = {name: content for name, content in contents(folder).items() if "/." not in f"/{name}"}
    for name, content in there.items():
        if golden.get(name) != content:
            found.append(name)
    for made in {_made(name) for name in there}:
        missing = [name for name in golden if _made(name) == made and name not in there]
        found += [f"{name} (missing beside others)" for name in missing]
    for path in (folder / "project" / "artifacts" / RUN / "metrics").rglob("*.json"):
        try:
            json.loads(path.read_text())
        except ValueError:
            found.append(str(path))
    return found


def _made(name: str) -> str:
    """What a file appears together with: a folder that is put in place as one, or the file itself."""
    parts = name.split("/")
    if parts[0] == "data":
        return "data"
    if parts[0] == "prompts":
        return "prompts"
    return "/".join(parts[:3]) if len(parts) > 3 and parts[1].startswith("step=") else "/".join(parts[:2])
