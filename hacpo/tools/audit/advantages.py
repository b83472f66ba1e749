"""Capabilities and a learner's advantages against the rewards they follow from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from hacpo.algorithm.advantage_table import (
    CapabilityRow,
    advantage_summary,
    capabilities_used,
    capability_by_agent,
    capability_rows,
    capability_summary,
    side_sample_capability,
)
from hacpo.algorithm.group_advantage import step_advantages
from hacpo.algorithm.selection import selection
from hacpo.artifacts import tables
from hacpo.data.oracle_table import capabilities_of_step
from hacpo.errors import HacpoError
from hacpo.tools.audit.audit_run import AuditRun
from hacpo.tools.audit.inputs import Batch
from hacpo.tools.audit.pools import TOLERANCE, PoolOrder, check_shared_columns
from hacpo.tools.audit.responses import Floats
from hacpo.tools.audit.rows import Rows
from hacpo.tools.audit.table_checks import read

_UNKNOWN: Any = object()
"""In place of a value that cannot be told."""


def check_capability(
    run: AuditRun, step: int, rewards: Mapping[str, Floats | None], side: Mapping[str, Floats | None] | None
) -> dict[str, CapabilityRow] | None:
    """Check every column of every agent; returns the rows as recorded, by agent.

    Args:
        side: rewards of the side sample; None without one.
    """
    content = read(run, tables.CAPABILITY, step)
    if content is None:
        run.skip("advantages", "capabilities cannot be read")
        return None
    rows = Rows(run, content, "agent", pa.array(run.agents, pa.string()))
    group = run.settings.responses_per_prompt
    known = {
        agent: values.reshape(-1, group)
        for agent, values in rewards.items()
        if values is not None and np.isfinite(values).all()
    }
    previous = _previous_rows(run, step)
    for agent in run.agents:
        if agent not in known or (step > 1 and agent not in previous):
            run.skip(f"capability of {agent}", "its rewards or the window before are not known")
    settings = run.settings.algorithm.capability
    computable = {agent: values for agent, values in known.items() if step == 1 or agent in previous}
    partial = len(computable) < len(run.agents)
    if partial:  # a covariance is one of two agents
        previous = {agent: replace(row, window_covariance=[]) for agent, row in previous.items()}
    made = {row.agent: row for row in (capability_rows(computable, previous, settings) if computable else ())}
    if partial:
        unknown = {"window_covariance": _UNKNOWN, "standard_error": _UNKNOWN}
        made = {agent: replace(row, **unknown) for agent, row in made.items()}
    oracle = _oracle(run, step, side)
    _check_nested(rows, "oracle", [oracle.get(agent, _UNKNOWN) for agent in run.agents])
    for column in ("accuracy", "capability", "accuracy_all"):
        expected = [getattr(made[agent], column) if agent in made else math.nan for agent in run.agents]
        rows.close("capability", column, expected, absolute=TOLERANCE)
    for column in ("window", "window_all", "window_covariance", "standard_error"):
        wanted = [getattr(made[agent], column) if agent in made else _UNKNOWN for agent in run.agents]
        _check_nested(rows, column, wanted)
    values = rows.floats("capability")
    rows.require("capability", "capability", np.isfinite(values) & (values > 0), "a finite number above 0")
    if not rows.complete:
        return None
    return capability_by_agent(content.arrow)


def _oracle(run: AuditRun, step: int, side: Mapping[str, Floats | None] | None) -> dict[str, float | None]:
    """Agent -> what the oracle says, None without one; agents of whom that cannot be told are left out."""
    settings = run.settings.algorithm.capability
    if settings.oracle_table is not None:
        try:
            return {**capabilities_of_step(run.pipeline.root / settings.oracle_table, step, run.agents)}
        except HacpoError as error:
            run.find("capability", run.pipeline.root / settings.oracle_table, found=str(error), expected="an oracle")
            return {}
    if side is None:
        return dict.fromkeys(run.agents)
    known = {agent: values for agent, values in side.items() if values is not None and np.isfinite(values).all()}
    for agent in run.agents:
        if agent not in known:
            run.skip(f"the oracle's capability of {agent}", "rewards of its side sample are not known")
    return {agent: side_sample_capability(values, settings) for agent, values in known.items()}


def capability_metrics(run: AuditRun, rows: Mapping[str, CapabilityRow]) -> dict[str, float | None]:
    """What the stage's metrics must repeat of a capability table, as far as its rows make sense."""
    settings = run.settings.algorithm
    try:
        return dict(capability_summary(rows.values(), settings.capability, coupled=settings.rollouts.coupled))
    except (HacpoError, ArithmeticError, ValueError, IndexError, TypeError):  # findings of the table's own
        numbers = ("accuracy", "capability")
        return {f"{agent}.{name}": getattr(row, name) for agent, row in rows.items() for name in numbers}


def _check_nested(rows: Rows, column: str, expected: Sequence[Any]) -> None:
    """A column of lists, or of numbers that may be null, against expected values; `_UNKNOWN`: all is well."""
    recorded = rows.arrow(column).to_pylist()
    good = [wanted is _UNKNOWN or _alike(value, wanted) for value, wanted in zip(recorded, expected, strict=True)]
    shown = np.empty(len(good), dtype=object)
    shown[:] = expected
    rows.require("capability", column, np.array(good, dtype=np.bool_), shown)


