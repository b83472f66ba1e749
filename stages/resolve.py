"""resolve: the settings of a run with every default and the recipe filled in."""

from __future__ import annotations

from typing import Annotated

import typer

from hacpo.pipeline.command_line import main_of
from hacpo.pipeline.options import OutOption, PipelineFolder, SetOption


def resolve(
    context: typer.Context,
    pipeline: PipelineFolder,
    out: OutOption = None,
    overrides: SetOption = None,
    stamped: Annotated[
        str | None,
        typer.Option("--stamped", help="Given in dvc.yaml: refuse where the DVC files are not those of params.yaml."),
    ] = None,
) -> None:
    """Write settings.json: what every stage reads, key by key, and what DVC tracks."""
    from hacpo.artifacts import storage
    from hacpo.artifacts.layout import Layout
    from hacpo.errors import SettingsError
    from hacpo.pipeline.project import Pipeline
    from hacpo.pipeline.stamp_check import check_stamped
    from hacpo.settings import params

    if overrides and out is None:
        raise SettingsError("--set is for debugging and needs --out")
    opened = Pipeline.open(pipeline, overrides or ())
    if stamped is not None:
        check_stamped(opened)
    target = (Layout(out) if out is not None else opened.layout).settings
    storage.write_json(target, params.dump(opened.settings))
    if context.obj is None:
        print(f"resolve: {target}")


if __name__ == "__main__":
    main_of(resolve)
