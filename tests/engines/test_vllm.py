"""What vLLM is started with, without starting it (tests/engines/test_vllm_pipeline.py does)."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from conftest import PARAMS, Cli
from hacpo.engines.vllm import local as vllm
from hacpo.engines.vllm.local import command_line, engine_arguments, environment
from hacpo.settings.engine import EngineSettings


def test_vllm_that_is_not_installed_is_one_line(project: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    params = Path("pipelines/small/params.yaml")
    params.write_text(PARAMS.replace("engine: {device", "engine: {name: vllm, device"))
    monkeypatch.setitem(sys.modules, "vllm", None)
    for command in (("resolve",), ("prepare",), ("warmup", "--agent", "ada")):
        assert cli(command[0], "pipelines/small", *command[1:]).code == 0
    refused = cli("generate", "pipelines/small", "--step", 1, "--agent", "ada")
    assert refused.code == 6
    assert "vLLM: not installed" in refused.error
    assert "set engine.name to transformers" in refused.error
    assert "vLLM: not installed" in cli("serve", "pipelines/small", "--agent", "ada").error


@pytest.mark.parametrize(
    ("parallel", "cores", "bound"),
    [
        ({}, [0, 1], "nobind"),
        ({"tensor_parallel": 2}, [0, 1], "0|1"),
        # a rank of each copy, in vLLM's order: copies, then tensor-parallel ranks; 9 cores over 4, one is left
        ({"tensor_parallel": 2, "data_parallel": 2}, [0, 1, 2, 3, 8, 9, 10, 11, 12], "0,1|2,3|8,9|10,11"),
    ],
)
def test_processes_on_a_cpu_have_their_own_cores(
    parallel: dict[str, int], cores: list[int], bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "cpu_cores", lambda: cores)
    settings = EngineSettings.model_validate({"name": "vllm_server", "vllm": parallel})
    assert environment(settings)["VLLM_CPU_OMP_THREADS_BIND"] == bound
    assert environment(settings)["VLLM_ENABLE_V1_MULTIPROCESSING"] == ("1" if parallel else "0")


def test_options_of_a_server_are_those_of_an_engine() -> None:
    settings = EngineSettings.model_validate(
        {"name": "vllm_server", "dtype": "bfloat16", "vllm": {"enforce_eager": True}}
    )
    words = command_line(engine_arguments(settings))
    options = dict(itertools.pairwise(words))
    assert options["--dtype"] == "bfloat16"
    assert options["--logprobs-mode"] == "processed_logprobs"
    assert options["--generation-config"] == "vllm"
    assert options["--worker-extension-cls"] == "hacpo.engines.vllm.worker_extension.CheckpointReload"
    assert options["--enforce-eager"].startswith("--")  # a switch, without a value
    assert "--max-model-len" not in words  # null: vLLM reads the model's own
