"""`hacpo copy`: a variant of a run from the same start."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Cli, contents, environment
from hacpo.artifacts.layout import Layout
from hacpo.errors import SettingsError
from hacpo.pipeline.running import copying

RUN, NEW = "pipelines/small", "pipelines/new"


def test_a_variant_starts_from_the_same_weights_and_leaves_the_run_alone(cli: Cli, finished_copy: Path) -> None:
    before = contents(finished_copy)
    made = cli("copy", RUN, NEW)
    assert made.code == 0, made.err
    assert "pipelines/new/params.yaml: starts from small's step 0 of ada, bo\n" in made.out
    old, new = (Layout(Path("artifacts", name)) for name in ("small", "new"))
    for agent in ("ada", "bo"):
        start = new.checkpoint(0, agent)
        assert start.joinpath("model.safetensors").samefile(old.checkpoint(0, agent) / "model.safetensors")
    stamps = {path: path.stat().st_mtime_ns for path in new.root.rglob("checkpoints/step=0000/**/*")}
    params = Path(NEW, "params.yaml")
    assert params.read_text() == Path(RUN, "params.yaml").read_text()
    params.write_text(params.read_text().replace("alpha: 1.0", "alpha: 2.0"))
    ran = cli("run", NEW, "--jobs", 1)
    assert ran.code == 0, ran.err
    assert "warmup" not in ran.err
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert contents(finished_copy) == before
    audited = cli("audit", NEW)
    assert audited.code == 0, audited.out
    dvc = subprocess.run(
        [sys.executable, "-m", "dvc", "status"], env=environment(), capture_output=True, text=True, check=False
    )
    assert "up to date" in dvc.stdout


def test_an_edited_run_can_be_copied_and_only_other_starts_are_made_anew(cli: Cli, finished_copy: Path) -> None:
    params = Path(RUN, "params.yaml")
    params.write_text(params.read_text().replace("model: models/bo", "model: models/ada").replace("0.03", "0.04"))
    made = cli("copy", RUN, NEW)
    assert made.code == 0, made.err
    assert "step 0 of ada; bo will be warmed up anew" in made.out
    assert not Path("artifacts/new/checkpoints/step=0000/agent=bo").exists()


def test_what_a_run_extends_is_found_from_another_depth(cli: Cli, finished_copy: Path) -> None:
    params = Path(RUN, "params.yaml")
    shutil.copy(params, "base.yaml")
    params.write_text("extends: ../../base.yaml  # what all runs share\nsteps: 2\n")
    made = cli("copy", RUN, "pipelines/group/new")
    assert made.code == 0, made.err
    text = Path("pipelines/group/new/params.yaml").read_text()
    assert text == "extends: ../../../base.yaml  # what all runs share\nsteps: 2\n"


def test_refusals_leave_nothing(cli: Cli, finished_copy: Path) -> None:
    assert "pipelines/small: is there already" in cli("copy", RUN, RUN).error
    assert "is no pipeline folder" in cli("copy", RUN, "elsewhere").error
    assert not Path("elsewhere").exists()
    Path("artifacts/new/checkpoints").mkdir(parents=True)
    assert "artifacts/new: there are artifacts of such a run" in cli("copy", RUN, NEW).error
    assert not Path(NEW).exists()
    shutil.rmtree("artifacts/new")
    shutil.rmtree("artifacts/small/checkpoints/step=0000")
    refused = cli("copy", RUN, NEW)
    assert refused.code == 3
    assert "no agent's start is made and up to date" in refused.error
    assert not Path(NEW).exists()
    assert not Path("artifacts/new").exists()


def test_a_copy_that_comes_second_leaves_the_first_ones_alone(
    cli: Cli, finished_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen that there is no such folder before either makes it."""

    def other_copy_first(*_: object) -> None:
        monkeypatch.undo()
        monkeypatch.chdir(finished_copy)
        command = [sys.executable, "-m", "hacpo.cli", "copy", RUN, NEW]
        subprocess.run(command, env=environment(), capture_output=True, check=True)

    monkeypatch.setattr(copying, "check_policy", other_copy_first)
    refused = cli("copy", RUN, NEW)
    assert refused.code == SettingsError.exit_code
    assert "pipelines/new: is there already" in refused.error
    assert Path(NEW, "params.yaml").read_text() == Path(RUN, "params.yaml").read_text()
    assert "warmup" not in cli("run", NEW, "--jobs", 1, "--until", 0).err


def test_a_copy_that_fails_leaves_nothing(cli: Cli, finished_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise SettingsError("no")

    monkeypatch.setattr(copying, "_link_start", refuse)
    assert cli("copy", RUN, NEW).error == "hacpo: error: no"
    assert not Path(NEW).exists()
    assert not Path("artifacts/new").exists()


@pytest.mark.parametrize(("before", "call"), [("_params", 1), ("stamp", 1), ("_link_start", 2), ("check_policy", 3)])
def test_a_killed_copy_is_made_by_the_same_command(cli: Cli, finished_copy: Path, before: str, call: int) -> None:
    """What it leaves is no run that lacks its start: nothing else works on it."""
    code = (
        "import os, signal, sys\n"
        "from hacpo.pipeline.running import copying\n"
        f"kept, calls = copying.{before}, []\n"
        "def killed(*given):\n"
        "    calls.append(given)\n"
        f"    if len(calls) == {call}:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return kept(*given)\n"
        f"copying.{before} = killed\n"
        "from hacpo.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "copy", RUN, NEW], env=environment(), check=False)
    assert done.returncode == -signal.SIGKILL
    for words in (["run", NEW], ["plan", NEW], ["resolve", NEW], ["repair", NEW], ["copy", NEW, "pipelines/third"]):
        refused = cli(*words)
        assert refused.code == SettingsError.exit_code
        assert "pipelines/new: is a copy that is not finished. Wait for its `hacpo copy`; if that was" in refused.error
    made = cli("copy", RUN, NEW)
    assert made.code == 0, made.err
    assert "starts from small's step 0 of ada, bo\n" in made.out
    ran = cli("run", NEW, "--jobs", 1, "--until", 0)
    assert ran.code == 0, ran.err
    assert "warmup" not in ran.out + ran.err
    assert not Path(NEW, ".copying").exists()


def test_no_mark_lets_a_copy_remove_through_a_link(cli: Cli, finished_copy: Path, tmp_path: Path) -> None:
    """A run that a stranger made may look like a copy that was killed."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "notes").write_text("mine")
    Path(NEW).mkdir()
    Path(NEW, ".copying").touch()
    Path("artifacts/new").symlink_to(home)
    assert "artifacts/new: there are artifacts of such a run" in cli("copy", RUN, NEW).error
    assert (home / "notes").read_text() == "mine"
