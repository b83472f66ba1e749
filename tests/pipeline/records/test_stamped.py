"""The stamped DVC files against params.yaml: DVC knows only of what is stamped, so a stage says where they differ."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Cli, environment
from hacpo.artifacts.layout import Layout
from hacpo.errors import BusyError
from hacpo.pipeline.locking.locks import driver_lock

FOLDER = Path("pipelines/small")
PARAMS = FOLDER / "params.yaml"


def repro(target: str = "pipelines/small/dvc.yaml") -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "repro", target], capture_output=True, text=True, env=environment(), check=False
    )
    return done.returncode, done.stdout + done.stderr


def change(old: str, new: str) -> None:
    text = PARAMS.read_text()
    assert old in text
    PARAMS.write_text(text.replace(old, new))


def resolve_command() -> list[str]:
    """The arguments of the resolve stage's command, as DVC gives them."""
    found = re.search(r"cmd: hacpo (resolve .*)", (FOLDER / "dvc.yaml").read_text())
    assert found is not None
    return found[1].split()


def test_dvc_repro_refuses_more_steps_than_are_stamped(finished_copy: Path, cli: Cli) -> None:
    said = (
        "hacpo: error: pipelines/small: its DVC files are stamped for another number of steps than params.yaml has "
        "(expected {} steps, found {}). Run `hacpo plan pipelines/small`"
    )
    change("steps: 2", "steps: 3")
    code, out = repro()
    assert code != 0
    assert said.format(3, 2) in out
    assert "prepare" not in out  # nothing was made for a step that nobody would train
    assert cli("plan", "pipelines/small").code == 0
    code, out = repro("pipelines/small/dvc.yaml:resolve")
    assert code == 0, out
    # Settings that DVC has seen before are restored from its cache without running anything, but not under these files.
    change("steps: 3", "steps: 2")
    code, out = repro()
    assert code != 0
    assert said.format(2, 3) in out
    assert cli("plan", "pipelines/small").code == 0
    code, out = repro()
    assert code == 0, out


STALE = {
    "an agent more": (
        "bo: {model: models/bo}",
        "bo: {model: models/bo}\n  cy: {model: models/bo}",
        "pipelines/small/steps/0000/dvc.yaml: is stamped from other settings than params.yaml has "
        "(expected `warmup-cy:`, found `evaluate:`)",
    ),
    "an agent less": (
        "  bo: {model: models/bo}\n",
        "",
        "pipelines/small/steps/0000/dvc.yaml: is stamped from other settings than params.yaml has "
        "(expected `evaluate:`, found `warmup-bo:`)",
    ),
    "an agent's name": (
        "  bo: {",
        "  cy: {",
        "(expected `warmup-cy:`, found `warmup-bo:`)",
    ),
    "an agent's model": (
        "model: models/bo",
        "model: models/ada",
        "(expected `- models/ada`, found `- models/bo`)",
    ),
    "an adapter": (
        "model: models/bo",
        "model: models/bo, adapter: {rank: 2}",
        "pipelines/small/steps/0002/dvc.yaml: is stamped from other settings than params.yaml has (expected "
        "`- artifacts/small/checkpoints/step=0000/agent=${item.agent}`",
    ),
    "when to evaluate": (
        "every: 2",
        "every: 1",
        "pipelines/small/steps/0001/dvc.yaml: is stamped from other settings than params.yaml has (expected "
        "`evaluate:`, found ``)",
    ),
    "a problem file": (
        "{task: arithmetic, split: train, problems: 64}",
        "{path: data/mine.parquet}",
        "pipelines/small/dvc.yaml: is stamped from other settings than params.yaml has (expected `deps:`, found "
        "`params:`)",
    ),
    "a reward function": (
        "seed: 1",
        "seed: 1\nverification: {reward: 'rewards:good'}",
        "pipelines/small/steps/0000/dvc.yaml: is stamped from other settings than params.yaml has (expected "
        "`- rewards.py`",
    ),
    "a file to extend": (
        "seed: 1",
        "extends: ../base.yaml\nseed: 1",
        "pipelines/small/dvc.yaml: is stamped from other settings than params.yaml has (expected "
        "`- pipelines/base.yaml`, found `outs:`)",
    ),
}


