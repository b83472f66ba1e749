"""What an agent's start refuses: its warm start, its adapter, its layers, its chat template. No weights are read."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hacpo.errors import HacpoError, ModelError
from hacpo.pipeline.project import Pipeline
from hacpo.settings.agents import AgentSettings
from hacpo.settings.model_source import hub_repository
from hacpo.settings.root import Settings
from hacpo.tools.check.agent_models import missing_parts
from hacpo.tools.check.remarks import Remark, error
from hacpo.tools.estimate.known_models import agent_shape, described_folder, hub_cache

Look = Callable[[Pipeline, str], None]
"""(pipeline, agent) -> raises HacpoError for the first thing that its start refuses."""


def check_starts(pipeline: Pipeline, refusals: dict[tuple[str, str], list[str]]) -> Iterator[Remark]:
    """Every agent, as far as it can be told without its weights and without the hub.

    Args:
        refusals: what was found before, by agent and everything that it follows from; added to.
    """
    settings = pipeline.settings
    for name, agent in settings.agents.items():
        keys = {"model", "revision", "chat_template", "warmup", "tiny", "adapter", "prompt"}
        known = agent.model_dump_json(include=keys), _splits(settings), pipeline.root.resolve()
        key = name, repr(known)
        if key not in refusals:
            refusals[key] = [line for look in _LOOKS if (line := _refusal(look, pipeline, name)) is not None]
        yield from map(error, refusals[key])


def _refusal(look: Look, pipeline: Pipeline, name: str) -> str | None:
    try:
        look(pipeline, name)
    except HacpoError as refusal:
        return str(refusal)
    return None


def _warm_start(pipeline: Pipeline, name: str) -> None:
    tiny = pipeline.settings.agents[name].tiny
    if tiny is not None:
        from hacpo.engines.models.tiny import build_tokenizer
        from hacpo.engines.training.warm_start import Corpus

        Corpus(name, tiny, build_tokenizer(tiny), 0)


def _layers(pipeline: Pipeline, name: str) -> None:
    """The adapter's targets and rank, and whether the model says what its layers are where that is needed."""
    settings = pipeline.settings
    adapter = settings.agents[name].adapter
    if adapter is None and not _splits(settings):
        return
    from hacpo.engines.models.adapter import resolve_targets
    from hacpo.engines.training.policy import decoder_layers

    model = _skeleton(pipeline, name)
    if model is None:
        return
    if adapter is not None:
        resolve_targets(model, adapter, f"agents.{name}.adapter")
    if _splits(settings):
        decoder_layers(model)


def _splits(settings: Settings) -> bool:
    """Whether an update takes the model apart into its layers: for FSDP, or to recompute activations."""
    return settings.fsdp or settings.optimizer.gradient_checkpointing


def _template(pipeline: Pipeline, name: str) -> None:
    """The chat template, as warm-up settles it, and whether it takes what `prompt` and `warmup` ask for."""
    from hacpo.tokens.prompts import check_template

    agent = pipeline.settings.agents[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        called = _tokenizer_files(name, agent, pipeline.root, folder)
        if called is not None:
            from hacpo.tokens.tokenizers import ChatTokenizer

            tokenizer = ChatTokenizer(folder, called)
            check_template(tokenizer, name, agent.prompt)
            if agent.warmup is not None:
                from hacpo.engines.training.model_warmup import Solutions

                Solutions(name, agent.warmup, tokenizer, 0)


def _tokenizer_files(name: str, agent: AgentSettings, root: Path, target: Path) -> Path | None:
    """Put an agent's tokenizer and template into an empty folder; returns what messages call it, None if it is not
    here."""
    if agent.tiny is not None:
        from hacpo.engines.models.tiny import build_tokenizer

        build_tokenizer(agent.tiny).save_pretrained(str(target))
        return Path("the tiny model's tokenizer")
    source, called = _here(name, agent, root)
    template = None if agent.chat_template is None else root / agent.chat_template
    if source is None or (template is not None and not template.is_file()):
        return None  # which another remark says
    from hacpo.artifacts.model_folder import copy_file, model_files
    from hacpo.artifacts.weights import is_weights
    from hacpo.tokens.chat_templates import settle_chat

    try:
        files = model_files(source)
    except ModelError:
        return None  # which another remark says, too
    for file in files:
        if not is_weights(file):
            copy_file(file, target / file.name)
    settle_chat(target, called, template)
    return called


def _here(name: str, agent: AgentSettings, root: Path) -> tuple[Path | None, Path]:
    """The folder of a model that is on this machine and whole, and what messages call it; None if there is none."""
    assert agent.model is not None
    repository = hub_repository(agent.model, root)
    if repository is None and root / agent.model != (described := _described(name, agent, root)):
        return described, root / agent.model
    folder = root / agent.model if repository is None else hub_cache(repository, agent.revision)
    if folder is None or not folder.is_dir() or missing_parts([file.name for file in folder.iterdir()]):
        return None, root
    return folder, folder


def _described(name: str, agent: AgentSettings, root: Path) -> Path | None:
    """See `described_folder`; None where another remark says what is wrong with the GGUF file."""
    try:
        return described_folder(name, agent, root)
    except ModelError:
        return None


def _skeleton(pipeline: Pipeline, name: str) -> Any:
    """An agent's model without weights; None where nothing is known of it, or its config is refused elsewhere."""
    try:
        return agent_shape(name, pipeline.settings.agents[name], pipeline.root).skeleton
    except ModelError:
        return None


_LOOKS: tuple[Look, ...] = (_warm_start, _layers, _template)
