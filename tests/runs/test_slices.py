"""Stages made in slices, by several processes: the bytes of one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from conftest import Cli
from hacpo.artifacts.layout import Layout
from tests.small_project import PARAMS, changed

RUN = Path("artifacts/small")
BY_DEFAULT = "{steps: 1, engine: {save_every: 12}, evaluation: {every: 1}}"
"""32 rollouts are files of 20 and 12, and blocks of 12, 12 and 8: a slice's rows begin within a block."""
STAGES = {
    "generate --agent ada": "rollouts/step=0001/agent=ada",
    "verify --agent ada": "verdicts/step=0001/agent=ada",
    "pool --learner bo": "pool/step=0001/learner=bo",
    "evaluate --agent bo": "evaluations/step=0001/agent=bo",
}


@pytest.fixture
def small(project: Path, cli: Cli) -> Path:
    """A project whose run is done."""
    Path("pipelines/small/params.yaml").write_text(changed(PARAMS, BY_DEFAULT))
    ran = cli("run", "pipelines/small")
    assert ran.code == 0, ran.err
    return project


def files(table: Path) -> dict[str, bytes]:
    """A table's files."""
    return {path.name: path.read_bytes() for path in table.iterdir()}


def numbers(stage: str) -> dict[str, float]:
    """A stage's metrics but for how long it took, and what it needed."""
    words = stage.split()
    metrics = json.loads(Layout(RUN).metrics(words[0], 1, words[2]).read_text())
    return {key: value for key, value in metrics.items() if "seconds" not in key and "memory" not in key}


@pytest.mark.parametrize("stage", STAGES)
def test_slices_make_the_bytes_of_one_process(small: Path, cli: Cli, stage: str) -> None:
    name, *whose = stage.split()
    command, table = (name, "pipelines/small", "--step", 1, *whose), RUN / STAGES[stage]
    whole, told = files(table), numbers(stage)
    assert len(whole) > 1
    shutil.rmtree(table)
    for part in (2, 0, 1):  # of three slices one has no file
        made = cli(*command, "--shard", f"{part}/3")
        assert made.code == 0, made.err
        assert not table.exists()
    assert numbers(stage) == told  # untouched
    slices = sorted(path.name for path in (RUN / ".slices").rglob("*.parquet"))
    assert slices == sorted(whole)
    ended = cli(*command)
    assert ended.code == 0, ended.err
    assert files(table) == whole
    assert numbers(stage) == told
    assert not (RUN / ".slices").exists()
    assert not (RUN / ".saved").exists()


def test_what_a_slice_has_left_undone_is_made_and_what_is_of_other_inputs_is_not_taken(small: Path, cli: Cli) -> None:
    verify = ("verify", "pipelines/small", "--step", 1, "--agent", "ada")
    table = RUN / "verdicts/step=0001/agent=ada"
    whole = files(table)
    assert cli(*verify, "--shard", "1/2").code == 0
    (half,) = (RUN / ".slices").rglob("*.parquet")
    made_at = half.stat().st_ino
    assert cli(*verify).code == 0
    assert files(table) == whole
    assert (table / half.name).stat().st_ino == made_at  # put in place as it was
    assert cli(*verify, "--shard", "1/2").code == 0
    (half,) = (RUN / ".slices").rglob("*.parquet")
    half.write_bytes(b"of other rollouts than those that lie there now")
    rollouts = RUN / "rollouts/step=0001/agent=ada/part-00001.parquet"
    shutil.copy(rollouts, "copy")
    Path("copy").replace(rollouts)
    assert cli(*verify).code == 0
    assert files(table) == whole
    assert not (RUN / ".slices").exists()


def test_a_slice_that_there_is_none_of_is_refused(project: Path, cli: Cli) -> None:
    assert cli("resolve", "pipelines/small").code == 0
    for shard in ("2/2", "1", "-1/2", "x/y", "0/0"):
        refused = cli("verify", "pipelines/small", "--step", 1, "--agent", "ada", f"--shard={shard}")
        assert refused.code == 2
        assert f"--shard is no part of a step (expected i/n with i from 0 to n - 1, found {shard})" in refused.error
