"""plan: check params.yaml and stamp the run's DVC files; with --check, look at everything and write nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hacpo.pipeline.execution.command_line import main_of

if TYPE_CHECKING:
    from hacpo.tools.check.remarks import Remark

_FEW = 3
"""Pipelines of which the same is said with each."""


def plan(
    pipelines: Annotated[
        list[Path],
        typer.Argument(
            help="Pipeline folders, for example pipelines/quickstart; with --check also groups of them, such as "
            "pipelines/paper."
        ),
    ],
    check: Annotated[
        bool,
        typer.Option("--check", help="Say all that stands in the way of running them, and write nothing; 1 if wrong."),
    ] = False,
    online: Annotated[
        bool, typer.Option("--online", help="With --check: also ask the hub for the models. Nothing is downloaded.")
    ] = False,
    elsewhere: Annotated[
        bool, typer.Option("--elsewhere", help="With --check: for another machine; not what this one lacks.")
    ] = False,
) -> None:
    """Write the dvc.yaml files of runs: safe to repeat, and needed after changing agents, steps or evaluation.every."""
    from hacpo.errors import SettingsError

    if check:
        _check(pipelines, online=online, elsewhere=elsewhere)
        return
    if online or elsewhere:
        raise SettingsError(f"{'--online' if online else '--elsewhere'} belongs to --check")
    for folder in pipelines:
        _stamp(folder)


def _stamp(folder: Path) -> None:
    from contextlib import nullcontext

    from hacpo.artifacts.durability import flushing
    from hacpo.pipeline.project import Pipeline
    from hacpo.pipeline.records.bookkeeping import Books
    from hacpo.pipeline.records.dvc_files import stamp
    from hacpo.pipeline.records.repairing import repair_if_needed
    from hacpo.pipeline.records.rwlock import temporary_folder
    from hacpo.settings.recipes import overridden

    opened = Pipeline.open(folder)
    # A run changes under DVC's lock what these files say of the cache. Where there is no DVC project, nothing runs.
    in_dvc = temporary_folder(opened.root) is not None
    with flushing(opened.settings.disk.fsync), Books(opened.root).open() if in_dvc else nullcontext():
        changed = stamp(opened)
    if mended := repair_if_needed(opened):
        print(f"{opened.run}: {mended}")
    settings = opened.settings
    updates = settings.updates_per_step
    print(
        f"{opened.run}: {settings.steps} steps, {len(settings.agents)} agents, {settings.algorithm.recipe}, "
        f"{settings.batch.prompts} prompts x {settings.responses_per_prompt} responses and {updates} updates "
        f"per agent and step; {len(changed)} DVC files changed"
    )
    overrides = overridden(settings.algorithm)
    if overrides:
        print(f"overriding the recipe: {', '.join(overrides)}")


def _check(folders: list[Path], *, online: bool, elsewhere: bool) -> None:
    from hacpo.tools.check.pipelines import Checker, pipelines_below
    from hacpo.tools.check.remarks import Kind

    checker = Checker(online=online, elsewhere=elsewhere)
    remarks_of: dict[Path, list[Remark]] = {}
    named = dict.fromkeys(folder for given in folders for folder in pipelines_below(given))
    several = len(named) > 1
    for folder in named:
        remarks_of[folder] = list(dict.fromkeys(checker.check(folder)))
    shared = _shared([remark for remarks in remarks_of.values() for remark in remarks if remark.kind is not Kind.TO_DO])
    for folder, remarks in remarks_of.items():
        for remark in remarks:
            if remark.kind is not Kind.TO_DO and remark not in shared:
                print(f"{folder}: {remark.kind}: {remark.what}")
        waiting = [remark.what for remark in remarks if remark.kind is Kind.TO_DO]
        if waiting and several and any(remark.kind is Kind.ERROR for remark in remarks):
            print(f"{folder}: {len(waiting)} of the things below are to be done too")
        elif waiting and several:
            print(f"{folder}: ready once {len(waiting)} of the things below are done")
        elif waiting:
            print("\n".join(f"{folder}: to do first: {what}" for what in waiting))
        elif not any(remark.kind is Kind.ERROR for remark in remarks):
            print(f"{folder}: ready to run")
        elif all(remark in shared for remark in remarks if remark.kind is Kind.ERROR):
            print(f"{folder}: only what is wrong with several, below")
    wrong = sum(any(remark.kind is Kind.ERROR for remark in remarks) for remarks in remarks_of.values())
    for remark, count in shared.items():
        print(f"{remark.kind} ({count} pipelines): {remark.what}")
    if several:
        _print_to_do(
            [remark.what for remarks in remarks_of.values() for remark in remarks if remark.kind is Kind.TO_DO]
        )
        print(f"{len(remarks_of)} pipelines, {wrong or 'none'} with errors")
    if wrong:
        raise typer.Exit(1)


def _shared(remarks: list[Remark]) -> dict[Remark, int]:
    """What is said of more than a few pipelines, and of how many: said once."""
    from collections import Counter

    return {remark: count for remark, count in Counter(remarks).items() if count > _FEW}


def _print_to_do(waiting: list[str]) -> None:
    """What several pipelines wait for, each once."""
    from collections import Counter

    for what, count in Counter(waiting).items():
        print(f"to do first: {what} ({count} {'pipeline' if count == 1 else 'pipelines'})")


if __name__ == "__main__":
    main_of(plan)
