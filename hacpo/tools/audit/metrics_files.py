"""Metrics files against the tables whose numbers they repeat."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from hacpo.artifacts.tables import WHOLE_STEP
from hacpo.pipeline.catalogue import StageSpec
from hacpo.pipeline.noted import NotedError, stage_metrics
from hacpo.tools.audit.audit_run import AuditRun

RELATIVE, ABSOLUTE = 1e-9, 1e-12
"""Of a number computed again in another order of additions."""


def check_metrics(
    run: AuditRun,
    stage: StageSpec,
    step: int,
    expected: Mapping[str, float | None],
    name: str = WHOLE_STEP,
    *,
    absent: Collection[str] = (),
) -> None:
    """Compare one metrics file with numbers from tables.

    Keys that follow from no table (seconds, peak memory, gradient norms...) are not compared, nor are keys of
    `expected` whose value is None (nothing known).

    Args:
        name: the agent's, where each has one.
        absent: keys that the file must not have: counts of what no table holds.
    """
    path = run.layout.metrics(stage.name, step, name)
    if not path.is_file():
        run.find("metrics", path, expected="a metrics file beside the stage's tables", found="no such file")
        return
    try:
        content = stage_metrics(run.layout, stage, step, name, strict=True)
    except NotedError as error:
        run.find("metrics", path, expected=error.expected, found=error.found[:120])
        return
    except OSError as error:
        run.find("metrics", path, expected="JSON", found=str(error)[:120])
        return
    run.looked_at("metrics", sum(key in content for key in expected))
    for key, wanted in expected.items():
        if wanted is not None and not _close(content.get(key), wanted):
            run.find("metrics", path, column=key, expected=wanted, found=content.get(key, "no such key"))
    for key in sorted(content.keys() & set(absent)):
        run.find("metrics", path, column=key, expected="no such key", found=content[key])


def _close(value: object, wanted: float) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isclose(value, wanted, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    except OverflowError:  # a whole number beyond every float
        return False
