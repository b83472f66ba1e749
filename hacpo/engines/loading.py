"""From a run's checkpoint to an engine that samples and scores."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacpo.config import EngineSettings
from hacpo.engines.base import Sampler, Scorer
from hacpo.engines.cache import ModelCache
from hacpo.engines.tokenizers import ChatTokenizer
from hacpo.engines.transformers import TransformersEngine
from hacpo.errors import MissingInputError


@dataclass(frozen=True)
class Engine:
    """An agent at one checkpoint: its tokenizer, and what samples and scores with its weights.

    `policy` is the content hash of those weights.
    """

    tokenizer: ChatTokenizer
    sampler: Sampler
    scorer: Scorer
    policy: str


def open_model(
    models: ModelCache, agent: str, folder: Path, settings: EngineSettings, made_by: str
) -> tuple[ChatTokenizer, Any, str]:
    """Tokenizer, model and policy hash of a checkpoint folder, warm where `models` still holds its weights.

    Raises:
        MissingInputError: there is no such checkpoint; `made_by` is the command that makes it.
        ModelError: it cannot be used.
    """
    if not folder.is_dir():
        raise MissingInputError("the checkpoint is missing", where=folder, remedy=f"run `{made_by}`")
    tokenizer = models.tokenizer(folder)
    return tokenizer, *models.model(agent, folder, settings)


def open_engine(models: ModelCache, agent: str, folder: Path, settings: EngineSettings, made_by: str) -> Engine:
    """The engine of a checkpoint folder; arguments and errors as for `open_model`."""
    tokenizer, model, policy = open_model(models, agent, folder, settings, made_by)
    engine = TransformersEngine(
        model,
        eos_token_ids=eos_token_ids(folder, tokenizer.eos_token_id),
        pad_token_id=tokenizer.pad_token_id,
        batch_size=settings.batch_size,
    )
    return Engine(tokenizer, engine, engine, policy)


def eos_token_ids(folder: Path, tokenizer_eos: int) -> list[int]:
    """Tokens that end a response: the tokenizer's EOS and those of the model's generation config."""
    found = {tokenizer_eos}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        found |= set(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(found)
