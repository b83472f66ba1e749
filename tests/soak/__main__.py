"""`python -m tests.soak [PART ...]`: attack small real runs, and exit with 1 if anything is found."""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import report
from .ending import killing
from .frame import Bench, Part, Tally, run_parts
from .parts import PARTS

_ROOT = Path(__file__).resolve().parents[2]


def soak(
    parts: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(PARTS)}; all without any.")] = None,
    minutes: Annotated[float | None, typer.Option(help="No trial begins later.", min=0.1)] = None,
    kills: Annotated[int, typer.Option(help="Of the part kills.", min=1)] = 1000,
    seed: Annotated[int | None, typer.Option(help="The same seed and number of a trial make the same trial.")] = None,
    parallel: Annotated[int, typer.Option(help="Trials side by side.", min=1)] = 1,
    only: Annotated[int | None, typer.Option(help="Do the trial of this number alone.")] = None,
    out: Annotated[Path | None, typer.Option(help="Results as JSON; artifacts/soak/<time>.json without it.")] = None,
    work: Annotated[Path | None, typer.Option(help="Where sandboxes are made; those with findings stay.")] = None,
) -> None:
    """Kill, disturb and starve small real runs, and compare what comes of them with an undisturbed one."""
    begun = time.time()
    unknown = [name for name in parts or [] if name not in PARTS]
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    seed = random.randrange(1_000_000) if seed is None else seed
    out = out or _ROOT / "artifacts" / "soak" / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(begun))}.json"
    work = Path(tempfile.mkdtemp(prefix="hacpo-soak-")) if work is None else work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(f"seed {seed}; sandboxes in {work}", highlight=False)
    tallies: list[Tally] = []
    told = report.Watch(console, lambda tally: report.write(out, [*tallies, tally], seed, begun))
    with killing(), told as watch:

        def bench(part: Part, deadline: float) -> Bench:
            return Bench(part.name, seed, work, deadline, parallel, kills, only, watch.told)

        for tally in run_parts([PARTS[name] for name in parts or PARTS], bench, minutes):
            tallies.append(tally)
            report.write(out, tallies, seed, begun)
    console.print(report.table(tallies))
    findings = [finding for tally in tallies for finding in tally.findings]
    for finding in findings:
        report.tell(console, finding)
    console.print(f"{report.machine()}; results: {out}", markup=False, highlight=False)
    if not findings:
        shutil.rmtree(work / "template", ignore_errors=True)
        with contextlib.suppress(OSError):  # there is something else
            work.rmdir()
    raise typer.Exit(1 if findings else 0)


if __name__ == "__main__":
    typer.run(soak)