@pytest.mark.parametrize("case", list(STALE))
def test_whatever_else_would_be_stamped_otherwise_is_refused(project: Path, cli: Cli, case: str) -> None:
    Path("rewards.py").write_text("def good(problem, response, finish_reason):\n    return 1.0\n")
    Path("pipelines/base.yaml").write_text("seed: 7\n")
    assert cli("plan", "pipelines/small").code == 0
    command = resolve_command()
    assert cli(*command).code == 0
    settings = Path("artifacts/small/settings.json")
    before = settings.read_bytes()
    old, new, said = STALE[case]
    change(old, new)
    refused = cli(*command)
    assert refused.code == 2
    assert said in refused.error
    assert "Run `hacpo plan pipelines/small`" in refused.error
    assert settings.read_bytes() == before
    assert cli("plan", "pipelines/small").code == 0
    again = resolve_command()
    assert again != command  # so that DVC does not take it for what it has seen
    assert cli(*again).code == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seed: 1", "seed: 2"),
        ("seed: 1", "# a remark\nseed: 1"),
        ("alpha: 1.0", "alpha: 2.0"),
        ("recipe: hacpo", "recipe: gspo"),  # which does not share: the stages are the same
        ("group_size: 4", "group_size: 8"),
        ("problems: 64", "problems: 32"),
        ("samples: 2", "samples: 4"),
    ],
)
def test_what_is_stamped_alike_is_not_refused(project: Path, cli: Cli, old: str, new: str) -> None:
    assert cli("plan", "pipelines/small").code == 0
    change(old, new)
    resolved = cli(*resolve_command())
    assert resolved.code == 0, resolved.err


def test_a_step_file_that_is_gone_or_edited_is_refused(project: Path, cli: Cli) -> None:
    assert cli("plan", "pipelines/small").code == 0
    step = FOLDER / "steps/0002/dvc.yaml"
    step.write_text(step.read_text().replace("--step ${step}", "--step 1"))
    refused = cli(*resolve_command())
    assert "pipelines/small/steps/0002/dvc.yaml: is stamped from other settings" in refused.error
    assert "found `cmd: hacpo generate pipelines/small --step 1 --agent ${item.agent}`" in refused.error
    step.unlink()
    assert "(expected 2 steps, found 1)" in cli(*resolve_command()).error


def test_the_stage_by_hand_needs_no_dvc_files(project: Path, cli: Cli) -> None:
    resolved = cli("resolve", "pipelines/small")
    assert resolved.code == 0
    assert resolved.out.startswith("resolve: artifacts/small/settings.json")
    assert not (FOLDER / "dvc.yaml").exists()


def test_the_stage_by_hand_waits_for_a_run_as_all_do(finished_copy: Path, cli: Cli) -> None:
    settings = Path("artifacts/small/settings.json")
    before = settings.stat().st_mtime_ns
    change("steps: 2", "steps: 3")
    with driver_lock(Layout(Path("artifacts/small"))):
        refused = cli("resolve", "pipelines/small")
        assert refused.code == BusyError.exit_code
        assert "another run works on this pipeline" in refused.error
        assert cli("resolve", "pipelines/small", "--out", "elsewhere", "--set", "seed=7").code == 0
    assert settings.stat().st_mtime_ns == before
    assert json.loads(Path("elsewhere/settings.json").read_text())["seed"] == 7
    assert "need --out" in cli("resolve", "pipelines/small", "--set", "seed=7").error
    assert cli("resolve", "pipelines/small").code == 0
    assert json.loads(settings.read_text())["steps"] == 3


def test_the_stage_flushes_as_the_settings_say(project: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HACPO_FSYNC", raising=False)
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    assert cli("resolve", "pipelines/small").code == 0
    assert flushed != []
    flushed.clear()
    PARAMS.write_text(f"{PARAMS.read_text()}disk: {{fsync: false}}\n")
    assert cli("resolve", "pipelines/small").code == 0
    assert flushed == []


@pytest.mark.parametrize("git", [True, False])
def test_git_leaves_artifacts_alone_before_dvc_would_say_so_output_by_output(
    project: Path, cli: Cli, git: bool
) -> None:
    """A file of DVC's for git, in a folder that a stage has read by then, would be a change of what it read."""
    ignoring = Path("artifacts/.gitignore")
    if git:
        subprocess.run(["git", "init", "--quiet"], check=True)
    assert cli("plan", "pipelines/small").code == 0
    assert ignoring.exists() == git
    if git:
        assert ignoring.read_text() == "*\n"
        ignoring.write_text("mine\n")
        assert cli("plan", "pipelines/small").code == 0
        assert ignoring.read_text() == "mine\n"
