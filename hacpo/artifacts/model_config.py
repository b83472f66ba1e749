"""What the JSON files of a model folder may ask of the libraries that read them: the folder is a stranger's input.

transformers lets them name other files, code and packings of the weights, and makes whatever sizes they state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hacpo.artifacts.config_sizes import check_sizes, pairs
from hacpo.artifacts.model_folder import read_mapping
from hacpo.errors import ModelError

_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)

_QUANTISED = "says that the weights are quantised, and training writes plain ones"
_OTHER_FILE = "has another file read than the usual one"

_REFUSED: Mapping[str, Mapping[str, str]] = {
    "config.json": {
        # Checked, hashed and copied are the files with the usual names. A checkpoint gets this config and weights under
        # the usual name, so that it could not be loaded again.
        "transformers_weights": _OTHER_FILE,
        "configuration_files": _OTHER_FILE,
        "checkpoint_path": _OTHER_FILE,
        "quantization_config": _QUANTISED,
        "compression_config": _QUANTISED,
        "fusion_config": "replaces parts of the model",
        "distributed_config": "places the model on devices",
        "use_pretrained_backbone": "has weights fetched from the hub",
    },
    "tokenizer_config.json": {
        "gguf_file": _OTHER_FILE,
        "init_inputs": "may have another file read than the usual one",
    },
}
"""Keys that may hold nothing, at any depth: what transformers 5 does with them in `_get_resolved_checkpoint_files`,
`get_configuration_file`, `get_hf_quantizer`, `from_pretrained`, `load_backbone` and timm's `create_model`; of
tokenizers, in `get_fast_tokenizer_file`, `_from_pretrained` and `TokenizersBackend`."""

_TABLES = ("vocab", "merges")
"""Keys of tokenizer_config.json whose value is a table, or else the path of a file that is opened wherever it is."""

_TOKENIZER = re.compile(r"(?!Auto|Rag)\w*(?:Tokenizer|TokenizerFast|Backend)")
"""Names of classes that are tokenizers. transformers takes any class that it exports, and `AutoProcessor` and others
ask on the terminal whether to run the folder's code."""


def check_config(folder: Path, called: Path | None = None) -> None:
    """Refuse a model folder whose JSON files would cost memory or time without end, have code run or fetched, or have
    other files read than those that are checked, hashed and copied.

    Args:
        called: what messages name instead of `folder`.

    Raises:
        ModelError: it is such a one.
    """
    for name in _FILES:
        try:
            content = read_mapping(folder / name)
        except (ModelError, OSError):
            continue  # transformers says what is wrong with it
        where = (called or folder) / name
        for key, value in pairs(content):
            _check_reference(name, key, value, where)
        check_sizes(content, where)


def _check_reference(file: str, key: str, value: Any, where: Path) -> None:
    """Refuse a key that has code run, or anything read but the folder's files."""
    refused = _REFUSED.get(file, {})
    if key in refused and value not in (None, False, [], {}):
        remedy = f"take {key} out and give the folder's files their usual names"
        if refused[key] == _QUANTISED:
            remedy = "start from the model that it was made of"
        raise ModelError(f"{key} {refused[key]}", where=where, found=repr(value)[:80], remedy=remedy)
    if key == "fast_tokenizer_files" and not all(_is_plain_name(name) for name in value or ()):
        # Of those in the folder itself (`tokenizer.<version>.json`) `same_tokenizer` knows.
        raise ModelError(f"{key} names a file elsewhere", where=where, found=repr(value)[:80], remedy=f"take {key} out")
    if file == "tokenizer_config.json" and key in _TABLES and isinstance(value, str):
        raise ModelError(f"{key} {_OTHER_FILE}", where=where, found=repr(value)[:80], remedy=f"take {key} out")
    if "attn_implementation" in key:
        for named in value.values() if isinstance(value, dict) else [value]:  # one for each part of a model
            if not (named is None or (isinstance(named, str) and named.replace("_", "").isalnum())):
                raise ModelError(f"{key} names code that is not in transformers", where=where, found=repr(named)[:80])
    if key == "tokenizer_class" and not (value is None or (isinstance(value, str) and _TOKENIZER.fullmatch(value))):
        raise ModelError(f"{key} names no tokenizer of transformers", where=where, found=repr(value)[:80])


def _is_plain_name(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name
