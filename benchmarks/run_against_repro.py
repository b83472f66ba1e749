"""How much the warm driver saves: `hacpo run` against `dvc repro` on the same steps, interleaved.

Run by hand from the project's root, in its environment: `python benchmarks/run_against_repro.py [--steps 2]
[--rounds 2]`. Each round runs the smoke pipeline's steps both ways in fresh copies, after one shared warm start;
compare ratios, not seconds of different machines.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def timed(command: list[str], folder: Path) -> float:
    """Seconds that a command takes; it must succeed."""
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Print seconds per step of both ways and their ratio."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=2)
    options.add_argument("--rounds", type=int, default=2)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch) / "base"
        (base / "pipelines" / "smoke").mkdir(parents=True)
        text = (ROOT / "pipelines" / "smoke" / "params.yaml").read_text()
        text = text.replace("steps: 2\n", f"steps: {chosen.steps}\n", 1)
        (base / "pipelines" / "smoke" / "params.yaml").write_text(text)
        shutil.copy(ROOT / ".dvcignore", base)
        subprocess.run(["dvc", "init", "--quiet", "--no-scm"], cwd=base, check=True)
        timed(["hacpo", "run", "pipelines/smoke", "--until", "0"], base)
        ways = {
            "hacpo run": ["hacpo", "run", "pipelines/smoke"],
            "dvc repro": ["dvc", "repro", "pipelines/smoke/dvc.yaml"],
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(chosen.rounds):
            for name, command in ways.items():
                copy = Path(scratch) / f"{name.replace(' ', '-')}-{number}"
                shutil.copytree(base, copy)
                seconds[name].append(timed(command, copy) / chosen.steps)
                shown = ", ".join(f"{value:.1f}" for value in seconds[name])
                print(f"{name}: {shown} s a step (start-up and report included)", flush=True)
    best = {name: min(values) for name, values in seconds.items()}
    print(f"dvc repro takes {best['dvc repro'] / best['hacpo run']:.1f} times as long as hacpo run")


if __name__ == "__main__":
    main()
