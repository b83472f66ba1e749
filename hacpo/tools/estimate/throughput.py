"""Seconds, where somebody has measured them: tokens a second from a table of the user's own, or of a finished run."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hacpo.artifacts.text_files import YamlError, load_yaml
from hacpo.errors import SettingsError
from hacpo.pipeline.catalogue import EVALUATE, GENERATE, SIDE_GENERATE, UPDATE
from hacpo.tools.estimate.lengths import Measured
from hacpo.tools.estimate.workload import AgentWork, together

_SAMPLING = (GENERATE, SIDE_GENERATE)
DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {"agents_at_once": 2},
    "a100": {"memory_gib": 79},
    "h100": {"memory_gib": 79},
    "h200": {"memory_gib": 139},
}
"""What is known of hardware without measuring: the memory of one GPU, and how many agents `hacpo run` starts there."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Speeds(_Entry):
    """One agent's stages as they were measured, with the processes and engine of that time.

    Attributes:
        sampling: response tokens a second of `generate`, rescoring and checkpoint reading included.
        training: tokens a second of `update`, prompts and checkpoint writing included.
        evaluation: response tokens a second of `evaluate`; None: as in sampling.
        other: seconds a step of everything else.
    """

    sampling: float = Field(gt=0)
    training: float = Field(gt=0)
    evaluation: float | None = Field(default=None, gt=0)
    other: float = Field(default=0, ge=0)


class Hardware(_Entry):
    """One kind of device.

    Attributes:
        source: where the speeds come from.
        memory_gib: of one device; None where it is the machine's own.
        agents_at_once: agents that work side by side.
        models: `agents.<name>.model` (the agent's name, if it is made from scratch) -> its speeds.
    """

    source: str = "no speeds measured"
    memory_gib: float | None = Field(default=None, gt=0)
    agents_at_once: int = Field(default=1, ge=1)
    models: dict[str, Speeds] = Field(default_factory=dict)


@dataclass(frozen=True)
class Seconds:
    """One agent's step by part, and one of its evaluations."""

    sampling: float
    update: float
    other: float
    evaluation: float

    @property
    def step(self) -> float:
        """A step without its evaluation."""
        return self.sampling + self.update + self.other


def agent_seconds(speeds: Speeds, work: AgentWork) -> Seconds:
    """Seconds of an agent's work at measured speeds."""
    return Seconds(
        sampling=together([work.step, work.side]).tokens / speeds.sampling,
        update=work.learned_tokens / speeds.training,
        other=speeds.other,
        evaluation=work.evaluation.tokens / (speeds.evaluation or speeds.sampling),
    )


def measured_speeds(work: AgentWork, measured: Measured) -> Speeds | None:
    """Speeds of an agent of which steps are finished; None before that.

    Args:
        work: its own, with the lengths of these steps.
    """
    seconds = measured.seconds
    sampling = sum(seconds.get(stage, 0.0) for stage in _SAMPLING)
    sampled = together([work.step, work.side]).tokens
    if not (sampled and seconds.get(GENERATE) and seconds.get(UPDATE)):
        return None
    evaluated = work.evaluation.tokens and seconds.get(EVALUATE)
    return Speeds(
        sampling=sampled / sampling,
        training=work.learned_tokens / seconds[UPDATE],
        evaluation=work.evaluation.tokens / seconds[EVALUATE] if evaluated else None,
        other=sum(value for stage, value in seconds.items() if stage not in (*_SAMPLING, UPDATE, EVALUATE)),
    )


def load(path: Path | None = None) -> dict[str, Hardware]:
    """Name -> hardware: `DEVICES`, with the table of a file laid over it, key by key.

    Raises:
        SettingsError: the file is not there or not usable.
    """
    mine = {} if path is None else _read(path)
    names = [*DEVICES, *(name for name in mine if name not in DEVICES)]
    return {name: _checked(name, {**DEVICES.get(name, {}), **mine.get(name, {})}, path) for name in names}


def choose(table: dict[str, Hardware], name: str) -> Hardware:
    """The named hardware.

    Raises:
        SettingsError: the table has no such name.
    """
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1)
        raise SettingsError(
            f"no hardware {name!r} in the throughput table",
            where="--hardware",
            expected=", ".join(table),
            remedy=f"did you mean {near[0]!r}?" if near else "add it in a file and name that with --throughput",
        )
    return table[name]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = load_yaml(path)
    except OSError as error:
        raise SettingsError(f"cannot be read: {(error.strerror or str(error)).lower()}", where=path) from None
    except YamlError as error:
        where = f"{path}:{error.line}" if error.line else path
        raise SettingsError(f"not valid YAML: {error}", where=where) from None
    if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content.values()):
        raise SettingsError("expected hardware names, each with its numbers", where=path, remedy="see docs/estimate.md")
    return {str(name): entry for name, entry in content.items()}


def _checked(name: str, entry: dict[str, Any], path: Path | None) -> Hardware:
    try:
        return Hardware.model_validate(entry)
    except ValidationError as error:
        first = min(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
        key = ".".join(str(part) for part in (name, *first["loc"]))
        message = {"missing": "is missing", "extra_forbidden": "is no key of a throughput table"}.get(first["type"])
        raise SettingsError(
            f"{key} {message}" if message else f"{key}: {first['msg'].lower()}",
            where=path,
            found=None if message else repr(first["input"])[:80],
            remedy="see docs/estimate.md",
        ) from None
