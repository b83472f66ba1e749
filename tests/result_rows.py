"""Rows of a run's results, of which all numbers are known."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

PROBLEMS = ["p1", "p2", "p3", "p4"]


def run_rows(
    run: str,
    correct: Sequence[Sequence[int]],
    *,
    base: str,
    variant: str,
    seed: int,
    start_seed: int,
    settings: Mapping[str, Any],
    each: int = 10,
    agent: str = "ada",
    benchmark: str = "heldout",
) -> list[dict[str, Any]]:
    """A run of as many evaluations, one a step, with so many correct of 4 responses to each of 4 problems.

    Args:
        each: rollouts of a step.
    """
    return [
        {
            "run": run,
            "base": base,
            "variant": variant,
            "seed": seed,
            "start_seed": start_seed,
            "agent": agent,
            "step": step,
            "benchmark": benchmark,
            "accuracy": sum(counts) / 16,
            "rollouts": step * each,
            "sampled_tokens": step * each * 7,
            "training_tokens": step * 5,
            "updates": step * 2,
            "seconds": step * 1.5,
            "problem_ids": PROBLEMS,
            "samples": [4] * 4,
            "correct": list(counts),
            "settings": json.dumps(settings),
        }
        for step, counts in enumerate(correct)
    ]
