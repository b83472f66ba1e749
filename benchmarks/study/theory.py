"""What the capability-aware baseline of the paper's Theorem 4.1 estimates, by simulation.

    python -m benchmarks.study.theory [--steps 4000] [--into docs/results/theory.parquet]

The theorem: mu^(k) = 1/(nG) sum over j of omega^(k,j) sum over i of R(y_i^(j)) (arXiv 2603.02604, eq. 7) is unbiased
for agent k's accuracy p_k. For n agents with accuracies p_j on a problem and omega known,

    E mu^(k) - p_k = 1/n sum over j != k of (omega^(k,j) p_j - p_k);  two agents: (omega p_j - p_k) / 2,

0 on every problem if p_k / p_j is the same, omega, on every problem. Averaged over problems it is 0 for any accuracies,
as omega is the ratio of their averages: a batch's baselines are right, each group's own is not.

A case is a sequence of steps, each of equally many problems of every kind; a kind is the agents' accuracies on it, the
learner's first. Rewards are drawn; capabilities, omega, baselines and advantages are the project's own functions':
`capability_rows` with its window, `omega_matrix`, `step_advantages` (`benchmarks/study/known_accuracies.py`). Columns:

    case            with the kind of problem where there are several: `every problem`, or accuracies `learner | others`
    baseline        of `hacpo.algorithm.group_advantage`: `capability` and `shrunk` take omega from the window, `oracle`
                    from the accuracies themselves
    quantity        `bias`: mean of mu^(k) - p_k, p_k of the group's own problem; `sd`: its standard deviation;
                    `punished`: of the groups with a right answer of the learner's and rewards that differ, the share in
                    which a right one gets a negative advantage; `guarded`: share of groups in which `baseline_guard`
                    took the place of mu^(k); `omega`: mean of omega^(k,j) of the first other agent
    value           simulated
    standard_error  of the simulation: of the means of `BATCHES` stretches of steps, as windows overlap
    closed_form     from binomial distributions, with omega known. Exact, but for `capability` and `shrunk`: there the
                    value's distance from it is what estimating omega does
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.study.known_accuracies import CASES, QUANTITIES, Case, Groups, closed_form, simulated
from hacpo.artifacts.storage import atomic

BATCHES = 40
"""Stretches of steps that a standard error is taken from."""
_WITH_OMEGA = ("capability", "oracle", "shrunk")
_OUT = Path("docs/results/theory.parquet")


def views(case: Case) -> dict[str, list[int]]:
    """What the table calls the case, over all problems and on each kind -> the kinds' numbers."""
    if len(case.kinds) == 1:
        return {case.name: [0]}
    each = {f"{case.name}: {_name(kind)}": [number] for number, kind in enumerate(case.kinds)}
    return {f"{case.name}: every problem": list(range(len(case.kinds))), **each}


def quantities(baseline: str) -> tuple[str, ...]:
    """Those of `QUANTITIES` that say something of a baseline."""
    return QUANTITIES if baseline in _WITH_OMEGA else QUANTITIES[:-1]


def rows(case: Case, steps: int) -> Iterator[Mapping[str, Any]]:
    """Rows of the table for one case."""
    kind_p = np.arange(case.problems) % len(case.kinds)
    for baseline, groups in simulated(case, steps).items():
        for name, numbers in views(case).items():
            seen = groups.part(np.s_[:, np.isin(kind_p, numbers)])
            expected = closed_form(case, baseline, [case.kinds[number] for number in numbers])
            for quantity in quantities(baseline):
                value, error = estimate(seen, quantity)
                yield {
                    "case": name,
                    "baseline": baseline,
                    "quantity": quantity,
                    "value": value,
                    "standard_error": error,
                    "closed_form": expected.quantity(quantity),
                }


def estimate(groups: Groups, quantity: str) -> tuple[float, float]:
    """A quantity over all steps, and its standard error from that of `BATCHES` stretches of them.

    Args:
        groups: [S, P]; S is at least `BATCHES`.
    """
    stretches = np.array_split(np.arange(len(groups.error)), BATCHES)
    each = np.array([groups.part(stretch).quantity(quantity) for stretch in stretches])
    return groups.quantity(quantity), float(each.std(ddof=1) / math.sqrt(BATCHES))


def _name(kind: Sequence[float]) -> str:
    learner, *others = (f"{p:g}".removeprefix("0") for p in kind)
    return f"{learner} | {' '.join(others)}"


def main() -> None:
    """Simulate every case, print what came out and write it down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000, help=f"of each case, at least {BATCHES}")
    parser.add_argument("--into", type=Path, default=_OUT, help="the table")
    options = parser.parse_args()
    if options.steps < BATCHES:
        parser.error(f"--steps: at least {BATCHES} are needed for a standard error")
    found = []
    for case in CASES:
        for row in rows(case, options.steps):
            found.append(row)
            print("{case:70s} {baseline:10s} {quantity:8s} {value:9.4f} +- {standard_error:.4f}".format(**row), end="")
            print(f"   {row['closed_form']:9.4f}", flush=True)
    options.into.parent.mkdir(parents=True, exist_ok=True)
    with atomic(options.into) as scratch:
        pq.write_table(pa.Table.from_pylist(found), scratch)


if __name__ == "__main__":
    main()
