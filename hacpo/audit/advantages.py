"""Capabilities and a learner's advantages against the rewards they follow from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from hacpo import schema
from hacpo.advantage import step_advantages
from hacpo.advantage_table import advantage_summary, capability_rows
from hacpo.audit.inputs import Batch
from hacpo.audit.pools import TOLERANCE, PoolOrder, check_shared_columns
from hacpo.audit.responses import Floats
from hacpo.audit.rows import Rows
from hacpo.audit.run import AuditRun
from hacpo.audit.tables import read
from hacpo.errors import HacpoError
from hacpo.rollouts import Row


def check_capability(run: AuditRun, step: int, rewards: Mapping[str, Floats | None]) -> dict[str, Row] | None:
    """Check every agent's accuracy, window and capability; returns the rows as recorded, by agent."""
    path = run.layout.capability(step)
    content = read(run, path, schema.CAPABILITY, step=step)
    if content is None:
        run.skip("advantages", "capabilities cannot be read")
        return None
    rows = Rows(run, content, "agent", pa.array(run.agents, pa.string()))
    known = {
        agent: values.tolist() for agent, values in rewards.items() if values is not None and np.isfinite(values).all()
    }
    previous = _previous_windows(run, step)
    for agent in run.agents:
        if agent not in known or (step > 1 and agent not in previous):
            run.skip(f"capability of {agent}", "its rewards or the window before are not known")
    settings = run.settings.algorithm.capability
    computable = {agent: values for agent, values in known.items() if step == 1 or agent in previous}
    made = {row["agent"]: row for row in capability_rows(computable, previous, settings)}
    for column in ("accuracy", "capability"):
        expected = [made[agent][column] if agent in made else math.nan for agent in run.agents]
        rows.close("capability", column, expected, absolute=TOLERANCE)
    windows = rows.arrow("window").to_pylist()
    expected_windows = [made[agent]["window"] if agent in made else None for agent in run.agents]
    good = [
        wanted is None
        or (len(wanted) == len(window) and np.allclose(window, wanted, rtol=0, atol=TOLERANCE, equal_nan=False))
        for window, wanted in zip(windows, expected_windows, strict=True)
    ]
    shown = np.empty(len(good), dtype=object)
    shown[:] = expected_windows
    rows.require("capability", "window", np.array(good, dtype=np.bool_), shown)
    values = rows.floats("capability")
    rows.require("capability", "capability", np.isfinite(values) & (values > 0), "a finite number above 0")
    if not rows.complete:
        return None
    return {row["agent"]: row for row in content.arrow.to_pylist()}


def _previous_windows(run: AuditRun, step: int) -> dict[str, list[float]]:
    path = run.layout.capability(step - 1)
    if step == 1 or not path.is_file():
        return {}
    try:
        rows = schema.read_table(path, schema.CAPABILITY).to_pylist()
    except HacpoError:
        return {}
    return {row["agent"]: row["window"] for row in rows if np.isfinite(row["window"]).all()}


def check_advantages(
    run: AuditRun,
    batch: Batch,
    learner: str,
    rewards: Mapping[str, Floats | None],
    capabilities: Mapping[str, Row] | None,
) -> tuple[Rows, dict[str, float | None]] | None:
    """Check a learner's advantages; returns its rows in order and the metrics that follow."""
    step, sources = batch.step, run.sources(learner)
    content = read(run, run.layout.advantages(step, learner), schema.ADVANTAGES, step=step, learner=learner)
    if content is None:
        run.skip(f"what follows from {learner}'s advantages", "they cannot be read")
        return None
    group = run.settings.responses_per_prompt
    order = PoolOrder.of(step, batch.problem_ids, sources, group)
    rows = Rows(run, content, "rollout_id", order.ids)
    check_shared_columns(run, rows, batch, order, learner)
    for number, source in enumerate(sources):
        values = rewards[source]
        if values is not None:
            rows.close(
                "advantages",
                "reward",
                values[order.response],
                where=order.source == number,
                note=f"{source}'s verdicts",
            )
    known = [values for source in sources if (values := rewards[source]) is not None]
    if len(known) < len(sources) or capabilities is None:
        run.skip(f"advantages of {learner}", "rewards or capabilities are not known")
    else:
        _check_values(run, rows, learner, np.stack([values.reshape(-1, group) for values in known], 1), capabilities)
    return rows, _advantage_metrics(rows) if rows.complete else {}


def _check_values(
    run: AuditRun, rows: Rows, learner: str, rewards_png: Floats, capabilities: Mapping[str, Row]
) -> None:
    """Baseline to effective advantage, of the problems whose rewards are all known."""
    algorithm, sources = run.settings.algorithm, run.sources(learner)
    whole = np.isfinite(rewards_png).all(axis=(1, 2))
    if not whole.any():
        run.skip(f"advantages of {learner}", "no problem has all its rewards")
        return
    try:
        made = step_advantages(
            rewards_png[whole],
            learner=sources.index(learner),
            capability_n=[capabilities[source]["capability"] for source in sources],
            settings=algorithm.advantage,
            capability_settings=algorithm.capability,
        )
    except HacpoError as error:
        run.skip(f"advantages of {learner}", str(error))
        return
    where = np.repeat(whole, rewards_png[0].size)
    for column in ("baseline", "sigma", "advantage", "omega", "effective_advantage"):
        expected = np.zeros(rewards_png.shape)
        expected[whole] = getattr(made, column)
        rows.close("advantages", column, expected.ravel(), relative=TOLERANCE, absolute=TOLERANCE, where=where)
    for column in ("uniform", "guarded"):
        flags = np.zeros(rewards_png.shape, dtype=np.bool_)
        flags[whole] = getattr(made, column)
        rows.equal("advantages", column, pa.array(flags.ravel()), where=where)


def _advantage_metrics(rows: Rows) -> dict[str, float | None]:
    columns: dict[str, Any] = {
        name: rows.floats(name) for name in ("reward", "baseline", "advantage", "omega", "effective_advantage")
    }
    if not all(np.isfinite(values).all() for values in columns.values()):
        return {}
    columns |= {name: rows.flags(name) for name in ("is_self", "uniform", "guarded")}
    # Numbers instead of texts: what identifies a problem is all that is asked of them.
    encoded = rows.arrow("problem_id").dictionary_encode()
    columns["problem_id"] = encoded.indices.to_numpy(zero_copy_only=False)
    return dict(advantage_summary(columns))
