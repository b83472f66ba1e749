"""From a stage's body to its command: the options that its catalogue entry asks for, and `open_stage` around it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import typer

from hacpo.artifacts.tables import SETTINGS
from hacpo.pipeline.catalogue import StageSpec
from hacpo.pipeline.execution.opening import open_stage
from hacpo.pipeline.options import (
    AgentOption,
    LearnerOption,
    LimitOption,
    OutOption,
    PipelineFolder,
    SetOption,
    ShardOption,
    SideOption,
    StepOption,
)

Body = Callable[..., None]
"""Takes the `Stage`, and by name what options of its own it declares."""


def stage_command(spec: StageSpec, *, side: StageSpec | None = None) -> Callable[[Body], Callable[..., None]]:
    """Make a stage's body a command of its name, with `--step`, `--agent` or `--learner`, `--out`, `--limit`, `--set`.

    Args:
        side: what it is with `--side`, if it can draw or verify a side sample.
    """

    def made(body: Body) -> Callable[..., None]:
        own = [
            option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for option in list(inspect.signature(body, eval_str=True).parameters.values())[1:]
        ]

        def command(context: typer.Context, **given: Any) -> None:
            chosen = side if side is not None and given.pop("side") else spec
            with open_stage(
                chosen,
                context.obj,
                given["pipeline"],
                step=given.get("step", 0),
                agent=given[spec.per] if spec.per != "run" else None,
                out=given["out"],
                limit=given.get("limit"),
                shard=given.get("shard"),
                overrides=given["overrides"] or (),
            ) as stage:
                body(stage, **{option.name: given[option.name] for option in own})

        options = [_option("context", typer.Context), *_options(spec, own, has_side=side is not None)]
        command.__name__, command.__doc__, command.__module__ = body.__name__, body.__doc__, body.__module__
        command.__annotations__ = {option.name: option.annotation for option in options}
        command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        return command

    return made


def _options(spec: StageSpec, own: list[inspect.Parameter], *, has_side: bool) -> list[inspect.Parameter]:
    options = [_option("pipeline", PipelineFolder)]
    options += [_option("step", StepOption)] if spec.at in ("step", "evaluation") else []
    options += [_option("agent", AgentOption)] if spec.per == "agent" else []
    options += [_option("learner", LearnerOption)] if spec.per == "learner" else []
    options += own
    options += [_option("side", SideOption, False)] if has_side else []
    options += [_option("shard", ShardOption, None)] if spec.sliced else []
    options += [_option("out", OutOption, None)]
    options += [] if spec.makes(SETTINGS) else [_option("limit", LimitOption, None)]
    return [*options, _option("overrides", SetOption, None)]


def _option(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
