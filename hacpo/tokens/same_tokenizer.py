"""Whether two model folders hold the same tokenizer, by content: token ids then mean the same to both models.

The files are read as JSON and compared; no tokenizer library is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacpo.artifacts.model_folder import read_mapping
from hacpo.artifacts.text_files import parse_json
from hacpo.errors import ModelError

_ADDED = "added_tokens.json"
_VOCABULARIES = (
    "vocab.json",
    "vocab.txt",
    "vocab.bpe",
    "encoder.json",
    "merges.txt",
    _ADDED,
    "tekken.json",
)
_SUFFIXES = (".model", ".spm", ".tiktoken")
"""Files of tokenizers that are written in Python or converted when they are loaded; `.model` and `.spm` are
SentencePiece's."""

_DESCRIPTIONS = {
    "backend",
    "chat_template",
    "clean_up_tokenization_spaces",
    "is_local",
    "local_files_only",
    "model_input_names",
    "model_max_length",
    "name_or_path",
    "padding_side",
    "processor_class",
    "special_tokens_map_file",
    "tokenizer_file",
    "truncation_side",
}
"""Keys of tokenizer_config.json that change no token id of a response."""

Json = dict[str, Any]


@dataclass(frozen=True)
class _Tokenizer:
    """What of a tokenizer.json decides token ids."""

    parts: Json
    pieces: frozenset[str]
    added: dict[int, str]


def same_tokenizer(first_folder: Path, second_folder: Path) -> bool:
    """Whether the tokenizers of two model folders give every text the same ids and every id the same token.

    Of tokenizer.json the model (vocabulary, merges and how it works), the normaliser, the pre-tokeniser and the added
    tokens count; of tokenizer_config.json the tokens that it adds. Truncation, padding, what is put around a whole
    document (BOS), how ids become text, the chat template, and which of the tokens is called EOS or is special do not.
    Folders without tokenizer.json have the same tokenizer if their vocabulary files are the same to the byte and their
    tokenizer_config.json says the same.

    Raises:
        ModelError: a file is damaged.
    """
    if _by_version(first_folder) != _by_version(second_folder):
        return False
    files = [folder / "tokenizer.json" for folder in (first_folder, second_folder)]
    if not all(file.is_file() for file in files):
        vocabulary = _vocabulary_files(first_folder)
        return (
            not any(file.is_file() for file in files)
            and any(vocabulary)
            and vocabulary == _vocabulary_files(second_folder)
        )
    contents = [file.read_bytes() for file in files]
    declared = [(_added(folder), _named(folder)) for folder in (first_folder, second_folder)]
    alike = contents[0] == contents[1]
    if alike and declared[0] == declared[1]:
        return True
    first = _tokenizer(files[0], contents[0])
    second = first if alike else _tokenizer(files[1], contents[1])
    return first.parts == second.parts and _tokens(first, *declared[0]) == _tokens(second, *declared[1])


def _by_version(folder: Path) -> dict[str, bytes]:
    """Files that take the place of tokenizer.json from a version of transformers on (`tokenizer.5.0.0.json`)."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("tokenizer.*.json"))}


def _tokenizer(file: Path, content: bytes) -> _Tokenizer:
    try:
        spec: Json = parse_json(content, deepest=None)
        # Older versions of the library write fewer of the model's options, and a merge as "a b", not as ["a", "b"].
        model = {
            key: value
            for key, value in spec["model"].items()
            if value is not None and value is not False and value != ""
        }
        if "merges" in model:
            model["merges"] = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
        vocabulary = model.get("vocab", {})
        return _Tokenizer(
            {"model": model, **{name: spec.get(name) for name in ("normalizer", "pre_tokenizer")}},
            frozenset(piece if isinstance(piece, str) else piece[0] for piece in vocabulary),
            {int(token["id"]): str(token["content"]) for token in spec.get("added_tokens") or ()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise ModelError("is no tokenizer that the `tokenizers` library writes", where=file) from None


def _tokens(tokenizer: _Tokenizer, added: Mapping[int, str], named: set[str]) -> tuple[dict[int, str], set[str]]:
    """Added tokens of both files by id, and those that get an id only when the tokenizer is loaded."""
    tokens = {**tokenizer.added, **added}
    return tokens, named - tokenizer.pieces - {*tokens.values()}


def _config(folder: Path) -> Json:
    return read_mapping(folder / "tokenizer_config.json")


def _added(folder: Path) -> dict[int, str]:
    """Tokens that tokenizer_config.json adds, by id; of an older folder, where it says nothing, added_tokens.json."""
    tokens = _config(folder).get("added_tokens_decoder")
    try:
        if tokens is None:
            return {int(token_id): str(content) for content, token_id in read_mapping(folder / _ADDED).items()}
        return {int(token_id): str(token["content"]) for token_id, token in tokens.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError("the tokens that are added have no ids and contents", where=folder) from None


def _named(folder: Path) -> set[str]:
    """Tokens with a role (`eos_token`, `additional_special_tokens`, ...)."""
    configs = (_config(folder), read_mapping(folder / "special_tokens_map.json"))
    return {
        content
        for config in configs
        for key, value in config.items()
        if key.endswith(("_token", "special_tokens"))
        for content in _contents(value)
    }


def _contents(value: object) -> set[str]:
    """Contents of tokens that are written as text, as a mapping with `content`, or as several of these."""
    if isinstance(value, dict) and "content" not in value:
        value = list(value.values())
    tokens = value if isinstance(value, list) else [value]
    named = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    return {content for content in named if isinstance(content, str)}


def _vocabulary_files(folder: Path) -> tuple[Json, dict[str, bytes]]:
    files = sorted(path for path in folder.iterdir() if path.name in _VOCABULARIES or path.suffix in _SUFFIXES)
    config = {key: value for key, value in _config(folder).items() if key not in _DESCRIPTIONS}
    return config, {path.name: path.read_bytes() for path in files}
