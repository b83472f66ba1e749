"""Bounds for the numbers in the JSON files of a model folder, whatever the architecture calls them.

transformers makes every layer, every label and some tables that a file asks for before it looks at the weights. What
costs is told by the key's name; the bounds are several times what the largest published models have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hacpo.errors import ModelError

_FREE = re.compile(
    r"\w*(?:_id|_ids|_index|token)|\w*max_length|max_new_tokens"
    r"|\w*(?:theta|_base|_limit|_seed|_params|_val|_value|clipping)\w*|seed|base"
)
"""Keys whose numbers nothing is made of: token ids, lengths that are only compared (`model_max_length` is 1e30 where a
tokenizer has none), the constants of rotary embeddings, which are raised to a power, and bounds of activations."""

_LABELS = re.compile(r"num_labels|extra_ids|offset|num_\w*words")
_EXPERTS = re.compile(r"\w*experts?")
_LAYERED = re.compile(
    r"\w*(?:layers?|blocks?|depths?|stages?|codebooks|quantizers|flows|cycles|levels|repeats|hidden_groups)"
    r"|attention_types|block_sizes|inner_group_num|num_mtp\w*"
)
_KINDS = (
    (_LABELS, 1 << 16),  # ImageNet-21k: 21,843
    (_EXPERTS, 4096),  # Switch-C: 2,048
    (_LAYERED, 1000),
    (re.compile(r"\w*rotary_(?:factor|pct|percent)"), 16),  # times the size of a head
)
"""Names of what is made one by one, and how many at most."""

_MOST_TOKEN_ID = 1 << 21
_MOST = 1 << 24
"""Any other number: positions (Llama 4: 10,485,760), vocabularies, widths."""

_MOST_IN_LIST = 4096
_MOST_OF_LISTED_LAYERS = 1 << 13
"""The numbers of one list of layers together; such a list may also be of the layers' indices."""
_MOST_EXPERTS = 1 << 17
"""Layers times experts (Kimi K2: 23,424)."""

_WITH_TABLES = {
    *("codegen", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "imagegpt", "marian", "musicgen", "musicgen_melody"),
    *("openai-gpt", "pegasus", "plbart", "roformer", "trocr", "xglm", "xlm"),
}
"""Model types with masks or sinusoids that are made for every position, in memory, some of them for each layer."""
_MOST_IN_TABLES = 1 << 32
"""Positions times layers times the larger of positions and width (StarCoder: 2.7e9)."""
_TABLE_OF = (
    ("n_layer", "num_layers", "num_hidden_layers", "decoder_layers", "encoder_layers"),
    ("n_positions", "max_position_embeddings", "max_positions", "n_ctx"),
    ("n_embd", "d_model", "hidden_size", "rotary_dim", "emb_dim"),
)
"""What the architectures call layers, positions and width."""


def pairs(content: Any) -> Iterator[tuple[str, Any]]:
    """Every key of nested mappings with its value; what is in a list goes with the list's key."""
    parts: list[tuple[str, Any]] = [("", content)]
    while parts:
        key, value = parts.pop()
        if key:
            yield key, value
        if isinstance(value, dict):
            parts += value.items()
        elif isinstance(value, list):
            parts += [(key, item) for item in value if isinstance(item, dict | list | int | float)]


def check_sizes(content: Mapping[str, Any], where: Path) -> None:
    """Refuse numbers that would cost memory or time without end.

    Raises:
        ModelError: there is one.
    """
    largest: dict[str, float] = {}
    for key, value in pairs(content):
        _check_key(key, where)
        if isinstance(value, list):
            _check_list(key, value, where)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(key, value, where)
            largest[key] = max(value, largest.get(key, 0))
    _check_products(
        largest, {name for key, name in pairs(content) if key == "model_type" and isinstance(name, str)}, where
    )


def _check_key(key: str, where: Path) -> None:
    """Refuse a name that is a number out of bounds (`added_tokens_decoder` is filled up to the largest)."""
    number = key.strip().lstrip("+").replace("_", "")  # all of which Python reads
    if number.isdecimal() and not (len(number) < 10 and int(number) <= _MOST_TOKEN_ID):
        raise ModelError("a key is out of bounds", where=where, expected=f"at most {_MOST_TOKEN_ID}", found=key[:40])


def _check_list(key: str, values: list[Any], where: Path) -> None:
    if where.name == "config.json" and len(values) > _MOST_IN_LIST:
        expected = f"at most {_MOST_IN_LIST} values"
        raise ModelError(f"{key} is out of bounds", where=where, expected=expected, found=len(values))
    if _LAYERED.fullmatch(key) and sum(value for value in values if type(value) is int) > _MOST_OF_LISTED_LAYERS:
        expected = f"at most {_MOST_OF_LISTED_LAYERS} in all"
        raise ModelError(f"{key} is out of bounds", where=where, expected=expected)


def _check_number(key: str, value: float, where: Path) -> None:
    most = next((most for kind, most in _KINDS if kind.fullmatch(key)), None)
    if where.name == "added_tokens.json":  # whose keys are the tokens
        most = _MOST_TOKEN_ID
    if most is None:
        # No float is a size as it stands; infinity stands for "no limit".
        if _FREE.fullmatch(key) or (isinstance(value, float) and not math.isfinite(value)):
            return
        most = _MOST
    if not value <= most:
        raise ModelError(f"{key} is out of bounds", where=where, expected=f"at most {most}", found=str(value)[:40])


def _check_products(largest: Mapping[str, float], model_types: set[str], where: Path) -> None:
    """Refuse numbers that are within their bounds, and too many things together."""
    layers, positions, width = (max((largest.get(name, 1) for name in names), default=1) for names in _TABLE_OF)
    experts = max((value for key, value in largest.items() if _EXPERTS.fullmatch(key)), default=1)
    if layers * experts > _MOST_EXPERTS:
        raise ModelError(
            "layers with experts are out of bounds",
            where=where,
            expected=f"{_MOST_EXPERTS} experts in all",
            found=f"{layers} of {experts}",
        )
    if model_types & _WITH_TABLES and layers * positions * max(positions, width) > _MOST_IN_TABLES:
        raise ModelError(
            "its tables of positions are out of bounds",
            where=where,
            expected="a few GiB",
            found=f"{layers} layers, {positions} positions, {width} wide",
        )
