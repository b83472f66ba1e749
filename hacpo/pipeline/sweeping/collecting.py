"""Results of the cells of a sweep: collected when a run has ended, and joined."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from hacpo.pipeline.sweeping.planned_cells import PlannedCell
from hacpo.pipeline.views.result_files import read_results, write_results
from hacpo.pipeline.views.run_results import results_of


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
