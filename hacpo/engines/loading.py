"""From a run's checkpoint to an engine that samples and scores."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacpo.config import EngineSettings
from hacpo.engines.base import Sampler, Scorer
from hacpo.engines.cache import ModelCache
from hacpo.engines.checkpoint import resolve_device
from hacpo.engines.tokenizers import ChatTokenizer
from hacpo.engines.transformers import TransformersEngine
from hacpo.errors import MissingInputError


@dataclass(frozen=True)
class Engine:
    """An agent at one checkpoint: its tokenizer, and what samples and scores with its weights.

    `policy` is the content hash of those weights, `metrics` what it took to bring the engine there.
    """

    tokenizer: ChatTokenizer
    sampler: Sampler
    scorer: Scorer
    policy: str
    metrics: Mapping[str, float]


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
    """The engine of a checkpoint folder; arguments and errors as for `open_model`.

    The training stack always scores; it also samples unless vLLM does.
    """
    tokenizer, model, policy = open_model(models, agent, folder, settings, made_by)
    scorer = TransformersEngine(
        model,
        eos_token_ids=tokenizer.stop_token_ids,
        pad_token_id=tokenizer.pad_token_id,
        batch_size=settings.batch_size,
    )
    if not samples_with_vllm(settings):
        return Engine(tokenizer, scorer, scorer, policy, {})
    resident = models.resident(agent, settings)
    sampler = resident.at(folder, policy, tokenizer, scorer)
    return Engine(tokenizer, sampler, scorer, policy, resident.metrics)


def samples_with_vllm(settings: EngineSettings) -> bool:
    """Whether vLLM samples: where it is asked for, and under `auto` on a GPU on which it is installed."""
    if settings.name != "auto":
        return settings.name == "vllm"
    return resolve_device(settings).type == "cuda" and importlib.util.find_spec("vllm") is not None
