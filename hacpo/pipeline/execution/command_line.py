"""Turning stage functions into commands whose errors are one clear line."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import typer

from hacpo.artifacts.storage import made_plain
from hacpo.engines.training.processes import launched, orphaned
from hacpo.errors import HacpoError, harmless
from hacpo.pipeline.execution.orphans import die_with_parent, left_by_dvc
from hacpo.pipeline.execution.session import Session, quiet_threads

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

_PANIC = "PanicException"
"""What pyo3 calls the end of a function in Rust; it is no Exception, so that nobody takes it for one."""


def new_app(**options: Any) -> typer.Typer:
    """A Typer application in the house style."""
    return typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, **options)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Imports make no garbage, but so many objects that to look for some takes a fifth of a short command's time: not
    while the block loads modules, and not among what they have made. A process with torch may hold tensors that are
    garbage: there all is looked through as ever."""
    gc.disable()
    try:
        yield
    finally:
        if "torch" not in sys.modules:
            gc.freeze()
        gc.enable()


def run_app(
    app: typer.Typer | typer.core.TyperGroup, arguments: Sequence[str] | None = None, session: Session | None = None
) -> int:
    """Run a command and return its exit code; whatever goes wrong becomes one line on standard
    error, and what nobody foresaw also a file (`hacpo.pipeline.execution.crashes`)."""
    quiet_threads()
    if "DVC_STAGE" in os.environ or launched():
        die_with_parent()  # a killed `dvc repro`, or a killed update, must not leave a stage behind
    if orphaned() or ("DVC_STAGE" in os.environ and left_by_dvc()):
        return 1
    try:
        command = typer.main.get_command(app) if isinstance(app, typer.Typer) else app
        code = command.main(
            args=list(arguments) if arguments is not None else None,
            prog_name="hacpo",
            standalone_mode=False,
            obj=session,
        )
    except typer.Exit as stop:
        return int(stop.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        if hasattr(error, "format_message"):  # click's usage errors; without a message it has printed the help
            return _refused(harmless(error.format_message()), 2)
        if (plain := made_plain(error)) is not None:
            return _refused(str(plain), plain.exit_code)
        from hacpo.pipeline.execution import crashes

        line = crashes.record(error, sys.argv[1:] if arguments is None else arguments)
        return _refused(str(HacpoError(line)), crashes.EXIT_CODE)
    if code == INTERRUPTED:  # Typer turns Ctrl-C into this return value
        print("hacpo: interrupted; finished stages are kept, the same command continues", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _refused(line: str, code: int) -> int:
    """Say what is wrong, and return the exit code; to a stage that started this process, the code too: whoever stands
    between the two ends with one of its own."""
    if line and launched():
        from hacpo.pipeline.execution.launching import error_line

        print(error_line(line, code), file=sys.stderr)
    elif line:
        print(f"hacpo: error: {line}", file=sys.stderr)
    return code


def keep_out_the_working_directory() -> None:
    """Import nothing from the working directory, here and in every process that is started from here: a file beside
    `pipelines`, named like a module, would be code that nobody asked for. Reward functions are found by their own
    rule (`hacpo.verifying.function`)."""
    os.environ["PYTHONSAFEPATH"] = "1"
    if not sys.flags.safe_path:  # else the first entry is no working directory of Python's own
        here = os.path.realpath(os.curdir)
        sys.path[:1] = [entry for entry in sys.path[:1] if os.path.realpath(entry) != here]


def main_of(function: Callable[..., None]) -> None:
    """Entry point of `python -m hacpo.stages.<name>`."""
    keep_out_the_working_directory()
    app = new_app()
    app.command()(function)
    sys.exit(run_app(app))
