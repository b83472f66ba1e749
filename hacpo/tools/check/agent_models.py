"""The models that agents start from: a folder that is whole, or a repository of the hub."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from hacpo.artifacts.model_folder import GGUF, gguf_of, indexed_weights
from hacpo.artifacts.tables import CHECKPOINT
from hacpo.errors import ArtifactError, HacpoError, ModelError
from hacpo.hub import model_files
from hacpo.pipeline.project import Pipeline
from hacpo.settings.agents import AgentSettings
from hacpo.settings.model_source import hub_repository, missing_folder
from hacpo.tools.check.remarks import Remark, error, to_do, warning
from hacpo.tools.estimate.known_models import KNOWN_MODELS, agent_shape
from hacpo.tools.estimate.shapes import ModelShape

_TOKENIZERS = {"tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tokenizer_config.json"}
"""Any of these makes a tokenizer."""
_CHECKPOINT = re.compile(rf"artifacts/(?P<run>.+)/{CHECKPOINT.pattern}")
_BYTES = 2
"""Per parameter of what is downloaded: models of today are stored in bfloat16."""

OnHub = Callable[[str, str | None, str], Sequence[str]]
"""(repository, revision, setting that names it) -> its files; raises HacpoError where this account cannot have it."""


def ask_hub(repository: str, revision: str | None, where: str) -> Sequence[str]:
    """The hub's own answer."""
    return model_files(repository, revision, where=where)


def check_agents(pipeline: Pipeline, on_hub: OnHub | None) -> Iterator[Remark]:
    """Every agent's model and chat template.

    Args:
        on_hub: None: the hub is not asked.
    """
    for name, agent in pipeline.settings.agents.items():
        if agent.tiny is not None:
            continue
        if agent.chat_template is not None and not (pipeline.root / agent.chat_template).is_file():
            yield error(f"agents.{name}.chat_template: there is no file {agent.chat_template}")
        repository = hub_repository(agent.model, pipeline.root)
        if repository is None:
            yield from _check_local(pipeline, name, agent)
        else:
            yield from _check_repository(name, repository, agent, on_hub)


def known_shape(pipeline: Pipeline, name: str) -> ModelShape | None:
    """The shape of an agent's model; None where it cannot be told (another remark says why)."""
    try:
        return agent_shape(name, pipeline.settings.agents[name], pipeline.root)
    except ModelError:
        return None


def _check_local(pipeline: Pipeline, name: str, agent: AgentSettings) -> Iterator[Remark]:
    """A model of this machine. Of a GGUF file all but the weights is read."""
    assert agent.model is not None
    try:
        gguf = gguf_of(pipeline.root / agent.model)
        if gguf is None and not agent.model.endswith(GGUF):
            yield from _check_folder(pipeline, name, agent)
        elif gguf is None:
            yield to_do(f"fetch {agent.model}, a GGUF file that agents.{name}.model names")
        elif find_spec("gguf") is None:
            yield to_do("`pip install 'hacpo[gguf]'`, which reads GGUF files")
        else:
            agent_shape(name, agent, pipeline.root)
    except ModelError as refusal:
        line = str(refusal)
        yield error(line if line.startswith("agents.") else f"agents.{name}.model: {line}")


def _check_folder(pipeline: Pipeline, name: str, agent: AgentSettings) -> Iterator[Remark]:
    assert agent.model is not None
    where, folder = f"agents.{name}.model", pipeline.root / agent.model
    made = _CHECKPOINT.fullmatch(Path(agent.model).as_posix())
    if Path(agent.model).is_relative_to(f"artifacts/{pipeline.run}"):
        yield error(f"{where}: an agent cannot start from its own run's output")
    elif made is not None and not folder.is_dir():
        yield to_do(f"run pipelines/{made['run']}, which makes {agent.model}")
    elif not folder.is_dir():
        yield error(f"{where}: {agent.model}: {missing_folder(agent.model, pipeline.root)}")
    else:
        lacking = missing_parts([file.name for file in folder.iterdir() if file.is_file()])
        yield from (error(f"{where}: {agent.model} has no {what}") for what in lacking)
        try:
            lost = [file for file in indexed_weights(folder) if not (folder / file).is_file()]
            yield from (error(f"{where}: {agent.model} lacks {file}, which its index names") for file in lost)
            if not lacking:
                agent_shape(name, agent, pipeline.root)
                _check_weights(folder, Path(agent.model))
        except (ModelError, ArtifactError) as refusal:
            yield error(f"{where}: {refusal}")
        if agent.revision is not None:
            yield warning(f"agents.{name}.revision: {agent.model} is a folder, of which no revision can be told")


def _check_weights(folder: Path, called: Path) -> None:
    """Refuse what warm-up refuses: links out of the folder, code instead of an architecture, weights that do not fit.

    Raises:
        ModelError, ArtifactError: that is so.
    """
    from hacpo.artifacts.model_folder import model_files
    from hacpo.engines.models.safe_load import load_whole

    model_files(folder)
    load_whole(folder, called, dtype="auto", device_map="meta")


def _check_repository(name: str, repository: str, agent: AgentSettings, on_hub: OnHub | None) -> Iterator[Remark]:
    where = f"agents.{name}.model"
    shape = KNOWN_MODELS.get(repository)
    near = difflib.get_close_matches(repository, KNOWN_MODELS, n=1, cutoff=0.9)
    if shape is None and on_hub is None:
        guess = f"; did you mean {near[0]}?" if near else ""
        yield warning(f"{where}: {repository} is not known here, so --online alone can tell whether it is there{guess}")
    if on_hub is not None:
        try:
            files = on_hub(repository, agent.revision, where)
        except HacpoError as refusal:
            yield error(refusal)
            return
        yield from (error(f"{where}: {repository} has no {what}") for what in missing_parts(files))
    at = f" at {agent.revision[:12]}" if agent.revision else ""
    size = "" if shape is None else f" ({shape.parameters * _BYTES / 1e9:.1f} GB)"
    yield to_do(f"`hacpo run` downloads {repository}{at}{size}")


def missing_parts(names: Sequence[str]) -> list[str]:
    """What a model folder with these files lacks, in words."""
    parts = {
        "config.json": "config.json" in names,
        "*.safetensors weights": any(name.endswith(".safetensors") for name in names),
        "tokenizer": not _TOKENIZERS.isdisjoint(names),
    }
    return [part for part, there in parts.items() if not there]
