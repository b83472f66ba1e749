"""The loop that continues prompts token by token: each prompt is read once, and responses that have ended leave.

It takes the place of transformers' own loop inside `generate` (its `custom_generate`), which prepares masks, positions
and the cache that the model's layers need. transformers' continuous batching is no way to do this: it draws with one
random stream for all that share a batch, and a response here depends on its own seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import Cache, GenerationConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

Choose = Callable[[torch.Tensor, list[int]], tuple[torch.Tensor, npt.NDArray[np.bool_]]]
"""From the logits [b, V] of b responses, and which they are: their next tokens [b], and whether they have ended."""

_LEAVING_SHARE = 8
"""Ended responses leave once they are an eighth of the batch: taking rows out copies the cache, as every token does."""


def decode(model: Any, prompts: Sequence[Sequence[int]], pad: int, longest: int, choose: Choose) -> None:
    """Continue each prompt until `choose` says that its response has ended, or for `longest` tokens.

    Args:
        model: a causal language model in evaluation mode.
        prompts: token ids of each response's prompt; those of equal prompts are computed once.
        pad: filler on the left of shorter prompts.
        longest: most tokens of a response.
        choose: picks the next tokens, once for every token of a response. One that has ended may come again, for
            nothing.
    """
    numbers: dict[tuple[int, ...], int] = {}
    of_prompt = [numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts]
    width = max(map(len, numbers))
    input_ids = torch.full((len(numbers), width), pad, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for prompt, number in numbers.items():
        input_ids[number, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask[number, width - len(prompt) :] = 1

    def loop(model: Any, input_ids: torch.Tensor, **inputs: Any) -> None:
        for name in ("logits_processor", "stopping_criteria", "generation_config"):
            del inputs[name]
        _continue(model, input_ids, inputs, torch.tensor(of_prompt, device=input_ids.device), longest, choose)

    model.generate(
        input_ids=input_ids.to(model.device),
        attention_mask=attention_mask.to(model.device),
        generation_config=GenerationConfig(max_new_tokens=longest, do_sample=False, pad_token_id=pad),
        custom_generate=loop,
    )


def _continue(
    model: Any, input_ids: torch.Tensor, inputs: dict[str, Any], of_prompt: torch.Tensor, longest: int, choose: Choose
) -> None:
    """The loop itself. `rows` are the responses in the batch, in its order."""
    rows = list(range(len(of_prompt)))
    moves = _keeps_all_in_its_cache(model, inputs)
    if not moves:
        input_ids = input_ids[of_prompt]
        _take_rows(inputs, of_prompt)
    logits = _forward(model, input_ids, inputs, first=True)
    if moves:
        logits = logits[of_prompt]
    behind = moves  # the batch still has a row for each prompt
    for count in range(1, longest + 1):
        tokens, ended = choose(logits, rows)
        staying = np.flatnonzero(~ended)
        if not len(staying) or count == longest:
            return
        leaves = moves and len(rows) - len(staying) >= max(1, len(rows) // _LEAVING_SHARE)
        if leaves:
            kept = torch.from_numpy(staying).to(tokens.device)
            rows, tokens = [rows[at] for at in staying], tokens[kept]
            _take_rows(inputs, of_prompt[kept] if behind else kept)
        elif behind:
            _take_rows(inputs, of_prompt)
        behind = False
        logits = _forward(model, tokens[:, None], inputs, first=False)


def _forward(model: Any, input_ids: torch.Tensor, inputs: dict[str, Any], *, first: bool) -> torch.Tensor:
    """Logits [b, V] after the last of some tokens [b, S], float32; `inputs` grow by them."""
    prepared = model.prepare_inputs_for_generation(
        input_ids, next_sequence_length=None if first else 1, is_first_iteration=first, **inputs
    )
    outputs = model(**prepared, return_dict=True)
    inputs.update(model._update_model_kwargs_for_generation(outputs, inputs, is_encoder_decoder=False))
    logits: torch.Tensor = outputs.logits[:, -1].float()
    return logits


def _keeps_all_in_its_cache(model: Any, inputs: dict[str, Any]) -> bool:
    """Whether rows of the cache can be moved, and with them all that the model remembers of its batch."""
    cache = _cache(inputs)
    if cache is None:  # states of its own (RWKV, xLSTM)
        return False
    # A recurrent model whose cache has no layer for its states keeps them in itself (RecurrentGemma).
    return not model._is_stateful or any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)


def _cache(inputs: dict[str, Any]) -> Cache | None:
    found = inputs.get("past_key_values") or inputs.get("cache_params")
    return found if isinstance(found, Cache) else None


def _take_rows(inputs: dict[str, Any], rows: torch.Tensor) -> None:
    """Make a batch of some of its rows, in place; the same one may come several times."""
    cache = _cache(inputs)
    if cache is not None:
        cache.reorder_cache(rows)
    for name in ("attention_mask", "position_ids", "token_type_ids"):
        if inputs.get(name) is not None:  # positions may have a leading dimension of their own
            inputs[name] = inputs[name].index_select(-2, rows)
