"""audit: every number of a run, recomputed from its files."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.options import PipelineFolder


class TextsOption(StrEnum):
    """Which texts are read."""

    ALL = "all"
    SAMPLE = "sample"
    NONE = "none"


def audit(
    pipeline: PipelineFolder,
    texts: Annotated[
        TextsOption | None,
        typer.Option(
            "--texts",
            help="Which responses to verify, decode and retokenise again (default: all up to 20,000 rollouts, else a "
            "sample of each table).",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            min=0,
            help="Which texts a sample is; drawn anew, and printed, if left out.",
            show_default=False,
        ),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also repeat the run with its checkpoints (takes as long as the run).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    first: Annotated[
        int | None, typer.Option("--from", help="First step to audit; 0 is the start.", show_default=False)
    ] = None,
    last: Annotated[int | None, typer.Option("--until", help="Last step to audit.", show_default=False)] = None,
) -> None:
    """Check every invariant of a run on its files; exits with 1 if there is a finding."""
    from hacpo.pipeline.execution.session import ConsoleProgress
    from hacpo.pipeline.project import Pipeline
    from hacpo.pipeline.records.repairing import repair_if_needed
    from hacpo.tools.audit import audit_view as view
    from hacpo.tools.audit.walk import audit as audit_run
    from hacpo.tools.inspect.plain import open_console, print_json

    opened = Pipeline.open(pipeline)
    if mended := repair_if_needed(opened):
        print(f"{opened.run}: {mended}", file=sys.stderr)
    progress = ConsoleProgress()
    with progress.showing("audit"):
        result = audit_run(
            opened,
            texts=None if texts is None else texts.value,
            seed=seed,
            deep=deep,
            first=first,
            last=last,
            on_progress=lambda what, done, total: progress.report(what, done, total, {}),
        )
    if as_json:
        print_json(view.as_json(result))
    else:
        view.print_audit(open_console(), result)
    if result.findings:
        raise typer.Exit(1)


if __name__ == "__main__":
    main_of(audit)
