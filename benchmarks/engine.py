"""Sampling, rescoring and gradients of the transformers engine; see `bench` and `engine_work`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from bench import ROOT, Row, Side, measured

_MODELS = {"small": "0.6M parameters", "middle": "27M", "vocabulary": "vocabulary 151,936"}
_SCRIPT = ROOT / "benchmarks" / "engine_work.py"


def _rows() -> dict[str, Row]:
    rows = {}
    for key, model in _MODELS.items():
        rows[f"{key}_sampling"] = Row(
            f"sampling over bare `generate`, tokens/s, groups of 8, mixed lengths, {model}", ">= 2"
        )
        rows[f"{key}_rescoring"] = Row(f"rescoring, ms of processor time a token, {model}")
        rows[f"{key}_gradient"] = Row(f"forward and backward, ms of processor time a token, {model}")
    return rows


@measured("engine", **_rows())
def engine(side: Side, folder: Path) -> dict[str, float]:
    """Processor time, one thread: other work on the machine matters less to it."""

    def seconds(model: str, work: str) -> float:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        command = side.command("python", str(_SCRIPT), model, work)
        done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
        return float(done.stdout.split()[-1])

    found = {}
    for model in _MODELS:
        bare = seconds(model, "bare_sampling")
        found[f"{model}_sampling"] = bare / seconds(model, "engine_sampling")
        found[f"{model}_rescoring"] = seconds(model, "rescoring") * 1e3
        found[f"{model}_gradient"] = seconds(model, "gradient") * 1e3
    return found
