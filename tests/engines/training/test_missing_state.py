"""An update whose step before has lost its optimizer's state: refused where there must be one, and only there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from conftest import Cli
from tests.updates_of_processes import TWO, UPDATE

BEFORE = "artifacts/small/checkpoints/step=0001/agent=ada"


@pytest.mark.parametrize("processes", [[], TWO], ids=["one", "two"])
def test_an_update_does_not_begin_with_empty_averages(
    finished_copy: Path, cli: Cli, tmp_path: Path, processes: list[str]
) -> None:
    shutil.rmtree(finished_copy / BEFORE / "trainer")
    result = cli(*UPDATE, "--out", tmp_path / "out", *processes)
    assert result.code == 3
    assert f"{BEFORE}/trainer: the optimizer's state, which every update writes, is missing" in result.error
    assert "Run `hacpo update pipelines/small --step 1 --agent ada`" in result.error
    assert not (tmp_path / "out/checkpoints").exists()


def test_the_command_that_it_names_brings_the_state_back(finished_copy: Path, cli: Cli, tmp_path: Path) -> None:
    file = finished_copy / BEFORE / "trainer/optimizer.safetensors"
    was = file.read_bytes()
    shutil.rmtree(file.parent)
    assert cli("update", "pipelines/small", "--step", 1, "--agent", "ada").code == 0
    assert file.read_bytes() == was
    assert cli(*UPDATE, "--out", tmp_path / "out", "--limit", 1).code == 0


def test_a_checkpoint_that_is_missing_as_a_whole_is_said_to_be(finished_copy: Path, cli: Cli, tmp_path: Path) -> None:
    shutil.rmtree(finished_copy / BEFORE)
    result = cli(*UPDATE, "--out", tmp_path / "out")
    assert result.code == 3
    assert "the checkpoint is missing" in result.error


def test_a_start_that_brings_its_own_goes_on_from_it(finished_copy: Path, cli: Cli, tmp_path: Path) -> None:
    """A step is 4 updates; this start has 40 behind it."""
    start = finished_copy / "artifacts/small/checkpoints/step=0000/agent=ada"
    update = ["update", "pipelines/small", "--step", 1, "--agent", "ada"]
    assert not (start / "trainer").exists()
    assert cli(*update, "--out", tmp_path / "none").code == 0
    shutil.copytree(finished_copy / BEFORE / "trainer", start / "trainer")
    (start / "trainer/state.json").write_text('{"updates_done": 40}')
    assert cli(*update, "--out", tmp_path / "own").code == 0
    done = [
        json.loads((tmp_path / out / "checkpoints/step=0001/agent=ada/trainer/state.json").read_text())["updates_done"]
        for out in ("none", "own")
    ]
    assert done == [4, 44]
