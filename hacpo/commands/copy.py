"""copy: a variant of a run, from the same start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.options import PipelineFolder


def copy(
    pipeline: PipelineFolder,
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Pipeline folder to make, for example pipelines/variant.")],
) -> None:
    """Make a pipeline folder with a run's params.yaml and its checkpoints of step 0, so that no warm-up is repeated.

    Change the new params.yaml and run it; the old run stays as it is.
    """
    from hacpo.artifacts.durability import flushing
    from hacpo.pipeline.project import Pipeline
    from hacpo.pipeline.running.copying import copy_run

    opened = Pipeline.open(pipeline)
    with flushing(opened.settings.disk.fsync):
        shared = copy_run(opened, new)
    others = [agent for agent in opened.settings.agents if agent not in shared]
    anew = f"; {', '.join(others)} will be warmed up anew" if others else ""
    print(f"{new / 'params.yaml'}: starts from {opened.run}'s step 0 of {', '.join(shared)}{anew}")
    print(f"change it, then run `hacpo run {new}`")


if __name__ == "__main__":
    main_of(copy)
