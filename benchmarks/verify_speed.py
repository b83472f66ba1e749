r"""How fast and how right verification is, beside math-verify called directly.

Run by hand from the project's root, in its environment:

    python benchmarks/verify_speed.py                  # labelled cases, easy, mixed; some minutes
    python benchmarks/verify_speed.py --hostile 10000  # also hostile answers, against a stated bound
    python benchmarks/verify_speed.py --ratios         # as JSON, for `bench.py verify`

- labelled cases: agreement by class (`trust`) of ../shared/data/verifier.
- easy: whole numbers (GSM8K, AIME). mixed: MATH-500, Minerva, OlympiadBench. Every other response has the answer to
  the next problem. groups: eight responses to each of 75 of these, three of them right, four wrong answers. hostile:
  tests/hostile.py, all different.
- peer: `math_verify.verify(parse(boxed gold), parse(response))` in a process of its own, one core, its own time limits,
  1 GiB of memory; on hostile answers it is stopped after --peer-seconds, or dies.

Both sides run in turn, one worker each, after a warm-up. Seconds, but those of hostile answers, are processor time of
all processes; compare the ratios of one run, not seconds of different machines.
Exits with 1 when a bound of the hostile set is broken, or a hostile answer is `correct`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import polars as pl
import psutil
from usage import used

from hacpo.settings.verification import VerificationSettings
from hacpo.verifying.verifier import Request, Verdict, Verifier

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data"
ROUNDS = 2

Case = tuple[str, str]
"""(gold answer, response)"""


def boxed(answer: str) -> str:
    """A response with this answer."""
    return rf"After some steps, the answer is $\boxed{{{answer}}}$."


def answers(*sets: str) -> list[str]:
    """The gold answers of the data sets that are there."""
    found = [DATA / f"{name}.parquet" for name in sets]
    return [answer for path in found if path.exists() for answer in pl.read_parquet(path)["answer"]]


def half_right(golds: Sequence[str], count: int) -> list[Case]:
    """Every other response has the answer to the next problem."""
    golds = golds[:count]
    return [(gold, boxed(golds[(i + i % 2) % len(golds)])) for i, gold in enumerate(golds)]


@dataclass(frozen=True)
class Took:
    """What verification used, all processes together and the busiest worker (with its child) alone."""

    verdicts: list[Verdict]
    wall: float
    seconds: float
    busiest: float


def ours(cases: Sequence[Case], workers: int = 1) -> Took:
    """Verify with fresh workers; what they took once they had started and compared other answers, as in a run."""
    requests, others = (
        [Request(str(index), response, "stop", gold) for index, (gold, response) in enumerate(asked)]
        for asked in (cases, _others(workers))
    )
    with Verifier(VerificationSettings(workers=workers)) as verifier:
        verifier.verify(others)
        before, own, start = _children(), time.process_time(), time.perf_counter()
        verdicts = verifier.verify(requests)
        wall, own = time.perf_counter() - start, time.process_time() - own
        spent = [seconds - before.get(pid, 0.0) for pid, seconds in _children().items()]
    return Took(verdicts, wall, own + sum(spent), max(spent, default=0.0))


def _children() -> dict[int, float]:
    """Processor seconds of each process below this one, with its own children's."""
    usages = {child.pid: used(child.pid) for child in psutil.Process().children()}
    return {pid: usage.seconds for pid, usage in usages.items() if usage}


def peer(cases: Sequence[Case], limit: float | None = None) -> tuple[float, list[bool]]:
    """Processor seconds that math-verify itself took for what it got through, and its verdicts on that."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([_others(1), list(cases)], file)
        file.flush()
        command = [sys.executable, __file__, "--peer", file.name]
        with tempfile.TemporaryFile("w+") as out:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(command, stdout=out, stderr=subprocess.DEVNULL, timeout=limit, check=False)
            out.seek(0)
            lines = [json.loads(line) for line in out.read().splitlines()]
    return sum(seconds for seconds, _ in lines), [correct for _, correct in lines]


def be_peer(path: Path) -> None:
    """One line of [seconds, correct] for each case, after a warm-up."""
    import logging

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), -1))
    others, cases = json.loads(path.read_text())
    for gold, response in others:
        with contextlib.suppress(Exception):
            verify(parse(rf"\boxed{{{gold}}}"), parse(response))
    for gold, response in cases:
        start = time.process_time()
        try:
            correct = bool(verify(parse(rf"\boxed{{{gold}}}"), parse(response)))
        except Exception:  # what it raises is its verdict
            correct = False
        print(json.dumps([time.process_time() - start, correct]), flush=True)


def labelled() -> None:
    """Agreement by class, ours and the peer's."""
    path = DATA / "verifier" / "cases.parquet"
    if not path.exists():
        print("no labelled cases (../shared/data/verifier is missing)")
        return
    table = pl.read_parquet(path)
    cases = list(zip(table["gold"], table["response"], strict=True))
    rewards = [verdict.reward == 1.0 for verdict in ours(cases).verdicts]
    table = table.with_columns(ours=pl.Series(rewards), peer=pl.Series(peer(cases)[1]))
    print(f"\n{'labelled cases':24} {'n':>5} {'agree':>6} {'precision':>10} {'peer agrees':>12} {'its precision':>14}")
    for (trust,), group in sorted(table.group_by("trust")):
        shown = [f"{trust!s:24} {group.height:5}"]
        for who, widths in (("ours", (6, 10)), ("peer", (12, 14))):
            agree = (group[who] == group["expected"]).sum()
            accepted = group.filter(pl.col(who))
            precision = accepted["expected"].mean()
            shown.append(f"{agree:{widths[0]}}")
            shown.append(f"{'-' if precision is None else f'{precision:.4f}':>{widths[1]}}")
        print(" ".join(shown))
    firm = table.filter(trust="firm")
    for who in ("ours", "peer"):
        print(f"firm, {who}: accuracy {(firm[who] == firm['expected']).mean():.4f}")


