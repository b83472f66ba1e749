"""An agent's first checkpoint from a model that exists: a folder or GGUF file of this machine, or a repository on the
hub."""

from __future__ import annotations

from pathlib import Path

from hacpo.artifacts.model_folder import gguf_of
from hacpo.callbacks import OnProgress
from hacpo.engines.models.checkpoint import copy_model_folder
from hacpo.engines.models.gguf_start import unpack_gguf
from hacpo.engines.models.safe_load import load_whole
from hacpo.errors import ModelError
from hacpo.hub import fetch_model
from hacpo.settings.agents import AgentSettings
from hacpo.settings.model_source import hub_repository, missing_folder, write_started_from
from hacpo.tokens.chat_templates import settle_chat


def start_from_model(
    name: str, settings: AgentSettings, root: Path, target: Path, on_progress: OnProgress | None = None
) -> str:
    """Fill an empty checkpoint folder with the agent's model, ready to answer chat prompts.

    Args:
        name: the agent's.
        settings: its own, with a `model`.
        root: the project's root.
        on_progress: called with bytes downloaded and in all.

    Returns:
        What was done, in words for the user.

    Raises:
        ModelError: the folder or the chat template is missing, or cannot be used; code of the folder is never run.
        HacpoError: the hub does not give the model.
    """
    assert settings.model is not None
    template = None if settings.chat_template is None else root / settings.chat_template
    if template is not None and not template.is_file():
        raise ModelError("the chat template is missing", where=template, remedy=f"correct agents.{name}.chat_template")
    source, notes = root / settings.model, []
    gguf = gguf_of(source)
    repository = hub_repository(settings.model, root)
    if repository is not None:
        source, commit = fetch_model(
            repository, settings.revision, where=f"agents.{name}.model", on_progress=on_progress
        )
        notes.append(f"{repository} on the hub, commit {commit}")
    elif gguf is not None:
        digest, done = unpack_gguf(gguf, target, where=f"agents.{name}", revision=settings.revision)
        write_started_from(target, gguf=gguf.name, sha256=digest)
        notes.append(f"taken from {settings.model}, SHA-256 {digest}, {done}")
    elif not source.is_dir():
        raise ModelError(missing_folder(settings.model, root), where=source, remedy=f"correct agents.{name}.model")
    else:
        notes.append(f"taken from {settings.model}")
        if settings.revision is not None:
            notes.append(f"a folder, of which revision {settings.revision} cannot be told")
    if gguf is None:
        copy_model_folder(source, target)
    if repository is not None:
        write_started_from(target, hub=repository, commit=commit)
    called = Path(settings.model) if repository else source
    notes += settle_chat(target, called, template)
    load_whole(target, called, dtype="auto", device_map="meta")  # what is missing is found before a rollout is paid for
    return ", ".join(notes)
