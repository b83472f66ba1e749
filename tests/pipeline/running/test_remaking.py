"""`hacpo run` says which finished steps it would train again, and does it only when told to."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import PARAMS as SETTINGS
from conftest import Cli, contents, environment, make_finished

RUN = "pipelines/small"
PARAMS = Path(RUN, "params.yaml")


def edit(old: str, new: str) -> None:
    text = PARAMS.read_text()
    assert old in text
    PARAMS.write_text(text.replace(old, new))


def everything(root: Path) -> dict[str, bytes]:
    """The run's artifacts, report and metrics too, and its pipeline folder."""
    return {
        str(path): path.read_bytes()
        for base in (root / "artifacts", root / "pipelines")
        for path in sorted(base.rglob("*"))
        if path.is_file() and ".locks" not in path.parts
    }


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("own_low: 0.03", "own_low: 0.04", "algorithm.clip.own_low (0.03 -> 0.04) has changed"),
        ("max_new_tokens: 26", "max_new_tokens: 25", "agents.ada.sampling.max_new_tokens (26 -> 25) has changed"),
    ],
)
def test_a_changed_setting_is_asked_about_before_anything_is_written(
    cli: Cli, finished_copy: Path, old: str, new: str, reason: str
) -> None:
    edit(old, new)
    before = everything(finished_copy)
    refused = cli("run", RUN)
    assert refused.code == 10
    assert "pipelines/small: steps 1-2 of ada, bo would be trained again, and 4 checkpoints (" in refused.error
    assert f"overwritten, because {reason}. Add --yes" in refused.error
    assert everything(finished_copy) == before
    assert cli("run", RUN, "--jobs", 1, "--until", 0).code == 10
    said = cli("run", RUN, "--jobs", 1, "--yes")
    assert said.code == 0, said.err
    assert "steps 1-2 of ada, bo are trained again" in said.err
    assert "everything is done" in cli("run", RUN).err


def test_a_changed_file_is_asked_about_before_a_checkpoint_is_touched(cli: Cli, finished_copy: Path) -> None:
    models = finished_copy / "models"
    shutil.copytree(models.resolve(), finished_copy / "own")
    models.unlink()
    (finished_copy / "own").rename(models)
    (models / "ada" / "config.json").write_text((models / "ada" / "config.json").read_text() + "\n")
    before = contents(finished_copy)
    refused = cli("run", RUN)
    assert refused.code == 10
    assert "overwritten, because models/ada has changed" in refused.error
    assert contents(finished_copy) == before


