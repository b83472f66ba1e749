"""Shared fixtures: the command line inside this process, and small projects with real models."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.small_project import PARAMS, ROOT, SHARED, make_finished, make_models, make_project
from tests.tampering import Sandbox

__all__ = ["PARAMS", "ROOT", "SHARED", "make_finished", "make_project"]

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HACPO_FSYNC", "0")  # for speed; tests/artifacts/test_durability.py removes it


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
    from hacpo.pipeline.execution.command_line import run_app

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        code = run_app(app, [str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Warm-started model folders `ada` (Qwen3, characters) and `bo` (Llama, numbers and words), right now and then."""
    return make_models(tmp_path_factory.mktemp("models"))


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


@pytest.fixture(scope="module")
def damaged(finished: Path) -> Path:
    """The finished project that `sandbox` is a copy of; a module that wants another has a fixture of this name."""
    return finished


@pytest.fixture(scope="module")
def _copies() -> dict[Path, Sandbox]:
    return {}


@pytest.fixture
def sandbox_of(
    _copies: dict[Path, Sandbox], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Path], Sandbox]]:
    """Makes a copy of a finished project, in its root; one for a whole module, put back after every test."""
    used = []

    def copy_of(project: Path) -> Sandbox:
        if project not in _copies:
            root = tmp_path_factory.mktemp("sandbox") / "project"
            shutil.copytree(project, root, symlinks=True)
            _copies[project] = Sandbox(root)
        used.append(_copies[project])
        monkeypatch.chdir(used[-1].root)
        return used[-1]

    yield copy_of
    for copy in used:
        copy.restore()


@pytest.fixture
def sandbox(sandbox_of: Callable[[Path], Sandbox], damaged: Path) -> Sandbox:
    """`sandbox_of` the module's finished project."""
    return sandbox_of(damaged)


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
