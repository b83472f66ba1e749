"""status: what is done, what comes next, and what it has cost so far."""

from __future__ import annotations

from typing import Annotated

import typer

from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.options import PipelineFolder


def status(
    context: typer.Context,
    pipeline: PipelineFolder,
    outcome: Annotated[bool, typer.Option("--outcome", help="Only the results so far.")] = False,
) -> None:
    """Print the run's progress, its cost and its results."""
    from hacpo.pipeline.project import Pipeline
    from hacpo.pipeline.records.repairing import repair_if_needed
    from hacpo.pipeline.views.made_otherwise import made_otherwise, recorded_settings
    from hacpo.pipeline.views.progress import print_outcome, print_status

    opened = Pipeline.open(pipeline)
    if context.obj is not None:
        return  # `hacpo run` prints the outcome itself when it is through
    if mended := repair_if_needed(opened):
        print(f"{opened.run}: {mended}")
    otherwise = made_otherwise(opened.layout, recorded_settings(opened))
    if not outcome:
        print_status(opened, otherwise)
    print_outcome(opened, otherwise)


if __name__ == "__main__":
    main_of(status)
