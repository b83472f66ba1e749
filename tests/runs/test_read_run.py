"""`hacpo.read_run`: every table of docs/artifacts.md by its name, whatever else lies beside them."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest

import hacpo
from hacpo.errors import ArtifactError

RUN = Path("artifacts/small")


def test_the_prompts_of_all_steps_are_the_schedule(finished_copy: Path) -> None:
    run = hacpo.read_run(RUN)
    assert list(run)[:3] == ["problems", "schedule", "prompts"]
    assert run["prompts"].equals(run["schedule"].filter(pl.col("step") <= 2))
    assert run["prompts"].height == 16  # 2 steps x 8 prompts


def test_folders_of_other_names_are_no_parts_of_a_table(finished_copy: Path) -> None:
    before = hacpo.read_run(RUN)
    tables, rollouts = list(before), before["rollouts"]
    for name in ("step=x", "step=1", "step=-001", "step=0001 (copy)", "step="):
        (RUN / "rollouts" / name / "agent=ada").mkdir(parents=True)
    after = hacpo.read_run(RUN)
    assert list(after) == tables
    assert after["rollouts"].equals(rollouts)


def test_a_schedule_that_names_no_run_is_refused_in_one_line(finished_copy: Path) -> None:
    path = RUN / "schedule.parquet"
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    with pytest.raises(ArtifactError) as refused:
        hacpo.read_run(RUN)
    assert str(refused.value) == f"{path}: does not say which run it is of (expected hacpo.run)"
