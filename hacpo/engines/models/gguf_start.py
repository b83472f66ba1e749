"""An agent's first checkpoint from a GGUF file: an ordinary model folder, its weights unpacked to float32.

A GGUF file holds a whole model as llama.cpp reads it: weights, mostly in quantised blocks, with config, tokenizer and
chat template (https://github.com/ggml-org/ggml). transformers reads it, with the package
`gguf`; training goes on from the values that its blocks stand for, which float32 holds as they are.

The file is a stranger's. It is read in a process with limits of memory and time, which fetches nothing; the folder that
comes of it is then treated as any other stranger's folder. Nothing in the file is executed, and its chat template is
rendered as every other (`tokens.renderer`).
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacpo.artifacts.model_config import check_config
from hacpo.artifacts.model_folder import gguf_hash, why_unloadable
from hacpo.artifacts.trial import MEMORY, SECONDS, try_reading
from hacpo.errors import ModelError, harmless
from hacpo.settings.model_source import SHA256

_NAME = "model.gguf"
"""What the file is called in the folder that transformers is given: alone there, so that nothing beside it is read."""

_TITLE = "_model_name_or_path"
"""Where transformers puts the name that a file gives its model."""

_MEMORY_FACTOR = 24
"""Bytes of memory that a byte of the file may take: blocks of 1.6 bits become 20 times as large."""
_SECONDS_PER_MIB = 1

_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Values of `tokenizer.ggml.pre` with which llama.cpp takes every digit by itself and splits the rest as GPT-2 does
(`llama-vocab.cpp`). transformers knows other values, and splits as GPT-2 alone where it does not know one."""
_AS_GPT2 = ("gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling")
"""Those with which it splits as GPT-2 does, too."""


def unpack_gguf(file: Path, target: Path, *, where: str, revision: str | None = None) -> tuple[str, str]:
    """Fill an empty folder with the model of a GGUF file.

    Args:
        file: `model_folder.gguf_of` the agent's model.
        where: `agents.<name>`, for messages.
        revision: SHA-256 that the file must have; None: any.

    Returns:
        SHA-256 of the file, and what was done, in words for the user.

    Raises:
        ModelError: the package `gguf` is not installed, the file is another than the one asked for, or it holds no
            causal language model that transformers can unpack without remainder, within bounds.
    """
    require_gguf(f"{where}.model")
    digest = gguf_hash(file)
    if revision is not None:
        _check_revision(revision, digest, where)
    return digest, _in_bounds(file, target, unpack)


def described_gguf(file: Path, *, where: str, revision: str | None = None) -> Path:
    """A folder with config, tokenizer and chat template of a GGUF file, without weights, as long as this process lives.

    Raises:
        ModelError: as of `unpack_gguf`, as far as it can be told without the weights.
    """
    require_gguf(f"{where}.model")
    state = file.stat()
    key = file.resolve(), state.st_size, state.st_mtime_ns
    if key not in _DESCRIBED:
        folder = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        try:
            _in_bounds(file, folder, describe)
            _DESCRIBED[key] = gguf_hash(file), folder
        except ModelError as refusal:
            _DESCRIBED[key] = "", refusal
    digest, made = _DESCRIBED[key]
    if isinstance(made, ModelError):
        raise made
    if revision is not None:
        _check_revision(revision, digest, where)
    return made


_DESCRIBED: dict[tuple[Path, int, int], tuple[str, Path | ModelError]] = {}
"""(file, size, when it was last changed) -> its SHA-256, and the folder or why there is none: an estimate and a check
ask several times."""


def _check_revision(revision: str, found: str, where: str) -> None:
    if revision != found:
        usual = SHA256.fullmatch(revision)
        what = "the GGUF file is another one" if usual else "the revision of a GGUF file is its SHA-256"
        raise ModelError(what, where=f"{where}.revision", expected=revision if usual else found, found=found)


