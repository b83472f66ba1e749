"""Models and tokenizers kept between stages of one process."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacpo.config import EngineSettings
from hacpo.engines.tokenizers import ChatTokenizer

if TYPE_CHECKING:
    from hacpo.engines.resident import Resident


class ModelCache:
    """Holds, per agent, the model whose weights hash to what a checkpoint folder holds, and its tokenizer.

    A model is reused only if its recorded hash is that of the folder asked for, so warm and cold runs compute the same.
    """

    def __init__(self) -> None:
        self._models: dict[str, tuple[tuple[str, str, str], Any]] = {}
        self._tokenizers: dict[str, ChatTokenizer] = {}
        self._residents: dict[str, Resident] = {}

    def model(self, agent: str, folder: Path, settings: EngineSettings) -> tuple[Any, str]:
        """The model of a checkpoint folder and its policy hash."""
        import torch

        from hacpo.engines.checkpoint import load_model, policy_hash

        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        policy = policy_hash(folder)
        held = self._models.pop(agent, None)
        if held is None or held[0] != _key(policy, settings):
            del held  # free it before the next one is loaded
            held = (_key(policy, settings), load_model(folder, settings))
        self._models[agent] = held
        return held[1], policy

    def discard(self, agent: str) -> None:
        """Forget an agent's model: its weights are about to change."""
        self._models.pop(agent, None)

    def keep(self, agent: str, policy: str, settings: EngineSettings, model: Any) -> None:
        """Remember a model whose weights were just saved under this policy hash."""
        self._models[agent] = (_key(policy, settings), model.eval())

    def resident(self, agent: str, settings: EngineSettings) -> Resident:
        """The agent's vLLM engine, whatever weights it holds just now; not started if there was none."""
        from hacpo.engines.resident import Resident

        held = self._residents.get(agent)
        if held is None or held.settings != settings:
            if held is not None:
                held.close()
            self._residents[agent] = Resident(settings)
        return self._residents[agent]

    def tokenizer(self, folder: Path) -> ChatTokenizer:
        """The tokenizer of a model folder; folders with the same tokenizer files share it."""
        digest = hashlib.sha256()
        for file in sorted(folder.iterdir()):
            if file.is_file() and file.suffix in (".json", ".jinja", ".model", ".txt") and ".index." not in file.name:
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
        key = digest.hexdigest()
        if key not in self._tokenizers:
            self._tokenizers[key] = ChatTokenizer(folder)
        return self._tokenizers[key]


def _key(policy: str, settings: EngineSettings) -> tuple[str, str, str]:
    return policy, settings.device, settings.dtype
