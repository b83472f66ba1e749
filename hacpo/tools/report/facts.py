"""What ran: the agents, the problem sets, and every setting beside the recipe's value or the default."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from hacpo.artifacts import tables
from hacpo.artifacts.layout import Layout
from hacpo.artifacts.model_folder import read_mapping
from hacpo.artifacts.run_files import RunFiles
from hacpo.artifacts.weights import tensor_shapes
from hacpo.errors import ArtifactError, harmless
from hacpo.settings import params as settings_of
from hacpo.settings.agents import INHERITED, AgentSettings, ModelWarmupSettings
from hacpo.settings.model_source import read_started_from, read_unpacked_from
from hacpo.settings.recipes import RECIPES
from hacpo.settings.root import Settings
from hacpo.tokens.context_length import context_length

_AGENTS_OWN = re.compile(rf"agents\.[^.]+\.(?P<key>(?:{'|'.join(INHERITED)})\..+)")
"""Key of a setting that agents inherit from the run; `key` is the run's."""


@dataclass(frozen=True)
class AgentFacts:
    """One agent; None where its first checkpoint is not there (yet, or any more)."""

    name: str
    origin: str
    architecture: str | None = None
    parameters: int | None = None
    layers: int | None = None
    width: int | None = None
    vocabulary: int | None = None
    context: int | None = None


@dataclass(frozen=True)
class ProblemSet:
    """One `<set>/<split>`: `training` or the benchmarks that use it, its size, and its first problem as an example."""

    name: str
    roles: tuple[str, ...]
    origin: str
    problems: int | None
    example: tuple[str, str] | None


@dataclass(frozen=True)
class SettingRow:
    """One resolved setting.

    Attributes:
        standing: `changed` (differs from `reference`), `recipe` or `default` (as the recipe or the model has it), or
            `given` (it has no default, or that is null).
        reference: the recipe's value or the default, as text.
    """

    key: str
    value: str
    standing: str
    reference: str
    meaning: str


def run_settings(layout: Layout, otherwise: Settings) -> Settings:
    """The settings that the run's artifacts were made with (settings.json), or `otherwise` if there are none yet.

    JSON keys are sorted; agents and benchmarks stand in the order of params.yaml all the same.

    Raises:
        ArtifactError: settings.json is damaged.
        SettingsError: it holds settings that this version does not know.
    """
    if not layout.settings.is_file():
        return otherwise
    try:
        raw = settings_of.recorded(layout.settings)
        _reorder(raw["agents"], raw.pop("agent_names", []))
        _reorder(raw["evaluation"]["benchmarks"], otherwise.evaluation.benchmarks)
    except (ValueError, KeyError, TypeError):
        raise ArtifactError("holds no settings", where=layout.settings, remedy="run `hacpo resolve`") from None
    return settings_of.resolve(raw, where=layout.settings)


def _reorder(named: dict[str, Any], order: Collection[str]) -> None:
    """Put the keys in `order` first, in that order.

    Raises:
        TypeError: there are none, or no order.
    """
    if not isinstance(named, dict):
        raise TypeError("no mapping")
    for name in [*(name for name in order if name in named), *(name for name in named if name not in order)]:
        named[name] = named.pop(name)


def agent_facts(layout: Layout, settings: Settings) -> list[AgentFacts]:
    """Every agent, in the order of params.yaml.

    Raises:
        ModelError: a checkpoint's config file is damaged.
        ArtifactError: a weights file is.
    """
    return [_agent(layout, name, agent) for name, agent in settings.agents.items()]


