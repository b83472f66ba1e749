"""LoRA adapters by numbers: what they add, how they start, how they are merged, and which layers can have one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hacpo.artifacts.weights import base_of, policy_hash
from hacpo.engines.models.adapter import adapter_of, check_adapter, load_adapter, resolve_targets, settle_adapter
from hacpo.engines.models.checkpoint import copy_model_folder, load_model, save_model
from hacpo.engines.models.merge import merge_into, merged_folder
from hacpo.errors import ArtifactError, ModelError, SettingsError
from hacpo.settings.agents import AdapterSettings, TinySettings, WarmupSettings
from hacpo.settings.engine import EngineSettings

FLOAT32 = EngineSettings(device="cpu")
SETTINGS = AdapterSettings(rank=4, alpha=8)
WHERE = "agents.ada.adapter"
TOKENS = torch.arange(3, 23)[None]


@pytest.fixture
def base(models: Path, tmp_path: Path) -> Path:
    """Step 0's checkpoint of an agent."""
    folder = tmp_path / "checkpoints/step=0000/agent=ada"
    folder.mkdir(parents=True)
    copy_model_folder(models / "ada", folder)
    return folder


def adapted(base: Path, settings: AdapterSettings = SETTINGS, engine: EngineSettings = FLOAT32, seed: int = 1) -> Any:
    model = load_model(base, engine)
    settle_adapter(model, settings, step=1, before=base, base=Path("a/b/step=0000/agent=ada"), seed=seed, where=WHERE)
    return model


def trained(base: Path, engine: EngineSettings = FLOAT32) -> tuple[Any, Path]:
    """A model with an adapter that does something, and its checkpoint."""
    model = adapted(base, engine=engine)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    folder = base.parents[1] / "step=0001/agent=ada"
    folder.mkdir(parents=True)
    save_model(model, folder, like=base)
    return model, folder


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(TOKENS).logits
    return result


def test_a_new_adapter_changes_nothing_and_alone_is_trained(base: Path) -> None:
    model = adapted(base)
    assert torch.equal(logits(model), logits(load_model(base, FLOAT32)))
    model(TOKENS).logits.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
        assert (parameter.grad is not None) == (".lora_" in name)


def test_a_is_drawn_from_the_seed_and_the_layer_alone(base: Path) -> None:
    """Uniform in +-1/sqrt(48 inputs) = +-0.1443, the standard deviation 0.1443 / sqrt(3) = 0.0833."""

    def drawn(seed: int) -> dict[str, torch.Tensor]:
        return {name: value for name, value in adapted(base, seed=seed).named_parameters() if ".lora_A." in name}

    before = torch.get_rng_state()
    one, same, other = drawn(1), drawn(1), drawn(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    query, key = (one[f"model.layers.0.self_attn.{name}.lora_A.default.weight"] for name in ("q_proj", "k_proj"))
    assert not torch.equal(query, key)
    wide = torch.cat([value.flatten() for value in one.values() if value.shape[1] == 48])
    assert wide.abs().max() <= 48**-0.5
    assert wide.std().item() == pytest.approx(48**-0.5 / 3**0.5, rel=0.05)


def test_what_an_adapter_adds_by_hand(base: Path) -> None:
    """y = W x + alpha / rank * B A x, with alpha / rank = 8 / 4 = 2."""
    model, _ = trained(base)
    layer = model.model.layers[0].mlp.gate_proj
    x = torch.linspace(-1, 1, 48)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    wanted = layer.base_layer.weight @ x + 2.0 * (b @ (a @ x))
    assert torch.allclose(layer(x), wanted, atol=1e-6)
    assert (2.0 * (b @ (a @ x))).abs().max() > 0.01


def test_a_checkpoint_holds_the_adapter_alone_and_loads_to_the_same_bits(base: Path) -> None:
    model, folder = trained(base)
    assert torch.equal(logits(load_model(folder, FLOAT32)), logits(model))
    assert sorted(file.name for file in folder.glob("*.safetensors")) == ["adapter_model.safetensors"]
    # Seven layers of the one block: q, k, v, o 48 x 48; gate, up 48 x 192, down 192 x 48.
    count = sum(tensor.numel() for tensor in load_file(folder / "adapter_model.safetensors").values())
    assert count == 4 * (4 * (48 + 48) + 3 * (48 + 192))
    assert base_of(folder) == (folder / "../../step=0000/agent=ada", policy_hash(base))


def test_the_policy_is_of_size_base_and_weights(base: Path) -> None:
    _, folder = trained(base)
    hashes = {policy_hash(folder)}
    for name, key, value in (("adapter_config.json", "lora_alpha", 9), ("adapter_base.json", "policy", "0" * 64)):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {key: value}))
        hashes.add(policy_hash(folder))
    assert len(hashes) == 3
    assert policy_hash(base) not in hashes


