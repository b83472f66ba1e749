"""Whether a run can come to its end, as far as that costs next to nothing to see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from hacpo.artifacts.model_folder import read_mapping
from hacpo.errors import HacpoError, ModelError
from hacpo.pipeline.catalogue import PREPARE
from hacpo.pipeline.project import Pipeline
from hacpo.settings.engine import VLLM_ENGINES
from hacpo.settings.root import DataSet
from hacpo.tokens.context_length import context_length
from hacpo.tools.check.fit import check_lengths
from hacpo.tools.check.problem_files import Files, check_data
from hacpo.tools.check.remarks import Kind, Remark, error


def obstacles(pipeline: Pipeline, changed: tuple[str, ...] | None) -> list[str]:
    """What the run would end at, each in words.

    Args:
        changed: settings that are others than the run's files were made with; None where these are not known.
    """
    return [
        f"to do first: {remark.what}" if remark.kind is Kind.TO_DO else remark.what
        for remark in _remarks(pipeline, changed)
        if remark.kind is not Kind.WARNING
    ]


def _remarks(pipeline: Pipeline, changed: tuple[str, ...] | None) -> Iterator[Remark]:
    settings, layout = pipeline.settings, pipeline.layout
    prepares = tuple(f"{key}." for key in PREPARE.settings)
    if changed is None or not layout.schedule.is_file() or any(f"{key}.".startswith(prepares) for key in changed):
        yield from check_data(pipeline, _Counted())
    for name in settings.agents:
        yield from check_lengths(
            settings, name, _context(pipeline, name), with_vllm=settings.engine.name in VLLM_ENGINES
        )
    if settings.engine.device == "cuda":
        from hacpo.engines.models.checkpoint import resolve_device

        try:
            resolve_device(settings.engine)
        except ModelError as refusal:
            yield error(refusal)


class _Counted(Files):
    """Problem sets, of which the sizes alone are looked at: what they hold the first stage reads."""

    def count(self, name: str, source: DataSet, root: Path) -> int:
        if source.problems is not None:
            return source.problems
        try:
            assert source.path is not None
            return int(pq.read_metadata(root / source.path).num_rows)
        except (pa.ArrowException, OSError):
            return super().count(name, source, root)


def _context(pipeline: Pipeline, name: str) -> int | None:
    """Most tokens that an agent's model takes; None where its files, which the start reads, do not say."""
    agent = pipeline.settings.agents[name]
    if agent.tiny is not None:
        return agent.tiny.context
    for folder in (pipeline.layout.checkpoint(0, name), pipeline.root / str(agent.model)):
        try:
            if (folder / "config.json").is_file():
                return context_length(read_mapping(folder / "config.json"))
        except HacpoError:
            return None
    return None
