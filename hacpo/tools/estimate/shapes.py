"""The shape of a decoder: how many parameters it has, and how many of them a LoRA adapter trains.

Notation: H width of the residual stream, A = heads x head size, K = key-value heads x head size, M width of the MLP,
V vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacpo.artifacts.text_files import load_json, parse_json
from hacpo.errors import ModelError
from hacpo.settings.agents import AdapterSettings, TinySettings
from hacpo.tokens.context_length import context_length

TINY_VOCABULARY = {"characters": 102, "numbers_words": 199, "digits_words": 58}
"""Tokens of the vocabularies that tiny agents are made with (`engines.models.tiny`, which needs torch to be asked)."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder's dimensions.

    Attributes:
        architecture: `model_type` of its config.json. Others than those of `KNOWN_ARCHITECTURES` count as `llama`.
        context: longest prompt plus response; None if it is not said.
        attention_bias: whether all projections of the attention have a bias (`qwen2`: its queries, keys and values do
            anyway).
        stored: parameters counted in the weights files, which the formula then gives way to; None if there are none.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    context: int | None = None
    attention_bias: bool = False
    stored: int | None = None

    @property
    def attention_width(self) -> int:
        """A."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """K."""
        return self.kv_heads * self.head_dim

    @property
    def normed_heads(self) -> bool:
        """Whether queries and keys are normalised head by head."""
        return self.architecture == "qwen3"

    @property
    def embedding(self) -> int:
        """Parameters of the token embeddings: V H."""
        return self.vocabulary * self.hidden

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """A layer's linear maps by the name that transformers gives them: (inputs, outputs)."""
        h, a, k, m = self.hidden, self.attention_width, self.kv_width, self.intermediate
        if self.architecture == "gpt_neox":
            return {
                "query_key_value": (h, 3 * a),
                "dense": (a, h),
                "dense_h_to_4h": (h, m),
                "dense_4h_to_h": (m, h),
            }
        return {
            "q_proj": (h, a),
            "k_proj": (h, k),
            "v_proj": (h, k),
            "o_proj": (a, h),
            "gate_proj": (h, m),
            "up_proj": (h, m),
            "down_proj": (m, h),
        }

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: linear maps, their biases, and norms."""
        weights = sum(rows * columns for rows, columns in self.matrices.values())
        h, a, k = self.hidden, self.attention_width, self.kv_width
        if self.architecture == "gpt_neox":  # a bias everywhere, and norms with one
            return weights + sum(columns for _, columns in self.matrices.values()) + 4 * h
        biases = a + 2 * k if self.attention_bias or self.architecture == "qwen2" else 0
        biases += h if self.attention_bias else 0
        return weights + biases + 2 * h + (2 * self.head_dim if self.normed_heads else 0)

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        if self.stored is not None:
            return self.stored
        final_norm = 2 * self.hidden if self.architecture == "gpt_neox" else self.hidden
        return self.layers * self.layer_parameters + self.embedding * (1 if self.tied else 2) + final_norm

    @property
    def multiplied(self) -> int:
        """Parameters that each token is multiplied with: everything but the embeddings' look-up."""
        return self.parameters - self.embedding * (0 if self.tied else 1)

    def adapter_parameters(self, adapter: AdapterSettings) -> int:
        """Parameters of a LoRA adapter: rank x (inputs + outputs) of each chosen map, in every layer."""
        chosen = [
            size
            for name, size in self.matrices.items()
            if adapter.targets == "all-linear" or any(name.endswith(target) for target in adapter.targets)
        ]
        return self.layers * adapter.rank * sum(rows + columns for rows, columns in chosen)

    def trained(self, adapter: AdapterSettings | None) -> int:
        """Parameters that training changes: all, or the adapter's."""
        return self.parameters if adapter is None else self.adapter_parameters(adapter)


KNOWN_ARCHITECTURES = ("qwen3", "llama", "qwen2", "mistral", "gpt_neox")
"""Those whose formula is checked against transformers."""


def from_config(config: Mapping[str, Any], *, where: object) -> ModelShape:
    """The shape that a config.json states.

    Raises:
        ModelError: it does not say a dimension under any usual name.
    """
    inner = config.get("text_config")
    said = {**config, **inner} if isinstance(inner, Mapping) else dict(config)

    def need(name: str) -> int:
        value = said.get(name)
        if not isinstance(value, int) or value < 1:
            raise ModelError(
                f"config.json does not say {name}", where=where, found=value, remedy="nothing else needs it"
            )
        return value

    heads, hidden = need("num_attention_heads"), need("hidden_size")
    return ModelShape(
        architecture=str(said.get("model_type") or "llama"),
        layers=need("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=said.get("num_key_value_heads") or heads,
        head_dim=said.get("head_dim") or hidden // heads,
        intermediate=need("intermediate_size"),
        vocabulary=need("vocab_size"),
        tied=bool(said.get("tie_word_embeddings", False)),
        context=context_length(config),
        attention_bias=bool(said.get("attention_bias", False)),
    )


def from_tiny(tiny: TinySettings) -> ModelShape:
    """The shape of an agent made from scratch."""
    return ModelShape(
        architecture=tiny.architecture,
        layers=tiny.layers,
        hidden=tiny.hidden,
        heads=tiny.heads,
        kv_heads=tiny.heads,
        head_dim=tiny.hidden // tiny.heads,
        intermediate=tiny.intermediate or 4 * tiny.hidden,
        vocabulary=TINY_VOCABULARY[tiny.vocabulary],
        tied=True,
        context=tiny.context,
    )


def from_folder(folder: Path) -> ModelShape:
    """The shape of a model folder; its parameters are counted in its safetensors files where there are some.

    Raises:
        ModelError: no readable config.json, or one that does not say enough.
    """
    path = folder / "config.json"
    try:
        config = load_json(path)
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, Mapping):
        raise ModelError("has no readable config.json", where=folder, remedy="name a model folder in params.yaml")
    tensors = dict(tensor for file in sorted(folder.glob("*.safetensors")) for tensor in _tensors(file))
    shape = from_config(config, where=path)
    if shape.tied:
        tensors.pop("lm_head.weight", None)  # some folders store a tied head a second time
    return dataclasses.replace(shape, stored=sum(tensors.values()) or None)


def _tensors(file: Path) -> Iterator[tuple[str, int]]:
    """(name, elements) of every tensor, from the file's header: 8 bytes of its length, then JSON."""
    try:
        with file.open("rb") as stream:
            header = parse_json(stream.read(int.from_bytes(stream.read(8), "little")))
        yield from ((name, math.prod(entry["shape"])) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError):
        raise ModelError("damaged weights: its header cannot be read", where=file) from None