def speed(name: str, cases: Sequence[Case]) -> None:
    """Responses a second, ours and the peer's, best of some rounds in turn."""
    if not cases:
        print(f"{name}: no data (../shared/data is missing)")
        return
    best_ours = best_peer = float("inf")
    right = [0, 0]
    for _ in range(ROUNDS):
        took = ours(cases)
        best_ours = min(best_ours, took.seconds)
        their_seconds, theirs = peer(cases)
        best_peer = min(best_peer, their_seconds)
        right = [sum(verdict.reward == 1.0 for verdict in took.verdicts), sum(theirs)]
    rates = [len(cases) / best_ours, len(cases) / best_peer]
    print(
        f"{name:8} {len(cases):6} responses: {rates[0]:10,.0f} a second, math-verify {rates[1]:8,.0f}: "
        f"{rates[0] / rates[1]:.1f} times as fast; correct {right[0]}, by math-verify {right[1]}",
        flush=True,
    )


def ratios(chosen: dict[str, list[Case]]) -> dict[str, float]:
    """Name -> how many times as fast as math-verify; `workers`: two workers over one.

    Two cores need half of all processor time, or the busiest worker's, whichever is longer.
    """
    found = {}
    for name, cases in chosen.items():
        took = ours(cases)
        found[name] = peer(cases)[0] / took.seconds
    if every := half_right(_mixed(), len(_mixed())):
        # One comparison takes its whole time limit, as long as all others together; it cannot be divided.
        verdicts = ours(every).verdicts
        within = [case for case, verdict in zip(every, verdicts, strict=True) if verdict.verdict != "timeout"]
        one, both = ours(within), ours(within, 2)
        found["workers"] = one.seconds / max(both.busiest, both.seconds / 2)
    return found


def against_hostile(count: int, workers: int, peer_seconds: float) -> bool:
    """Whether hostile answers stayed within the bound and without a reward."""
    sys.path.insert(0, str(ROOT / "tests"))
    import hostile

    cases = [("5", boxed(answer)) for answer in hostile.answers(count)]
    settings = VerificationSettings(workers=workers)
    share = settings.timeout_seconds / 10
    # Each worker may begin one more full-time answer before the patience is spent.
    bound = settings.patience_seconds + settings.timeout_seconds + count * share / workers
    took = ours(cases, workers)
    seconds, verdicts = took.wall, took.verdicts
    counts = Counter(verdict.verdict for verdict in verdicts)
    print(
        f"hostile  {count:6} responses: {seconds:.0f} s with {workers} workers ({count / seconds:.0f} a second), "
        f"bound {bound:.0f} s; {dict(counts)}",
        flush=True,
    )
    timeouts = Counter(
        name
        for index, verdict in enumerate(verdicts)
        for name in [list(hostile.FAMILIES)[index % len(hostile.FAMILIES)]]
        if verdict.verdict == "timeout"
    )
    print(f"         timeouts: {dict(timeouts)}")
    their_seconds, theirs = peer([case for case in cases if "\ud800" not in case[1]], peer_seconds)
    print(
        f"         math-verify: {len(theirs)} responses in {their_seconds:.0f} s before it was stopped or died, "
        f"{sum(theirs)} of them correct"
    )
    return seconds <= bound and not counts["correct"]


def main() -> None:
    """Print the figures."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--hostile", type=int, default=0, help="how many hostile answers")
    options.add_argument("--workers", type=int, default=2, help="for the hostile answers")
    options.add_argument("--easy", type=int, default=2000)
    options.add_argument("--mixed", type=int, default=600)
    options.add_argument("--peer-seconds", type=float, default=60.0)
    options.add_argument("--ratios", action="store_true", help="print the ratios alone, as JSON")
    options.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.peer:
        be_peer(chosen.peer)
        return
    sets = {
        "easy": half_right(answers("aime2025/test", "gsm8k/test"), chosen.easy),
        "mixed": half_right(_spread(chosen.mixed), chosen.mixed),
        "groups": in_groups(_spread(75)),
    }
    if chosen.ratios:
        print(json.dumps(ratios({name: cases for name, cases in sets.items() if cases})))
        return
    labelled()
    print()
    for name, cases in sets.items():
        speed(name, cases)
    if chosen.hostile and not against_hostile(chosen.hostile, chosen.workers, chosen.peer_seconds):
        sys.exit(1)


def in_groups(golds: Sequence[str]) -> list[Case]:
    """Eight responses to a problem: three right ones, and answers to the next problems, one of them twice."""
    offsets = (0, 1, 0, 2, 3, 1, 0, 4)
    return [
        (gold, boxed(golds[(index + offset) % len(golds)])) for index, gold in enumerate(golds) for offset in offsets
    ]


@cache
def _mixed() -> list[str]:
    return answers("math500/test", "minerva/test", "olympiadbench/test")


def _spread(count: int) -> list[str]:
    golds = _mixed()
    return golds[:: max(2, len(golds) // count // 2 * 2)][:count]


def _others(workers: int) -> list[Case]:
    """Answers that are not measured, compared first: libraries fill their tables with the first hundred they read."""
    golds = _mixed()[1 :: max(2, 8 // workers)] or ["1", r"\frac{1}{2}", r"2^{10}", "x+1"]  # between those of `_spread`
    return [(gold, boxed(golds[index - 1])) for index, gold in enumerate(golds)]


if __name__ == "__main__":
    main()
