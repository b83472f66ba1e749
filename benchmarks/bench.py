"""Every speed that the project promises, measured side by side: `make bench`, or

    python benchmarks/bench.py [NAME ...] [--rounds 3] [--beside CHECKOUT] [--into docs/performance.md]

A measurement is a function in one of `MODULES`, marked with `measured`; it is called once a round for every side (this
checkout, and another one with an environment of its own if named), in turn, and gives a number for each of its rows.
The table has the medians. Compare ratios of one run, not seconds of different machines.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("running", "repro", "growing", "agents", "starting", "verify", "tables", "engine", "beside_trl", "files")
"""Beside this file: where measurements are."""
_PACKAGES = ("torch", "transformers", "tokenizers", "dvc", "pyarrow")
_BEGIN, _END = "<!-- bench: begin -->\n", "<!-- bench: end -->\n"


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        what: what is measured, with the unit of its number.
        target: what it should be.
    """

    what: str
    target: str = ""


@dataclass(frozen=True)
class Side:
    """A checkout with its environment in `.venv`."""

    name: str
    root: Path

    def command(self, *words: str) -> list[str]:
        """A program of the environment with its arguments."""
        program = self.root / ".venv" / "bin" / words[0]
        return [str(program) if program.exists() else words[0], *words[1:]]

    def run(self, *words: str, at: Path) -> float:
        """Run a program of the environment in a folder; returns the seconds that it took.

        Raises:
            CalledProcessError: it failed.
        """
        search = os.pathsep.join([str(self.root / ".venv" / "bin"), os.environ["PATH"]])
        environment = {**os.environ, "PATH": search}
        start = time.perf_counter()
        subprocess.run(self.command(*words), cwd=at, check=True, capture_output=True, env=environment)
        return time.perf_counter() - start

    def processor_seconds(self, *words: str, at: Path) -> float:
        """The same, but the time of processors: other work on the machine matters less to it."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.run(*words, at=at)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


Measure = Callable[[Side, Path], Mapping[str, float]]
"""Takes a side, and a folder that it keeps between rounds; returns row -> number."""


@dataclass(frozen=True)
class Measurement:
    """What `measured` has marked."""

    name: str
    rows: Mapping[str, Row]
    measure: Measure


MEASUREMENTS: dict[str, Measurement] = {}


def measured(name: str, **rows: Row) -> Callable[[Measure], Measure]:
    """Enter a function in the table under a name, with its rows by the keys that it returns."""

    def entered(measure: Measure) -> Measure:
        MEASUREMENTS[name] = Measurement(name, rows, measure)
        return measure

    return entered


def machine() -> str:
    """Processor, cores, load, and versions, in one line."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    return (
        f"{time.strftime('%Y-%m-%d')}, {cores} cores of {model or platform.machine()}, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, {packages}"
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def taken(
    measurements: Sequence[Measurement], sides: Sequence[Side], rounds: int
) -> dict[tuple[str, Row], list[float]]:
    """(side, row) -> its numbers, one a round."""
    found: dict[tuple[str, Row], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        for measurement in measurements:
            for number in range(rounds):
                for side in sides:
                    folder = Path(scratch) / measurement.name / side.name
                    folder.mkdir(parents=True, exist_ok=True)
                    for key, value in measurement.measure(side, folder).items():
                        row = measurement.rows[key]
                        found.setdefault((side.name, row), []).append(value)
                        print(f"round {number + 1}, {side.name}: {row.what} {value:.3g}", flush=True)
    return found


def table(found: Mapping[tuple[str, Row], Sequence[float]]) -> str:
    """The medians, a column for each side, in Markdown."""
    sides = list(dict.fromkeys(side for side, _ in found))
    rows = list(dict.fromkeys(row for _, row in found))
    lines = [f"| what | {' | '.join(sides)} | target |", "|---" * (len(sides) + 2) + "|"]
    for row in rows:
        numbers = [found.get((side, row)) for side in sides]
        shown = [f"{statistics.median(values):.3g}" if values else "-" for values in numbers]
        lines.append(f"| {row.what} | {' | '.join(shown)} | {row.target} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what is named, or everything, and print the table."""
    for module in MODULES:
        importlib.import_module(module)
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MEASUREMENTS))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--beside", type=Path, help="another checkout, measured in turn with this one")
    options.add_argument("--into", type=Path, help=f"a page; the table goes between its {_BEGIN.strip()} and end")
    chosen = options.parse_args()
    if unknown := set(chosen.names) - MEASUREMENTS.keys():
        options.error(f"no measurement {', '.join(sorted(unknown))}")
    sides = [Side("this", ROOT), *([Side("beside", chosen.beside.resolve())] if chosen.beside else [])]
    measurements = [MEASUREMENTS[name] for name in chosen.names or MEASUREMENTS]
    text = f"{machine()}.\n\n{table(taken(measurements, sides, chosen.rounds))}"
    print(f"\n{text}")
    if chosen.into is not None:
        before, _, rest = chosen.into.read_text().partition(_BEGIN)
        chosen.into.write_text(f"{before}{_BEGIN}{text}{_END}{rest.partition(_END)[2]}")


if __name__ == "__main__":
    import bench  # the registry that the modules enter themselves in

    bench.main()
