"""estimate: what a run will need, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hacpo.pipeline.command_line import main_of


def estimate(
    pipelines: Annotated[
        list[Path], typer.Argument(help="Pipeline folders, or folders of them; several runs are compared.")
    ],
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", help="Entry of the throughput table (default: cpu, or h100 for a GPU)."),
    ] = None,
    throughput: Annotated[
        Path | None, typer.Option("--throughput", help="YAML file laid over the shipped throughput table.")
    ] = None,
    mean_response: Annotated[
        float | None,
        typer.Option("--mean-response-tokens", min=1, help="Mean response, instead of what is measured or assumed."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    """Print rollouts, tokens, memory, disk and time that runs will need. Nothing is loaded or written."""
    from hacpo.pipeline.project import Pipeline
    from hacpo.tools.estimate import estimate_view as view
    from hacpo.tools.estimate.throughput import choose, load
    from hacpo.tools.estimate.totals import default_hardware
    from hacpo.tools.estimate.totals import estimate as estimate_run
    from hacpo.tools.inspect.plain import open_console, print_json

    opened = [Pipeline.open(folder) for named in pipelines for folder in _runs(named)]
    table = load(throughput)
    estimates = []
    for pipeline in opened:
        name = hardware or default_hardware(pipeline.settings)
        estimates.append(estimate_run(pipeline, name, choose(table, name), mean_response=mean_response))
    if as_json:
        print_json({"pipelines": [view.as_json(run_estimate) for run_estimate in estimates]})
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