def _alike(value: Any, wanted: Any) -> bool:
    """Numbers within `TOLERANCE` of each other, in lists of the same lengths."""
    if isinstance(wanted, list):
        return isinstance(value, list) and len(value) == len(wanted) and all(map(_alike, value, wanted))
    return value is wanted if wanted is None or value is None else bool(abs(value - wanted) <= TOLERANCE)


def _previous_rows(run: AuditRun, step: int) -> dict[str, CapabilityRow]:
    if step == 1:
        return {}
    try:
        rows = capability_by_agent(run.run_files.read(tables.CAPABILITY, step - 1))
    except HacpoError:
        return {}
    return {agent: row for agent, row in rows.items() if _is_usable(row, len(run.agents))}


def _is_usable(row: CapabilityRow, agents: int) -> bool:
    """Whether what goes from a step's capability into the next one's is numbers, and as many as there must be."""
    covariances = row.window_covariance
    values = [*row.window, *row.window_all, *(value for step in covariances for value in step)]
    return all(map(math.isfinite, values)) and {len(step) for step in covariances} <= {0, agents}


def check_advantages(
    run: AuditRun,
    batch: Batch,
    learner: str,
    rewards: Mapping[str, Floats | None],
    capabilities: Mapping[str, CapabilityRow] | None,
) -> tuple[Rows, dict[str, float | None]] | None:
    """Check a learner's advantages; returns its rows in order and the metrics that follow."""
    step, sources = batch.step, run.sources(learner)
    content = read(run, tables.ADVANTAGES, step, learner)
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
    compared = run.settings.compared_with(learner)
    known = [values for agent in compared if (values := rewards[agent]) is not None]
    if len(known) < len(compared) or capabilities is None:
        run.skip(f"advantages of {learner}", "rewards or capabilities are not known")
    else:
        rewards_png = np.stack([values.reshape(-1, group) for values in known], 1)
        _check_values(run, rows, learner, rewards_png, capabilities, step)
    return rows, _advantage_metrics(rows) if rows.complete else {}


def _check_values(
    run: AuditRun, rows: Rows, learner: str, rewards_png: Floats, capabilities: Mapping[str, CapabilityRow], step: int
) -> None:
    """Baseline to effective advantage, of the problems whose rewards are all known.

    Args:
        rewards_png: of every agent that the learner is compared with.
    """
    algorithm, compared = run.settings.algorithm, run.settings.compared_with(learner)
    learned_n = [compared.index(source) for source in run.sources(learner)]
    whole = np.isfinite(rewards_png).all(axis=(1, 2))
    if not whole.any():
        run.skip(f"advantages of {learner}", "no problem has all its rewards")
        return
    used = capabilities_used(capabilities.values(), algorithm.advantage)
    capability_n = [capability for agent in compared if (capability := used[agent]) is not None]
    if None in used.values():
        run.skip(f"advantages of {learner}", "the oracle's capabilities are not known")
        return
    try:
        made = step_advantages(
            rewards_png[whole],
            learner=compared.index(learner),
            capability_n=capability_n,
            settings=algorithm.advantage,
            capability_settings=algorithm.capability,
        )
    except HacpoError as error:
        run.skip(f"advantages of {learner}", str(error))
        return
    where = np.repeat(whole, rewards_png[0, learned_n].size)
    for column in ("baseline", "sigma", "advantage", "omega", "effective_advantage"):
        expected = np.zeros(rewards_png.shape)
        expected[whole] = getattr(made, column)
        rows.close(
            "advantages", column, expected[:, learned_n].ravel(), relative=TOLERANCE, absolute=TOLERANCE, where=where
        )
    if whole.all():
        _check_selected(run, rows, learner, made.effective_advantage[:, learned_n].ravel(), step)
    elif algorithm.rollouts.select != "all":
        run.skip(f"what {learner} trains on", "some rewards are not known")
    for column in ("uniform", "guarded"):
        flags = np.zeros(rewards_png.shape, dtype=np.bool_)
        flags[whole] = getattr(made, column)
        rows.equal("advantages", column, pa.array(flags[:, learned_n].ravel()), where=where)


def _check_selected(run: AuditRun, rows: Rows, learner: str, effective_advantage: Floats, step: int) -> None:
    """Which rows are trained on, drawn again."""
    columns = {name: rows.arrow(name) for name in ("rollout_id", "problem_id", "source", "is_self", "reward")}
    columns["effective_advantage"] = effective_advantage
    drawn = selection(columns, run.settings.algorithm.rollouts, step=step, learner=learner)
    expected = pa.array(drawn["selected"]) if drawn else pa.nulls(len(rows), pa.bool_())
    rows.equal("advantages", "selected", expected, note="drawn again by `rollouts.select`")


def _advantage_metrics(rows: Rows) -> dict[str, float | None]:
    columns: dict[str, Any] = {
        name: rows.floats(name) for name in ("reward", "baseline", "advantage", "omega", "effective_advantage")
    }
    if not all(np.isfinite(values).all() for values in columns.values()):
        return {}
    columns |= {name: rows.flags(name) for name in ("is_self", "uniform", "guarded")}
    if rows.arrow("selected").null_count < len(rows):
        columns["selected"] = rows.flags_or_false("selected")
    # Numbers instead of texts: what identifies a problem is all that is asked of them.
    encoded = rows.arrow("problem_id").dictionary_encode()
    columns["problem_id"] = encoded.indices.to_numpy(zero_copy_only=False)
    return dict(advantage_summary(columns))
