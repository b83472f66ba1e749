"""Which files make a model folder, and which of them are taken: the folder is a stranger's input.

Weights, config, tokenizer, templates and licences, by name: nothing else is read, linked or copied. A file may be a
link within its folder, or into the `blobs` of the hub's cache that the folder lies in; a link elsewhere could hand
anybody's file on to whoever gets the checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hacpo.artifacts.links import leads_to_object
from hacpo.artifacts.text_files import load_json, read_bytes
from hacpo.artifacts.weights import ADAPTER_FILES, WEIGHT_SUFFIXES, holds_adapter, is_weights
from hacpo.errors import ModelError, first_line

_PAPERS = ("README.md", "LICENSE*", "LICENCE*", "NOTICE*", "COPYING*", "USE_POLICY*")
"""Patterns of the names of files for people."""

MODEL_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "vocab.bpe",
    "merges.txt",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "*processor_config.json",
    "adapter_config.json",
    "adapter_base.json",
    *_PAPERS,
)
"""Patterns of the names of a model's files."""


GGUF = ".gguf"
"""Ending of a file that holds a whole model as llama.cpp reads it (https://github.com/ggml-org/ggml)."""

CHAT_TEMPLATES = "additional_chat_templates"
"""Folder of a model folder for templates under other names; never taken along."""


def is_model_file(name: str) -> bool:
    """Whether a file of this name may belong to a model folder: weights in safetensors, and what is read beside them.

    Weights in formats that can hold code (pickles), scripts and anything unknown are none.
    """
    if name.startswith(".") or (Path(name).suffix in WEIGHT_SUFFIXES and not name.endswith(".safetensors")):
        return False
    return any(fnmatchcase(name, pattern) for pattern in MODEL_FILES)


def model_files(folder: Path) -> list[Path]:
    """The model's files in a folder, by name.

    Raises:
        ModelError: one of them is a link that leaves the folder, or leads nowhere; or the folder holds an adapter.
    """
    if holds_adapter(folder):
        raise ModelError("holds an adapter, not a model alone", where=folder, remedy="merge the two first")
    files = [path for path in sorted(folder.iterdir()) if is_model_file(path.name) and not path.is_dir()]
    roots = _roots(folder)
    templates = folder / CHAT_TEMPLATES  # transformers reads what is in there, too
    files_read = [*files, *([templates] if templates.is_symlink() else []), *sorted(templates.glob("*.jinja"))]
    for file in files_read:
        real = Path(os.path.realpath(file))  # `resolve` raises for links in a circle
        is_there = real.is_file() or file == templates
        if not is_there or not any(real.is_relative_to(root) for root in roots):
            raise ModelError(
                "is no file of this model folder",
                where=file,
                found=f"a link to {file.readlink()}" if file.is_symlink() else "no regular file",
                remedy="put a copy in its place if it belongs to the model, else remove it",
            )
    return files


def gguf_of(model: Path) -> Path | None:
    """The GGUF file that an agent starts from: `model` itself, or the one in the folder, if it holds nothing that is
    read otherwise; None where there is none.

    Raises:
        ModelError: it is one of several, or a link that leaves the folder, or no regular file.
    """
    if model.suffix == GGUF and not model.is_dir():
        files = [model] if model.exists() else []
    else:
        files = [] if (model / "config.json").exists() else sorted(model.glob(f"*{GGUF}"))
    if len(files) > 1:
        raise ModelError(
            "holds several GGUF files",
            where=model,
            found=", ".join(file.name for file in files)[:160],
            remedy="name the one that is meant in agents.<name>.model; a model in several parts cannot be used",
        )
    for file in files:
        real = Path(os.path.realpath(file))
        if not real.is_file() or not (file == model or any(real.is_relative_to(root) for root in _roots(model))):
            what = f"a link to {file.readlink()}" if file.is_symlink() else "no regular file"
            raise ModelError("is no file of this model", where=file, found=what, remedy="put a copy in its place")
    return files[0] if files else None


