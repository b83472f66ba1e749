"""examples/extending: a stage with a table, an engine and a task, in a copy of the checkout, run and audited."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from conftest import ROOT, environment

EXAMPLE = ROOT / "examples/extending"
PATCHES = sorted(EXAMPLE.glob("*.patch"))
RUN = Path("artifacts/extended")
AGENTS = """
agents:
  ada: {tiny: null, model: models/ada}
  bo: {tiny: null, model: models/bo}
"""
"""In place of the warm starts."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """A copy of the checkout with the example in it."""
    copy = tmp_path_factory.mktemp("extended") / "project"
    for folder in ("hacpo", "stages", "pipelines/smoke"):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", *PATCHES], cwd=copy, check=True, env={**os.environ, "GIT_CEILING_DIRECTORIES": "/"})
    shutil.copytree(EXAMPLE / "files", copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "pipelines/extended/params.yaml").open("a") as params:
        params.write(AGENTS)
    (copy / "models").symlink_to(models)
    shutil.copy(ROOT / ".dvcignore", copy)
    (copy / ".dvc").mkdir()
    (copy / ".dvc/config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
    return copy


def command(checkout: Path, *words: str) -> str:
    """What a command of the copy prints; it must end well."""
    variables = environment() | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=checkout, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout + done.stderr


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_each_is_an_edit_in_at_most_two_files_that_fits(patch: Path) -> None:
    subprocess.run(["git", "apply", "--check", patch], cwd=ROOT, check=True)
    assert 1 <= patch.read_text().count("\n+++ ") <= 2


@pytest.mark.slow
def test_a_run_has_all_three(checkout: Path) -> None:
    command(checkout, "hacpo.cli", "run", "pipelines/extended", "--jobs", "1")
    prompts = pl.read_parquet(checkout / RUN / "prompts/**/*.parquet", hive_partitioning=False)
    assert prompts["problem"].str.contains(r"^max\(\d+,\d+,\d+\)=\?$").all()
    settings = json.loads((checkout / RUN / "settings.json").read_text())
    assert settings["engine"]["name"] == "one_by_one"
    rows = pl.read_parquet(checkout / RUN / "agreement/step=0001/agent=ada/*.parquet", hive_partitioning=False)
    verdicts = pl.read_parquet(checkout / RUN / "verdicts/step=0001/agent=ada/*.parquet", hive_partitioning=False)
    assert rows["problem_id"].to_list() == prompts["problem_id"].to_list()
    for row in rows.to_dicts():
        given = verdicts.filter(problem_id=row["problem_id"])["extracted"]
        counts = given.drop_nulls().value_counts()["count"]
        most = counts.max() if len(counts) else 0
        assert (row["responses"], row["answers"], row["agreement"]) == (4, len(counts), most / 4)

    audited = command(checkout, "hacpo.cli", "audit", "pipelines/extended", "--deep")
    assert "8 agreement" in audited  # 2 agents x 4 prompts
    assert "extended: no finding" in audited
    assert "values of agreement" in audited

    made = (checkout / RUN / "agreement/step=0001/agent=bo/part-00000.parquet").read_bytes()
    shutil.rmtree(checkout / RUN / "agreement")
    assert "Stage 'pipelines/extended/steps/0001/dvc.yaml:agreement@bo'" in command(
        checkout, "dvc", "repro", "pipelines/extended/dvc.yaml"
    )
    assert (checkout / RUN / "agreement/step=0001/agent=ada").is_dir()
    stage = "pipelines/extended/steps/0001/dvc.yaml:agreement@bo"
    again = command(checkout, "dvc", "repro", "--force", "--single-item", stage)
    assert "> hacpo agreement pipelines/extended --step 0001 --agent bo" in again
    assert (checkout / RUN / "agreement/step=0001/agent=bo/part-00000.parquet").read_bytes() == made

    place = next((checkout / RUN / "agreement/step=0001/agent=ada").glob("*.parquet"))
    pl.read_parquet(place).drop("answers").write_parquet(place)
    damaged = subprocess.run(
        [sys.executable, "-m", "hacpo.cli", "audit", "pipelines/extended"],
        cwd=checkout,
        env=environment() | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert damaged.returncode != 0
    assert "agreement/step=0001/agent=ada" in damaged.stdout