def _agent(layout: Layout, name: str, agent: AgentSettings) -> AgentFacts:
    origin = _origin(agent)
    folder = layout.checkpoint(0, name)
    if not (folder / "config.json").is_file():
        return AgentFacts(name, origin, agent.tiny.architecture if agent.tiny else None)
    config = read_mapping(folder / "config.json")
    shapes = [shape for file in sorted(folder.glob("*.safetensors")) for shape in tensor_shapes(file).values()]
    started = read_started_from(folder)
    if started is not None:
        origin = f"{started[0]} on the hub, commit {started[1]}"
    unpacked = read_unpacked_from(folder)
    if unpacked is not None:
        origin = f"GGUF file {harmless(unpacked[0])}, SHA-256 {unpacked[1]}, unpacked to float32"
    if agent.warmup is not None:
        origin += _warmed_up(agent.warmup)
    inner = config.get("text_config")
    config |= inner if isinstance(inner, dict) else {}
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else config.get("model_type")
    layers, width, vocabulary = (config.get(key) for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    return AgentFacts(
        name,
        origin,
        architecture=architecture if isinstance(architecture, str) else None,
        parameters=sum(map(math.prod, shapes)) or None,
        layers=layers if type(layers) is int else None,
        width=width if type(width) is int else None,
        vocabulary=vocabulary if type(vocabulary) is int else None,
        context=context_length(config),
    )


def _warmed_up(warmup: ModelWarmupSettings) -> str:
    learned = ", ".join(warmup.mixture or warmup.families) or "arithmetic"
    return f", then {warmup.steps:,} supervised warm-up steps ({learned})"


def _origin(agent: AgentSettings) -> str:
    if agent.tiny is None:
        return f"model folder {agent.model}"
    warmup = agent.tiny.warmup
    text = f"made from scratch, then {warmup.steps:,} supervised warm-up steps"
    weak = [f"{family} {share:.0%}" for family, share in sorted(warmup.guessing.items()) if share >= 0.5]
    if weak:
        text += f", taught to guess instead of working in its weak families ({', '.join(weak)})"
    return f"{text}; tokens: {agent.tiny.vocabulary.replace('_', ' and ')}"


def problem_sets(layout: Layout, run: str, settings: Settings) -> list[ProblemSet]:
    """Every problem set: the one trained on first, then those of the benchmarks, then the rest.

    Raises:
        ArtifactError: a table is damaged or belongs to another run.
    """
    roles: dict[str, list[str]] = {settings.data.train: ["training"]}
    for name, benchmark in settings.evaluation.benchmarks.items():
        roles.setdefault(benchmark.data, []).append(name)
    sets = []
    for name in [*roles, *(name for name in settings.data.sets if name not in roles)]:
        source = settings.data.sets[name]
        origin = f"file {source.path}" if source.path else f"made by hacpo: {source.task}, {source.split} side"
        count, example = None, None
        if layout.problems(name).is_file():
            table = RunFiles(run, layout).read(tables.PROBLEMS, None, name, columns=["problem", "answer"])
            count = len(table)
            first = table.slice(0, 1).to_pylist()
            example = (first[0]["problem"], first[0]["answer"]) if first else None
        sets.append(ProblemSet(name, tuple(roles.get(name, ())), origin, count, example))
    return sets


def setting_rows(settings: Settings) -> list[SettingRow]:
    """Every setting as one row, in the order of `hacpo.settings.root.Settings`.

    Of what agents inherit only where they differ from the run; the run's value is then the `reference`.
    """
    rows = list(_rows("", settings, RECIPES[settings.algorithm.recipe]))
    values = {row.key: row.value for row in rows}
    result = []
    for row in rows:
        agent = _AGENTS_OWN.fullmatch(row.key)
        if agent is None:
            result.append(row)
        elif row.value != values[agent["key"]]:
            result.append(replace(row, standing="changed", reference=values[agent["key"]]))
    return result


def _rows(prefix: str, section: BaseModel, recipe: Mapping[str, Any]) -> Iterator[SettingRow]:
    for name, field in type(section).model_fields.items():
        key, value = f"{prefix}{name}", getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _rows(f"{key}.", value, recipe)
        elif isinstance(value, dict) and any(isinstance(inner, BaseModel) for inner in value.values()):
            for label, inner in value.items():
                yield from _rows(f"{key}.{label}.", inner, recipe)
        else:
            standing, reference = "given", ""
            block, _, leaf = key.removeprefix("algorithm.").partition(".")
            if key.startswith("algorithm.") and leaf:
                standing, reference = _standing(value, recipe[block][leaf], "recipe")
            elif not field.is_required():
                standing, reference = _standing(value, field.get_default(call_default_factory=True), "default")
            yield SettingRow(key, as_text(value), standing, reference, field.description or "")


def _standing(value: object, reference: object, same: str) -> tuple[str, str]:
    if value == reference:
        return same, as_text(reference)
    return ("given", "") if reference is None else ("changed", as_text(reference))


def as_text(value: object) -> str:
    """A setting's value as YAML would have it."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_text(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(as_text, value)) + "]"
    return value if isinstance(value, str) else json.dumps(value)