def gguf_hash(file: Path) -> str:
    """SHA-256 of a GGUF file, as `sha256sum` prints it."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_cached(file: Path) -> bool:
    """Whether a link leads to an object of DVC's cache, by the name that DVC gives one."""
    return file.is_file() and leads_to_object(file)


def check_checkpoint(folder: Path) -> None:
    """Refuse a checkpoint with a link, or a pipe or device, in it or on the last two levels of the way to it.

    hacpo makes none, and DVC makes only such as lead to objects of its cache (`cache.type symlink`). In a run that was
    handed over, another link would put anybody's file into the next checkpoint, and into what is exported of it.

    Raises:
        ModelError: it has one.
    """
    inside = [Path(at) / name for at, folders, files in os.walk(folder) for name in (*folders, *files)]
    for path in (folder.parent, folder, *sorted(inside)):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or is_cached(path)):
            raise ModelError(
                "is no file of this checkpoint",
                where=path,
                found=f"a link to {path.readlink()}" if stat.S_ISLNK(mode) else "no regular file",
                remedy="put a copy in its place if it belongs to the model, else remove it",
            )


def config_files(folder: Path) -> list[Path]:
    """What beside its weights a model folder has libraries read, by name: config, generation config, tokenizer and chat
    template. Of an adapter only what its policy leaves out (`weights.policy_files`)."""
    return [
        file
        for file in sorted(folder.iterdir())
        if is_model_file(file.name)
        and not any(fnmatchcase(file.name, pattern) for pattern in _PAPERS)
        and not (is_weights(file) or file.name in ADAPTER_FILES)
        and file.is_file()
    ]


def config_hash(folder: Path) -> str:
    """SHA-256 of what `sha256sum` prints of the `config_files`, in the order of the bytes of their names.

    The same weights compute something else with another config, and read another text with another tokenizer.

    Raises:
        OSError: one cannot be read.
    """
    sums = [f"{hashlib.sha256(read_bytes(file)).hexdigest()}  {file.name}\n" for file in config_files(folder)]
    return hashlib.sha256("".join(sums).encode()).hexdigest()


def indexed_weights(folder: Path) -> list[str]:
    """The weights files that the index of a folder names, there or not; none without an index.

    Raises:
        ModelError: the index is damaged, or names a file elsewhere, which transformers would take for the model's own.
    """
    names: set[str] = set()
    for index in sorted(folder.glob("*.safetensors.index.json")):
        weight_map = read_mapping(index).get("weight_map")
        files = list(weight_map.values()) if isinstance(weight_map, dict) else [weight_map]
        for file in files:
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise ModelError("names no weights file of this folder", where=index, found=repr(file)[:80])
            names.add(file)
    return sorted(names)


def _roots(folder: Path) -> list[Path]:
    """Where a model folder's files may really lie: in it, or beside the snapshot of the hub's cache that it is
    (`models--<owner>--<name>/snapshots/<commit>`, whose files are links to `../../blobs`)."""
    whole = folder.resolve()
    cached = whole.parent.name == "snapshots" and whole.parents[1].name.startswith("models--")
    return [whole, whole.parents[1] / "blobs"] if cached else [whole]


def read_mapping(file: Path) -> dict[str, Any]:
    """The content of a model folder's JSON file; empty if there is none.

    Raises:
        ModelError: it holds no mapping.
    """
    try:
        content = load_json(file) if file.is_file() else {}
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ModelError("is no JSON mapping", where=file)
    return content


def copy_file(file: Path, target: Path) -> None:
    """Copy a file with its permissions: what only its owner may read stays so. Its owner may write the copy, also of a
    file that DVC has write-protected."""
    shutil.copyfile(file, target)
    target.chmod(stat.S_IMODE(file.stat().st_mode) | stat.S_IWUSR)


def why_unloadable(error: BaseException) -> str:
    """What to say of an error that transformers raised over a model folder, in one line."""
    text = str(error)
    if "trust_remote_code" in text:
        return "it brings code of its own (auto_map), which is never run, for an architecture that is unknown here"
    return first_line(error, 160)
