"""What every block of settings is made of: frozen, strict, no unknown keys, every key with its unit and source."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,62}[A-Za-z0-9])?")
"""What an agent or run may be called: one path component that is also a DVC stage name."""


def knob(default: Any = ..., *, doc: str, unit: str = "", source: str = "", **constraints: Any) -> Any:
    """A documented setting; `unit` and `source` (paper, equation) go to docs/settings.md."""
    return Field(default, description=doc, json_schema_extra={"unit": unit, "source": source}, **constraints)


class Section(BaseModel):
    """Base of every block: frozen, strict types, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, block by block; neither is touched."""
    result = copy.deepcopy(dict(base))
    for key, value in changes.items():
        inner = result.get(key)
        result[key] = (
            merged(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else copy.deepcopy(value)
        )
    return result
