"""Shapes of models on the hub that can be estimated without a network: public facts of their config.json files.

`docs/estimate.md` says how they are checked. Any other model is read from its folder, or from the hub's cache here.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hacpo.artifacts.model_folder import GGUF, gguf_of
from hacpo.errors import ModelError
from hacpo.settings.agents import AgentSettings
from hacpo.settings.model_source import hub_repository, missing_folder
from hacpo.tools.estimate.shapes import ModelShape, from_folder, from_tiny


def _qwen3(layers: int, hidden: int, heads: int, intermediate: int, *, tied: bool, context: int) -> ModelShape:
    return ModelShape("qwen3", layers, hidden, heads, 8, 128, intermediate, 151_936, tied, context)


def _qwen3_pair(
    size: str, layers: int, hidden: int, heads: int, intermediate: int, *, tied: bool
) -> dict[str, ModelShape]:
    base = _qwen3(layers, hidden, heads, intermediate, tied=tied, context=32_768)
    return {f"Qwen/Qwen3-{size}-Base": base, f"Qwen/Qwen3-{size}": dataclasses.replace(base, context=40_960)}


def _llama(layers: int, hidden: int, heads: int, head_dim: int) -> ModelShape:
    return ModelShape("llama", layers, hidden, heads, 8, head_dim, 8_192, 128_256, True, 131_072)


KNOWN_MODELS: dict[str, ModelShape] = {
    **_qwen3_pair("0.6B", 28, 1_024, 16, 3_072, tied=True),
    **_qwen3_pair("1.7B", 28, 2_048, 16, 6_144, tied=True),
    **_qwen3_pair("4B", 36, 2_560, 32, 9_728, tied=True),
    **_qwen3_pair("8B", 36, 4_096, 32, 12_288, tied=False),
    "Qwen/Qwen3-4B-Instruct-2507": _qwen3(36, 2_560, 32, 9_728, tied=True, context=262_144),
    **{f"meta-llama/Llama-3.2-1B{kind}": _llama(16, 2_048, 32, 64) for kind in ("", "-Instruct")},
    **{f"meta-llama/Llama-3.2-3B{kind}": _llama(28, 3_072, 24, 128) for kind in ("", "-Instruct")},
}
"""`owner/name` on the hub -> shape."""


def agent_shape(name: str, agent: AgentSettings, root: Path) -> ModelShape:
    """The shape of an agent's model: made from scratch, a folder, or a repository on the hub. Nothing is downloaded.

    Args:
        name: the agent's, for messages.
        root: the project's root, which model folders are relative to.

    Raises:
        ModelError: the folder is not there, or the hub's repository is neither known nor in the hub's cache here.
    """
    if agent.tiny is not None:
        return from_tiny(agent.tiny)
    assert agent.model is not None
    repository = hub_repository(agent.model, root)
    if repository is None:
        return from_folder(described_folder(name, agent, root))
    shape = KNOWN_MODELS.get(repository)
    if shape is not None:
        return shape
    cached = hub_cache(repository, agent.revision)
    if cached is None:
        raise ModelError(
            f"the shape of {repository} is not known here",
            where=f"agents.{name}.model",
            remedy=f"fetch its config once with `hf download {repository} config.json`, or name a folder that holds it",
        )
    return from_folder(cached)


def described_folder(name: str, agent: AgentSettings, root: Path) -> Path:
    """The folder that says what an agent's model is: its own, or one made of its GGUF file, without weights.

    Raises:
        ModelError: the GGUF file is missing, or cannot be read.
    """
    assert agent.model is not None
    gguf = gguf_of(root / agent.model)
    if gguf is None:
        if agent.model.endswith(GGUF):
            raise ModelError(missing_folder(agent.model, root), where=f"agents.{name}.model", found=agent.model)
        return root / agent.model
    from hacpo.engines.models.gguf_start import described_gguf

    return described_gguf(gguf, where=f"agents.{name}", revision=agent.revision)


def hub_cache(repository: str, revision: str | None) -> Path | None:
    """The folder of a repository's config in the hub's cache on this machine; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repository, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None
