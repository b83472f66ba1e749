"""Cosines between own and cross gradients: by hand, and against an update of a finished run."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.study.cosine import compared, cosine, main, rows
from benchmarks.study.gradients import Gradients, gradients_of, halves
from hacpo.errors import ArtifactError
from hacpo.pipeline.project import Pipeline
from tests.conftest import Cli


def parts(*vectors: tuple[float, float]) -> np.ndarray:
    """[problems' half, responses' half, parameter]."""
    return np.array(vectors, dtype=np.float64).reshape(2, 2, 2)


def test_columns_by_hand() -> None:
    own = parts((1, 0), (0, 1), (1, 0), (0, 1))
    cross = parts((1, 0), (0, 0), (0, 0), (1, 0))
    (found,) = compared(Gradients({"ada": own, "bo": cross}, {"ada": 1.0, "bo": 0.5}), "ada")
    # Own (2, 2), cross (2, 0): cosine 4 / (sqrt(8) x 2).
    assert found["cosine"] == pytest.approx(1 / math.sqrt(2))
    assert (found["own_norm"], found["cross_norm"]) == (pytest.approx(math.sqrt(8)), 2.0)
    # Halves of responses: own (2, 0) and (0, 2), cross (1, 0) and (1, 0): cosines 1, 1, 0, 0.
    assert found["control"] == 0.0
    assert found["cosine_halves"] == 0.5
    assert found["cross_control"] == 1.0
    # Halves of problems: own (1, 1) twice, cross (1, 0) twice.
    assert found["control_problems"] == pytest.approx(1.0)
    assert found["cosine_problems"] == pytest.approx(1 / math.sqrt(2))
    assert (found["other"], found["cross_live"]) == ("bo", 0.5)


def test_nothing_has_no_angle() -> None:
    assert cosine(np.zeros(2), np.ones(2)) is None
    own, nothing = parts((1, 0), (0, 1), (1, 0), (0, 1)), parts(*[(0, 0)] * 4)
    (found,) = compared(Gradients({"bo": nothing, "ada": own}, {"ada": 1.0, "bo": 0.0}), "ada")
    assert [found[name] for name in ("cosine", "cosine_halves", "cosine_problems", "cross_control")] == [None] * 4
    assert found["control"] == 0.0


def test_halves_are_even_and_depend_on_the_seed_alone() -> None:
    problem = [f"p{number // 6}" for number in range(24)]
    source = ["ada" if number % 6 < 4 else "bo" for number in range(24)]
    by_problem, by_response = halves(problem, source, 1)
    for name in set(problem):
        rows_of = [row for row in range(24) if problem[row] == name]
        assert len(set(by_problem[rows_of])) == 1
        for who, half in (("ada", 2), ("bo", 1)):
            assert sum(by_response[row] for row in rows_of if source[row] == who) == half
    assert by_problem.sum() == 12
    assert (halves(problem, source, 1) == np.stack([by_problem, by_response])).all()
    assert any((halves(problem, source, seed)[1] != by_response).any() for seed in (2, 3))


@pytest.mark.slow
def test_the_parts_add_up_to_the_updates_own_gradient(finished_copy: Path, cli: Cli) -> None:
    pipeline = Pipeline.open(Path("pipelines/small"))
    gradients = gradients_of(pipeline, "ada", 2)
    # One update of all responses of the step (`select: rescue` leaves U = 8 / 8 where sharing has 2, and which
    # responses it would choose is told by `advantage`, which is not repeated here).
    changes = ("--set", "batch.minibatch_prompts=8", "--set", "algorithm.rollouts.select=rescue")
    done = cli("update", "pipelines/small", "--step", "2", "--agent", "ada", "--out", "elsewhere", *changes)
    assert done.code == 0, done.err
    (noted,) = Path("elsewhere").rglob("metrics/update/*/ada.json")
    metrics = json.loads(noted.read_text())
    assert metrics["updates"] == 1
    whole = sum(part.sum(axis=(0, 1)) for part in gradients.parts.values())
    assert np.linalg.norm(whole) == pytest.approx(metrics["grad_norm"], rel=1e-5)


INTO = Path("results/cosines.parquet")


def look(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["cosine", "pipelines/small", "--into", str(INTO), *words])
    main()


@pytest.mark.slow
def test_a_table_of_a_run_that_grows(finished_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look(monkeypatch, "--steps", "1")
    look(monkeypatch, "--steps", "1", "2", "--agents", "bo")
    look(monkeypatch, "--steps", "1", "--agents", "ada", "--set", "algorithm.clip.cross=none")
    table = pq.read_table(INTO).to_pylist()
    assert [(row["run"], row["agent"], row["step"], row["other"]) for row in table] == [
        ("small", "ada", 1, "bo"),
        ("small", "bo", 1, "ada"),
        ("small", "bo", 2, "ada"),
        ("small algorithm.clip.cross=none", "ada", 1, "bo"),
    ]
    stored, unclipped = table[0], table[-1]
    for name in ("own_norm", "control", "control_problems"):
        assert stored[name] == unclipped[name], name
    assert unclipped["cross_live"] > stored["cross_live"]
    assert all(row["own_norm"] > 0 and -1 <= row["control"] <= 1 for row in table)


@pytest.mark.slow
def test_what_cannot_be_looked_at_is_said_in_one_line(finished_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, said in (
        (["--agents", "eve"], r"no such agent \(expected ada, bo, found eve\)"),
        (["--steps", "9"], "no checkpoint from which one of these updates began is there"),
        (["--set", "algorithm.clip.crass=none"], "unknown key 'algorithm.clip.crass'"),
        (["--set", "algorithm.recipe=gspo"], "agents learn from their own responses alone"),
        (["--into", "pipelines/small/params.yaml"], "params.yaml: "),
    ):
        with pytest.raises(SystemExit, match=f"^cosine: error: .*{said}"):
            look(monkeypatch, *words)
    params = Path("pipelines/small/params.yaml")
    params.write_text(params.read_text().replace("alpha: 1.0", "alpha: 2.0"))
    with pytest.raises(SystemExit, match=r"^cosine: error: .*has changed since the settings were resolved"):
        look(monkeypatch)
    assert not INTO.exists()


@pytest.mark.slow
def test_a_checkpoint_that_is_gone_or_anothers(finished_copy: Path) -> None:
    pipeline = Pipeline.open(Path("pipelines/small"))
    checkpoints = Path("artifacts/small/checkpoints")
    weights = "agent=ada/model.safetensors"
    shutil.copyfile(checkpoints / "step=0002" / weights, checkpoints / "step=0001" / weights)
    with pytest.raises(ArtifactError, match=r"rollouts are not of the checkpoint before .*within 0\.001 of 1"):
        gradients_of(pipeline, "ada", 2)
    shutil.rmtree(checkpoints / "step=0001" / "agent=ada")
    assert [row["step"] for row in rows(pipeline, ["ada"], [1, 2])] == [1]
