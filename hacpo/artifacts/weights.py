"""Weights files of a model folder: which they are, and the content hash that names a policy; torch is not needed.

The checkpoints of an agent that trains a LoRA adapter hold the adapter alone: its weights, its config as every tool
reads it, and `ADAPTER_BASE`, which says which folder holds the base and what its weights hash to (docs/lora.md).
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from hacpo.artifacts.text_files import check_regular, load_json
from hacpo.errors import ArtifactError, ModelError

_CHUNK = 1 << 22
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Endings of weights files, in the formats that model folders come in; only safetensors are read."""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_BASE = "adapter_base.json"
"""`{"folder": the base's, relative to this one, "policy": SHA-256 of its weights}`."""
ADAPTER_FILES = (ADAPTER_BASE, ADAPTER_CONFIG, ADAPTER_WEIGHTS)
"""Everything that makes the policy of a folder with an adapter, the base's hash included."""


def policy_hash(folder: Path) -> str:
    """SHA-256 of the weights: of the bytes of all `*.safetensors` files in name order.

    For a folder with one weights file this is what `sha256sum model.safetensors` prints. For a folder with an adapter
    it is what `cat adapter_* | sha256sum` prints: rank, scale and the base's hash make the policy as its weights do.

    Raises:
        ModelError: the folder has no safetensors weights.
    """
    digest = hashlib.sha256()
    for file in policy_files(folder):
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def policy_files(folder: Path) -> list[Path]:
    """The files that make a folder's policy, in the order in which they are hashed; errors as of `policy_hash`."""
    files = sorted(folder.glob("*.safetensors"))
    if holds_adapter(folder):
        files = [folder / name for name in ADAPTER_FILES]
    for file in files:
        if not file.is_file():
            raise ModelError("there is no such file beside the adapter's others", where=file)
    if not files:
        raise ModelError("no *.safetensors weights", where=folder)
    return files


def holds_adapter(folder: Path) -> bool:
    """Whether a model folder holds an adapter, without the base that it belongs to."""
    return (folder / ADAPTER_CONFIG).is_file()


def adapter_config(*, base: str, rank: int, alpha: int, targets: list[str], transposed: bool) -> dict[str, Any]:
    """The content of `ADAPTER_CONFIG`: what PEFT's defaults do not say.

    Args:
        base: where tools look for the base.
        rank, alpha: the adapter's size, and the scale times the rank.
        targets: endings of the paths of the layers that have an adapter.
        transposed: whether they keep their weights as [inputs, outputs] (GPT-2).
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,  # a ratio compares policies, not masks
        "target_modules": targets,
        "fan_in_fan_out": transposed,
        "bias": "none",
        "inference_mode": True,
    }


def tensor_shapes(file: Path) -> dict[str, list[int]]:
    """Name -> shape of every tensor in a safetensors file. Its header is read and held against its length, nothing
    more.

    Raises:
        ArtifactError: damaged: cut, lengthened, or no such file at all.
    """
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(file)
        with safe_open(file, framework="numpy") as opened:
            return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise ArtifactError("damaged weights: its header cannot be read", where=file, found=str(error)[:80]) from None


def base_of(folder: Path) -> tuple[Path, str]:
    """Folder and policy hash of the base that a folder's adapter belongs to.

    Raises:
        ArtifactError: the file that says so is missing or damaged.
    """
    path = folder / ADAPTER_BASE
    try:
        content: Any = load_json(path)
        base, policy = content["folder"], content["policy"]
        if not isinstance(base, str) or not isinstance(policy, str):
            raise TypeError("no text")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        # Raised in here, it is told from a disk that does not let the file be read (`made_plain`).
        raise ArtifactError("names no base model of the adapter", where=path) from None
    return folder / base, policy


def whole_model(folder: Path) -> Path:
    """The folder with config, tokenizer and full weights that a checkpoint needs: itself, or its adapter's base.

    Raises:
        ArtifactError: an adapter does not say what its base is.
    """
    return base_of(folder)[0] if holds_adapter(folder) else folder


def is_weights(file: Path) -> bool:
    """Whether a file of a model folder holds weights or says which file holds which; all others never change."""
    return file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".safetensors.index.json")


_STATE_FILE = re.compile(r"optimizer(?:-(\d{5})-of-(\d{5}))?\.safetensors")


def optimizer_name(number: int, parts: int) -> str:
    """Name of a file of an optimizer's state, which has `parts` of them; counted from 1."""
    return "optimizer.safetensors" if parts == 1 else f"optimizer-{number:05d}-of-{parts:05d}.safetensors"


def optimizer_files(trainer: Path) -> list[Path]:
    """Files of the optimizer's state in a checkpoint's `trainer` folder; none unless all are there."""
    found = sorted(path for path in trainer.glob("optimizer*.safetensors") if _STATE_FILE.fullmatch(path.name))
    wanted = [optimizer_name(number, len(found)) for number in range(1, len(found) + 1)]
    return found if [path.name for path in found] == wanted else []
