"""Checkpoint folders: content hash, copying, loading and saving as plain Hugging Face model folders."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hacpo.config import EngineSettings
from hacpo.errors import ArtifactError, ModelError
from hacpo.weights import WEIGHT_SUFFIXES, is_weights, policy_hash

__all__ = ["copy_model_folder", "load_model", "policy_hash", "resolve_device", "save_model", "storage_errors"]


def resolve_device(settings: EngineSettings) -> torch.device:
    """The device that the settings name; `auto` is cuda where there is one.

    Raises:
        ModelError: cuda is asked for and not there.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ModelError("engine.device is cuda, but torch sees no GPU", remedy="set engine.device to auto or cpu")
    return torch.device("cuda" if settings.device != "cpu" and torch.cuda.is_available() else "cpu")


def load_model(folder: Path, settings: EngineSettings) -> Any:
    """The folder's causal language model, in the settings' dtype on the settings' device, in evaluation mode.

    Raises:
        ModelError: transformers cannot load it.
        ArtifactError: a weights file is damaged.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # one for each file, through our own

    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), local_files_only=True, dtype=getattr(torch, settings.dtype)
        )
    except SafetensorError as error:
        raise ArtifactError(f"damaged weights: {error}", where=folder) from None
    except Exception as error:
        # transformers raises OSError, ValueError, KeyError and others for folders it cannot use.
        raise ModelError(f"cannot be loaded: {(str(error).splitlines() or ['?'])[0][:160]}", where=folder) from None
    for parameter in model.parameters():
        # Weights may be views into a mapped file at any alignment, and alignment can change the last bit of a product.
        parameter.data = parameter.data.clone()
    # Whatever a folder's generation config says (temperature, repetition penalty...), params.yaml alone decides how we
    # sample.
    model.generation_config = GenerationConfig()
    return model.to(resolve_device(settings)).eval()


def copy_model_folder(source: Path, target: Path) -> None:
    """Copy a model folder (weights by hard link where possible), leaving out trainer state and foreign weight formats.

    Raises:
        ModelError: no config.json or no safetensors weights.
    """
    for wanted in ("config.json",):
        if not (source / wanted).is_file():
            raise ModelError(f"is no model folder: it has no {wanted}", where=source)
    policy_hash(source)
    for file in sorted(source.iterdir()):
        if not file.is_file() or (file.suffix in WEIGHT_SUFFIXES and file.suffix != ".safetensors"):
            continue
        real = file.resolve()
        try:
            os.link(real, target / file.name)
        except OSError:
            shutil.copyfile(real, target / file.name)


def save_model(model: Any, target: Path, like: Path) -> None:
    """Save weights as safetensors, and every other file byte for byte from the folder `like`.

    Config, tokenizer and template never change during training, so they are copied and cannot drift.
    """
    with storage_errors():
        model.save_pretrained(str(target))
    for file in target.iterdir():
        if not is_weights(file):
            file.unlink()
    for file in sorted(like.iterdir()):
        if file.is_file() and not is_weights(file):
            shutil.copyfile(file, target / file.name)
    for file in target.iterdir():
        file.chmod(0o644)  # safetensors makes files that only their owner may read


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """Turn safetensors' own error for a refused write ("... (os error 28)") into the OSError that it was."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from None
