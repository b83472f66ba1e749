"""Files of a run that are there and are not what they should be, and processes that die at once: one line each."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from conftest import Cli, make_project

RUN = "pipelines/small"
ROOT = Path("artifacts/small")
READERS = [
    ("verdicts/step=0001/agent=ada", f"advantage {RUN} --step 1"),
    ("verdicts/step=0001/agent=ada", f"pool {RUN} --step 1 --learner ada"),
    ("rollouts/step=0001/agent=ada", f"verify {RUN} --step 1 --agent ada"),
    ("rollouts/step=0001/agent=bo", f"pool {RUN} --step 1 --learner ada"),
    ("capability/step=0001", f"advantage {RUN} --step 2"),
    ("prompts/step=0001", f"generate {RUN} --step 1 --agent ada"),
    ("prompts/step=0001", f"verify {RUN} --step 1 --agent ada"),
    ("pool/step=0001/learner=ada", f"update {RUN} --step 1 --agent ada"),
    ("advantages/step=0001/learner=ada", f"update {RUN} --step 1 --agent ada"),
    ("data/arithmetic/heldout.parquet", f"evaluate {RUN} --step 0 --agent ada"),
]
"""A table and a command that reads it."""


def shards(table: str) -> list[Path]:
    path = ROOT / table
    return [path] if path.is_file() else sorted(path.glob("*.parquet"))


@pytest.mark.parametrize(("table", "command"), READERS)
def test_a_table_without_rows_is_one_line(finished_copy: Path, cli: Cli, table: str, command: str) -> None:
    for shard in shards(table):
        whole = pq.read_table(shard, partitioning=None)
        shard.unlink()
        pq.write_table(whole.slice(0, 0).replace_schema_metadata(whole.schema.metadata), shard)
    refused = cli(*command.split(), "--out", "elsewhere")
    assert refused.error
    assert refused.code in (4, 5)


@pytest.mark.parametrize(("table", "command"), READERS)
def test_nobody_waits_for_a_pipe_in_the_place_of_a_table(
    finished_copy: Path, cli: Cli, table: str, command: str
) -> None:
    shard = shards(table)[0]
    shard.unlink()
    os.mkfifo(shard)
    refused = cli(*command.split(), "--out", "elsewhere")
    assert refused.code in (3, 4)
    assert str(shard) in refused.error


def test_the_audit_and_the_readers_of_metadata_say_what_is_odd(finished_copy: Path, cli: Cli) -> None:
    shard = shards("rollouts/step=0001/agent=ada")[0]
    shard.unlink()
    os.mkfifo(shard)
    assert "not a regular file" in cli("audit", RUN).out


def test_a_model_folder_with_a_link_that_leads_nowhere_is_named_before_anything_runs(
    tmp_path: Path, models: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_project(tmp_path / "project", tmp_path / "models")
    shutil.copytree(models, tmp_path / "models")
    monkeypatch.chdir(root)
    (tmp_path / "models/bo/special_tokens_map.json").symlink_to("/nowhere")
    refused = cli("run", RUN, "--jobs", "1")
    assert refused.code == 6
    assert (
        "models/bo/special_tokens_map.json: is no file of this model folder (found a link to /nowhere)" in refused.error
    )
    assert not (root / "artifacts").exists()
    shutil.rmtree(tmp_path / "models/bo")
    assert "the model folder is missing" in cli("run", RUN, "--jobs", "1").error
    assert not (root / "artifacts").exists()


def test_a_link_that_dvc_cannot_follow_is_named(
    tmp_path: Path, models: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that belongs to no model is left alone by everything but DVC, which hashes the folder."""
    root = make_project(tmp_path / "project", tmp_path / "models")
    shutil.copytree(models, tmp_path / "models")
    monkeypatch.chdir(root)
    (tmp_path / "models/ada/notes.txt").symlink_to("/nowhere")
    refused = cli("run", RUN, "--jobs", "1")
    assert refused.code == 4
    assert "models/ada/notes.txt: cannot be read: No such file or directory. Put it in its place" in refused.error


