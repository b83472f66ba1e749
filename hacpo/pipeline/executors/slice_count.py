"""How many files the table of a stage will have: as many slices there can be."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from hacpo.artifacts.run_files import RunFiles
from hacpo.artifacts.tables import PROBLEMS, PROMPTS
from hacpo.pipeline.catalogue import EVALUATE, GENERATE, POOL_STAGE, STAGES, VERIFY
from hacpo.pipeline.project import Pipeline


def files_made_by(pipeline: Pipeline, words: Sequence[str]) -> int:
    """Of a command, `generate pipelines/x --step 1 --agent ada`; 1 where it makes no table, or nobody knows."""
    spec = STAGES.get(words[0])
    if spec is None or not spec.sliced:
        return 1
    step = int(words[words.index("--step") + 1])
    try:
        rows = _rows(pipeline, spec.name, step, side="--side" in words)
    except (OSError, pa.ArrowException):
        return 1  # what is wrong there the stage says
    return max(-(-rows // pipeline.settings.storage.rows_per_shard), 1)


def _rows(pipeline: Pipeline, stage: str, step: int, *, side: bool) -> int:
    settings, files = pipeline.settings, RunFiles(pipeline.run, pipeline.layout)
    if stage == EVALUATE.name:
        return sum(
            pq.read_metadata(files.path(PROBLEMS, whose=benchmark.data)).num_rows * benchmark.samples
            for benchmark in settings.evaluation.benchmarks.values()
        )
    problems = sum(pq.read_metadata(file).num_rows for file in files.path(PROMPTS, step).glob("part-*.parquet"))
    samples = settings.responses_per_prompt
    if side and stage in (GENERATE.name, VERIFY.name):
        samples = settings.algorithm.capability.oracle_samples or 0
    return int(problems * samples * (settings.sources if stage == POOL_STAGE.name else 1))
