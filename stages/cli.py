"""hacpo: all commands under one name."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hacpo.pipeline.command_line import INTERRUPTED, new_app, run_app
from hacpo.pipeline.session import Session
from stages.advantage import advantage
from stages.audit import audit
from stages.copy import copy
from stages.estimate import estimate
from stages.evaluate import evaluate
from stages.export import export
from stages.generate import generate
from stages.import_problems import import_problems
from stages.plan import plan
from stages.pool import pool
from stages.prepare import prepare
from stages.prune import prune
from stages.repair import repair
from stages.report import report
from stages.resolve import resolve
from stages.restore import restore
from stages.run import run
from stages.serve import serve
from stages.show import show
from stages.status import status
from stages.update import update
from stages.verify import verify
from stages.warmup import warmup
from stages.what_if import what_if

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
    resolve,
    prepare,
    warmup,
    generate,
    verify,
    pool,
    advantage,
    update,
    evaluate,
    report,
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
    sys.exit(run_app(app))


if __name__ == "__main__":
    main()
