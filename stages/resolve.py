"""resolve: the settings of a run with every default and the recipe filled in."""

from __future__ import annotations

from typing import Annotated

import typer

from hacpo.pipeline.catalogue import RESOLVE
from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.execution.stage import Stage
from hacpo.pipeline.execution.stage_command import stage_command


@stage_command(RESOLVE)
def resolve(
    stage: Stage,
    stamped: Annotated[
        str | None,
        typer.Option("--stamped", help="Given in dvc.yaml: refuse where the DVC files are not those of params.yaml."),
    ] = None,
) -> None:
    """Write settings.json: what every stage reads, key by key, and what DVC tracks."""
    from hacpo.artifacts import storage
    from hacpo.settings import params

    if stamped is not None:
        stage.check_stamped()
    target = stage.outputs.settings
    storage.write_json(target, params.dump(stage.settings))
    stage.summary = str(target)


if __name__ == "__main__":
    main_of(resolve)
