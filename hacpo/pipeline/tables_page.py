"""The list of artifacts in docs/artifacts.md, from the catalogue.

`python -m hacpo.pipeline.tables_page docs/artifacts.md` writes it anew, between two comments of the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from hacpo.artifacts.tables import PROBLEMS, Artifact, Column, Table
from hacpo.pipeline.catalogue import PIPELINE, StageSpec

_BEGIN = "<!-- from here on by `python -m hacpo.pipeline.tables_page docs/artifacts.md` -->\n"
_END = "<!-- to here -->\n"


def with_tables(page: str) -> str:
    """The page with its list of artifacts as the catalogue has it.

    Raises:
        ValueError: the page has no place for it.
    """
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"the page lacks {_BEGIN.strip() if not begin else _END.strip()}")
    return "".join([before, begin, *(f"{line}\n" for line in _lines()), end, after])


def _lines() -> Iterator[str]:
    """One row for each artifact, in the order in which they are made."""
    yield "| path | written by | read by | key | columns |"
    yield "|---|---|---|---|---|"
    for artifact in dict.fromkeys(use.artifact for spec in PIPELINE for use in spec.writes):
        key = ", ".join(artifact.key) if isinstance(artifact, Table) else ""
        cells = [_path(artifact), _commands(artifact, "writes"), _commands(artifact, "reads"), key, _words(artifact)]
        yield f"| {' | '.join(cells)} |"


def _path(artifact: Artifact) -> str:
    """`rollouts/step/agent`: the names of partitions stand for `step=0007` and `agent=ada`."""
    if artifact == PROBLEMS:
        return "`data/<set>/<split>.parquet`"
    partitions = {"run": (), "step": ("step",)}.get(artifact.per, ("step", artifact.per))
    return f"`{'/'.join(part for part in (artifact.folder, *partitions, artifact.file) if part)}`"


def _commands(artifact: Artifact, does: str) -> str:
    """The commands whose stages read or write it."""

    def named(spec: StageSpec) -> bool:
        return artifact in {use.artifact for use in getattr(spec, does)}

    return ", ".join(
        dict.fromkeys(f"{spec.command} --side" if spec.side else spec.command for spec in PIPELINE if named(spec))
    )


def _words(artifact: Artifact) -> str:
    if artifact.about or not isinstance(artifact, Table):
        return artifact.about
    return ", ".join(_column(artifact, column) for column in artifact.columns)


def _column(table: Table, column: Column) -> str:
    note = f" ({table.notes[column.name]})" if column.name in table.notes else ""
    return f"{column.name}{'?' if column.nullable else ''}{note}"


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.write_text(with_tables(place.read_text("utf-8")), encoding="utf-8")
