"""One whole model from a checkpoint that holds an adapter: for engines and tools that know no adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hacpo.artifacts.storage import remove
from hacpo.artifacts.weights import base_of, holds_adapter
from hacpo.engines.models.checkpoint import load_model, save_model
from hacpo.settings.engine import EngineSettings


@contextlib.contextmanager
def merged_folder(folder: Path, scratch: Path, settings: EngineSettings) -> Iterator[Path]:
    """A model folder that any tool loads: the given one, or its adapter merged with the base, for the block alone.

    Args:
        folder: a checkpoint.
        scratch: where to merge to, if need be; removed afterwards, as is what a killed process left there.
        settings: merged weights have the engine's dtype.

    Raises:
        ModelError: the base or PEFT is missing.
        ArtifactError: the adapter is damaged, or its base has changed.
    """
    if not holds_adapter(folder):
        yield folder
        return
    remove(scratch)
    scratch.mkdir(parents=True)
    try:
        merge_into(folder, scratch, settings)
        yield scratch
    finally:
        remove(scratch)
        with contextlib.suppress(OSError):  # another agent's is there
            scratch.parent.rmdir()


def merge_into(folder: Path, target: Path, settings: EngineSettings) -> None:
    """Write a checkpoint's adapter, merged with its base, into an existing, empty folder; errors as above."""
    model = load_model(folder, settings.model_copy(update={"device": "cpu"}))
    save_model(merge(model), target, like=base_of(folder)[0])


def merge(model: Any) -> Any:
    """Add a model's adapter to its weights, in place; returns the model, which has no adapter then.

    W + alpha / rank * B A is computed in float32, and rounded once where the weights are bfloat16.
    """
    from peft.tuners.lora import LoraLayer

    for path, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.lora_A.float()
            module.lora_B.float()
            module.merge()
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, module.get_base_layer())
    del model._hacpo_adapter, model.peft_config
    return model
