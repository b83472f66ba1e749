"""The study in one command: `make study`, or

    python -m benchmarks.study [--quick] [--jobs 2] [--only FAMILY] [--page]

Every family of docs/protocol.md is swept, as far as it is not done, and collected into docs/results/; learning rates
are chosen after the first; docs/results.md and docs/results.html follow from what is collected. Kill it at any moment:
the same command goes on. `--quick` goes the whole way in minutes, below artifacts/study-quick, a project of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.study import markdown, quick, rates
from benchmarks.study.asked import FAMILIES, RESULTS, begun, everything, read_study
from hacpo.artifacts import storage
from hacpo.tools.compare.compare_page import render

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path("docs/results.md")
FIGURES = Path("docs/results.html")
TITLE = "Does sharing rollouts pay?"


def study(root: Path, families: Sequence[str], jobs: int) -> None:
    """Sweep and collect what is not done, and write the pages after each family.

    Raises:
        SystemExit: a sweep cannot be run, and it has said why; or there are no learning rates yet.
    """
    for family in families:
        if family == "tuning":
            _tune(root, jobs)
        elif "tuning" not in read_study(root).groups:
            raise SystemExit(f"{family}: learning rates are chosen by the family tuning, which is not collected yet")
        else:
            _sweep(root, family, jobs)
        write_pages(root)


def _tune(root: Path, jobs: int) -> None:
    """Choose every recipe's learning rate, and write it into the sweeps; none if a cell lacks, even for one recipe."""
    whole = _sweep(root, "tuning", jobs, [f"*{rates.GRID}{rate}/*" for rate in rates.INNER])
    tuned = rates.tuned(read_study(root).groups["tuning"])
    if whole and (more := rates.beyond(tuned)):
        whole = _sweep(root, "tuning", jobs, more)
        tuned = rates.tuned(read_study(root).groups["tuning"])
    if not whole:
        raise SystemExit("tuning: runs have failed twice, so learning rates are not chosen; see the logs above")
    rates.write(rates.chosen(tuned), (root / quick.STUDY).glob("*/sweep.yaml"))


def _sweep(root: Path, family: str, jobs: int, only: Sequence[str] = ()) -> bool:
    """Run what of a family is not done, what fails once more, and collect all; returns whether all is done."""
    words = [word for pattern in only for word in ("--only", pattern)]
    if (root / begun(family)).is_file():
        _hacpo(root, family, "--take", str(begun(family)))
    failed = _hacpo(root, family, "--jobs", str(jobs), *words)
    if failed:
        print(f"{family}: what has failed is run once more", flush=True)
        failed = _hacpo(root, family, "--jobs", str(jobs), *words)
    (root / RESULTS).mkdir(parents=True, exist_ok=True)
    _hacpo(root, family, "--collect", str(RESULTS / f"{family}.parquet"))
    (root / begun(family)).unlink(missing_ok=True)
    return not failed


def _hacpo(root: Path, family: str, *options: str) -> bool:
    """Run a sweep; returns whether cells have failed."""
    command = [sys.executable, "-m", "hacpo.cli", "sweep", str(quick.STUDY / family), *options]
    code = subprocess.run(command, cwd=root, check=False).returncode
    if code not in (0, 1):
        raise SystemExit(code)
    return code == 1


def write_pages(root: Path) -> None:
    """Both pages, from what is collected."""
    done = read_study(root)
    text = markdown.page((root / PAGE).read_text("utf-8"), markdown.generated(root, done))
    whole = everything(done)
    for path, content in ((PAGE, text), (FIGURES, None if whole is None else render(whole, TITLE))):
        if content is not None:
            with storage.atomic(root / path) as scratch:
                scratch.write_text(content, encoding="utf-8", newline="\n")
            print(f"page: {root / path}", flush=True)


def main() -> None:
    """Run the study."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="few seeds, steps and variants, below artifacts/")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    options.add_argument("--only", choices=FAMILIES, action="append", help="only this family; repeatable")
    options.add_argument("--page", action="store_true", help="run nothing: write the pages from what is collected")
    chosen = options.parse_args()
    root = ROOT
    if chosen.quick:
        root = ROOT / "artifacts/study-quick"
        quick.project(root, ROOT)
    study(root, () if chosen.page else chosen.only or FAMILIES, chosen.jobs)
    if chosen.page:
        write_pages(root)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
