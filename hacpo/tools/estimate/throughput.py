"""What hardware does in a second: the shipped table, and tables of the user's own laid over it."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hacpo.artifacts.text_files import YamlError, load_yaml
from hacpo.errors import SettingsError

SHIPPED = Path(__file__).with_name("throughput.yaml")


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Peak(_Entry):
    """Dense matrix products at best, in TFLOP/s of one device."""

    float32: float = Field(gt=0)
    bfloat16: float = Field(gt=0)


class Efficiency(_Entry):
    """Share of what the device could do: of its bandwidth or arithmetic in sampling, of its arithmetic elsewhere.

    `scoring` and `training` are those of wide models: a width H gets H / (H + half_width) of them.
    """

    sampling: float = Field(gt=0, le=1)
    scoring: float = Field(gt=0, le=1)
    training: float = Field(gt=0, le=1)
    half_width: float = Field(default=0, ge=0)


class DecodeStep(_Entry):
    """Seconds that one token for every response of a batch takes at least, however small the model."""

    transformers: float = Field(ge=0)
    vllm: float = Field(ge=0)


class Measured(_Entry):
    """Tokens per second of one device with one model, instead of what peak and efficiency give."""

    sampling: float | None = Field(default=None, gt=0)
    scoring: float | None = Field(default=None, gt=0)
    training: float | None = Field(default=None, gt=0)


NOT_MEASURED = Measured()


class Hardware(_Entry):
    """One kind of device.

    Attributes:
        source: where the numbers come from: `measured ...` or `assumed ...`.
        memory_gib: of one device; None where it is the machine's own.
        bandwidth_gb: GB/s of its memory.
        most_sequences: responses that vLLM samples at a time.
        disk_gb: GB/s at which checkpoints are written and read.
        hash_gb: GB/s at which DVC hashes them.
        stage_seconds: what a stage costs before and after its work.
        verdicts: responses that one verification process judges in a second.
        agents_at_once: agents that work side by side.
        models: `agents.<name>.model` -> measured tokens per second.
    """

    source: str
    memory_gib: float | None = Field(default=None, gt=0)
    peak_tflops: Peak
    bandwidth_gb: float = Field(gt=0)
    efficiency: Efficiency
    decode_step_seconds: DecodeStep
    most_sequences: int = Field(default=256, ge=1)
    disk_gb: float = Field(gt=0)
    hash_gb: float = Field(gt=0)
    stage_seconds: float = Field(ge=0)
    verdicts: float = Field(gt=0)
    agents_at_once: int = Field(default=1, ge=1)
    models: dict[str, Measured] = Field(default_factory=dict)


def load(path: Path | None = None) -> dict[str, Hardware]:
    """Name -> hardware: the shipped table, with that of a file laid over it, key by key.

    Raises:
        SettingsError: the file is not there or not usable.
    """
    table = dict(_read(SHIPPED))
    for name, entry in _read(path).items() if path is not None else ():
        table[name] = _merged(table.get(name, {}), entry)
    return {name: _checked(name, entry, path or SHIPPED) for name, entry in table.items()}


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


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {
        **base,
        **{
            key: _merged(base[key], value) if isinstance(base.get(key), dict) and isinstance(value, dict) else value
            for key, value in changes.items()
        },
    }


def _checked(name: str, entry: dict[str, Any], path: Path) -> Hardware:
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
