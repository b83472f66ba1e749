"""Bounds for the numbers of a model folder's JSON files: what a stranger writes in, and what published models have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hacpo.artifacts.model_config import check_config
from hacpo.errors import ModelError


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", {"num_labels": 3_000_000_000}, "num_labels is out of bounds (expected at most 65536"),
        ("config.json", {"num_labels": 10**10, "id2label": {"0": "a"}}, "num_labels is out of bounds"),
        ("config.json", {"attention_types": [[["global", "local"], 10**13]]}, "attention_types is out of bounds"),
        ("config.json", {"attention_types": [[["global"], 999]] * 5000}, "attention_types is out of bounds"),
        ("config.json", {"vision_config": {"depths": [999] * 9}}, "depths is out of bounds (expected at most 8192 in"),
        ("config.json", {"n_routed_experts": 10**7}, "n_routed_experts is out of bounds"),
        ("config.json", {"ffn_config": {"moe_num_experts": 10**9}}, "moe_num_experts is out of bounds"),
        # 1000 x 4096 = 4,096,000 experts, each within its bound.
        ("config.json", {"n_layers": 1, "num_layers": 1000, "num_experts": 4096}, "layers with experts are out of"),
        # 24 layers x 100,000 x 100,000 places of a mask.
        ("config.json", {"model_type": "gpt_neo", "num_layers": 24, "n_positions": 100_000}, "its tables of positions"),
        ("config.json", {"any_thing": {"else": [[1, 2**40]]}}, "else is out of bounds (expected at most 16777216"),
        ("config.json", {"mlp_ratio": 1e12}, "mlp_ratio is out of bounds"),
        ("config.json", {"partial_rotary_factor": 1e5}, "partial_rotary_factor is out of bounds"),
        ("config.json", {"hidden_layers": float("inf")}, "hidden_layers is out of bounds"),
        ("config.json", {"hidden_layers": float("nan")}, "hidden_layers is out of bounds"),
        ("generation_config.json", {"num_beams": 10**10}, "num_beams is out of bounds"),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "T5Tokenizer", "extra_ids": 10**10},
            "extra_ids is out of bounds",
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1000000000000": {}}}, "a key is out of bounds"),
        ("tokenizer_config.json", {"added_tokens_decoder": {" +1_000_000_000 ": {}}}, "a key is out of bounds"),
        ("added_tokens.json", {"<a>": 10**12}, "<a> is out of bounds"),
        ("added_tokens.json", {"a_token": 10**12}, "a_token is out of bounds"),
    ],
)
def test_a_number_without_end_is_refused_before_a_library_sees_it(
    tmp_path: Path, name: str, content: dict[str, Any], says: str
) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ModelError) as refused:
        check_config(tmp_path)
    assert f"{name}: {says}" in str(refused.value)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama4_text", "max_position_embeddings": 10_485_760, "num_local_experts": 128},
        {"model_type": "kimi_k2", "n_routed_experts": 384, "num_hidden_layers": 61, "rope_theta": 50_000_000},
        {"model_type": "gpt_bigcode", "n_layer": 40, "n_positions": 8192, "n_embd": 6144, "n_inner": 24_576},
        {"model_type": "gptj", "n_layer": 28, "n_positions": 2048, "n_embd": 4096, "rotary_dim": 64},
        {"model_type": "switch_transformers", "num_layers": 15, "num_experts": 2048},
        {"model_type": "mamba2", "time_step_limit": [0.0, float("inf")], "vocab_size": 50_288},
        {"model_type": "gemma3n", "audio_config": {"gradient_clipping": 1e10}, "final_logit_softcapping": 30.0},
        {"model_type": "xlm-roberta", "vocab_size": 901_629, "id2label": {str(label): "" for label in range(21_843)}},
        {"model_type": "kimi_linear", "linear_attn_config": {"kda_layers": list(range(1, 93))}},
        {"model_type": "chatglm", "rope_ratio": 10_000, "seq_length": 1_048_576, "attn_mask_value": -1e30},
    ],
)
def test_what_published_models_have_is_within_the_bounds(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 10**30, "bos_token": None}))
    check_config(tmp_path)
