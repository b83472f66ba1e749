"""What the stages that only work on tables take for many rollouts; see `bench` and `tables_work`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from bench import ROOT, Row, Side, measured

ROLLOUTS = int(os.environ.get("HACPO_BENCH_ROLLOUTS", "1000000"))
"""Of both agents together, in one step."""
_SCRIPT = ROOT / "benchmarks" / "tables_work.py"
_STEP = ("pipelines/tables", "--step", "1")


@measured(
    "tables",
    pool=Row(f"pool, {ROLLOUTS:,} rollouts: speed over that of the tokenizers alone", ">= 0.8"),
    pool_memory=Row(f"pool, {ROLLOUTS:,} rollouts: peak memory, GiB", "< 2 for a million"),
    advantage=Row(f"advantage, {ROLLOUTS:,} rollouts: rollouts a second of processor time", ">= 500,000"),
    advantage_memory=Row(f"advantage, {ROLLOUTS:,} rollouts: peak memory, GiB", "< 0.5 for a million"),
)
def tables(side: Side, folder: Path) -> dict[str, float]:
    """Both stages as a user starts them, and what their tokenizers need for the same texts."""
    if not (folder / "artifacts").exists():
        shutil.copy(side.root / ".dvcignore", folder)
        side.run("dvc", "init", "--quiet", "--no-scm", at=folder)
        side.run("python", str(_SCRIPT), "make", str(ROLLOUTS), at=folder)
    bare = subprocess.run(
        side.command("python", str(_SCRIPT), "bare"), cwd=folder, check=True, capture_output=True, text=True
    )
    pool, pool_memory = _taken(side, folder, "pool", *_STEP, "--learner", "ada")
    advantage, advantage_memory = _taken(side, folder, "advantage", *_STEP)
    return {
        "pool": float(bare.stdout) / pool,
        "pool_memory": pool_memory,
        "advantage": ROLLOUTS / advantage,
        "advantage_memory": advantage_memory,
    }


def _taken(side: Side, folder: Path, *words: str) -> tuple[float, float]:
    """Seconds of processor time, and GiB of memory at most, of a command of hacpo's.

    Raises:
        CalledProcessError: it failed.
    """
    command = side.command("hacpo", *words)
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20
