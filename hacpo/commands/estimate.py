"""estimate: what a run will need, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hacpo.pipeline.execution.command_line import main_of


def estimate(
    pipelines: Annotated[
        list[Path], typer.Argument(help="Pipeline folders, or folders of them; several runs are compared.")
    ],
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", help="cpu, a100, h100, h200, or an entry of the throughput table."),
    ] = None,
    throughput: Annotated[
        Path | None,
        typer.Option("--throughput", help="Measured speeds, for times: a YAML table, or a run with finished steps."),
    ] = None,
    mean_response: Annotated[
        float | None,
        typer.Option("--mean-response-tokens", min=1, help="Mean response, instead of what is measured or assumed."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    """Print rollouts, tokens, arithmetic, memory and disk that runs will need, and time where speeds are measured."""
    from hacpo.pipeline.project import Pipeline
    from hacpo.tools.estimate import estimate_view as view
    from hacpo.tools.estimate.throughput import choose, load
    from hacpo.tools.estimate.totals import default_hardware, speeds_of
    from hacpo.tools.estimate.totals import estimate as estimate_run
    from hacpo.tools.inspect.plain import open_console, print_json

    opened = [Pipeline.open(folder) for named in pipelines for folder in _runs(named)]
    table = load(None if throughput is not None and throughput.is_dir() else throughput)
    speeds = {}
    if throughput is not None and throughput.is_dir():
        measured = Pipeline.open(throughput)
        name = default_hardware(measured.settings)
        speeds = {
            "source": f"measured by {measured.run}",
            "models": speeds_of(estimate_run(measured, name, table[name])),
        }
    estimates = []
    for pipeline in opened:
        name = hardware or default_hardware(pipeline.settings)
        device = choose(table, name).model_copy(update=speeds)
        estimates.append(estimate_run(pipeline, name, device, mean_response=mean_response))
    if as_json:
        print_json({"pipelines": [view.as_json(each) for each in estimates]})
    elif len(estimates) == 1:
        view.print_run(open_console(), estimates[0])
    else:
        view.print_comparison(open_console(), estimates)


def _runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run's or holds none, else the runs below it."""
    below = [] if (folder / "params.yaml").is_file() else sorted(path.parent for path in folder.rglob("params.yaml"))
    return below or [folder]


if __name__ == "__main__":
    main_of(estimate)
