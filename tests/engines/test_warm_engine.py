"""When an engine is loaded, woken, started anew or given up, with an engine whose weights are one number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hacpo.engines.vllm.warm_engine import Resident
from hacpo.errors import ModelError
from hacpo.settings.engine import EngineSettings

SETTINGS = EngineSettings(name="vllm", dtype="float32")


class Tokenizer:
    vocabulary_size = 10
    stop_token_ids = (1,)

    def render(self, name: str, messages: object) -> list[int]:
        return [5, 6]


class Scorer:
    """The training stack: every log-probability is the number in the folder's name."""

    def __init__(self, folder: Path) -> None:
        self.value = float(folder.name)

    def score(self, sequences: Sequence[Any], **_: object) -> list[Any]:
        return [np.full(len(response), self.value, dtype=np.float32) for _, response in sequences]


class Engine:
    """Gives log-probability `held`, plus what is wrong with it."""

    remedy = "turn it off and on again"
    longest = 40

    def __init__(self, folder: Path, log: list[str]) -> None:
        self.log = log
        self.held, self.sleeps, self.copies, self.stuck = float(folder.name), True, 1, False
        log.append(f"start {folder}")

    def load(self, folder: Path) -> None:
        self.log.append(f"load {folder}")
        if not self.stuck:
            self.held = float(folder.name)

    def probe(self, token_ids: Sequence[int]) -> list[Any]:
        assert len(token_ids) == self.longest - 1  # one new token must fit
        return [np.full(len(token_ids) - 1, self.held + 10 * copy) for copy in range(self.copies)]

    def sample(self, *_: object) -> list[Any]:
        return []

    def sleep(self) -> bool:
        self.log.append("sleep")
        return self.sleeps

    def close(self) -> None:
        self.log.append("close")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def at(log: list[str], tmp_path: Path) -> Callable[[str], Engine]:
    """Bring the engine to the weights of a folder; `at.resident` is whose engine it is."""
    resident = Resident(SETTINGS, lambda folder, eos: Engine(folder, log))

    def bring(folder: str) -> Any:
        path = Path(folder)
        return resident.at(path, f"policy of {folder}", Tokenizer(), Scorer(path), tmp_path)

    bring.resident = resident  # type: ignore[attr-defined]
    return bring


def facts(resident: Resident) -> tuple[float, float]:
    return resident.metrics["vllm_starts"], resident.metrics["vllm_reloads"]


def test_the_same_weights_are_loaded_once(at: Any, log: list[str]) -> None:
    at("-1")
    assert facts(at.resident) == (1, 0)
    at("-1")
    assert facts(at.resident) == (0, 0)
    assert log == ["start -1"]


def test_other_weights_are_loaded_into_the_same_engine(at: Any, log: list[str]) -> None:
    first = at("-1")
    assert at("-2") is first
    assert (facts(at.resident), at.resident.metrics["vllm_probe_difference"]) == ((0, 1), 0.0)
    assert log == ["start -1", "load -2"]


def test_an_engine_that_rested_loads_again_whatever_it_held(at: Any, log: list[str]) -> None:
    at("-1")
    at.resident.release_memory()
    at.resident.release_memory()  # it sleeps already
    at("-1")
    assert facts(at.resident) == (0, 1)
    assert log == ["start -1", "sleep", "load -1"]


def test_an_engine_that_does_not_sleep_keeps_its_weights(at: Any, log: list[str]) -> None:
    at("-1").sleeps = False
    at.resident.release_memory()
    at("-1")
    assert facts(at.resident) == (0, 0)


def test_weights_that_stayed_as_they_were_cost_a_new_start(at: Any, log: list[str], capsys: Any) -> None:
    at("-1").stuck = True
    assert at("-3").held == -3
    assert facts(at.resident) == (1, 1)
    assert log == ["start -1", "load -3", "close", "start -3"]
    assert "after the reload vLLM is off by 2 nats a token" in capsys.readouterr().err


def test_a_load_that_fails_costs_a_new_start(at: Any, log: list[str], capsys: Any, monkeypatch: Any) -> None:
    def refuse(folder: Path) -> None:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(at("-1"), "load", refuse)
    at("-2")
    assert log == ["start -1", "close", "start -2"]
    assert "could not take over the weights" in capsys.readouterr().err


@pytest.mark.parametrize(("wrong", "found"), [("copies", "10"), ("nan", "nan")])
def test_an_engine_that_is_wrong_from_the_start_draws_nothing(
    at: Any, log: list[str], monkeypatch: Any, wrong: str, found: str
) -> None:
    """A second copy that is off by 10 counts, and so does a difference that is no number."""

    class Wrong(Engine):
        def __init__(self, folder: Path, log: list[str]) -> None:
            super().__init__(folder, log)
            self.copies = 2 if wrong == "copies" else 1
            self.held = float("nan") if wrong == "nan" else self.held

    monkeypatch.setattr(at.resident, "start", lambda folder, eos: Wrong(folder, log))
    with pytest.raises(ModelError) as refused:
        at("-1")
    assert f"found {found}). Turn it off and on again" in str(refused.value)
    assert (at.resident.engine, at.resident.policy) == (None, "")
    assert log == ["start -1", "close"]
