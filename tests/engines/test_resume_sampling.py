"""A killed `generate` or `evaluate` draws only what it had not saved, and ends with the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import Cli, contents
from hacpo.engines.transformers import TransformersEngine

BLOCKS = "engine.save_every=8"


class Killed(BaseException):
    """Stands for a kill: nothing catches it on its way out."""


def interrupted(monkeypatch: pytest.MonkeyPatch, after: int | None) -> list[int]:
    """Count the requests of each block that is drawn, and die before the one after `after`."""
    drawn: list[int] = []
    sample = TransformersEngine.sample

    def counting(self: TransformersEngine, requests: Any, *options: Any) -> Any:
        if len(drawn) == after:
            raise Killed
        drawn.append(len(requests))
        return sample(self, requests, *options)

    monkeypatch.setattr(TransformersEngine, "sample", counting)
    return drawn


@pytest.mark.parametrize("stage", ["generate", "evaluate"])
def test_only_what_is_missing_is_drawn_again(
    finished_copy: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    step = 1 if stage == "generate" else 2
    command = [stage, "pipelines/small", "--step", step, "--agent", "ada", "--set", BLOCKS, "--out"]
    assert cli(*command, tmp_path / "whole").code == 0

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        drawn = interrupted(patch, after=2)
        with pytest.raises(Killed):
            cli(*command, out)
        assert drawn == [8, 8]
    saved = sorted((out / ".saved").rglob("*.parquet"))
    assert len(saved) == 2
    assert not (out / "rollouts").exists()
    assert not (out / "evaluations").exists()
    saved[0].write_bytes(saved[0].read_bytes()[:-7])  # a damaged block counts as missing

    with monkeypatch.context() as patch:
        drawn = interrupted(patch, after=None)
        assert cli(*command, out).code == 0
        assert drawn == [8, 8, 8]  # 32 requests: one block was saved whole
    table = "rollouts" if stage == "generate" else "evaluations"
    for path in sorted((tmp_path / "whole" / table).rglob("*.parquet")):
        assert (out / path.relative_to(tmp_path / "whole")).read_bytes() == path.read_bytes()
    assert not list((out / ".saved").rglob("*.parquet"))


def test_what_was_drawn_otherwise_is_not_taken_over(
    finished_copy: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["generate", "pipelines/small", "--step", 1, "--agent", "ada", "--set", BLOCKS, "--out", tmp_path / "out"]
    with monkeypatch.context() as patch:
        interrupted(patch, after=2)
        with pytest.raises(Killed):
            cli(*command)
    drawn = interrupted(monkeypatch, after=None)
    assert cli(*command, "--set", "sampling.temperature=0.5").code == 0
    assert drawn == [8, 8, 8, 8]


def test_saved_blocks_stay_out_of_what_the_run_consists_of(finished: Path) -> None:
    assert not [name for name in contents(finished) if ".saved" in name]
