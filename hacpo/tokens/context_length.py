"""What a model takes, as the config.json of its folder says: how many tokens at once, and which token ids; no
library is needed to read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Transformers calls it by the first; files of the GPT-2 family (GPT-J, CodeGen, CTRL) and of MPT and DBRX do not."""


def context_length(config: Mapping[str, Any]) -> int | None:
    """Most tokens of one sequence, prompt and response together; None if the config does not say.

    Args:
        config: content of config.json; where it does not say, its `text_config` may.
    """
    return _first(config, _NAMES)


def vocabulary_rows(config: Mapping[str, Any]) -> int | None:
    """How many token ids have a row in the model's embeddings, which may be more than its tokenizer has; None if the
    config does not say.

    Args:
        config: as for `context_length`.
    """
    return _first(config, ("vocab_size",))


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    inner = config.get("text_config")
    parts = [config, inner] if isinstance(inner, Mapping) else [config]
    found = (part.get(name) for part in parts for name in names)
    return next((limit for limit in found if isinstance(limit, int)), None)
