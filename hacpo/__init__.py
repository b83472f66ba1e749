"""hacpo: heterogeneous agents learn the same verifiable task from each other's rollouts (HACPO, arXiv 2603.02604).

The public API is what `__all__` names: runs as a whole (`run`, `read_run`, `audit`), and the paper as pure functions.
Each is imported when it is first used, so that `import hacpo` costs nothing. Everything else may change with any
version.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hacpo.algorithm.capability import accuracy, capability_ratio, extend_window, smoothed
    from hacpo.algorithm.group_advantage import StepAdvantages, step_advantages
    from hacpo.algorithm.importance import clip_bounds, log_ratio
    from hacpo.algorithm.loss import ResponseBatch, kl_to_initial, response_terms, update_loss
    from hacpo.algorithm.trace import trace_columns
    from hacpo.api import RunTables, audit, read_run, run
    from hacpo.artifacts.problem_rows import Problem
    from hacpo.errors import HacpoError
    from hacpo.verifying.verifier import Request, Verdict, Verifier

__version__ = "0.1.0"

__all__ = [
    "HacpoError",
    "Problem",
    "Request",
    "ResponseBatch",
    "RunTables",
    "StepAdvantages",
    "Verdict",
    "Verifier",
    "accuracy",
    "audit",
    "capability_ratio",
    "clip_bounds",
    "extend_window",
    "kl_to_initial",
    "log_ratio",
    "read_run",
    "response_terms",
    "run",
    "smoothed",
    "step_advantages",
    "trace_columns",
    "update_loss",
]

_HOMES = {
    "hacpo.algorithm.capability": ("accuracy", "capability_ratio", "extend_window", "smoothed"),
    "hacpo.algorithm.group_advantage": ("StepAdvantages", "step_advantages"),
    "hacpo.algorithm.importance": ("clip_bounds", "log_ratio"),
    "hacpo.algorithm.loss": ("ResponseBatch", "kl_to_initial", "response_terms", "update_loss"),
    "hacpo.algorithm.trace": ("trace_columns",),
    "hacpo.api": ("RunTables", "audit", "read_run", "run"),
    "hacpo.artifacts.problem_rows": ("Problem",),
    "hacpo.errors": ("HacpoError",),
    "hacpo.verifying.verifier": ("Request", "Verdict", "Verifier"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'hacpo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
