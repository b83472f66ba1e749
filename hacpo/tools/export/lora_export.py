"""What a LoRA agent's checkpoint is exported as: one whole model, or the adapter alone with the name of its base."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

from hacpo.artifacts.model_folder import copy_file
from hacpo.artifacts.text_files import load_json
from hacpo.artifacts.weights import ADAPTER_BASE, ADAPTER_CONFIG, ADAPTER_WEIGHTS, holds_adapter, tensor_shapes
from hacpo.errors import ArtifactError, SettingsError
from hacpo.settings.engine import EngineSettings
from hacpo.settings.model_source import read_started_from
from hacpo.tools.export.folder import is_exported


@dataclass(frozen=True)
class AdapterFacts:
    """An exported adapter.

    Attributes:
        rank, alpha, targets: its size, scale times rank, and layers.
        parameters: how many.
        alone: exported without its base; False: merged into it.
        base: where tools find the base: a hub's `owner/name`, or a folder.
        revision: the base's commit; None if it has none.
        digest: SHA-256 of the adapter's weights file.
    """

    rank: int
    alpha: int
    targets: tuple[str, ...]
    parameters: int
    alone: bool
    base: str
    revision: str | None
    digest: str


def adapter_facts(checkpoint: Path, *, alone: bool, base: str | None, pushed: bool) -> AdapterFacts | None:
    """What the files of a checkpoint say of its adapter; None if it holds none.

    Args:
        alone: it is exported without its base.
        base: what the user calls the base; None: the hub's model that the agent started from, or step 0's folder.
        pushed: it will go to the hub.

    Raises:
        SettingsError: there is no adapter to export alone, or strangers would not find its base.
        ArtifactError: a file is damaged.
    """
    if not holds_adapter(checkpoint):
        if alone:
            raise SettingsError("--adapter: this checkpoint holds none", where=checkpoint, remedy="leave it out")
        return None
    facts = _read(checkpoint, alone=alone, base=base)
    if alone and pushed and base is None and facts.revision is None:
        raise SettingsError(
            "--push: nobody else finds the adapter's base", where=facts.base, remedy="name it with --base OWNER/NAME"
        )
    return facts


def _read(checkpoint: Path, *, alone: bool, base: str | None) -> AdapterFacts:
    started = read_started_from(checkpoint)
    path = checkpoint / ADAPTER_WEIGHTS
    try:
        config = load_json(checkpoint / ADAPTER_CONFIG)
        return AdapterFacts(
            rank=config["r"],
            alpha=config["lora_alpha"],
            targets=tuple(config["target_modules"]),
            parameters=sum(map(prod, tensor_shapes(path).values())),
            alone=alone,
            base=base or (started[0] if started else config["base_model_name_or_path"]),
            revision=started[1] if started and base is None else None,
            digest=hashlib.sha256(path.read_bytes()).hexdigest(),
        )
    except (ArtifactError, OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ArtifactError("the adapter's files are damaged", where=checkpoint) from None


def export_adapter(checkpoint: Path, target: Path, facts: AdapterFacts, engine: EngineSettings) -> None:
    """Write a checkpoint's adapter into an empty folder: merged with its base, in the engine's dtype, or alone.

    Raises:
        ModelError: the base or PEFT is missing, or the tokenizer is unusable.
        ArtifactError: the adapter is damaged, or does not fit its base.
    """
    from hacpo.engines.models.checkpoint import load_model
    from hacpo.engines.models.merge import merge_into
    from hacpo.tokens.tokenizers import ChatTokenizer

    if not facts.alone:
        merge_into(checkpoint, target, engine)
        for file in target.iterdir():
            if not is_exported(file):
                file.unlink()
        return
    load_model(checkpoint, engine.model_copy(update={"device": "cpu"}))  # it must fit its base
    for file in sorted(checkpoint.iterdir()):
        if is_exported(file) and file.name not in (ADAPTER_BASE, ADAPTER_CONFIG):
            copy_file(file, target / file.name)
    config = load_json(checkpoint / ADAPTER_CONFIG)
    config |= {"base_model_name_or_path": facts.base} | ({"revision": facts.revision} if facts.revision else {})
    text = json.dumps(config, indent=2, sort_keys=True)
    (target / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
    ChatTokenizer(target, checkpoint).render("export", [{"role": "user", "content": "1+1"}])
