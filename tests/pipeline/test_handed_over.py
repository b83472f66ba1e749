"""A run that a stranger has handed over as docs/sharing.md says, with more in it than a run has."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Cli, environment


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A file that nobody else may read."""
    path = tmp_path / "id_rsa"
    path.write_text("a private key")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["update", "pipelines/small", "--step", "2", "--agent", "ada"],
        ["generate", "pipelines/small", "--step", "2", "--agent", "ada"],
        ["export", "pipelines/small", "exported", "--agent", "ada", "--step", "1"],
    ],
)
def test_a_link_in_a_checkpoint_is_refused(finished_copy: Path, cli: Cli, private: Path, words: list[str]) -> None:
    """Else the file would be in the next checkpoint, and in whatever is exported or shared of it."""
    checkpoints = finished_copy / "artifacts" / "small" / "checkpoints"
    (checkpoints / "step=0001" / "agent=ada" / "LICENSE.txt").symlink_to(private)
    newest = checkpoints / "step=0002" / "agent=ada"
    before = sorted(newest.iterdir())
    result = cli(*words)
    assert result.code == 6
    assert "LICENSE.txt: is no file of this checkpoint (found a link to" in result.error
    assert sorted(newest.iterdir()) == before
    assert not Path("exported").exists()


def test_a_link_in_a_start_is_not_copied_with_the_run(finished_copy: Path, cli: Cli, private: Path) -> None:
    start = finished_copy / "artifacts" / "small" / "checkpoints" / "step=0000" / "agent=ada"
    linked = start / "tokenizer.json"
    private.write_bytes(linked.read_bytes())  # else the start is not the recorded one, and not taken over
    linked.unlink()
    linked.symlink_to(private)
    result = cli("copy", "pipelines/small", "pipelines/next")
    assert "tokenizer.json: is no file of this checkpoint" in result.error
    assert not Path("artifacts/next/checkpoints/step=0000/agent=ada").exists()


def test_a_saved_checkpoint_takes_a_models_files_alone(models: Path, tmp_path: Path, private: Path) -> None:
    from hacpo.engines.models.checkpoint import load_model, save_model
    from hacpo.settings.engine import EngineSettings

    like, target = tmp_path / "like", tmp_path / "target"
    shutil.copytree(models / "ada", like)
    target.mkdir()
    (like / "LICENSE.txt").symlink_to(private)
    (like / "notes.txt").write_text("no model's file")
    (like / "NOTICE").write_text("free")
    save_model(load_model(like, EngineSettings(device="cpu")), target, like=like)
    names = {path.name for path in target.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "NOTICE"} <= names
    assert not {"LICENSE.txt", "notes.txt"} & names


@pytest.mark.parametrize("way", ["console script", "module"])
def test_no_file_beside_the_pipelines_is_imported(finished_copy: Path, way: str) -> None:
    """Workers are `python -c`, which looks for modules in the working directory first."""
    for name in ("multiprocessing", "sympy", "tqdm"):
        (finished_copy / f"{name}.py").write_text("open('run_by_a_stranger', 'w').close()\n")
    words = ["run", "pipelines/small", "--jobs", "2"]
    hacpo = [str(Path(sys.executable).with_name("hacpo"))] if way == "console script" else [sys.executable, "-P"]
    hacpo += [] if way == "console script" else ["-m", "hacpo.cli"]
    done = subprocess.run([*hacpo, *words], capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert not (finished_copy / "run_by_a_stranger").exists()