def test_status_points_to_the_run(finished_copy: Path, cli: Cli) -> None:
    assert "next: nothing, all outputs are there" in cli("status", RUN).out
    params = Path(RUN, "params.yaml")
    params.write_text(params.read_text().replace("seed: 1", "seed: 2"))
    said = cli("status", RUN).out
    assert f"next: hacpo run {RUN} repeats what depends on the settings below" in said
    assert "params.yaml has changed since: seed 1 -> 2" in said
    shutil.rmtree(ROOT)
    said = cli("status", RUN).out
    assert f"next: hacpo run {RUN} (alone, what comes first: hacpo resolve {RUN})" in said
    assert "disk:" not in said


@pytest.mark.parametrize("file", ["dvc.yaml", "steps/0001/dvc.yaml"])
@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_dvc_file_that_is_no_text_is_stamped_anew(finished_copy: Path, cli: Cli, file: str, command: str) -> None:
    damaged = Path(RUN, file)
    before = damaged.read_bytes()
    damaged.write_bytes(before[:40] + b"\xff" + before[40:])
    stamped = cli("resolve", RUN, "--stamped", "0")
    assert stamped.code == 2
    assert f"{damaged}: is stamped from other settings than params.yaml has" in stamped.error
    said = cli(command, RUN)
    assert said.code == 0, said.err
    assert damaged.read_bytes() == before


def test_status_passes_over_what_holds_no_settings_and_no_numbers(finished_copy: Path, cli: Cli) -> None:
    metrics = [ROOT / f"metrics/{stage}/step=0001/ada.json" for stage in ("generate", "update", "verify")]
    for path, content in zip(metrics, ('{"rollouts": ', "[1]", '{"accuracy": "high"}'), strict=True):
        path.unlink()
        path.write_text(content)
    (ROOT / "metrics/advantage/step=0001/all.json").write_text("[1]")
    (ROOT / "settings.json").unlink()
    (ROOT / "settings.json").write_text("[1]")
    said = cli("status", RUN)
    assert said.code == 0, said.err
    assert "artifacts/small/settings.json is not readable" in said.out
    assert "32" in said.out  # rollouts of step 2 alone
    assert "not readable as JSON" in cli("prepare", RUN).error


def test_a_file_that_goes_while_a_folder_is_measured_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hacpo.artifacts.storage import disk_bytes

    for name in ("stays", "goes"):
        (tmp_path / name).write_bytes(b"1234")
    real, looked = os.stat, set()

    def stat(path: str | Path, **options: bool) -> os.stat_result:
        if Path(path).name == "goes":
            if path in looked:
                raise FileNotFoundError(path)
            looked.add(path)
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert disk_bytes(tmp_path) in (4, 8)
    assert disk_bytes(tmp_path) == 4


def test_an_unknown_run_is_told_which_there_are(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_project(tmp_path / "project", tmp_path))
    assert "Did you mean pipelines/small?" in cli("status", "pipelines/smal").error
    assert "The runs here are pipelines/small" in cli("status", "pipelines/zzz").error
    for number in range(9):
        Path(f"pipelines/r{number}").mkdir()
        Path(f"pipelines/r{number}/params.yaml").write_text("seed: 1")
    assert "pipelines/r7 and 2 more" in cli("status", "pipelines/zzz").error
    (Path(RUN) / "params.yaml").unlink()
    (Path(RUN) / "params.yaml").mkdir()
    assert "pipelines/small?" not in cli("status", RUN).error


def test_what_is_wrong_with_many_pipelines_is_said_once(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_project(tmp_path / "project", tmp_path)
    monkeypatch.chdir(root)
    for number in range(4):
        shutil.copytree(RUN, f"pipelines/group/r{number}")
    result = cli("plan", "--check", "pipelines/group")
    assert result.code == 1
    said = result.out.splitlines()
    missing = [line for line in said if "models/ada: the model folder is missing" in line]
    assert len(missing) == 1
    assert missing[0].startswith("error (4 pipelines): agents.ada.model: ")
    assert "pipelines/group/r0: only what is wrong with several, below" in said
    assert said[-1] == "4 pipelines, 4 with errors"
