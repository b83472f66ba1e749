"""Models and tokenizers kept between stages of one process."""

from __future__ import annotations

import gc
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacpo.artifacts.weights import whole_model
from hacpo.engines.vllm.servers import Server
from hacpo.settings.engine import EngineSettings
from hacpo.tokens.tokenizers import ChatTokenizer

if TYPE_CHECKING:
    from hacpo.engines.vllm.warm_engine import Reloadable, Resident, Start


class ModelCache:
    """Holds, per agent, the model whose weights hash to what a checkpoint folder holds, and its tokenizer.

    A model is reused only if its recorded hash is that of the folder asked for, so warm and cold runs compute the same.
    """

    def __init__(self) -> None:
        self._models: dict[str, tuple[tuple[str, str, str], Any]] = {}
        self._tokenizers: dict[str, ChatTokenizer] = {}
        self._residents: dict[str, tuple[tuple[EngineSettings, Server | None], Resident]] = {}

    def model(self, agent: str, folder: Path, settings: EngineSettings) -> tuple[Any, str]:
        """The model of a checkpoint folder and its policy hash."""
        import torch

        from hacpo.engines.models.checkpoint import load_model, policy_hash, resolve_device

        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        policy = policy_hash(folder)
        if resolve_device(settings).type == "cuda":
            for other in set(self._models) - {agent}:
                del self._models[other]  # one agent's weights at a time on a GPU; the next load is from the page cache
        held = self._models.pop(agent, None)
        if held is None or held[0] != _key(policy, settings):
            del held  # free it before the next one is loaded
            held = (_key(policy, settings), load_model(folder, settings))
        self._models[agent] = held
        return held[1], policy

    def discard(self, agent: str) -> None:
        """Forget an agent's model: its weights are about to change."""
        self._models.pop(agent, None)

    def discard_all(self) -> None:
        """Forget all models: the memory is needed."""
        import torch

        self._models.clear()
        gc.collect()  # a sharded model is a cycle of references
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def keep(self, agent: str, policy: str, settings: EngineSettings, model: Any) -> None:
        """Remember a model whose weights were just saved under this policy hash."""
        self._models[agent] = (_key(policy, settings), model.eval())

    def resident(self, agent: str, settings: EngineSettings, server: Server | None = None) -> Resident:
        """The agent's vLLM engine, whatever weights it holds just now; not started if there was none.

        Args:
            server: the server that it is; None: in this process.
        """
        from hacpo.engines.vllm.warm_engine import Resident

        key = (settings, server)
        held = self._residents.get(agent)
        if held is None or held[0] != key:
            if held is not None:
                held[1].close()
            self._residents[agent] = (key, Resident(settings, _starter(agent, settings, server)))
        return self._residents[agent][1]

    def tokenizer(self, folder: Path) -> ChatTokenizer:
        """The tokenizer of a model folder (or of an adapter's base); the same tokenizer files are read once."""
        folder = whole_model(folder)
        digest = hashlib.sha256()
        for file in sorted(folder.iterdir()):
            if file.is_file() and file.suffix in (".json", ".jinja", ".model", ".txt") and ".index." not in file.name:
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
        key = digest.hexdigest()
        if key not in self._tokenizers:
            self._tokenizers[key] = ChatTokenizer(folder)
        return self._tokenizers[key]


def _starter(agent: str, settings: EngineSettings, server: Server | None) -> Start:
    """What starts the agent's vLLM engine, here or by connecting to a server."""

    def start(folder: Path, tokenizer: ChatTokenizer) -> Reloadable:
        eos = tokenizer.stop_token_ids
        if server is not None:
            from hacpo.engines.vllm.server import VllmServer

            return VllmServer(
                server.url, agent, folder, settings, eos_token_ids=eos, decode=tokenizer.decode, key=server.key
            )
        from hacpo.engines.vllm.local import VllmEngine

        return VllmEngine(folder, settings, eos_token_ids=eos)

    return start


def _key(policy: str, settings: EngineSettings) -> tuple[str, str, str]:
    return policy, settings.device, settings.dtype
