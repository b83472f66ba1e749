"""What `hacpo run` prints at its end: held-out results, as the evaluations' tables have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.views.progress import print_outcome

METRICS, TABLES = Path("artifacts/small/metrics/evaluate"), Path("artifacts/small/evaluations")


def with_settings(pipeline: Pipeline, block: str, **changes: Any) -> Pipeline:
    changed = getattr(pipeline.settings, block).model_copy(update=changes)
    return Pipeline(pipeline.folder, pipeline.settings.model_copy(update={block: changed}))


def printed(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> str:
    print_outcome(pipeline, {})
    return capsys.readouterr().out


def test_results_are_the_same_from_what_a_stage_noted_and_from_its_table(
    finished_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = {"heldout": ["avg", "pass@1", "best", "maj"]}  # pass@1 stands in no metrics file
    pipeline = with_settings(Pipeline.open(Path("pipelines/small")), "evaluation", metrics=metrics)
    noted = printed(pipeline, capsys)
    assert all(title in noted for title in ("heldout (", "heldout pass@1", "heldout best@2", "heldout maj@2"))
    shutil.rmtree(METRICS)
    assert printed(pipeline, capsys) == noted


def test_without_its_table_an_evaluation_was_not_made(finished_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(TABLES / "step=0002")
    assert "not evaluated since" in printed(Pipeline.open(Path("pipelines/small")), capsys)


def test_a_mean_of_grades_is_the_tables(finished_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graded = with_settings(Pipeline.open(Path("pipelines/small")), "verification", reward="grades.py:grade")
    before = printed(graded, capsys)
    assert "heldout, mean reward" in before
    for file in METRICS.rglob("*.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"heldout.accuracy": 0.123}))
    assert printed(graded, capsys) == before
