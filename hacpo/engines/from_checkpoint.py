"""From a run's checkpoint to an engine that samples and scores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hacpo.artifacts.layout import MERGED
from hacpo.artifacts.model_folder import check_checkpoint
from hacpo.artifacts.weights import policy_hash, whole_model
from hacpo.engines.cache import ModelCache
from hacpo.engines.interface import Sampler, Scorer
from hacpo.engines.models.checkpoint import load_model
from hacpo.engines.training.processes import leads
from hacpo.engines.transformers import TransformersEngine
from hacpo.engines.vllm.refusals import check_vllm, installed_build, this_machine
from hacpo.engines.vllm.servers import server_of
from hacpo.engines.vllm.warm_engine import Resident
from hacpo.errors import MissingInputError
from hacpo.settings.engine import VLLM_ENGINES, EngineSettings, sampling_engine
from hacpo.tokens.tokenizers import ChatTokenizer


@dataclass(frozen=True)
class Engine:
    """An agent at one checkpoint: its tokenizer, and what samples and scores with its weights.

    `policy` is the content hash of those weights, `metrics` what it took to bring the engine there.
    """

    tokenizer: ChatTokenizer
    sampler: Sampler
    scorer: Scorer
    policy: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    resident: Resident | None = None

    def release_memory(self) -> None:
        """Sampling is over for now: a vLLM engine gives its memory to what runs next."""
        if self.resident is not None:
            self.resident.release_memory()


def open_tokenizer(models: ModelCache, folder: Path, made_by: str) -> ChatTokenizer:
    """Tokenizer of a checkpoint folder, which holds no links; no weights are read. Arguments as for `open_model`.

    Raises:
        MissingInputError: there is no such checkpoint.
        ModelError: it cannot be used.
    """
    if not folder.is_dir():
        raise MissingInputError("the checkpoint is missing", where=folder, remedy=f"run `{made_by}`")
    check_checkpoint(folder)
    whole = Path(os.path.normpath(whole_model(folder)))
    if whole != folder and whole.is_dir():
        check_checkpoint(whole)
    return models.tokenizer(folder)


def open_model(
    models: ModelCache, agent: str, folder: Path, settings: EngineSettings, made_by: str
) -> tuple[ChatTokenizer, Any, str]:
    """Tokenizer, model and policy hash of a checkpoint folder, warm where `models` still holds its weights.

    Raises:
        MissingInputError: there is no such checkpoint; `made_by` is the command that makes it.
        ModelError: it cannot be used.
    """
    tokenizer = open_tokenizer(models, folder, made_by)
    return tokenizer, *models.model(agent, folder, settings)


def open_to_train(
    models: ModelCache, agent: str, folder: Path, settings: EngineSettings, made_by: str, *, fsdp: bool
) -> tuple[ChatTokenizer, Any, str | None]:
    """Tokenizer, model and policy hash of a checkpoint folder, for training to change; errors as for `open_model`.

    Args:
        fsdp: FSDP takes the model: it comes in float32 on the CPU, and no other model is kept in memory beside it. Of
            several processes only the first gets it and the hash; the others get None.
    """
    if not fsdp:
        tokenizer, model, policy = open_model(models, agent, folder, settings, made_by)
        models.discard(agent)
        return tokenizer, model, policy
    tokenizer = open_tokenizer(models, folder, made_by)
    models.discard_all()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if not leads():
        return tokenizer, None, None
    policy = policy_hash(folder)
    return tokenizer, load_model(folder, settings, to_shard=True), policy


def open_engine(
    models: ModelCache,
    agent: str,
    folder: Path,
    settings: EngineSettings,
    made_by: str,
    pipeline: Path = Path(),
    scratch: Path = Path(MERGED),
) -> Engine:
    """The engine of a checkpoint folder; other arguments and errors as for `open_model`.

    The training stack always scores; it also samples unless vLLM does.

    Args:
        pipeline: the run's folder, where `servers.yaml` is.
        scratch: where vLLM finds an adapter merged with its base while it loads it.

    Raises:
        SettingsError: no server is named for the agent (`vllm_server`).
        ModelError: vLLM cannot do what the settings ask for.
    """
    server = None
    if samples_with_vllm(settings):
        if settings.name == "vllm_server":
            server = server_of(pipeline, agent)
        check_vllm(whole_model(folder), settings, None if server else this_machine())
    tokenizer, model, policy = open_model(models, agent, folder, settings, made_by)
    scorer = TransformersEngine(
        model,
        eos_token_ids=tokenizer.stop_token_ids,
        pad_token_id=tokenizer.pad_token_id,
        batch_size=settings.batch_size,
        batch_tokens=settings.batch_tokens,
        decode=tokenizer.decode,
    )
    if not samples_with_vllm(settings):
        return Engine(tokenizer, scorer, scorer, policy)
    resident = models.resident(agent, settings, server)
    sampler = resident.at(folder, policy, tokenizer, scorer, scratch)
    return Engine(tokenizer, sampler, scorer, policy, resident.metrics, resident)


def samples_with_vllm(settings: EngineSettings) -> bool:
    """Whether vLLM samples on this machine."""
    on_gpu = torch.cuda.is_available()
    return sampling_engine(settings, on_gpu=on_gpu, vllm=installed_build()) in VLLM_ENGINES
