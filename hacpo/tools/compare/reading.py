"""What is compared, as one frame of results (`hacpo.pipeline.views.run_results`), whichever way it was named."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import polars as pl
import pyarrow as pa

from hacpo.errors import ArtifactError, MissingInputError, SettingsError, first_line
from hacpo.pipeline.catalogue import RESOLVE
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.sweeping.collecting import joined
from hacpo.pipeline.sweeping.planned_cells import planned
from hacpo.pipeline.sweeping.sweep_file import SWEEP, SweepFile
from hacpo.pipeline.views.result_files import read_given_results
from hacpo.pipeline.views.run_results import difference, results_of
from hacpo.settings import params


def read(named: Iterable[str]) -> pl.DataFrame:
    """The results of everything that is named, one below the other.

    Args:
        named: pipeline folders, folders with a sweep.yaml, or files that `hacpo sweep --collect` wrote; as `name=path`
            what its runs are called. Several paths may have one name.

    Raises:
        SettingsError: a path is none of these, or the same run is named twice.
        MissingInputError: there are no results yet.
        ArtifactError: a file is damaged, or holds no results, or more than is compared.
    """
    frames = []
    for text in named:
        name, equals, path = text.rpartition("=")
        frame = pl.from_arrow(_read(Path(path if equals else text)))
        assert isinstance(frame, pl.DataFrame)
        # A run's settings are long, and stay one text for all of its rows.
        frame = frame.with_columns(pl.col(pl.Categorical).exclude("settings").cast(pl.String))
        frames.append(frame.with_columns(pl.lit(name).alias("variant")) if equals else frame)
    whole = pl.concat(frames, how="vertical_relaxed")
    keys = ["run", "agent", "step", "benchmark"]
    twice = whole.filter(whole.select(keys).is_duplicated())
    if twice.height:
        raise SettingsError("is named twice", where=twice["run"][0], remedy="name every run once")
    return whole


def _read(path: Path) -> pa.Table:
    if not path.exists() and path.suffix:
        raise MissingInputError("no such file", where=path)
    if path.is_file() and path.name not in (SWEEP, "params.yaml"):
        return read_given_results(path)
    folder = path.parent if path.is_file() else path
    if (folder / SWEEP).is_file():
        done = [cell for cell in planned(SweepFile.read(folder)) if cell.done]
        if not done:
            raise MissingInputError("no cell is done yet", where=folder, remedy=f"run `hacpo sweep {folder}`")
        return joined(done)
    pipeline = Pipeline.open(folder)
    _check_settings(pipeline)
    return results_of(pipeline)


def _check_settings(pipeline: Pipeline) -> None:
    """Refuse a run whose files were made with other settings than its params.yaml says: they would count as its own."""
    path = pipeline.layout.settings
    if not path.is_file():
        return
    try:
        recorded = params.recorded(path)
    except ValueError as error:
        remedy = f"run `{pipeline.command_for(RESOLVE)}`"
        raise ArtifactError(f"cannot be read: {first_line(error)}", where=path, remedy=remedy) from None
    why = difference(recorded, pipeline.settings)
    if why is not None:
        raise SettingsError(
            f"was made with other settings than params.yaml has: {why}",
            where=pipeline.folder,
            remedy=f"run `{pipeline.command('run')}`, or change it back",
        )
