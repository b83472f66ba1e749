"""The shape of a decoder: how many parameters it has, and how many of them a LoRA adapter trains.

Dimensions are what a config states. Parameters are counted on the model itself, made without weights: that takes torch
and transformers, which are imported at the first count.

Notation: H width of the residual stream, A = heads x head size, K = key-value heads x head size, M width of the MLP,
V vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hacpo.artifacts.text_files import load_json
from hacpo.data.tiny_vocabularies import CONTROL_TOKENS, PIECES
from hacpo.errors import ModelError
from hacpo.settings.agents import AdapterSettings, TinySettings
from hacpo.tokens.context_length import context_length


@dataclass(frozen=True)
class ModelShape:
    """A decoder's dimensions.

    Attributes:
        architecture: `model_type` of its config.json.
        context: longest prompt plus response; None if it is not stated.
        start: what the model itself is made from: its folder, or what an agent made from scratch is; None: `config`.
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
    start: Path | TinySettings | None = field(default=None, compare=False)

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
    def dimensions(self) -> dict[str, Any]:
        """The shape as plain values."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "start"}

    @property
    def config(self) -> dict[str, Any]:
        """The dimensions as a config.json has them."""
        return {
            "model_type": self.architecture,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
        }

    @cached_property
    def skeleton(self) -> Any:
        """The model on the meta device: modules without weights.

        Raises:
            ModelError: transformers does not know the architecture.
        """
        from hacpo.engines.models.adapter import skeleton

        return skeleton(self.start or self.config)

    @cached_property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        return int(self.skeleton.num_parameters())

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of one layer: linear maps, their biases, and norms."""
        from hacpo.engines.training.policy import decoder_layers

        return sum(parameter.numel() for parameter in decoder_layers(self.skeleton)[0].parameters())

    @property
    def multiplied(self) -> int:
        """Parameters that each token is multiplied with: everything but the embeddings' look-up."""
        return self.parameters - self.embedding * (0 if self.tied else 1)

    def trained(self, adapter: AdapterSettings | None, where: str = "adapter") -> int:
        """Parameters that training changes: all, or the adapter's.

        Args:
            where: `agents.<name>.adapter`, for messages.

        Raises:
            SettingsError: the adapter does not fit the model.
        """
        if adapter is None:
            return self.parameters
        from hacpo.engines.models.adapter import adapter_parameters

        return adapter_parameters(self.skeleton, adapter, where)


def from_config(config: Mapping[str, Any], *, where: object) -> ModelShape:
    """The shape that a config.json states.

    Raises:
        ModelError: it does not say a dimension under any usual name.
    """
    inner = config.get("text_config")
    stated = {**config, **inner} if isinstance(inner, Mapping) else dict(config)

    def need(name: str) -> int:
        value = stated.get(name)
        if not isinstance(value, int) or value < 1:
            raise ModelError(
                f"config.json does not say {name}", where=where, found=value, remedy="nothing else needs it"
            )
        return value

    heads, hidden = need("num_attention_heads"), need("hidden_size")
    return ModelShape(
        architecture=str(stated.get("model_type") or "llama"),
        layers=need("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=stated.get("num_key_value_heads") or heads,
        head_dim=stated.get("head_dim") or hidden // heads,
        intermediate=need("intermediate_size"),
        vocabulary=need("vocab_size"),
        tied=bool(stated.get("tie_word_embeddings", False)),
        context=context_length(config),
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
        vocabulary=len(CONTROL_TOKENS) + len(PIECES[tiny.vocabulary]),
        tied=True,
        context=tiny.context,
        start=tiny,
    )


def from_folder(folder: Path) -> ModelShape:
    """The shape of a model folder; its weights are not read.

    Raises:
        ModelError: no readable config.json, or one that does not say enough.
    """
    path = folder / "config.json"
    try:
        config = load_json(path)
        if not isinstance(config, Mapping):
            raise TypeError("no mapping")
    except (OSError, ValueError, TypeError, RecursionError):
        # Raised in here, it is told from a disk that does not let the file be read (`made_plain`).
        raise ModelError(
            "has no readable config.json", where=folder, remedy="name a model folder in params.yaml"
        ) from None
    return dataclasses.replace(from_config(config, where=path), start=folder)
