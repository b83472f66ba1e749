"""run: do everything of a run that is not done, in warm processes, recording each stage in DVC."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hacpo.pipeline.execution.command_line import loading, main_of
from hacpo.pipeline.options import PipelineFolder


def run(
    pipeline: PipelineFolder,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Agents that work side by side.")] = None,
    until: Annotated[int | None, typer.Option("--until", min=0, help="Stop after this step.")] = None,
    executor: Annotated[
        str | None, typer.Option("--executor", metavar="KIND", help="Who carries out stages: local, ray or slurm.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Train finished steps again where what they depend on has changed.")
    ] = False,
) -> None:
    """Continue a run to its end. The same files and locks as `dvc repro`, sooner; stop it at any moment, it resumes.

    Checkpoints of finished steps are not overwritten without asking.
    """
    with loading():
        from hacpo.errors import RemakeError, SettingsError
        from hacpo.pipeline.project import Pipeline
        from hacpo.pipeline.running.driver import run_pipeline
        from hacpo.pipeline.views.made_otherwise import made_otherwise
        from hacpo.pipeline.views.progress import print_outcome, steps_beyond
        from hacpo.settings.executor import KINDS
        from hacpo.tools.check.before_run import check_before_run

    opened = Pipeline.open(pipeline)
    steps = opened.settings.steps
    if until is not None and until > steps:
        raise SettingsError("--until is beyond the last step", where=pipeline, expected=f"0 to {steps}", found=until)
    if executor is not None and executor not in KINDS:
        raise SettingsError("--executor is none that there is", expected=" or ".join(KINDS), found=executor)
    kind = next((known for known in KINDS if known == executor), None)
    check_before_run(opened)
    try:
        run_pipeline(opened, jobs=jobs, until=until, remake=yes, executor=kind)
    except RemakeError as refusal:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        print(refusal, file=sys.stderr)
        if not typer.confirm("Do it?", err=True):
            print(f"{opened.run}: nothing was changed", file=sys.stderr)
            raise typer.Exit(refusal.exit_code) from None
        run_pipeline(opened, jobs=jobs, until=until, remake=True, executor=kind)
    print_outcome(opened, made_otherwise(opened.layout, opened.settings) if until is not None else {})
    if beyond := steps_beyond(opened):
        print(beyond)
    if until is not None and until < steps:
        print(f"stopped after step {until} of {steps}, as asked; `hacpo run pipelines/{opened.run}` goes on")


if __name__ == "__main__":
    main_of(run)
