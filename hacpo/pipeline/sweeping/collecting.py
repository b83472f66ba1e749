"""Results of the cells of a sweep: collected when a run has ended, joined, and taken from where they were made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from hacpo.artifacts import storage
from hacpo.artifacts.durability import make_folders
from hacpo.pipeline.locking.locks import only_one
from hacpo.pipeline.sweeping.discarding import is_there
from hacpo.pipeline.sweeping.planned_cells import LOCK, PlannedCell
from hacpo.pipeline.sweeping.sweep_file import SweepFile
from hacpo.pipeline.views.result_files import read_given_results, read_results, write_results
from hacpo.pipeline.views.run_results import SCHEMA, difference, results_of

_PLAIN = pa.schema(
    [(field.name, pa.string() if pa.types.is_dictionary(field.type) else field.type) for field in SCHEMA]
)
"""Texts as they are: where a few rows are kept, so are only their words."""


@contextmanager
def alone(sweep: SweepFile, group: Path) -> Iterator[None]:
    """Work on a sweep's folder of artifacts while nobody else does.

    Raises:
        BusyError: another `hacpo sweep` works on this one.
        StorageError: the disk refuses.
    """
    try:
        make_folders(group)
    except OSError as error:
        raise storage.refused(group, error) from None
    with only_one(group / LOCK, f"another `hacpo sweep` works on {sweep.folder}"):
        yield


def collect(cell: PlannedCell) -> None:
    """Write the results of a cell whose run is done; from then on the cell is.

    Raises:
        HacpoError: the run's tables cannot be read, or the disk refuses.
    """
    write_results(cell.results, results_of(cell.pipeline, cell.cell.base, cell.cell.variant), cell.pipeline.settings)


def joined(cells: Sequence[PlannedCell]) -> pa.Table:
    """The results of cells that are done, in the order of the sweep.

    Raises:
        ArtifactError: a file is damaged.
    """
    tables = [read_results(cell.results, "remove it, and run the sweep again") for cell in cells]
    return pa.concat_tables(tables).unify_dictionaries()


def take(cells: Sequence[PlannedCell], path: Path) -> tuple[list[PlannedCell], dict[str, str]]:
    """Take results that were collected elsewhere: cells that are not done and whose results a file has are done then.

    Args:
        path: a file that `hacpo sweep --collect` has written.

    Returns:
        The cells that were taken, and of the others that the file has why they were not.

    Raises:
        ArtifactError: it is no such file.
        StorageError: the disk refuses.
    """
    results = read_given_results(path)
    runs = results["run"].cast(pa.string())
    held = set(runs.unique().to_pylist())
    taken, others = [], {}
    for cell in cells:
        if cell.pipeline.run not in held or cell.done:
            continue
        own = results.filter(pc.equal(runs, cell.pipeline.run))
        other = difference(json.loads(own["settings"][0].as_py()), cell.pipeline.settings)
        if is_there(cell.pipeline):
            others[cell.cell.name] = "its run is here; it is collected when it ends"
        elif other is None:
            write_results(cell.results, own.cast(_PLAIN).cast(SCHEMA), cell.pipeline.settings)
            taken.append(cell)
        else:
            others[cell.cell.name] = f"it was made with other settings than sweep.yaml has: {other}"
    return taken, others