def test_merged_weights_give_the_same_logits(base: Path, tmp_path: Path) -> None:
    """The embeddings are tied to the head, and stay tied."""
    model, folder = trained(base)
    with merged_folder(folder, tmp_path / "merged/agent=ada", FLOAT32) as whole:
        assert {file.name for file in whole.iterdir()} == {file.name for file in base.iterdir()}
        found = logits(load_model(whole, FLOAT32))
    assert not (tmp_path / "merged").exists()
    wanted = logits(model)
    # Measured: 5e-7 of the largest logit.
    assert (found - wanted).abs().max() < 2e-6 * wanted.abs().max()
    assert (found - logits(load_model(base, FLOAT32))).abs().max() > 0.1
    with merged_folder(base, tmp_path / "merged/agent=ada", FLOAT32) as whole:
        assert whole == base


def test_bfloat16_weights_are_rounded_once(base: Path, tmp_path: Path) -> None:
    engine = EngineSettings(device="cpu", dtype="bfloat16")
    model, folder = trained(base, engine)
    layer = model.model.layers[0].mlp.gate_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.dtype == torch.bfloat16
    wanted = (layer.base_layer.weight.float() + 2.0 * (b.float() @ a.float())).bfloat16()
    (tmp_path / "whole").mkdir()
    merge_into(folder, tmp_path / "whole", engine)
    assert torch.equal(load_file(tmp_path / "whole/model.safetensors")["model.layers.0.mlp.gate_proj.weight"], wanted)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"targets": ["q_proj", "query"]},
            "agents.ada.adapter.targets: 'query' is no layer of this model (expected some",
        ),
        ({"targets": ["lm_head"]}, "agents.ada.adapter.targets: 'lm_head' is the output head, or no linear layer"),
        ({"targets": ["embed_tokens"]}, "'embed_tokens' is the output head, or no linear layer"),
        ({"rank": 48}, "agents.ada.adapter.rank: an adapter as large as its layer saves nothing (expected less than"),
    ],
)
def test_what_does_not_fit_the_model_is_named(base: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as refused:
        check_adapter(base, AdapterSettings(**settings), WHERE)
    assert says in str(refused.value)


def test_targets_are_endings_of_paths(base: Path) -> None:
    model = load_model(base, FLOAT32)
    everything = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert resolve_targets(model, SETTINGS, WHERE) == everything
    some = adapted(base, AdapterSettings(rank=2, alpha=2, targets=["v_proj", "self_attn.q_proj"]))
    names = {name.split(".lora_")[0] for name, parameter in some.named_parameters() if parameter.requires_grad}
    assert names == {"model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"}


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt_neox"])
def test_a_model_from_scratch_is_checked_before_it_is_made(architecture: Any) -> None:
    tiny = TinySettings(
        architecture=architecture,
        layers=1,
        hidden=32,
        heads=2,
        vocabulary="characters",
        warmup=WarmupSettings(steps=1),
    )
    check_adapter(tiny, SETTINGS, WHERE)
    with pytest.raises(SettingsError, match="expected less than the 32 of"):
        check_adapter(tiny, AdapterSettings(rank=32), WHERE)


def test_an_adapter_of_another_base_is_refused(base: Path, models: Path) -> None:
    _, folder = trained(base)
    (base / "model.safetensors").unlink()  # a link to the model that the agent started from
    (base / "model.safetensors").write_bytes((models / "bo/model.safetensors").read_bytes())
    with pytest.raises(ArtifactError, match="its weights are not those that this adapter belongs to"):
        load_model(folder, FLOAT32)


def test_a_damaged_adapter_is_one_line(base: Path) -> None:
    _, folder = trained(base)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ArtifactError, match="the adapter does not fit its base"):
        load_adapter(load_model(base, FLOAT32), folder)


def test_steps_follow_each_other_with_the_same_adapter(base: Path) -> None:
    def settle(model: Any, settings: AdapterSettings | None, step: int) -> None:
        settle_adapter(model, settings, step=step, before=base, base=base, seed=1, where=WHERE)

    model, folder = trained(base)
    settle(load_model(folder, FLOAT32), SETTINGS, 2)
    elsewhere = AdapterSettings(rank=4, alpha=8, targets=["q_proj"])
    for other in (None, AdapterSettings(rank=4, alpha=9), AdapterSettings(rank=2, alpha=8), elsewhere):
        with pytest.raises(SettingsError, match=r"step 1 has another adapter \(expected rank 4, alpha 8"):
            settle(load_model(folder, FLOAT32), other, 2)
    with pytest.raises(SettingsError, match=r"step 1 has another adapter \(expected none, found rank 4"):
        settle(load_model(base, FLOAT32), SETTINGS, 2)
    assert adapter_of(model) is not None
    settle(load_model(base, FLOAT32), None, 2)


def test_an_agent_cannot_start_from_an_adapter(base: Path, tmp_path: Path) -> None:
    _, folder = trained(base)
    (folder / "config.json").write_text("{}")
    (tmp_path / "new").mkdir()
    with pytest.raises(ModelError, match="holds an adapter, not a model alone"):
        copy_model_folder(folder, tmp_path / "new")