def test_where_nobody_shares_only_those_are_named_whose_training_differs(
    cli: Cli, tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = SETTINGS.replace("recipe: hacpo", "recipe: gspo").replace("steps: 2", "steps: 1")
    root = make_finished(tmp_path / "project", models, alone)
    monkeypatch.chdir(root)
    Path("models").unlink()
    shutil.copytree(models, "models")
    config = Path("models/bo/config.json")
    config.write_text(config.read_text() + "\n")
    refused = cli("run", RUN)
    assert refused.code == 10
    assert "step 1 of bo would be trained again, and 1 checkpoint (" in refused.error
    config = Path("models/ada/config.json")
    config.write_text(config.read_text() + "\n")
    assert "step 1 of ada, bo would be trained again, and 2 checkpoints (" in cli("run", RUN).error


def test_checkpoints_of_another_run_are_not_overwritten_unasked(cli: Cli, finished_copy: Path) -> None:
    folder = Path("artifacts/small/checkpoints/step=0001/agent=ada")
    shutil.copy(folder.parents[1] / "step=0002/agent=ada/model.safetensors", folder)
    before = contents(finished_copy)
    refused = cli("run", RUN)
    assert refused.code == 10
    assert f"because {folder} is not what this run has made" in refused.error
    assert contents(finished_copy) == before


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "alpha: 1.0",
            "alpha: 2.0",
            "trace of ada with algorithm.importance.alpha 1.0, not 2.0",
        ),
        # Which problems there are stands in no table of a step.
        (
            "split: train, problems: 64",
            "split: train, problems: 48",
            "ada's rollouts were drawn from another checkpoint than step 1 has made",
        ),
    ],
)
def test_a_run_that_is_half_another_is_not_a_whole_one(
    cli: Cli, finished_copy: Path, tmp_path: Path, old: str, new: str, reason: str
) -> None:
    whole = cli("status", RUN)
    assert "2 of 2 steps done" in whole.out
    assert "other settings" not in whole.out
    edit(old, new)
    stopped = cli("run", RUN, "--jobs", 1, "--until", 1, "--yes")
    assert stopped.code == 0, stopped.err
    found = f"step 2 made with other settings, or of another training, than the rest ({reason})"
    assert found in stopped.out
    said = cli("status", RUN)
    assert "small: 1 of 2 steps done" in said.out
    assert "next: hacpo run pipelines/small" in said.out
    assert found in said.out
    for refused in (
        cli("export", RUN, tmp_path / "model", "--agent", "ada", "--step", 2),
        cli("compare", RUN, RUN),
    ):
        assert refused.code == 4
        assert f"pipelines/small: {found}. Finish it: `hacpo run pipelines/small`" in refused.error
    assert cli("export", RUN, tmp_path / "model", "--agent", "ada", "--step", 1).code == 0
    assert cli("report", RUN).code == 0
    page = (finished_copy / "artifacts/small/report/index.html").read_text()
    assert "in progress: 1 of 2 steps" in page
    assert "This is no single run: step 2 made with other settings" in page


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "prompts: 8",
            "prompts: 80",
            "batch.prompts: a step takes 80 prompts, and arithmetic/train has 64 problems; lower it, or give it more "
            "problems (data.sets.arithmetic/train)",
        ),
        (
            "max_new_tokens: 26",
            "max_new_tokens: 96",
            "agents.ada.sampling.max_new_tokens: 96 leaves agent ada no room for a prompt within the 96 tokens of its "
            "model's context; lower it (1 more: `hacpo plan pipelines/small --check`)",
        ),
        pytest.param(
            "device: cpu",
            "device: cuda",
            "engine.device is cuda, but torch sees no GPU. Set engine.device to auto or cpu",
            marks=pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there may be a GPU"),
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_asked_or_written(
    cli: Cli, finished_copy: Path, old: str, new: str, reason: str
) -> None:
    edit(old, new)
    before = everything(finished_copy)
    for answer in ((), ("--yes",)):
        refused = cli("run", RUN, *answer)
        assert refused.code == 2
        assert refused.error == f"hacpo: error: pipelines/small/params.yaml: {reason}"
    assert everything(finished_copy) == before
    checked = cli("plan", "--check", RUN)
    assert checked.code == 1
    assert f"{RUN}: error: {reason.split(' (1 more', maxsplit=1)[0]}" in checked.out


def test_settings_that_no_stage_reads_make_no_step_another(cli: Cli, finished_copy: Path) -> None:
    edit("steps: 2", "steps: 3\nretention: {keep_last: 1}\ndisk: {fsync: false}\nreport: {problems_per_step: 1}")
    assert cli("resolve", RUN).code == 0
    said = cli("status", RUN)
    assert "small: 2 of 3 steps done" in said.out
    assert "other settings" not in said.out


def test_what_loses_nothing_is_not_asked_about(cli: Cli, finished_copy: Path) -> None:
    kept = contents(finished_copy)
    edit("steps: 2", "steps: 3")
    PARAMS.write_text(PARAMS.read_text() + "retention: {keep_last: 3}\n")
    shutil.rmtree("artifacts/small/pool/step=0001")
    assert cli("run", RUN, "--jobs", 1).code == 0
    made = contents(finished_copy)
    assert {name: made[name] for name in kept if name.startswith("checkpoints")} == {
        name: content for name, content in kept.items() if name.startswith("checkpoints")
    }


def test_an_agreed_run_goes_on_unasked_after_a_stop(cli: Cli, finished_copy: Path) -> None:
    edit("learning_rate: 3.0e-4", "learning_rate: 6.0e-4")
    assert cli("run", RUN, "--jobs", 1, "--yes", "--until", 1).code == 0
    assert not [*finished_copy.rglob("remaking*")]  # it is this user's word, and not for whoever is given the run
    assert cli("run", RUN, "--jobs", 1).code == 0
    edit("learning_rate: 6.0e-4", "learning_rate: 3.0e-4")
    assert cli("run", RUN, "--jobs", 1).code == 10


@pytest.mark.parametrize(("answer", "code"), [("n", 10), ("y", 0)])
def test_a_terminal_is_asked(finished_copy: Path, answer: str, code: int) -> None:
    edit("learning_rate: 3.0e-4", "learning_rate: 6.0e-4")
    before = contents(finished_copy)
    own, its = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "hacpo.cli", "run", RUN, "--jobs", "1"],
        stdin=its, stdout=subprocess.DEVNULL, stderr=its, env=environment(),
    ) as process:  # fmt: skip
        os.close(its)
        said = b""
        while b"Do it? [y/N]" not in said:
            said += os.read(own, 1024)
        os.write(own, f"{answer}\n".encode())
        try:
            while said_more := os.read(own, 1024):
                said += said_more
        except OSError:  # the other end is closed
            pass
    os.close(own)
    assert process.returncode == code, said
    assert said.count(b"would be trained again") == 1
    assert (b"small: nothing was changed" in said) == (answer == "n")
    assert (contents(finished_copy) == before) == (answer == "n")


def test_a_run_made_shorter_says_what_is_left(finished_copy: Path, cli: Cli) -> None:
    params = Path("pipelines/small/params.yaml")
    params.write_text(params.read_text().replace("steps: 2", "steps: 1"))
    said = "made while `steps` was larger: steps 2; they are kept, and the run's again once it is"
    assert said in cli("run", "pipelines/small").out
    assert said in cli("status", "pipelines/small").out
    params.write_text(params.read_text().replace("steps: 1", "steps: 2"))
    assert "made while" not in cli("run", "pipelines/small").out
