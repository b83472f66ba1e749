"""hacpo: all commands under one name. A command's module is loaded when it is called, its help when it is asked for."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Sequence
from types import CodeType
from typing import Any

import typer

import hacpo.stages
from hacpo.errors import SettingsError
from hacpo.pipeline.execution.command_line import (
    INTERRUPTED,
    keep_out_the_working_directory,
    loading,
    new_app,
    run_app,
)
from hacpo.pipeline.execution.session import Session

_MODULES = {module.name for module in pkgutil.iter_modules(hacpo.stages.__path__)}
STAGES = [*hacpo.stages.ORDER, *sorted(_MODULES.difference(hacpo.stages.ORDER))]
"""The stages' commands, of each module there the function of its name: in the order of the pipeline."""

_PLACES = {
    **{
        name: f"hacpo.commands.{name}"
        for name in ("run", "sweep", "compare", "copy", "serve", "status", "plan", "estimate")
    },
    **{name: f"hacpo.stages.{name}" for name in STAGES},
    **{name: f"hacpo.commands.{name}" for name in ("audit", "show")},
    "what-if": "hacpo.commands.what_if",
    **{name: f"hacpo.commands.{name}" for name in ("export", "prune", "restore", "repair")},
    "import": "hacpo.commands.import_problems",
}
"""Command -> its module, which has a function of its own name."""


class _Commands(typer.core.TyperGroup):
    """Loads the one that is called."""

    _listing = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As ever, but for `--version`."""
        if args[:1] == ["--version"]:
            from importlib.metadata import version

            print(f"hacpo {version('hacpo')}")
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is named; of one that there is none of, which may be meant."""
        name = args[0]
        if not name.startswith("-") and name not in _PLACES and (near := difflib.get_close_matches(name, _PLACES, n=1)):
            raise SettingsError(f"no such command {name!r}", remedy=f"did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Their names."""
        return list(_PLACES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """The command; while all are listed, what is said of it."""
        if cmd_name not in _PLACES:
            return None
        if self._listing:
            panel = "Stages" if cmd_name in STAGES else None
            return typer.core.TyperCommand(cmd_name, help=_summary(_PLACES[cmd_name]), rich_help_panel=panel)
        return _loaded(_PLACES[cmd_name])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """List the commands without loading them."""
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


@functools.cache
def _loaded(place: str) -> Any:
    """The command of a module, as Typer makes it."""
    with loading():
        module = importlib.import_module(place)
    one = new_app()
    one.command()(getattr(module, place.rpartition(".")[2]))
    return typer.main.get_command(one)


def _summary(place: str) -> str:
    """What the function of a module's own name says of itself, read from the module's code, which is not run."""
    loader: Any = getattr(importlib.util.find_spec(place), "loader", None)
    code: CodeType = loader.get_code(place)
    functions = {inner.co_name: inner for inner in code.co_consts if isinstance(inner, CodeType)}
    said = functions[place.rpartition(".")[2]].co_consts[0]
    return said if isinstance(said, str) else ""


app = _Commands(
    name="hacpo",
    no_args_is_help=True,
    help="Train several language models together: HACPO as stages with file artifacts. "
    "`hacpo run pipelines/<run>` runs everything that is not done.",
)


def execute(arguments: Sequence[str], session: Session) -> None:
    """Run one command inside this process, sharing `session`; errors are raised."""
    if app.main(args=list(arguments), prog_name="hacpo", standalone_mode=False, obj=session) == INTERRUPTED:
        raise KeyboardInterrupt


def main() -> None:
    """Entry point of `hacpo`."""
    keep_out_the_working_directory()
    sys.exit(run_app(app))


if __name__ == "__main__":
    main()
