"""Metrics files against the tables whose numbers they repeat."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from hacpo.artifacts.text_files import load_json
from hacpo.tools.audit.audit_run import AuditRun

RELATIVE, ABSOLUTE = 1e-9, 1e-12
"""Of a number computed again in another order of additions."""


def check_metrics(
    run: AuditRun,
    stage: str,
    step: int,
    name: str,
    expected: Mapping[str, float | None],
    *,
    absent: Collection[str] = (),
) -> None:
    """Compare one metrics file with numbers from tables.

    Keys that follow from no table (seconds, peak memory, gradient norms...) are not compared, nor are keys of
    `expected` whose value is None (nothing known).

    Args:
        absent: keys that the file must not have: counts of what no table holds.
    """
    path = run.layout.metrics(stage, step, name)
    if not path.is_file():
        run.find("metrics", path, expected="a metrics file beside the stage's tables", found="no such file")
        return
    try:
        content = load_json(path)
    except (OSError, ValueError, RecursionError) as error:
        run.find("metrics", path, expected="JSON", found=str(error)[:120])
        return
    if not isinstance(content, dict):
        run.find("metrics", path, expected="a mapping of numbers", found=type(content).__name__)
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
