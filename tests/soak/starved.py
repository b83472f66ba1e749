"""Small finished runs, and copies of them in which a command is to fail."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from .forks import Done, Forks
from .sandbox import copy_tree

ROOT = Path(__file__).resolve().parents[2]
RUN = "small"
PIPELINE = f"pipelines/{RUN}"
NAMES = "ada,bo,cy"
_HEAD = """
seed: 1
steps: {steps}
agents:
  ada: {{model: models/ada}}
  cy: {{model: models/ada, adapter: {{rank: 2, alpha: 4}}}}
"""
_SCRATCH = """
  bo:
    tiny: {architecture: llama, layers: 1, hidden: 16, heads: 2, vocabulary: numbers_words, warmup: {steps: 20}}
"""
_REST = """
algorithm:
  recipe: hacpo
data:
  train: arithmetic/train
  sets:
    arithmetic/train: {task: arithmetic, split: train, problems: 16}
    arithmetic/heldout: {task: arithmetic, split: heldout, problems: 4}
sampling: {group_size: 2, max_new_tokens: 12}
batch: {prompts: 4, minibatch_prompts: 4}
optimizer: {learning_rate: 3.0e-4}
engine: {device: cpu, threads: 1}
evaluation:
  every: 2
  benchmarks:
    heldout: {data: arithmetic/heldout, samples: 1, temperature: 1.0}
"""
THREE = _HEAD.format(steps=2) + _SCRATCH.lstrip("\n") + _REST
"""Two steps of three agents: weights trained in full, an adapter, and a model made from scratch."""
TWO = _HEAD.format(steps=1) + _REST
"""One step of two agents."""


def variables(folder: Path) -> dict[str, str]:
    """What keeps everything that a command writes below one folder."""
    return {
        "DVC_SITE_CACHE_DIR": str(folder / "site"),
        "TMPDIR": str(folder / "tmp"),
        "HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
    }


def make_project(folder: Path, params: str) -> Path:
    """A project with a run that has not begun, below a folder that holds all that commands write; returns its root."""
    root = folder / "project"
    for name in ("tmp", "site", "home"):
        (folder / name).mkdir(parents=True)
    (root / PIPELINE).mkdir(parents=True)
    (root / PIPELINE / "params.yaml").write_text(params)
    (root / ".dvc").mkdir()
    (root / ".dvc" / "config").write_text(
        "[core]\n    no_scm = true\n    analytics = false\n    check_update = false\n"
    )
    shutil.copy(ROOT / ".dvcignore", root / ".dvcignore")
    return root


def make_model(folder: Path) -> None:
    """The model folder that agents start from."""
    from hacpo.engines.training.warm_start import warm_start
    from hacpo.settings.agents import TinySettings, WarmupSettings

    settings = TinySettings(
        architecture="qwen3", layers=1, hidden=16, heads=2, vocabulary="characters", warmup=WarmupSettings(steps=40)
    )
    folder.mkdir(parents=True)
    warm_start("ada", settings, 1, folder)


@dataclass(frozen=True)
class Golden:
    """An undisturbed run, and the same project before it."""

    finished: Path
    fresh: Path

    @classmethod
    def make(cls, folder: Path, forks: Forks, params: str) -> Golden:
        """Train it."""
        fresh, finished = folder / "fresh", folder / "finished"
        make_model(make_project(fresh, params) / "models" / "ada")
        copy_tree(fresh, finished)
        for _ in range(2):  # a start may have come into DVC's cache since, as the equal weights of a later step
            done = hacpo(forks, finished, "run", PIPELINE, "--jobs", "1")
            assert done.code == 0, done.err
        return cls(finished, fresh)


def hacpo(forks: Forks, folder: Path, *arguments: object, **steering: str) -> Done:
    """A command of hacpo in a copy of the project."""
    return forks.run(["hacpo", *arguments], folder / "project", {**variables(folder), **steering})


# --- what must hold
# ----------------------------------------------------------------------------------------------------


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
