"""show: all agents' responses to one problem of a step, side by side, and what each learner made of them."""

from __future__ import annotations

from typing import Annotated

import typer

from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.options import PipelineFolder, StepOption


def show(
    pipeline: PipelineFolder,
    step: StepOption,
    problem: Annotated[
        str | None, typer.Option("--problem", help="Its problem_id; without it, the step's problems are listed.")
    ] = None,
    learner: Annotated[str | None, typer.Option("--learner", help="Only what this learner made of it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    """Print one problem's responses side by side, or the step's problems to choose from."""
    from dataclasses import asdict

    from hacpo.evaluation.measure import measure
    from hacpo.pipeline.project import Pipeline
    from hacpo.tools.inspect.plain import open_console, print_json
    from hacpo.tools.inspect.side_by_side import list_problems, read_side_by_side
    from hacpo.tools.inspect.side_by_side_view import print_missing, print_problems, print_side_by_side
    from hacpo.tools.inspect.step_reader import StepReader, learners_of

    opened = Pipeline.open(pipeline)
    learners = learners_of(opened, learner)
    reader = StepReader(opened, step)
    if problem is not None:
        shown = read_side_by_side(reader, problem, learners)
        if as_json:
            print_json(asdict(shown))
        else:
            print_side_by_side(open_console(), shown)
        return
    lines = list_problems(reader, learners)
    if as_json:
        print_json(
            {
                "run": opened.run,
                "step": step,
                "problems": [asdict(line) for line in lines],
                "missing": [asdict(table) for table in reader.missing],
            }
        )
        return
    console = open_console()
    what = "correct responses" if opened.settings.verification.is_binary else measure(opened.settings.verification)
    title = f"{opened.run}, step {step}: {what} of each agent"
    print_problems(console, title, lines, list(opened.settings.agents), learners)
    print_missing(console, reader.missing)


if __name__ == "__main__":
    main_of(show)
