"""Checkpoint folders: content hash, copying, loading and saving as plain Hugging Face model folders."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hacpo.artifacts.model_folder import copy_file, is_cached, is_model_file, model_files
from hacpo.artifacts.weights import ADAPTER_FILES, base_of, holds_adapter, is_weights, policy_files, policy_hash
from hacpo.engines.models.safe_load import load_whole
from hacpo.errors import ArtifactError, ModelError
from hacpo.settings.engine import EngineSettings
from hacpo.settings.model_source import STARTED_FROM

__all__ = ["copy_model_folder", "load_model", "policy_hash", "resolve_device", "save_model"]


def resolve_device(settings: EngineSettings) -> torch.device:
    """The device that the settings name; `auto` is cuda where there is one.

    Raises:
        ModelError: cuda is asked for and not there.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ModelError("engine.device is cuda, but torch sees no GPU", remedy="set engine.device to auto or cpu")
    return torch.device("cuda" if settings.device != "cpu" and torch.cuda.is_available() else "cpu")


def load_model(folder: Path, settings: EngineSettings, *, to_shard: bool = False) -> Any:
    """The folder's causal language model, in the settings' dtype on the settings' device, in evaluation mode; with its
    adapter in place where the folder holds one.

    Args:
        to_shard: in float32 on the CPU instead: what is sharded and trained.

    Raises:
        ModelError: transformers cannot load it, its weights are not those of its config, or it holds an adapter and
            there is no PEFT.
        ArtifactError: a weights file is damaged, or an adapter's base has changed.
    """
    from transformers import GenerationConfig

    base = _base(folder) if holds_adapter(folder) else folder
    model = load_whole(
        base,
        folder,
        dtype=torch.float32 if to_shard else getattr(torch, settings.dtype),
        **({} if settings.attention == "auto" else {"attn_implementation": settings.attention}),
    )
    for parameter in model.parameters():
        # Weights may be views into a mapped file at any alignment, and alignment can change the last bit of a product.
        parameter.data = parameter.data.clone()
    if base != folder:
        from hacpo.engines.models.adapter import load_adapter

        load_adapter(model, folder)
    # Whatever a folder's generation config says (temperature, repetition penalty...), params.yaml alone decides how we
    # sample.
    model.generation_config = GenerationConfig()
    return model.to("cpu" if to_shard else resolve_device(settings)).eval()


def _base(folder: Path) -> Path:
    """The base of a folder's adapter, if its weights are those that the adapter was trained with."""
    base, policy = base_of(folder)
    if not base.is_dir():
        raise ModelError("the base of the adapter is missing", where=folder, expected=base)
    if policy_hash(base) != policy:
        raise ArtifactError("its weights are not those that this adapter belongs to", where=base, expected=policy)
    return base


def copy_model_folder(source: Path, target: Path) -> None:
    """Copy the model's files of a folder (by hard link where possible), without what another run wrote down about its
    own start.

    Raises:
        ModelError: no config.json or no safetensors weights, or what `model_files` refuses.
    """
    for wanted in ("config.json",):
        if not (source / wanted).is_file():
            raise ModelError(f"is no model folder: it has no {wanted}", where=source)
    files = model_files(source)
    policy_files(source)
    for file in files:
        try:
            os.link(file.resolve(), target / file.name)
        except OSError:
            copy_file(file, target / file.name)


def save_model(model: Any, target: Path, like: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Save weights as safetensors (of a model with an adapter: the adapter's alone), and the model's other files byte
    for byte from the folder `like`.

    Config, tokenizer and template never change during training, so they are copied and cannot drift. Links but those to
    objects of DVC's cache, and files that are no model's, stay where they are.

    Args:
        weights: what to save; None: the model's own.
    """
    from hacpo.engines.models.adapter import adapter_of, write_adapter

    adapter = adapter_of(model)
    if adapter is not None:
        write_adapter(adapter, model.state_dict() if weights is None else weights, target)
    else:
        model.save_pretrained(str(target), state_dict=None if weights is None else dict(weights))
        for file in target.iterdir():
            if not is_weights(file):
                file.unlink()
    readable = 0o644
    for file in sorted(like.iterdir()):
        # transformers takes a folder with a config for a whole model, and would not look for the adapter's base.
        kept_out = (*ADAPTER_FILES, "config.json") if adapter is not None else ()
        named = is_model_file(file.name) or file.name == STARTED_FROM
        if named and _may_be_copied(file) and not is_weights(file) and file.name not in kept_out:
            copy_file(file, target / file.name)
        elif is_weights(file):
            readable = stat.S_IMODE(file.stat().st_mode) | stat.S_IWUSR
    for file in target.iterdir():
        if is_weights(file) or file.name in ADAPTER_FILES:
            file.chmod(readable)  # safetensors makes files that only their owner may read


def _may_be_copied(file: Path) -> bool:
    """Whether it is a file of the folder's own, or one that DVC keeps in its cache for it (`cache.type symlink`)."""
    return stat.S_ISREG(file.lstat().st_mode) or is_cached(file)
