"""`hacpo sweep`: make the pipeline folders of a sweep, run what is not done, collect what has ended."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from hacpo.errors import BusyError, HacpoError, SettingsError
from hacpo.pipeline.sweeping.collecting import alone, collect
from hacpo.pipeline.sweeping.discarding import discard, is_there
from hacpo.pipeline.sweeping.planned_cells import PlannedCell, strays
from hacpo.pipeline.sweeping.sweep_file import SWEEP, SweepFile
from hacpo.pipeline.sweeping.sweep_view import SweepView
from hacpo.pipeline.sweeping.working import SweepWork
from hacpo.pipeline.views.result_files import read_results


@dataclass
class _Discards:
    """Cells that are done and whose runs are to be removed, as soon as none that waits needs a start of theirs.

    Attributes:
        ended: their runs are there.
        left: name of a cell whose run could not be removed -> a line that says why.
    """

    ended: list[PlannedCell]
    view: SweepView
    left: dict[str, str] = field(default_factory=dict)

    def go_on(self, work: SweepWork) -> None:
        """Remove what can be removed by now. What cannot be is tried again the next time, and said once."""
        for cell in [*self.ended]:
            name = cell.cell.name
            if work.starts.needed_from(cell, work.waiting):
                continue
            try:
                read_results(cell.results, "remove it, and run the sweep again")  # or nothing would be left
                discard(cell.pipeline)
            except BusyError:
                continue  # somebody looks at it: it stays until the next time
            except HacpoError as error:
                work.starts.without(cell)
                if name not in self.left:
                    self.view.left(cell, str(error))
                self.left[name] = str(error)
            else:
                self.ended.remove(cell)
                self.left.pop(name, None)


def run_sweep(
    sweep: SweepFile, every: Sequence[PlannedCell], chosen: Sequence[PlannedCell], *, jobs: int, remake: bool
) -> dict[str, str]:
    """Run the chosen cells that are not done; returns those that failed, or are done and could not be removed from the
    disk, each with a line that says why.

    Args:
        every: all cells of the sweep.
        jobs: runs at a time.
        remake: make cells again whose settings have changed.

    Raises:
        SettingsError: cells are stale, without `remake`; or a params.yaml is in the way. Nothing was run.
        BusyError: another `hacpo sweep` works on this one.
        StorageError: the disk refuses.
    """
    with alone(sweep, every[0].group):
        waiting = [cell for cell in chosen if not cell.done]
        _check_stale(sweep, waiting, remake=remake)
        for cell in chosen:
            cell.write()
        name = os.path.relpath(sweep.folder.resolve(), every[0].pipeline.root.resolve())
        ended = [cell for cell in chosen if cell.done and is_there(cell.pipeline)]

        def settle(cell: PlannedCell | None) -> None:
            if cell is not None:
                collect(cell)
                ended.append(cell)
            if sweep.settings.keep == "results":
                discards.go_on(work)

        with SweepView(name, len(chosen), len(chosen) - len(waiting)) as view:
            discards = _Discards(ended, view)
            view.begins(len(strays(sweep, every)), jobs)
            work = SweepWork(
                waiting, every, jobs=jobs, remake=remake, audit=sweep.settings.audit, collect=settle, view=view
            )
            settle(None)
            work.run()
            settle(None)
            view.closes(len(discards.left))
    return work.failed | discards.left


def _check_stale(sweep: SweepFile, cells: Sequence[PlannedCell], *, remake: bool) -> None:
    """Refuse to make again what is made with other settings, unawares.

    Raises:
        SettingsError: there is such a cell.
    """
    stale = {cell.cell.name: why for cell in cells if (why := cell.stale) is not None}
    if not stale or remake:
        return
    name, why = next(iter(stale.items()))
    more = f" (and {len(stale) - 1} more)" if len(stale) > 1 else ""
    raise SettingsError(
        f"{name}{more} was made with other settings: {why}",
        where=sweep.folder / SWEEP,
        remedy="--yes makes such cells again; a variant of another name leaves them alone",
    )
