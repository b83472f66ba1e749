"""Chunked log-probabilities agree with the model's own head, forward and backward, for every form of head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers import models as hf

from hacpo.engines.training import head, logprobs

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "qwen3 tied": hf.qwen3.Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True),
    "llama": hf.llama.LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "gpt_neox": hf.gpt_neox.GPTNeoXConfig(**{k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}),
    "phi, with a bias": hf.phi.PhiConfig(**SHAPE),
    "gemma2, capped": hf.gemma2.Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=3.0),
    "cohere, scaled": hf.cohere.CohereConfig(**SHAPE, logit_scale=0.25),
    "granite, scaled": hf.granite.GraniteConfig(**SHAPE, logits_scaling=4.0),
}


def build(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)  # logits far enough apart that scaling and capping show
    return model


def batch() -> logprobs.TokenBatch:
    return logprobs.collate(
        [([5, 6, 7], [8, 9, 10, 2]), ([5], [11, 12]), ([3, 4], [40, 41, 42])], 0, torch.device("cpu")
    )


def run(model: Any, chunk: int, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    for module in (head, logprobs):
        monkeypatch.setattr(module, "CHUNK_LOGITS", chunk)
    model.zero_grad(set_to_none=True)
    values = logprobs.token_logprobs(model, batch(), 0.7)
    (values * torch.arange(values.numel()).reshape(values.shape)).sum().backward()  # every token weighs differently
    return values.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("chunk", [61 * 2, 1])
def test_chunks_give_the_same_values_and_gradients(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(CONFIGS[name])
    values, gradients = run(model, 1 << 40, monkeypatch)
    assert head.output_head(model) is not None, "the head's form is not recognised, so nothing would be chunked"
    chunked_values, chunked_gradients = run(model, chunk, monkeypatch)
    torch.testing.assert_close(chunked_values, values, rtol=1e-5, atol=2e-6)
    assert chunked_gradients.keys() == gradients.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(chunked_gradients[parameter], gradient, rtol=1e-4, atol=1e-5)


def test_logits_between_short_and_long_prompts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two responses of 3 tokens after prompts of 40 and 1: the model's own pass holds 2 x 42 positions, not 2 x 3."""
    model = build(CONFIGS["llama"])
    uneven = logprobs.collate([([5] * 40, [8, 9, 10]), ([5], [11, 12, 13])], 0, torch.device("cpu"))
    held = []
    model.lm_head.register_forward_hook(lambda module, given, logits: held.append(logits.numel()))
    whole = logprobs.token_logprobs(model, uneven, 0.7)
    assert held == [2 * 42 * 61]
    for module in (head, logprobs):
        monkeypatch.setattr(module, "CHUNK_LOGITS", 2 * 41 * 61)
    model._hacpo_plain_head = True  # its check has a forward pass of its own
    chunked = logprobs.token_logprobs(model, uneven, 0.7)
    assert held == [2 * 42 * 61], "logits that do not fit into a chunk were held together"
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=2e-6)


def test_a_batch_of_empty_responses_has_no_log_probabilities() -> None:
    nothing = logprobs.collate([([5, 6], []), ([5], [])], 0, torch.device("cpu"))
    assert logprobs.token_logprobs(build(CONFIGS["llama"]), nothing, 1.0).shape == (2, 0)


def test_a_head_of_another_form_falls_back_to_the_models_own_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(CONFIGS["llama"])
    model.lm_head.register_forward_hook(lambda module, given, logits: logits**3)
    assert head.output_head(model) is None
    whole, _ = run(model, 1 << 40, monkeypatch)
    chunked, _ = run(model, 1, monkeypatch)
    assert torch.equal(whole, chunked)


def test_frozen_head_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(CONFIGS["llama"])
    model.lm_head.weight.requires_grad_(False)
    _, gradients = run(model, 61, monkeypatch)
    assert "lm_head.weight" not in gradients
    assert gradients["model.embed_tokens.weight"].abs().sum() > 0


def test_bfloat16_weights_keep_float32_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(CONFIGS["llama"]).bfloat16()
    values, gradients = run(model, 61, monkeypatch)
    assert values.dtype == torch.float32
    assert gradients["lm_head.weight"].dtype == torch.bfloat16
    whole, whole_gradients = run(model, 1 << 40, monkeypatch)
    torch.testing.assert_close(values, whole, rtol=0, atol=1e-4)
    torch.testing.assert_close(gradients["lm_head.weight"], whole_gradients["lm_head.weight"], rtol=0.05, atol=0.05)


def test_on_a_cpu_no_more_logits_are_held_than_stay_in_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 tokens by 61 ids at 96 logits a block: 12 ids at a time, five times, and one that is left."""
    model = build(CONFIGS["llama"])
    assert head.output_head(model) is not None
    held: list[tuple[int, ...]] = []
    logits = head.Head.logits

    def noted(self: head.Head, hidden_nh: torch.Tensor) -> torch.Tensor:
        found = logits(self, hidden_nh)
        held.append(tuple(found.shape))
        return found

    monkeypatch.setattr(head.Head, "logits", noted)
    monkeypatch.setattr(head, "_CPU_BLOCK_LOGITS", 96)
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", 1)
    rows = logprobs.collate([([5, 6, 7], [8, 60, 10, 2]), ([5], [11, 12, 0, 1])], 0, torch.device("cpu"))
    logprobs.token_logprobs(model, rows, 0.7).sum().backward()
    assert held == [*[(8, 12)] * 5, (8, 1)] * 2  # forward and backward
