"""Verification beside math-verify called directly; see `bench` and `verify_speed`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from bench import ROOT, Row, Side, measured

_SCRIPT = ROOT / "benchmarks" / "verify_speed.py"


@measured(
    "verify",
    mixed=Row("verify: answers/s over plain math-verify, one worker, 600 different answers of three data sets", ">= 5"),
    groups=Row("verify: the same, 75 of their problems with 8 responses each", ">= 5"),
    easy=Row("verify: the same, whole numbers", ">= 5"),
    workers=Row("verify: two workers over one", ">= 1.9"),
)
def verify(side: Side, folder: Path) -> dict[str, float]:
    """Processor time; empty where the data sets of ../shared/data are missing."""
    command = side.command("python", str(_SCRIPT), "--ratios")
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found
