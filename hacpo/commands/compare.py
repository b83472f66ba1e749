"""compare: runs, or groups of seeds, against one of them: differences with intervals, and a verdict on each."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hacpo.pipeline.execution.command_line import main_of


class Axis(StrEnum):
    """What is counted as spent."""

    ROLLOUTS = "rollouts"
    STEPS = "steps"
    SAMPLED_TOKENS = "sampled_tokens"
    TRAINING_TOKENS = "training_tokens"
    UPDATES = "updates"
    SECONDS = "seconds"


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Pipeline folders, folders with a sweep.yaml, or files of `hacpo sweep --collect`; NAME=RUN names its "
            "group, several runs may bear one name.",
        ),
    ],
    against: Annotated[
        str | None, typer.Option("--against", metavar="GROUP", help="Compare with this group; else with the first.")
    ] = None,
    by: Annotated[
        Axis, typer.Option("--by", help="Cost by which accuracies are taken at an equal budget.")
    ] = Axis.ROLLOUTS,
    benchmark: Annotated[list[str] | None, typer.Option("--benchmark", help="Only this benchmark; repeatable.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write one HTML page, with curves.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the bootstrap.")] = 0,
) -> None:
    """Compare runs by their held-out accuracy at equal cost, paired by seed.

    Runs that differ in nothing but seeds are one group.
    """
    from hacpo.artifacts import storage
    from hacpo.artifacts.targets import check_file
    from hacpo.tools.compare.compare_view import as_json as plain
    from hacpo.tools.compare.compare_view import print_compared
    from hacpo.tools.compare.comparing import compare as compared_by
    from hacpo.tools.compare.grouping import groups_of
    from hacpo.tools.compare.reading import read
    from hacpo.tools.inspect.plain import open_console, print_json

    if html is not None:
        from hacpo.tools.compare.compare_page import is_page, render

        check_file(html, is_page, what="page of `hacpo compare`")
    groups = groups_of(read(runs))
    compared = compared_by(groups, against=against, axis=by.value, benchmarks=benchmark or (), seed=seed)
    if html is not None:
        title = " / ".join(dict.fromkeys(group.name for group in groups))
        text = render(compared, title)
        with storage.atomic(html) as scratch:
            scratch.write_text(text, encoding="utf-8", newline="\n")
    if as_json:
        print_json(plain(compared))
    else:
        print_compared(open_console(), compared)
        if html is not None:
            print(f"page: {html}")


if __name__ == "__main__":
    main_of(compare)
