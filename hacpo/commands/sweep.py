"""sweep: many runs from one small file, several at a time; what is done stays done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hacpo.pipeline.execution.command_line import main_of

if TYPE_CHECKING:
    from hacpo.pipeline.sweeping.planned_cells import PlannedCell
    from hacpo.pipeline.sweeping.sweep_file import SweepFile


def sweep(
    folder: Annotated[
        Path, typer.Argument(metavar="SWEEP", help="Folder with a sweep.yaml, for example pipelines/study.")
    ],
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Runs at a time.")] = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="PATTERN", help="Only cells of such names, such as 'size/hacpo*/*'; repeatable."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be made and run; write nothing.")] = False,
    collect: Annotated[
        Path | None,
        typer.Option(
            "--collect",
            metavar="FILE",
            help="Write the results of the cells that are done into one Parquet file, and run nothing.",
        ),
    ] = None,
    take: Annotated[
        list[Path] | None,
        typer.Option(
            "--take",
            metavar="FILE",
            help="Count cells as done whose results such a file has, and run nothing: they ran elsewhere; repeatable.",
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Make cells again whose settings in sweep.yaml have changed since they ran.")
    ] = False,
) -> None:
    """Run what sweep.yaml describes: bases x variants x seeds, each cell a run like any other.

    Kill it at any moment: the same command goes on. Warm starts are made once for all cells that share them.
    """
    from fnmatch import fnmatchcase

    from hacpo.errors import SettingsError
    from hacpo.pipeline.sweeping.planned_cells import planned
    from hacpo.pipeline.sweeping.sweep_file import SweepFile

    described = SweepFile.read(folder)
    every = planned(described)
    chosen = [cell for cell in every if not only or any(fnmatchcase(cell.cell.name, pattern) for pattern in only)]
    if not chosen:
        raise SettingsError(
            "--only fits no cell", found=", ".join(only or ()), expected=f"such as {every[0].cell.name}"
        )
    if take and dry_run:
        raise SettingsError("--take writes, and --dry-run does not", remedy="give one of them")
    if take:
        _take(described, chosen, take)
    if collect is not None:
        _collect(chosen, collect)
    elif dry_run:
        _say_what_comes(described.folder, chosen)
    elif not take:
        from hacpo.pipeline.sweeping.sweeping import run_sweep

        failed = run_sweep(described, every, chosen, jobs=jobs, remake=yes)
        if failed:
            raise typer.Exit(1)


def _take(described: SweepFile, cells: list[PlannedCell], files: list[Path]) -> None:
    from hacpo.pipeline.sweeping.collecting import alone, take

    with alone(described, cells[0].group):
        for file in files:
            taken, others = take(cells, file)
            print(f"{file}: {len(taken)} runs taken")
            for name, why in others.items():
                print(f"{name}: not taken, {why}")
    print(f"{described.folder}: {sum(cell.done for cell in cells)} of {len(cells)} runs done")


def _collect(cells: list[PlannedCell], out: Path) -> None:
    from hacpo.artifacts.targets import check_file
    from hacpo.errors import MissingInputError
    from hacpo.pipeline.sweeping.collecting import joined
    from hacpo.pipeline.views.result_files import holds_results, write_results

    check_file(out, holds_results, what="file of results")
    done = [cell for cell in cells if cell.done]
    if not done:
        raise MissingInputError("no cell is done yet", where=cells[0].group, remedy="run the sweep first")
    results = joined(done)
    write_results(out, results)
    size = out.stat().st_size
    print(f"{out}: {len(done)} of {len(cells)} runs, {results.num_rows:,} rows, {size / 2**10:,.0f} KiB")
    if len(done) < len(cells):
        print(f"not done: {', '.join(cell.cell.name for cell in cells if not cell.done)}")


def _say_what_comes(folder: Path, cells: list[PlannedCell]) -> None:
    done = [cell for cell in cells if cell.done]
    stale = {cell.cell.name: why for cell in cells if cell not in done and (why := cell.stale) is not None}
    print(f"{folder}: {len(cells)} runs, {len(done)} done, {len(stale)} of other settings than they were made with")
    for cell in cells:
        state = "done" if cell in done else f"stale: {stale[cell.cell.name]}" if cell.cell.name in stale else "to do"
        print(f"{cell.cell.name}: {state}")


if __name__ == "__main__":
    main_of(sweep)
