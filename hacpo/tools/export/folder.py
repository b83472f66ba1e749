"""The files of a model folder: which of a checkpoint's are taken along, and where they may be written."""

from __future__ import annotations

from pathlib import Path

from hacpo.artifacts.model_folder import copy_file, is_cached, is_model_file
from hacpo.artifacts.targets import check_outside_kept
from hacpo.artifacts.weights import ADAPTER_CONFIG
from hacpo.errors import MissingInputError, SettingsError
from hacpo.settings.model_source import STARTED_FROM

CARD = "README.md"


def check_target(target: Path, artifacts: Path, *, force: bool) -> None:
    """Refuse a place that an export must not be written to.

    Only a folder that holds a model and nothing else is ever replaced: `--force` with the wrong name must not cost
    anybody their work.

    Raises:
        SettingsError: it lies in the run's artifacts, or among the files that DVC, git or hacpo keep of a run, or
            something is there already.
    """
    whole, run = target.resolve(), artifacts.resolve()
    if whole.is_relative_to(run) or run.is_relative_to(whole):
        raise SettingsError("must lie outside the run's artifacts", where=target, remedy="name another folder")
    check_outside_kept(target, remedy="name another folder")
    if not whole.exists() or (whole.is_dir() and not any(whole.iterdir())):
        return
    if not force:
        raise SettingsError(
            "is there already", where=target, remedy="add --force to replace it, or name another folder"
        )
    model = whole.is_dir() and any((whole / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
    foreign = [entry.name for entry in sorted(whole.iterdir()) if not _is_of_export(entry)] if model else []
    if not model or foreign or not any(whole.glob("*.safetensors")):
        raise SettingsError(
            "is no exported model folder and is not replaced",
            where=target,
            found=foreign[0] if foreign else None,
            remedy="remove it yourself",
        )


def _is_of_export(entry: Path) -> bool:
    """Whether an export may have written a file: a model's, or what says where it is from."""
    return entry.is_file() and (is_model_file(entry.name) or entry.name in (CARD, STARTED_FROM))


def copy_model(checkpoint: Path, target: Path) -> None:
    """Copy what any tool needs to load the model, licences included, into the empty folder `target`.

    Taken along is what makes a model folder (`artifacts.model_folder`), without a model card: ours is another. The
    files are copies, never links: whoever edits the export must not change the checkpoint.

    Raises:
        MissingInputError: the checkpoint holds no model.
    """
    if not (checkpoint / "config.json").is_file():
        raise MissingInputError("is no checkpoint: it has no config.json", where=checkpoint)
    for file in sorted(checkpoint.iterdir()):
        if is_exported(file):
            copy_file(file, target / file.name)


def is_exported(file: Path) -> bool:
    """Whether a file of a checkpoint is taken along."""
    named = is_model_file(file.name) or file.name == STARTED_FROM
    return named and file.is_file() and (not file.is_symlink() or is_cached(file)) and file.name != CARD
