"""GGUF files of a few kilobytes: a llama with byte-level tokens, as llama.cpp's converter writes one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ t", "h e", "Ġt he", "1 2")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HEADS, KV_HEADS, LAYERS = 4, 2, 2

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tokens() -> list[str]:
    """Every token, by id."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*CONTROL, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]


def tiny_llama(seed: int = 0) -> Any:
    """The model that `write_gguf` writes, in float32; 64 wide, so that rows are whole blocks."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokens()),
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                num_key_value_heads=KV_HEADS,
                max_position_embeddings=256,
                rms_norm_eps=1e-5,
                rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
                tie_word_embeddings=True,
                initializer_range=0.2,
            )
        ).eval()


def packed(name: str, weights: Any) -> Any:
    """A tensor's values in the order of llama.cpp, which keeps the two halves of each rotated head interleaved
    (`convert_hf_to_gguf.py`, `LlamaModel.permute`)."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return weights
    rows, width = weights.shape
    return weights.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def gguf_tensors(model: Any) -> dict[str, Any]:
    """Name in a GGUF file -> values as numpy arrays."""
    found = {}
    for name, parameter in model.named_parameters():
        parts = name.removeprefix("model.").removesuffix(".weight").split(".", 2)
        if parts[0] == "layers":
            stored = f"blk.{parts[1]}.{_NAMES[parts[2]]}.weight"
        else:
            stored = {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[parts[0]]
        found[stored] = packed(stored, parameter.detach().numpy())
    return found


def write_gguf(
    path: Path,
    *,
    kind: str = "F32",
    template: str | None = CHATML,
    pre: str = "smollm",
    tensors: Mapping[str, Any] | None = None,
    numbers: Mapping[str, int] | None = None,
    vocabulary: Sequence[str] | None = None,
) -> Path:
    """Write a tiny llama.

    Args:
        kind: how matrices are stored: `F32`, `F16`, `Q8_0`, `Q4_1`; vectors are F32 always, as in llama.cpp.
        tensors: in place of `tiny_llama`'s.
        numbers: of the metadata, in place of what is true.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    vocabulary = tokens() if vocabulary is None else list(vocabulary)
    writer = GGUFWriter(path, "llama")
    stated = {
        "llama.block_count": LAYERS,
        "llama.context_length": 256,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.vocab_size": len(vocabulary),
        "llama.rope.dimension_count": 16,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
    }
    for key, value in {**stated, **(numbers or {})}.items():
        writer.add_uint32(key, value)
    writer.add_string("general.name", "Tiny")
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10_000.0)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", pre)
    writer.add_array("tokenizer.ggml.tokens", vocabulary)
    writer.add_array("tokenizer.ggml.token_type", [3] * len(CONTROL) + [1] * (len(vocabulary) - len(CONTROL)))
    writer.add_array("tokenizer.ggml.merges", list(MERGES))
    if template is not None:
        writer.add_string("tokenizer.chat_template", template)
    for name, values in (gguf_tensors(tiny_llama()) if tensors is None else tensors).items():
        stored = GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        writer.add_tensor(name, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
