"""Shared fixtures: the command line inside this process, and small projects with real models."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HACPO_FSYNC", "0")  # for speed; tests/artifacts/test_durability.py removes it

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"

PARAMS = """
seed: 1
steps: 2
agents:
  ada: {model: models/ada}
  bo: {model: models/bo}
algorithm:
  recipe: hacpo
  importance: {alpha: 1.0}
  clip: {own_low: 0.03, own_high: 0.03}
data:
  train: arithmetic/train
  sets:
    arithmetic/train: {task: arithmetic, split: train, problems: 64}
    arithmetic/heldout: {task: arithmetic, split: heldout, problems: 16}
sampling: {group_size: 4, max_new_tokens: 26}
batch: {prompts: 8, minibatch_prompts: 4}
optimizer: {learning_rate: 3.0e-4, micro_batch_size: 32}
engine: {device: cpu, threads: 1}
storage: {rows_per_shard: 20}
evaluation:
  every: 2
  benchmarks:
    heldout: {data: arithmetic/heldout, samples: 2, temperature: 1.0}
"""
"""Two steps of two agents in about a second, once torch is loaded."""


@dataclass
class Result:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that a user sees when a command refuses."""
        lines = [line for line in self.err.splitlines() if line.startswith("hacpo: error: ")]
        assert len(lines) == 1, f"expected one error line, got: {self.err!r}"
        assert "Traceback" not in self.err
        return lines[0]


Cli = Callable[..., Result]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that need models or a finished run: `make check` leaves them out."""
    for item in items:
        if "models" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.run)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run `hacpo ...` in the working directory, in this process."""
    from hacpo.cli import app
    from hacpo.pipeline.command_line import run_app

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        code = run_app(app, [str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Warm-started model folders `ada` (Qwen3, characters) and `bo` (Llama, numbers and words), right now and then."""
    from hacpo.engines.training.warm_start import warm_start
    from hacpo.settings.agents import TinySettings, WarmupSettings

    folder = tmp_path_factory.mktemp("models")
    for name, architecture, vocabulary in (("ada", "qwen3", "characters"), ("bo", "llama", "numbers_words")):
        settings = TinySettings(
            architecture=architecture,
            layers=1,
            hidden=48,
            initializer_range=0.1,
            heads=2,
            vocabulary=vocabulary,
            warmup=WarmupSettings(steps=300, batch_size=32, learning_rate=4e-3, drills=0.2),
        )
        (folder / name).mkdir()
        warm_start(name, settings, 1, folder / name)
    return folder


def make_project(folder: Path, models: Path, params: str = PARAMS, run: str = "small") -> Path:
    """A project with one pipeline, ready for `hacpo plan`; returns its root."""
    (folder / "pipelines" / run).mkdir(parents=True)
    (folder / "pipelines" / run / "params.yaml").write_text(params)
    (folder / "models").symlink_to(models)
    (folder / ".dvc").mkdir()
    (folder / ".dvc" / "config").write_text(
        "[core]\n    no_scm = true\n    analytics = false\n    check_update = false\n"
    )
    shutil.copy(ROOT / ".dvcignore", folder / ".dvcignore")
    return folder


def make_finished(folder: Path, models: Path, params: str = PARAMS) -> Path:
    """A project whose run `small` is complete; returns its root."""
    from hacpo.cli import app
    from hacpo.pipeline.command_line import run_app

    root, before = make_project(folder, models, params), Path.cwd()
    os.chdir(root)
    try:
        assert run_app(app, ["run", "pipelines/small", "--jobs", "1"]) == 0
    finally:
        os.chdir(before)
    return root


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """The root of a project whose run `small` is complete; read it, or copy it before changing it."""
    return make_finished(tmp_path_factory.mktemp("finished"), models)


@pytest.fixture
def project(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh project, in its root."""
    root = make_project(tmp_path / "project", models)
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def finished_copy(tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished project, in its root."""
    root = tmp_path / "copy"
    shutil.copytree(finished, root, symlinks=True)
    monkeypatch.chdir(root)
    return root


def train(cli: Cli, run: str, agents: Sequence[str], steps: int = 1) -> Path:
    """Train stage by stage, without evaluations or a report; returns the run's artifacts."""
    pipeline = f"pipelines/{run}"

    def each(*words: object) -> None:
        result = cli(*words)
        assert result.code == 0, result.err

    for name in ("resolve", "prepare"):
        each(name, pipeline)
    for agent in agents:
        each("warmup", pipeline, "--agent", agent)
    for step in range(1, steps + 1):
        for name in ("generate", "verify"):
            for agent in agents:
                each(name, pipeline, "--step", step, "--agent", agent)
        for agent in agents:
            each("pool", pipeline, "--step", step, "--learner", agent)
        each("advantage", pipeline, "--step", step)
        for agent in agents:
            each("update", pipeline, "--step", step, "--agent", agent)
    return Path("artifacts") / run


def contents(root: Path, run: str = "small") -> dict[str, bytes]:
    """Every table and checkpoint file of a run: what must be the same bytes however the run was made."""
    base = root / "artifacts" / run
    return {
        str(path.relative_to(base)): path.read_bytes()
        for path in sorted(base.rglob("*"))
        if path.is_file() and path.relative_to(base).parts[0] not in ("metrics", "report", ".locks")
    }


def environment() -> dict[str, str]:
    """For subprocesses: this project importable and `hacpo` on the path."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
