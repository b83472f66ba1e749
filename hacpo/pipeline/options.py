"""The options that every stage has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PipelineFolder = Annotated[Path, typer.Argument(help="Pipeline folder, for example pipelines/quickstart.")]
StepOption = Annotated[int, typer.Option("--step", help="Training step, from 1.", show_default=False)]
AgentOption = Annotated[str, typer.Option("--agent", help="Agent whose part of the step this is.", show_default=False)]
LearnerOption = Annotated[str, typer.Option("--learner", help="Agent that will learn from it.", show_default=False)]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="Write below this folder instead; the run itself is not touched.")
]
SideOption = Annotated[
    bool, typer.Option("--side", help="The side sample for capability (capability.oracle_samples), in its own tables.")
]
ShardOption = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Only these files of the table, the Ith of N parts from 0; the command without it puts all in place.",
    ),
]
LimitOption = Annotated[int | None, typer.Option("--limit", help="Only the first N problems (debugging; needs --out).")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting, key.path=value (debugging; needs --out).")
]
