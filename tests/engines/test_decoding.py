"""What is computed while sampling: each prompt once, ended responses no more; in models with every kind of cache."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hacpo.engines.interface import SampledResponse, SamplingParameters, SamplingRequest
from hacpo.engines.transformers import TransformersEngine

VOCABULARY = 97
EOS = list(range(8))
PARAMETERS = SamplingParameters(1.0, 20)

_WIDTHS = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GATED_DELTA = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 16,
}
_STATES = {"state_size": 8, "head_dim": 8, "num_heads": 8, "n_groups": 2, "chunk_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": _WIDTHS | _HEADS | {"head_dim": 8},
    "Mistral": _WIDTHS | _HEADS | {"sliding_window": 6},
    "Qwen3Next": _WIDTHS | _HEADS | {"head_dim": 8} | _EXPERTS | _GATED_DELTA,
    "Lfm2": _WIDTHS | _HEADS | {"layer_types": ["conv", "full_attention"]},
    "Mamba2": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2} | _STATES,
    "Bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
}
"""Attention with and without a window, recurrent states with and without attention, positions by a bias."""


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**MODELS[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.generation_config = transformers.GenerationConfig()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # at their usual size all next tokens are nearly as likely
    return model


def engine_of(model: Any, batch_size: int = 64) -> TransformersEngine:
    return TransformersEngine(model, eos_token_ids=EOS, pad_token_id=0, batch_size=batch_size)


def requests() -> list[SamplingRequest]:
    """Four responses to each of four prompts of different length; two prompts are the same."""
    choice = random.Random(1)
    prompts = [[choice.randrange(VOCABULARY) for _ in range(length)] for length in (5, 9, 13)]
    return [SamplingRequest(prompt, 10 * n + k) for n, prompt in enumerate([*prompts, prompts[1]]) for k in range(4)]


class Forwards:
    """Rows and tokens of each forward pass of a model."""

    def __init__(self, model: Any) -> None:
        self.shapes: list[tuple[int, int]] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _: Any, __: Any, given: dict[str, Any]) -> None:
        self.shapes.append(tuple(given["input_ids"].shape))


@pytest.mark.parametrize("family", MODELS)
def test_a_response_is_the_same_in_a_group_and_alone_and_has_the_models_probabilities(family: str) -> None:
    model = model_of(family)
    engine = engine_of(model)
    together = engine.sample(requests(), PARAMETERS)
    assert len({tuple(r.token_ids) for r in together}) > 8
    for request, response in zip(requests(), together, strict=True):
        alone = engine.sample([request], PARAMETERS)[0]
        assert alone.token_ids == response.token_ids
        start = len(request.prompt_token_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([[*request.prompt_token_ids, *response.token_ids]]), use_cache=False).logits
        expected = torch.log_softmax(logits[0, start - 1 : -1], dim=-1)[
            range(len(response.token_ids)), response.token_ids
        ]
        # Recurrent states are added up in another order token by token than all at once: 7e-6 is measured.
        np.testing.assert_allclose(response.logprobs, expected, atol=2e-5)


def test_a_prompt_is_computed_once_and_an_ended_response_leaves() -> None:
    model = model_of("Qwen3")
    forwards = Forwards(model)
    lengths = [len(r.token_ids) for r in engine_of(model).sample(requests(), PARAMETERS)]
    # 16 responses to 3 different prompts, of 13 tokens at most; then a token of each that is left, and no more passes
    # than the longest response has tokens.
    assert forwards.shapes[0] == (3, 13)
    assert len(forwards.shapes) == max(lengths)
    assert len(set(lengths)) > 4
    for count, (rows, tokens) in enumerate(forwards.shapes[1:], start=1):
        going_on = sum(length > count for length in lengths)
        assert tokens == 1
        # Those that have ended since, fewer than an eighth of the batch, may still be in it.
        assert going_on <= rows <= going_on + max(0, rows // 8 - 1)


def test_where_a_model_keeps_states_of_its_own_nothing_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """As RecurrentGemma does, beside a cache: every response computes its prompt, and all stay to the end."""
    model = model_of("Qwen3")
    forwards = Forwards(model)
    expected = engine_of(model).sample(requests(), PARAMETERS)
    forwards.shapes.clear()
    monkeypatch.setattr(type(model), "_is_stateful", True)
    _same(engine_of(model).sample(requests(), PARAMETERS), expected)
    assert forwards.shapes == [(16, 13), *[(16, 1)] * (max(len(r.token_ids) for r in expected) - 1)]


def _same(responses: list[SampledResponse], expected: list[SampledResponse]) -> None:
    for response, other in zip(responses, expected, strict=True):
        assert (response.token_ids, response.finish_reason) == (other.token_ids, other.finish_reason)
        np.testing.assert_allclose(response.logprobs, other.logprobs, atol=1e-5)


def test_what_each_token_was_drawn_from_is_kept_while_others_leave() -> None:
    engine = engine_of(model_of("Qwen3"))
    parameters = SamplingParameters(1.0, 20, 0.9, 12, record=True)
    together = engine.sample(requests(), parameters)
    assert len({len(r.token_ids) for r in together}) > 3
    for request, response in zip(requests(), together, strict=True):
        alone = engine.sample([request], parameters)[0]
        assert response.support is not None
        assert alone.support is not None
        assert alone.token_ids == response.token_ids
        np.testing.assert_array_equal(alone.support.token_ids, response.support.token_ids)
        np.testing.assert_array_equal(alone.support.counts, response.support.counts)
        assert len(response.support.counts) == len(response.token_ids)