def require_gguf(where: str) -> None:
    """Refuse where the package `gguf` is not installed.

    Raises:
        ModelError: it is not.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(
            "a GGUF file needs the package gguf, which is not installed",
            where=where,
            remedy="run `pip install 'hacpo[gguf]'`",
        )


def _in_bounds(file: Path, target: Path, reader: Callable[[Path, Path], str | None]) -> str:
    size = file.stat().st_size
    memory, seconds = MEMORY + _MEMORY_FACTOR * size, SECONDS + _SECONDS_PER_MIB * (size >> 20)
    too_large = ModelError(
        "takes too much memory to read", where=file, expected=f"at most {memory >> 30} GiB", remedy="take another file"
    )
    return try_reading(
        file,
        reader,
        ModelError,
        too_large,
        parts="take another file",
        into=target,
        memory=memory,
        seconds=seconds,
    )


# --- in the process with limits --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Header:
    """What a GGUF file says of itself.

    Attributes:
        types: of its tensors, as llama.cpp calls them (`Q4_1`), and how many there are.
        values: of all tensors together.
        splits: by which rule its tokenizer splits texts (`tokenizer.ggml.pre`); None: it does not say.
    """

    types: Counter[str]
    values: int
    splits: Any


def describe(file: Path, target: Path) -> None:
    """Write config, tokenizer and chat template of a GGUF file into an empty folder; errors as of `unpack`."""
    header = _header(file)
    with _alone(file, target) as source:
        _config(source, target)
        _tokenizer(source, target, header)


def unpack(file: Path, target: Path) -> str:
    """Write the model of a GGUF file into an empty folder, its weights in float32; returns what was done.

    Raises:
        ModelError: the file is damaged, or transformers cannot unpack all of it, or finds not all of a model in it.
    """
    header = _header(file)
    with _alone(file, target) as source:
        model = _model(file, source, _config(source, target))
        placed = sum(parameter.numel() for parameter in model.parameters())
        if placed != header.values:  # transformers leaves out what it has no place for
            raise ModelError(
                f"transformers' {type(model).__name__} has not a place for each of its tensors",
                where=file,
                expected=f"{placed:,} values",
                found=f"{header.values:,}",
                remedy="take the model in the Hugging Face format",
            )
        _save(model, target, stat.S_IMODE(file.stat().st_mode))
        note = _tokenizer(source, target, header)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(header.types.items()))
    return f"unpacked to float32 from {counts}{note}"


def _header(file: Path) -> _Header:
    """What a file says, if its tensors are no more than it holds.

    Raises:
        ModelError: they overlap: a file of a megabyte could be unpacked to terabytes.
    """
    from gguf import GGUFReader

    reader = GGUFReader(file)
    stated = sum(tensor.n_bytes for tensor in reader.tensors)
    if stated > file.stat().st_size:
        raise ModelError("its tensors overlap", where=file, expected=f"{stated:,} bytes", found=file.stat().st_size)
    splits = reader.get_field("tokenizer.ggml.pre")
    return _Header(
        Counter(tensor.tensor_type.name for tensor in reader.tensors),
        sum(tensor.n_elements for tensor in reader.tensors),
        None if splits is None else splits.contents(),
    )


@contextmanager
def _alone(file: Path, target: Path) -> Iterator[dict[str, Any]]:
    """Where transformers finds the file and nothing else; given as arguments of its `from_pretrained`."""
    with tempfile.TemporaryDirectory(dir=target) as folder:
        (Path(folder) / _NAME).symlink_to(file.resolve())
        yield {"pretrained_model_name_or_path": folder, "gguf_file": _NAME, "local_files_only": True}


def _config(source: Mapping[str, Any], target: Path) -> Any:
    """Write config.json, and refuse what no folder's may say, before anything is made of that size."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(**source, trust_remote_code=False)
    stated = config.to_dict()
    stated.pop(_TITLE, None)
    (target / "config.json").write_text(json.dumps(stated, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    check_config(target)
    return config


def _model(file: Path, source: Mapping[str, Any], config: Any) -> Any:
    """The model with all its weights in float32.

    Raises:
        ModelError: transformers cannot unpack it, or a parameter is missing.
    """
    import torch
    import transformers

    from hacpo.engines.models.safe_load import check_report

    packing = getattr(transformers, "GgufConfig", None)  # with it, transformers may compute with the blocks themselves
    options = {} if packing is None else {"quantization_config": packing(dequantize=True)}
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            **source,
            trust_remote_code=False,
            config=config,
            output_loading_info=True,
            dtype=torch.float32,
            **options,
        )
    except MemoryError:
        raise
    except Exception as error:
        raise ModelError(f"cannot be unpacked: {why_unloadable(error)}", where=file) from None
    check_report(report, file)
    return model


def _save(model: Any, target: Path, mode: int) -> None:
    """Write a model as one that never was quantised, its weights for those who may read the file (its `mode`)."""
    for name in ("quantization_config", _TITLE):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.hf_quantizer = None
    model.save_pretrained(str(target))
    for weights in target.glob("*.safetensors"):
        weights.chmod(mode & 0o666 | stat.S_IRUSR | stat.S_IWUSR)  # safetensors makes files for their owner alone


def _tokenizer(source: Mapping[str, Any], target: Path, header: _Header) -> str:
    """Write the tokenizer, which splits texts as the file says; returns what is to be said of that."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
    backend, note = tokenizer.backend_tokenizer, ""
    as_gpt2 = isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) and backend.pre_tokenizer.use_regex
    if as_gpt2 and header.splits in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif as_gpt2 and header.splits not in _AS_GPT2:
        named = "the file names no rule"
        if header.splits is not None:
            named = f"the file's rule {harmless(str(header.splits))[:40]} is not known"
        note = f", texts split as by GPT-2, for {named}"
    tokenizer.save_pretrained(str(target))
    return note
