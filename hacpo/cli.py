"""hacpo: all commands under one name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from hacpo.commands.audit import audit
from hacpo.commands.copy import copy
from hacpo.commands.estimate import estimate
from hacpo.commands.export import export
from hacpo.commands.import_problems import import_problems
from hacpo.commands.plan import plan
from hacpo.commands.prune import prune
from hacpo.commands.repair import repair
from hacpo.commands.restore import restore
from hacpo.commands.run import run
from hacpo.commands.serve import serve
from hacpo.commands.show import show
from hacpo.commands.status import status
from hacpo.commands.what_if import what_if
from hacpo.pipeline.catalogue import PIPELINE
from hacpo.pipeline.execution.command_line import INTERRUPTED, keep_out_the_working_directory, new_app, run_app
from hacpo.pipeline.execution.session import Session

STAGES = [
    getattr(importlib.import_module(f"hacpo.stages.{name}"), name)
    for name in dict.fromkeys(spec.command for spec in PIPELINE)
]
"""The stages' commands: of each entry in the catalogue the function of its name, in the module of its name."""

app = new_app(
    help="Train several language models together: HACPO as stages with file artifacts. "
    "`hacpo run pipelines/<run>` runs everything that is not done."
)
for command in (
    run,
    copy,
    serve,
    status,
    plan,
    estimate,
    *STAGES,
    audit,
    show,
    what_if,
    export,
    prune,
    restore,
    repair,
):
    app.command()(command)
app.command("import")(import_problems)


def execute(arguments: Sequence[str], session: Session) -> None:
    """Run one command inside this process, sharing `session`; errors are raised."""
    import typer

    code = typer.main.get_command(app).main(args=list(arguments), prog_name="hacpo", standalone_mode=False, obj=session)
    if code == INTERRUPTED:
        raise KeyboardInterrupt


def main() -> None:
    """Entry point of `hacpo`."""
    keep_out_the_working_directory()
    sys.exit(run_app(app))


if __name__ == "__main__":
    main()
