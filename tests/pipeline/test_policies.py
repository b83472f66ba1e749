"""Weights of one run never pass under the name of another: every reader of a checkpoint compares its policy."""

from __future__ import annotations

import hashlib
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


def _mixed_up(root: Path, finished: Path, first: dict[str, str], second: dict[str, str]) -> Path:
    """A project whose settings, locks and tables are those of one run, and whose checkpoints are of another: run, kept,
    run with other settings, taken back with `dvc checkout`. Both are texts of params.yaml -> what stands there."""
    shutil.copytree(finished, root, symlinks=True)
    for name in ("ada", "bo"):
        shutil.copytree(finished / f"models/{name}", root / f"others/{name}")
    config, template = root / "others/ada/config.json", root / "others/bo/chat_template.jinja"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 500}))
    template.write_text(template.read_text() + "{# another #}")
    params = root / RUN / "params.yaml"

    def command(*words: str) -> None:
        done = subprocess.run(words, cwd=root, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def change(texts: dict[str, str]) -> None:
        for before, after in texts.items():
            assert before in params.read_text()
            params.write_text(params.read_text().replace(before, after))

    params.write_text(f"{params.read_text()}retention: {{cache: none}}\n")
    change(first)
    command(sys.executable, "-m", "hacpo.cli", "run", RUN, "--yes")
    shutil.copytree(root / RUN, root / "kept")
    tables = {path: path.read_bytes() for path in (root / ARTIFACTS).rglob("*.parquet")}
    change(second)
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
    for path, content in tables.items():
        assert path.read_bytes() == content, path
    return root


@pytest.fixture(scope="module")
def mixed_up(tmp_path_factory: pytest.TempPathFactory, finished: Path) -> Path:
    """Mixed up with a run of another learning rate: other weights at steps 1 and 2."""
    other = {"learning_rate: 3.0e-4": "learning_rate: 6.0e-4"}
    return _mixed_up(tmp_path_factory.mktemp("mixed") / "project", finished, {}, other)


@pytest.fixture(scope="module")
def same_weights(tmp_path_factory: pytest.TempPathFactory, finished: Path) -> Path:
    """Mixed up with a run of models with the same weights, another config (ada) and chat template (bo); at such a
    learning rate no weight changes."""
    nothing = {"learning_rate: 3.0e-4": "learning_rate: 1.0e-30"}
    other = {"models/ada": "others/ada", "models/bo": "others/bo"}
    return _mixed_up(tmp_path_factory.mktemp("same") / "project", finished, nothing, other)


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
        assert f"checkpoints of {agent}: not those that this run's files were made with: steps 1-2" in said
    assert "policy" in cli("audit", RUN).out


@pytest.mark.parametrize(
    ("words", "step", "agent"),
    [
        (("export", RUN, "model", "--agent", "ada", "--step", 1), 1, "ada"),
        (("evaluate", RUN, "--agent", "bo", "--step", 2), 2, "bo"),
        (("generate", RUN, "--agent", "ada", "--step", 2), 1, "ada"),
        (("update", RUN, "--agent", "bo", "--step", 2), 1, "bo"),
        (("pool", RUN, "--learner", "bo", "--step", 1), 0, "bo"),
        (("serve", RUN, "--agent", "ada"), 2, "ada"),
        (("restore", RUN, "--agent", "bo", "--step", 1), 1, "bo"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_the_same_weights_with_another_config_or_template_are_refused(
    cli: Cli, same_weights: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], step: int, agent: str
) -> None:
    monkeypatch.chdir(same_weights)
    folder = Layout(ARTIFACTS).checkpoint(step, agent)
    assert policy_hash(folder) == policy_hash(same_weights / "models" / agent)
    refused = cli(*words)
    assert refused.code == 4
    assert f"{folder}: its config, generation config, tokenizer or chat template is not the one that the" in (
        refused.error
    )
    wanted, found = (_summed(at) for at in (Path("models", agent), folder))
    assert f"(expected policy_config {wanted[:16]}, found {found[:16]})" in refused.error
    assert not Path("model").exists()


def _summed(folder: Path) -> str:
    """What docs/artifacts.md says: `sha256sum` of the files without weights and README, by name, summed."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".json", ".jinja"))
    lines = "".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    return hashlib.sha256(lines.encode()).hexdigest()


def test_status_and_audit_name_another_config(cli: Cli, same_weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(same_weights)
    said = cli("status", RUN).out
    assert "small: 0 of 2 steps done" in said
    for agent in ("ada", "bo"):
        assert f"checkpoints of {agent}: not those that this run's files were made with: steps 0-2" in said
    assert "policy_config" in cli("audit", RUN).out


def test_a_run_whose_metrics_note_no_config_is_read_as_before(cli: Cli, finished_copy: Path, tmp_path: Path) -> None:
    for path in (ARTIFACTS / "metrics").rglob("*.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in content.items() if key != "policy_config"}))
    assert cli("export", RUN, tmp_path / "model", "--agent", "ada", "--step", 2).code == 0
    assert "policy_config" not in cli("audit", RUN).out


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
