"""Kernels that repeat themselves while an update trains, and the process as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from conftest import Cli
from hacpo.engines.training.repeatable import repeatable_kernels
from tests.updates_of_processes import UPDATE

STATES = [(False, False), (True, True), (True, False)]
"""Deterministic, and whether others only warn."""


def state() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.fixture(params=STATES, ids=["off", "warning", "refusing"])
def before(request: pytest.FixtureRequest) -> Iterator[tuple[bool, bool]]:
    """What the process was set to."""
    asked: tuple[bool, bool] = request.param
    torch.use_deterministic_algorithms(asked[0], warn_only=asked[1])
    yield state()
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("device", "inside"), [("cuda", (True, True)), ("cpu", (False, True))])
@pytest.mark.parametrize("fails", [False, True])
def test_a_block_leaves_the_process_as_it_was(
    before: tuple[bool, bool], device: str, inside: tuple[bool, bool], fails: bool
) -> None:
    seen = []
    try:
        with repeatable_kernels(torch.device(device)):
            seen.append(state())
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    assert seen == [inside]
    assert state() == before


@pytest.mark.parametrize("fails", [False, True])
def test_an_update_leaves_the_process_as_it_was(
    finished_copy: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, before: tuple[bool, bool], fails: bool
) -> None:
    """On a CPU that has a GPU beside it, which the settings do not ask for."""
    if fails:
        file = finished_copy / "artifacts/small/checkpoints/step=0001/agent=ada/trainer/optimizer.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = cli(*UPDATE, "--out", finished_copy / "out", "--limit", 1, "--set", "engine.device=cpu")
    assert result.code == (4 if fails else 0), result.err
    assert state() == before
