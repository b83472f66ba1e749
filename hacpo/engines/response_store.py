"""Sampling that survives a kill: what has been drawn is kept block by block, and only the rest is drawn again.

A block is a run of requests in their order, so an interrupted stage and an undisturbed one put the same requests
together and draw the same bytes. A saved block is found again by a digest of everything its responses depend on: the
policy, the engine's settings, how they were drawn, and each request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hacpo.algorithm.rollouts import supports
from hacpo.algorithm.support import to_column
from hacpo.artifacts import parquet, storage, tables
from hacpo.artifacts.durability import flush
from hacpo.artifacts.layout import SAVED
from hacpo.artifacts.storage import refused
from hacpo.callbacks import OnProgress
from hacpo.engines.interface import SampledResponse, Sampler, SamplingParameters, SamplingRequest
from hacpo.errors import ArtifactError, MissingInputError, StorageError
from hacpo.settings.engine import EngineSettings

_OF_ROLLOUTS = {column.name: column for column in tables.ROLLOUTS.columns}

_BLOCK = tables.Table(
    "saved_responses",
    SAVED,
    "agent",
    columns=(
        tables.Column("request", "int32"),
        *(_OF_ROLLOUTS[name] for name in ("token_ids", "sampler_logprobs", "finish_reason", "support")),
    ),
    key=("request",),
)


@dataclass(frozen=True)
class SavingSampler:
    """A sampler (`interface.Sampler`) that saves its responses below a folder while it draws them.

    Attributes:
        sampler: who draws.
        policy: content hash of the weights.
        settings: the engine's; `save_every` is the size of a block.
        folder: where blocks are kept, until `remove_saved`.
    """

    sampler: Sampler
    policy: str
    settings: EngineSettings
    folder: Path

    def sample(
        self,
        requests: Sequence[SamplingRequest],
        parameters: SamplingParameters,
        on_progress: OnProgress | None = None,
    ) -> list[SampledResponse]:
        """See `interface.Sampler`."""
        responses: list[SampledResponse] = []
        for start in range(0, len(requests), self.settings.save_every):
            block = requests[start : start + self.settings.save_every]
            path = self.folder / f"{self._digest(block, parameters)}.parquet"
            drawn = _saved(path, len(block))
            if drawn is None:
                done = len(responses)
                drawn = self.sampler.sample(block, parameters, _shifted(on_progress, done, len(requests)))
                _save(path, drawn)
            responses += drawn
            if on_progress:
                on_progress(len(responses), len(requests))
        return responses

    def _digest(self, block: Sequence[SamplingRequest], parameters: SamplingParameters) -> str:
        depends = [self.policy, self.settings.model_dump(mode="json"), dataclasses.asdict(parameters)]
        asked = [[request.seed, *map(int, request.prompt_token_ids)] for request in block]
        return hashlib.sha256(json.dumps([depends, asked], sort_keys=True).encode()).hexdigest()


def remove_saved(saved: Path) -> None:
    """Remove what was saved in a folder, if there is one: the stage has written its table."""
    if not saved.is_dir():
        return
    storage.remove(saved)
    gone = saved
    with contextlib.suppress(OSError):  # another agent's blocks are still there
        for folder in list(saved.parents)[:3]:
            folder.rmdir()
            gone = folder
    with contextlib.suppress(OSError):  # or a power cut brings them back, when nobody asks for them any more
        flush(gone.parent)


def _shifted(on_progress: OnProgress | None, done: int, total: int) -> OnProgress | None:
    return None if on_progress is None else lambda now, _: on_progress(done + now, total)


def _save(path: Path, responses: Sequence[SampledResponse]) -> None:
    columns = {
        "request": list(range(len(responses))),
        "token_ids": [response.token_ids for response in responses],
        "sampler_logprobs": [response.logprobs for response in responses],
        "finish_reason": [response.finish_reason for response in responses],
        "support": to_column([response.support for response in responses]),
    }
    try:
        parquet.write_table(path, _BLOCK, parquet.to_arrow(_BLOCK, columns), run="")
    except StorageError as error:
        raise refused(path.parent, error.reason) from None  # whose name says more than a digest


def _saved(path: Path, count: int) -> list[SampledResponse] | None:
    """The saved block, or None where there is none that is whole."""
    try:
        table = parquet.read_table(path, _BLOCK)
    except (ArtifactError, MissingInputError):
        return None
    if len(table) != count:
        return None
    columns = [table[name].to_pylist() for name in ("token_ids", "sampler_logprobs", "finish_reason")]
    return [
        SampledResponse(token_ids, np.array(logprobs, dtype=np.float32), finish_reason, support)
        for token_ids, logprobs, finish_reason, support in zip(*columns, supports(table), strict=True)
    ]
