"""Weights of one run never pass under the name of another: every reader of a checkpoint compares its policy."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Cli, environment
from hacpo.artifacts.layout import Layout
from hacpo.artifacts.weights import policy_hash

RUN = "pipelines/small"
ARTIFACTS = Path("artifacts/small")


@pytest.fixture(scope="module")
def mixed_up(tmp_path_factory: pytest.TempPathFactory, finished: Path) -> Path:
    """A project whose settings, locks and tables are those of one run, and whose checkpoints of steps 1 and 2 are of
    another: run, kept, run with another learning rate, taken back with `dvc checkout`."""
    root = tmp_path_factory.mktemp("mixed") / "project"
    shutil.copytree(finished, root, symlinks=True)
    params = root / RUN / "params.yaml"

    def command(*words: str) -> None:
        done = subprocess.run(words, cwd=root, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    params.write_text(f"{params.read_text()}retention: {{cache: none}}\n")
    command(sys.executable, "-m", "hacpo.cli", "run", RUN)
    shutil.copytree(root / RUN, root / "kept")
    params.write_text(params.read_text().replace("learning_rate: 3.0e-4", "learning_rate: 6.0e-4"))
    command(sys.executable, "-m", "hacpo.cli", "run", RUN, "--jobs", "1", "--yes")
    shutil.rmtree(root / RUN)
    (root / "kept").rename(root / RUN)
    outputs = [f"{RUN}/dvc.yaml", *(f"{RUN}/steps/{step:04d}/dvc.yaml" for step in range(3))]
    subprocess.run(  # complains that the checkpoints are not in the cache, and brings back everything else
        [sys.executable, "-m", "dvc", "checkout", "--force", "--allow-missing", *outputs],
        cwd=root,
        env=environment(),
        capture_output=True,
        check=False,
    )
    for path in (root / ARTIFACTS).rglob("*.parquet"):
        name = path.relative_to(root)
        assert path.read_bytes() == (finished / name).read_bytes(), name
    return root


@pytest.fixture
def here(mixed_up: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the root of the mixed-up project, which nothing here changes."""
    monkeypatch.chdir(mixed_up)
    return mixed_up


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (("export", RUN, "model", "--agent", "ada", "--step", 2), 2),
        (("evaluate", RUN, "--agent", "ada", "--step", 2), 2),
        (("generate", RUN, "--agent", "bo", "--step", 2), 1),
        (("update", RUN, "--agent", "ada", "--step", 2), 1),
        (("serve", RUN, "--agent", "ada"), 2),
        (("restore", RUN, "--agent", "bo", "--step", 1), 1),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_weights_of_another_run_are_refused(
    cli: Cli, here: Path, finished: Path, words: tuple[object, ...], step: int
) -> None:
    agent = words[words.index("--agent") + 1]
    right, wrong = (policy_hash(Layout(root / ARTIFACTS).checkpoint(step, str(agent))) for root in (finished, here))
    refused = cli(*words)
    assert refused.code == 4
    assert f"checkpoints/step={step:04d}/agent={agent}: its weights are not those that the files of this run" in (
        refused.error
    )
    assert f"(expected policy {right[:16]}, found {wrong[:16]})" in refused.error
    assert not Path("model").exists()


def test_status_and_audit_name_them(cli: Cli, here: Path) -> None:
    said = cli("status", RUN).out
    assert "small: 0 of 2 steps done" in said
    assert f"what comes first: hacpo update {RUN} --step 1 --agent ada)" in said
    for agent in ("ada", "bo"):
        assert f"checkpoints of {agent}: not the weights that this run's files were made with: steps 1-2" in said
    assert "policy" in cli("audit", RUN).out


def test_the_start_is_what_it_was(cli: Cli, here: Path, tmp_path: Path) -> None:
    """Both runs begin with the same weights, so step 0 is still the run's."""
    assert cli("export", RUN, tmp_path / "start", "--agent", "ada", "--step", 0).code == 0


def test_a_run_whose_metrics_note_no_policy_goes_by_its_rollouts(cli: Cli, finished_copy: Path, tmp_path: Path) -> None:
    for path in (ARTIFACTS / "metrics").rglob("*.json"):
        path.write_text(
            json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "policy"})
        )
    folders = [Layout(ARTIFACTS).checkpoint(step, "ada") for step in (1, 2)]
    shutil.copy(folders[1] / "model.safetensors", folders[0] / "model.safetensors")
    refused = cli("export", RUN, tmp_path / "model", "--agent", "ada", "--step", 1)
    assert refused.code == 4
    assert "its weights are not those that the files of this run were made with" in refused.error
    assert (
        cli("export", RUN, tmp_path / "model", "--agent", "ada", "--step", 2).code == 0
    )  # nothing says what they were


def test_status_reads_no_weights(cli: Cli, finished_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hacpo.artifacts.weights

    def refuse(folder: Path) -> str:
        raise AssertionError(f"read {folder}")

    monkeypatch.setattr(hacpo.artifacts.weights, "policy_hash", refuse)
    monkeypatch.setattr("hacpo.pipeline.policies.policy_hash", refuse)
    assert "2 of 2 steps done" in cli("status", RUN).out
