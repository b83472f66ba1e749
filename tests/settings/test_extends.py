"""Settings files that extend another, and runs grouped in folders: through plan, run and DVC."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from conftest import PARAMS, Cli, environment
from hacpo.errors import SettingsError
from hacpo.pipeline.project import Pipeline
from hacpo.settings import params as settings_of

CHILD = """
extends: ../base.yaml
seed: 2
algorithm: {recipe: gspo}
"""


@pytest.fixture
def grouped(project: Path) -> Path:
    """The project with the run `pair/own`, which extends pipelines/pair/base.yaml."""
    folder = project / "pipelines" / "pair"
    (folder / "own").mkdir(parents=True)
    (folder / "base.yaml").write_text(PARAMS)
    (folder / "own" / "params.yaml").write_text(CHILD)
    return project


def test_the_nearer_file_wins_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "far.yaml").write_text("a: {x: 1, y: 2, z: {p: 1}}\nb: [1, 2]\nc: 3\n")
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "mid.yaml").write_text("extends: ../far.yaml\na: {y: 3}\nb: [4]\n")
    (tmp_path / "near" / "params.yaml").write_text("extends: mid.yaml\na: {z: {q: null}, x: null}\nd: null\n")
    path = tmp_path / "near" / "params.yaml"
    # x is left out, y comes from the middle, z keeps p; lists are replaced; a null with nothing to leave out stays.
    assert settings_of.read_params(path) == {"a": {"y": 3, "z": {"p": 1, "q": None}}, "b": [4], "c": 3, "d": None}
    assert [file.name for file in settings_of.files(path)] == ["params.yaml", "mid.yaml", "far.yaml"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("extends: ../nowhere.yaml\n", "extends a file that is not there"),
        ("extends: params.yaml\n", "extend each other in a circle"),
        ("extends: [a]\n", "extends: expected a path relative to this file"),
        ("extends: ''\n", "extends: expected a path relative to this file"),
    ],
)
def test_a_base_that_cannot_be_used_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=says):
        settings_of.read_params(path)


def test_a_grouped_run_that_extends_a_file(grouped: Path, cli: Cli) -> None:
    assert cli("run", "pipelines/pair/own", "--jobs", 1, "--until", 1).code == 0
    layout = Pipeline.open(Path("pipelines/pair/own")).layout
    settings = json.loads(layout.settings.read_text())
    assert (settings["seed"], settings["algorithm"]["rollouts"]["share"]) == (2, False)
    assert layout.root == Path("artifacts/pair/own")
    assert layout.checkpoint(1, "ada").is_dir()
    # DVC sees the same: nothing to do, until the file that is extended changes.
    again = dvc("repro", "pipelines/pair/own/steps/0001/dvc.yaml", "-s")
    assert "up to date" in again, again
    base = grouped / "pipelines" / "pair" / "base.yaml"
    base.write_text(base.read_text().replace("alpha: 1.0", "alpha: 2.0"))
    assert "pipelines/pair/base.yaml" in dvc("status", "pipelines/pair/own/dvc.yaml")
    refused = cli("advantage", "pipelines/pair/own", "--step", 1)
    assert "has changed since the settings were resolved" in refused.error


def test_a_run_inside_another_is_refused(grouped: Path, cli: Cli) -> None:
    (grouped / "pipelines" / "pair" / "params.yaml").write_text(PARAMS)
    assert "lies inside another run" in cli("plan", "pipelines/pair/own").error


def test_names_that_cannot_be_runs(grouped: Path, cli: Cli) -> None:
    folder = grouped / "pipelines" / "pair" / "steps"
    folder.mkdir()
    (folder / "params.yaml").write_text(CHILD)
    assert "'steps' cannot be in the name of a run" in cli("plan", "pipelines/pair/steps").error
    assert "is no pipeline folder" in cli("plan", "pipelines").error


def test_a_base_outside_the_project_is_refused(grouped: Path, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "outside.yaml").write_text(PARAMS)
    path = grouped / "pipelines" / "pair" / "own" / "params.yaml"
    path.write_text("extends: ../../../../outside.yaml\n")
    assert "extends a file outside the project" in cli("plan", "pipelines/pair/own").error


def dvc(*arguments: str) -> str:
    result = subprocess.run(["dvc", *arguments], capture_output=True, text=True, env=environment(), check=False)
    return result.stdout + result.stderr


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("pipelines/pair/owm", "there is no params.yaml. Did you mean pipelines/pair/own?"),
        ("pipelines/pair", "It holds 1 runs; name one, for example pipelines/pair/own"),
        ("small", "is no pipeline folder (expected <project>/pipelines/<run>). Did you mean pipelines/small?"),
        ("pipelines/zzz", "there is no params.yaml. The runs here are pipelines/pair/own, pipelines/small"),
    ],
)
def test_a_wrong_folder_names_what_may_have_been_meant(grouped: Path, cli: Cli, folder: str, says: str) -> None:
    assert says in cli("plan", folder).error


def test_set_merges_a_block_as_extends_does(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(PARAMS)
    clip = settings_of.load(path, ["algorithm.clip = {own_low: 0.2}"]).algorithm.clip
    assert (clip.own_low, clip.own_high) == (0.2, 0.03)  # own_high as the file has it, not as the recipe does
    with pytest.raises(SettingsError, match=r"params.yaml with --set algorithm.importance.alpha=x: .*valid number"):
        settings_of.load(path, ["algorithm.importance.alpha=x"])
