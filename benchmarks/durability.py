"""What flushing every output to the disk costs: the same steps with `disk.fsync` on and off, in interleaved pairs.

Run by hand from the project's root, in its environment: `python benchmarks/durability.py [--pipeline smoke]
[--steps 3] [--pairs 4] [--disk DIR]`. Each pair runs the same steps in two fresh copies, after one shared warm start;
compare the ratios of one run, not seconds of different machines. Flushes are counted in a run of their own, and one
flush of this disk is timed, so that the cost on another disk follows from its own time for one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COUNTING = """
import os, sys, time
fsync, counted = os.fsync, []
def count(opened):
    begun = time.perf_counter()
    fsync(opened)
    counted.append(time.perf_counter() - begun)
os.fsync = count
from hacpo.pipeline.execution.command_line import run_app
from hacpo.cli import app
code = run_app(app, sys.argv[1:])
print("flushes", len(counted), sum(counted), file=sys.stderr)
sys.exit(code)
"""


def timed(command: list[str], folder: Path, fsync: bool) -> tuple[float, str]:
    """Seconds that a command takes, and what it says on standard error; it must succeed."""
    environment = {**os.environ, "HACPO_FSYNC": "1" if fsync else "0"}
    begun = time.perf_counter()
    ended = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, env=environment)
    return time.perf_counter() - begun, ended.stderr


def one_flush(folder: Path, count: int = 50) -> float:
    """Median milliseconds of the flush of a new file of 100 KiB."""
    seconds = []
    for number in range(count):
        with (folder / f"file-{number}").open("wb") as file:
            file.write(os.urandom(100 << 10))
            file.flush()
            begun = time.perf_counter()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds) * 1000


def main() -> None:
    """Print seconds per step of both, the ratio of every pair, and how often a step flushes."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pipeline", default="smoke")
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--pairs", type=int, default=4)
    options.add_argument("--disk", type=Path, help="a folder on the disk to try; the temporary folder without it")
    chosen = options.parse_args()
    name = f"pipelines/{chosen.pipeline}"
    with tempfile.TemporaryDirectory(dir=chosen.disk) as scratch:
        base = Path(scratch) / "base"
        (base / name).mkdir(parents=True)
        shutil.copy(ROOT / name / "params.yaml", base / name)
        shutil.copy(ROOT / ".dvcignore", base)
        subprocess.run(["dvc", "init", "--quiet", "--no-scm"], cwd=base, check=True)
        timed(["hacpo", "run", name, "--until", "0"], base, fsync=False)
        run = ["run", name, "--jobs", "1", "--until", str(chosen.steps)]
        counted = Path(scratch) / "counted"
        shutil.copytree(base, counted)
        said = timed([sys.executable, "-c", COUNTING, *run], counted, fsync=True)[1]
        _, count, spent = said.splitlines()[-1].split()
        print(f"one flush of a new file of 100 KiB: {one_flush(Path(scratch)):.2f} ms")
        print(f"{int(count) / chosen.steps:.0f} flushes a step, {float(spent) / chosen.steps:.3f} s a step", flush=True)
        ratios = []
        for number in range(chosen.pairs):
            seconds = {}
            for fsync in (True, False) if number % 2 else (False, True):
                copy = Path(scratch) / f"{fsync}-{number}"
                shutil.copytree(base, copy)
                seconds[fsync] = timed(["hacpo", *run], copy, fsync=fsync)[0] / chosen.steps
            ratios.append(seconds[True] / seconds[False])
            shown = f"with {seconds[True]:.2f}, without {seconds[False]:.2f} s a step (start-up included)"
            print(f"{shown}: {ratios[-1]:.3f} times as long", flush=True)
        print(f"median {statistics.median(ratios):.3f} times as long, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
