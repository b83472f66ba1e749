"""Capabilities that are given instead of estimated: the table behind `capability.oracle_table`."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from pathlib import Path

import pyarrow as pa

from hacpo.artifacts.parquet import read_given
from hacpo.errors import ArtifactError, DataError, MissingInputError, NotParquetError, first_line

_REMEDY = "correct the file, or algorithm.capability.oracle_table in params.yaml"
_COLUMNS = pa.schema({"step": pa.int64(), "agent": pa.string(), "capability": pa.float64()})


def read_oracle(path: Path) -> dict[tuple[int, str], float]:
    """(step, agent) -> capability, of every row of a file with these three columns. Others are not read.

    Raises:
        MissingInputError: there is no such file.
        ArtifactError: it is not Parquet.
        DataError: a column is missing or of another kind, a value is missing, twice, not finite, or not above 0.
    """
    if not path.is_file():
        raise MissingInputError("the table of capabilities is missing", where=path, remedy=_REMEDY)
    try:
        table = read_given(path)
    except NotParquetError as error:
        raise ArtifactError(f"not readable as Parquet: {error.reason}", where=path, remedy=_REMEDY) from None
    for name in _COLUMNS.names:
        if table.schema.names.count(name) != 1:
            names = ", ".join(table.schema.names)
            raise DataError(f"needs column {name!r} once", where=path, found=names or "no column", remedy=_REMEDY)
    try:
        rows = table.select(_COLUMNS.names).cast(_COLUMNS).to_pylist()
    except (pa.ArrowException, ValueError) as error:
        reason = first_line(error)
        expected = "whole numbers, texts and numbers"
        raise DataError(f"step, agent, capability: {reason}", where=path, expected=expected, remedy=_REMEDY) from None
    capabilities: dict[tuple[int, str], float] = {}
    for number, row in enumerate(rows):
        key, value = (row["step"], row["agent"]), row["capability"]
        where = f"{path} row {number}"
        if None in (*key, value):
            raise DataError("a value is missing", where=where, remedy=_REMEDY)
        if not (math.isfinite(value) and value > 0):
            raise DataError("a capability must be finite and above 0", where=where, found=value, remedy=_REMEDY)
        if key in capabilities:
            raise DataError("the same step and agent twice", where=where, found=f"step {key[0]}, {key[1]}")
        capabilities[key] = value
    return capabilities


def capabilities_of_step(path: Path, step: int, agents: Sequence[str]) -> dict[str, float]:
    """Agent -> capability at a step.

    Raises:
        DataError: an agent has none.
        HacpoError: as `read_oracle`.
    """
    capabilities = read_oracle(path)
    refuse_gaps(path, capabilities.keys(), [step], agents)
    return {agent: capabilities[step, agent] for agent in agents}


def refuse_gaps(path: Path, known: Container[tuple[int, str]], steps: Sequence[int], agents: Sequence[str]) -> None:
    """Every agent has a capability at every one of the steps.

    Raises:
        DataError: one has none.
    """
    for step in steps:
        for agent in agents:
            if (step, agent) not in known:
                expected = "a row for every step and agent"
                raise DataError(
                    f"has no capability of {agent} at step {step}", where=path, expected=expected, remedy=_REMEDY
                )
