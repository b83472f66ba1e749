"""Weights files of a model folder: which they are, and the content hash that names a policy; torch is not needed."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hacpo.errors import ModelError

_CHUNK = 1 << 22
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Endings of weights files, in the formats that model folders come in; only safetensors are read."""


def policy_hash(folder: Path) -> str:
    """SHA-256 of the weights: of the bytes of all `*.safetensors` files in name order.

    For a folder with one weights file this is what `sha256sum model.safetensors` prints.

    Raises:
        ModelError: the folder has no safetensors weights.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError("no *.safetensors weights", where=folder)
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def is_weights(file: Path) -> bool:
    """Whether a file of a model folder holds weights or says which file holds which; all others never change."""
    return file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".safetensors.index.json")
