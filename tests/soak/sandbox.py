"""Small real runs to attack: two agents with different tokenizers, three steps, evaluations, retention.

A `Template` is made once: the project before anything has run, after some steps, and finished without a disturbance,
which is what every attacked copy must end as. A `Sandbox` is a copy that belongs to one trial.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.small_project import PARAMS, ROOT, RUN, changed, make_project

from . import processes
from .golden import Golden
from .zygote import Zygote, is_for

PIPELINE = f"pipelines/{RUN}"
_PARAMS = changed(
    PARAMS,
    """
steps: 3
agents:
  bo:
    model: null
    tiny:
      {architecture: llama, layers: 1, hidden: 48, heads: 2, initializer_range: 0.1, vocabulary: numbers_words,
       warmup: {steps: 30, batch_size: 16, learning_rate: 6.0e-3}}
data:
  sets:
    arithmetic/train: {problems: 32}
    arithmetic/heldout: {problems: 8}
sampling: {max_new_tokens: 20}
batch: {prompts: 4, minibatch_prompts: 2}
engine: {save_every: 4}
storage: {rows_per_shard: 10}
evaluation:
  every: 1
  benchmarks:
    heldout: {samples: 1}
""",
)
_PRUNED = "retention: {keep_last: 1, keep_best: heldout}\n"
KINDS = {"kept": _PARAMS, "pruned": _PARAMS + _PRUNED, "remade": changed(_PARAMS, "optimizer: {learning_rate: 6.0e-4}")}
"""Kinds of runs: their params.yaml. `pruned`, because `dvc repro` behaves otherwise where checkpoints went; `remade` is
a `kept` one whose learning rate is changed on its way: what it has trained is to be trained again."""
STEPS = 3
_MINUTES = 10.0


@dataclass(frozen=True)
class Ended:
    """What a command did."""

    command: tuple[str, ...]
    code: int | None
    """None: it did not end in time, and was killed."""
    output: str


def hacpo(*words: str) -> list[str]:
    """A hacpo command."""
    return [sys.executable, "-m", "hacpo.cli", *words]


def dvc(*words: str) -> list[str]:
    """A DVC command."""
    return [sys.executable, "-m", "dvc", *words]


def drivers(kind: str, jobs: int = 2) -> dict[str, list[str]]:
    """The two ways to go on with a run, as docs/retention.md gives them."""
    missing = ["--allow-missing"] if kind == "pruned" else []
    return {
        "run": hacpo("run", PIPELINE, "--jobs", str(jobs), *(["--yes"] if kind == "remade" else [])),
        "repro": dvc("repro", *missing, f"{PIPELINE}/dvc.yaml"),
    }


@dataclass
class Sandbox:
    """A project of one trial; everything that is started in it carries its mark."""

    folder: Path
    kind: str
    golden: Golden
    zygote: Zygote | None = None
    """What forks commands; without one they are new interpreters."""
    log_name: str = "log.txt"

    @property
    def root(self) -> Path:
        """The project."""
        return self.folder / "project"

    @property
    def log(self) -> Path:
        """Commands and what they printed."""
        return self.folder / self.log_name

    def start(self, command: Sequence[str], **variables: str) -> processes.Started:
        """Start a command in a session of its own."""
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        all_variables = environment() | {"TMPDIR": str(temporary)} | variables
        zygote = self.zygote if is_for(command) else None
        return processes.start(command, self.root, self.log, all_variables, str(self.folder), zygote)

    def call(self, command: Sequence[str], minutes: float = _MINUTES, **variables: str) -> Ended:
        """Run a command to its end."""
        with self.start(command, **variables) as started:
            try:
                code: int | None = started.process.wait(minutes * 60)
            except subprocess.TimeoutExpired:
                code = None
        return Ended(tuple(command), code, started.output())


def environment() -> dict[str, str]:
    """This project importable, its commands on the path, one thread to a process."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **{name: value for name, value in os.environ.items() if name not in ("DVC_STAGE", "PYTEST_CURRENT_TEST")},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
    }


class Template:
    """What sandboxes are copies of, made in `folder` when it is first asked for; parts that run one after another share
    it. Leave it as a context manager to end the processes that it keeps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._golden: dict[str, Golden] = {}
        self._zygotes: dict[int, Zygote] = {}
        self._guard = threading.Lock()

    @staticmethod
    @functools.cache
    def of(work: Path) -> Template:
        """The one below a folder for sandboxes."""
        return Template(work / "template")

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        while self._zygotes:
            self._zygotes.popitem()[1].close()

    def zygote(self) -> Zygote:
        """One of the calling thread's own."""
        if threading.get_ident() not in self._zygotes:
            self._zygotes[threading.get_ident()] = Zygote(self.folder, environment())
        return self._zygotes[threading.get_ident()]

    def golden(self, kind: str) -> Golden:
        """An undisturbed run of a kind.

        Raises:
            RuntimeError: an undisturbed command failed.
        """
        with self._guard:
            if not (self.folder / "models").is_dir():
                _make_models(self.folder / "models")
            if kind not in self._golden:
                self._golden[kind] = self._make_run(kind)
            return self._golden[kind]

    def _make_run(self, kind: str) -> Golden:
        base = self.folder / kind
        project = base / "0" / "project"
        shutil.rmtree(base, ignore_errors=True)
        make_project(project, None, KINDS[kind])
        shutil.copytree(self.folder / "models", project / "models")
        self._must(Sandbox(base / "0", kind, Golden(), self.zygote()), hacpo("plan", PIPELINE))
        for step in range(1, STEPS + 1):
            copy_tree(base / str(step - 1), base / str(step))
            until = [] if step == STEPS else ["--until", str(step)]
            self._must(
                Sandbox(base / str(step), kind, Golden(), self.zygote()), [*drivers(kind, jobs=1)["run"], *until]
            )
        finished = Sandbox(base / str(STEPS), kind, Golden(), self.zygote())
        status = finished.call(dvc("status")).output
        return Golden.of(finished.root, RUN, status)

    @staticmethod
    def _must(sandbox: Sandbox, command: Sequence[str]) -> None:
        ended = sandbox.call(command)
        if ended.code != 0:
            raise RuntimeError(f"undisturbed, {' '.join(command)} ended with {ended.code}:\n{ended.output}")

    def copy(self, folder: Path, kind: str, steps: int = 0) -> Sandbox:
        """A sandbox of which so many steps are done."""
        golden, before = self.golden(kind), "kept" if kind == "remade" else kind
        self.golden(before)
        copy_tree(self.folder / before / str(steps) / "project", folder / "project")
        (folder / "project" / PIPELINE / "params.yaml").write_text(KINDS[kind])
        return Sandbox(folder, kind, golden, self.zygote())


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder. Names of one file are names of one file again: DVC's cache has checkpoints by hard link, and lacks
    a start that is one with the user's model folder."""
    made: dict[int, str] = {}

    def copy(old: str, new: str) -> None:
        first = made.setdefault(os.stat(old).st_ino, new)
        shutil.copy2(old, new) if first == new else os.link(first, new)

    shutil.copytree(source, target, symlinks=True, copy_function=copy)


def _make_models(folder: Path) -> None:
    """A warm-started model folder, right now and then, so that rewards are not all alike."""
    code = (
        "import sys; from pathlib import Path; from tests.small_project import make_models\n"
        "make_models(Path(sys.argv[1]), ['ada'])\n"
    )
    making = folder.with_name("making")
    shutil.rmtree(making, ignore_errors=True)
    made = subprocess.run(
        [sys.executable, "-c", code, str(making)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise RuntimeError(made.stderr)
    making.rename(folder)
