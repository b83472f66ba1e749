"""A learner's trace against its pool and advantages: which update saw what, and every number the loss was made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hacpo.algorithm.trace import LOG_RATIO_BOUND, TraceColumns, trace_columns
from hacpo.algorithm.updates import group_numbers, shuffle_seeds, step_slots
from hacpo.artifacts import tables
from hacpo.artifacts.list_columns import Flags, Ints
from hacpo.pipeline.catalogue import UPDATE
from hacpo.tools.audit.audit_run import AuditRun
from hacpo.tools.audit.inputs import Batch
from hacpo.tools.audit.metrics_files import check_metrics
from hacpo.tools.audit.pools import TOLERANCE, PoolOrder
from hacpo.tools.audit.responses import Floats, Responses
from hacpo.tools.audit.rows import Rows
from hacpo.tools.audit.table_checks import Content, read

BEFORE_UPDATES = {"float32": 1e-3, "bfloat16": 0.1}
"""Nats that an own response's mean log-probability may differ between `generate` and the step's first update: the same
weights in other batches. Measured: below 1e-5 in float32 and up to 6e-2 a token in bfloat16."""


@dataclass(frozen=True)
class _Known:
    """Of the trace's rows, what pool, advantages and schedule of updates say; [B]."""

    row: Ints
    """Row in the pool."""
    pass_: Ints
    """The pass over the pool that its update belongs to."""
    update: Ints
    own: Flags
    source: Ints
    response: Ints
    source_logprob: Floats
    """Sum, as in the pool; NaN where the ratio divides by something else."""
    source_tokens: Ints
    learner_tokens: Ints
    text_bytes: Ints
    effective_advantage: Floats


def check_trace(
    run: AuditRun,
    batch: Batch,
    learner: str,
    pool: tuple[Rows, PoolOrder],
    advantages: Rows | None,
    responses: Mapping[str, Responses | None],
) -> None:
    """Check the trace of a learner's updates in a step."""
    step = batch.step
    content = read(run, tables.TRACE, step, learner)
    if content is None:
        return
    pool_rows, order = pool
    if run.settings.algorithm.loss.minibatch_order == "balanced" and not pool_rows.complete:
        run.skip("trace", f"which update sees what depends on the lengths in {learner}'s pool, which lacks rows")
        return
    selected = _selected(run, order, advantages)
    if selected is None:
        run.skip("trace", f"which responses {learner} trains on is in advantages that cannot be read")
        return
    slots_pb = _slots(run, pool_rows, order, learner, step, selected)
    known = _known(run, pool_rows, order, slots_pb, advantages, learner)
    rows = _rows(run, content, order.ids.take(pa.array(known.row)), known.pass_)
    sources = run.sources(learner)
    rows.equal("trace", "source", pa.array(sources, pa.string()).take(pa.array(known.source)))
    rows.equal("trace", "is_self", pa.array(known.own))
    rows.equal("trace", "update", known.update, note="where the schedule of updates puts its problem")
    made = _expected(run, rows, known)
    _check_logprobs(run, rows, known, responses[learner])
    _check_numbers(run, rows, made)
    _check_sampler_weight(run, rows, known, responses[learner])
    if rows.complete:
        metrics = _update_metrics(run, rows, pool_rows, selected)
        if run.settings.algorithm.loss.kl_coef == 0:
            metrics["loss"] = _loss(run, rows, known, order, slots_pb)
        else:
            run.skip("loss", "the KL penalty does not follow from the trace")
        check_metrics(run, UPDATE, step, {**metrics, "updates": run.settings.updates_per_step}, learner)


def _rows(run: AuditRun, content: Content, ids: Any, pass_b: Ints) -> Rows:
    """The trace's rows; a response that several passes see is named with the pass, counted from 0."""
    if run.settings.algorithm.rollouts.passes == 1:
        return Rows(run, content, "rollout_id", ids)

    def named(identity: Any, pass_: Any) -> Any:
        return pc.binary_join_element_wise(identity, pa.array(pass_).cast(pa.string()), " in pass ")

    seen_in = np.asarray(content.arrow["update"], dtype=np.int64) // run.settings.updates_per_pass
    rows = named(content.arrow["rollout_id"].combine_chunks(), seen_in)
    return Rows(run, replace(content, arrow=content.arrow.append_column("row", rows)), "row", named(ids, pass_b))


def _selected(run: AuditRun, order: PoolOrder, advantages: Rows | None) -> Flags | None:
    """Which rows of the pool are trained on, as the advantages say; None where they cannot be read."""
    if run.settings.algorithm.rollouts.select == "all":
        return np.ones(len(order.problem), dtype=np.bool_)
    return None if advantages is None else advantages.present & advantages.flags_or_false("selected")


def _slots(run: AuditRun, pool: Rows, order: PoolOrder, learner: str, step: int, selected: Flags) -> Ints:
    """The update that sees each row of the pool, usable or not, in each pass; -1 if none does; [passes, rows]."""
    loss, by_group = run.settings.algorithm.loss, run.settings.algorithm.rollouts.select == "sample"
    groups = group_numbers(order.problem, order.source, run.sources(learner), selected) if by_group else order.problem
    return step_slots(
        groups,
        order.source,
        pool.lists("prompt_token_ids").lengths + pool.ints("source_tokens"),
        learner=run.sources(learner).index(learner),
        updates=run.settings.updates_per_pass,
        order=loss.minibatch_order,
        ranks=loss.ranks,
        seeds=shuffle_seeds(run.settings, step, learner),
        selected_b=selected,
    )


def _known(
    run: AuditRun, pool: Rows, order: PoolOrder, slots_pb: Ints, advantages: Rows | None, learner: str
) -> _Known:
    kept_b = np.asarray(pc.equal(pool.arrow("status"), "kept")) & pool.present
    row, pass_ = np.nonzero((kept_b & (slots_pb >= 0)).T)
    own = order.source[row] == run.sources(learner).index(learner)
    learner_tokens = pool.ints("learner_tokens")[row]
    by_learner = ~own & (run.settings.algorithm.importance.reference == "self")
    worth = np.full(len(row), np.nan)
    if advantages is not None:
        worth = np.where(advantages.present, advantages.floats("effective_advantage"), np.nan)[row]
    return _Known(
        row=row,
        pass_=pass_,
        update=slots_pb[pass_, row],
        own=own,
        source=order.source[row],
        response=order.response[row],
        source_logprob=np.where(by_learner, np.nan, pool.floats("source_logprob")[row]),
        source_tokens=np.where(by_learner, learner_tokens, pool.ints("source_tokens")[row]),
        learner_tokens=learner_tokens,
        text_bytes=pool.ints("text_bytes")[row],
        effective_advantage=worth,
    )


def _expected(run: AuditRun, rows: Rows, known: _Known) -> TraceColumns:
    algorithm = run.settings.algorithm
    with np.errstate(invalid="ignore", over="ignore"):
        return trace_columns(
            learner_logprob=rows.floats("learner_logprob"),
            source_logprob=rows.floats("source_logprob"),
            learner_tokens=known.learner_tokens,
            source_tokens=known.source_tokens,
            text_bytes=known.text_bytes,
            is_self=known.own,
            effective_advantage=known.effective_advantage,
            update=known.update,
            importance=algorithm.importance,
            clip=algorithm.clip,
        )


def _check_logprobs(run: AuditRun, rows: Rows, known: _Known, own: Responses | None) -> None:
    """What the ratio is made of."""
    learner, source = rows.floats("learner_logprob"), rows.floats("source_logprob")
    for column, values in (("learner_logprob", learner), ("source_logprob", source)):
        rows.require("trace", column, np.isfinite(values) & (values <= 0), "a finite number not above 0", shown=values)
    rows.close(
        "trace",
        "source_logprob",
        known.source_logprob / np.maximum(known.source_tokens, 1),
        relative=TOLERANCE,
        absolute=1e-12,
        note="mean of the pool's source_logprob over source_tokens",
    )
    most = BEFORE_UPDATES[run.settings.engine.dtype]
    first = known.update == 0
    note = f"before the step's first update, within {most:g} nats"
    if own is not None and len(own.source_logprob):
        mean = (own.source_logprob / np.maximum(own.scored, 1))[known.response]
        rows.close("trace", "learner_logprob", mean, absolute=most, where=first & known.own, note=note)
    if run.settings.algorithm.importance.reference == "self":
        where = first & ~known.own
        rows.close("trace", "source_logprob", learner, absolute=most, where=where, note=note)
        run.skip("source_logprob of cross rows in later updates", "`reference: self`: the learner's own")
    run.skip("learner_logprob after a step's first update, and of cross rows", "only `--deep` computes it again")


def _check_numbers(run: AuditRun, rows: Rows, made: TraceColumns) -> None:
    """Ratio, interval, clipped flag, weight and objective."""
    known = made.known
    rows.close("trace", "ratio", made.ratio, relative=TOLERANCE)
    rows.close("trace", "lower", made.lower, absolute=1e-12)
    rows.close("trace", "upper", made.upper, absolute=1e-12)
    ratio = rows.floats("ratio")
    # A ratio on a bound itself may fall on either side of it by rounding.
    on_bound = (np.abs(made.ratio - made.lower) <= TOLERANCE) | (np.abs(made.ratio - made.upper) <= TOLERANCE)
    # Own responses are clipped by the sign of their advantage, which may not be readable: no objective follows then.
    told = known & np.isfinite(made.ratio) & np.isfinite(made.objective)
    rows.equal("trace", "clipped", pa.array(made.clipped), where=told & ~on_bound)
    rows.close("trace", "is_weight", made.is_weight, relative=TOLERANCE)
    rows.close("trace", "objective", made.objective, relative=TOLERANCE, absolute=1e-12)
    if not known.all():
        run.skip("ratio, clipped, objective of own responses", "`level: token`: ratios of single tokens are not kept")
        possible = np.isfinite(ratio) & (ratio > 0) & (ratio <= np.exp(LOG_RATIO_BOUND))
        rows.require("trace", "ratio", possible | known, "a finite number above 0", shown=ratio)
        most = math.expm1(BEFORE_UPDATES[run.settings.engine.dtype])
        first = ~known & (rows.ints("update") == 0)
        rows.close("trace", "ratio", 1.0, absolute=most, where=first, note="before the step's first update")
        finite = np.isfinite(rows.floats("objective"))
        rows.require("trace", "objective", finite | known, "a finite number")


def _check_sampler_weight(run: AuditRun, rows: Rows, known: _Known, own: Responses | None) -> None:
    loss = run.settings.algorithm.loss
    expected = np.ones(len(rows))
    if loss.sampler_correction == "truncated":
        if own is None:
            expected[known.own] = np.nan
        else:
            cap = loss.sampler_correction_cap
            weights = np.exp(np.minimum(own.sampler_log_weight, np.log(cap)))[known.response]
            expected = np.where(known.own, np.minimum(weights, cap), 1.0)
    rows.close("trace", "sampler_weight", expected, relative=TOLERANCE)


def _update_metrics(run: AuditRun, rows: Rows, pool: Rows, selected: Flags) -> dict[str, float | None]:
    """As `hacpo.engines.training.trainer.summarise`, and what the pool gives."""
    tokens = int(pool.ints("learner_tokens")[selected].sum()) * run.settings.algorithm.rollouts.passes
    metrics: dict[str, float | None] = {"tokens": tokens}
    own, ratio = rows.flags("is_self"), rows.floats("ratio")
    lower, upper = rows.floats("lower"), rows.floats("upper")
    for kind, mine in (("own", own), ("cross", ~own)):
        if not mine.any():
            continue
        chosen = ratio[mine]
        metrics |= {
            f"{kind}.rows": int(mine.sum()),
            f"{kind}.ratio_mean": float(chosen.mean()),
            f"{kind}.ratio_min": float(chosen.min()),
            f"{kind}.ratio_max": float(chosen.max()),
            f"{kind}.clipped": float(rows.flags("clipped")[mine].mean()),
            f"{kind}.below": float((chosen < lower[mine]).mean()),
            f"{kind}.above": float((chosen > upper[mine]).mean()),
            f"{kind}.is_weight_mean": float(rows.floats("is_weight")[mine].mean()),
        }
        # A spread far below the ratios themselves is mostly rounding.
        spread = float(chosen.std())
        metrics[f"{kind}.ratio_sd"] = spread if spread > 1e-6 * abs(float(chosen.mean())) else None
    if own.any():
        metrics["own.sampler_weight_mean"] = float(rows.floats("sampler_weight")[own].mean())
    return metrics


def _loss(run: AuditRun, rows: Rows, known: _Known, order: PoolOrder, slots_pb: Ints) -> float | None:
    """Mean over updates of minus the weighted sum of objectives (eq. 47), the unusable responses in the counts."""
    updates, sources = run.settings.updates_per_step, int(order.source.max()) + 1
    counts = np.zeros((updates, sources))
    for slots in slots_pb:
        np.add.at(counts, (slots[slots >= 0], order.source[slots >= 0]), 1)
    if run.settings.algorithm.loss.aggregation == "mean":
        counts = np.broadcast_to(counts.sum(axis=1, keepdims=True), counts.shape)
    weight = np.where(known.own, 1.0, run.settings.algorithm.loss.cross_weight)
    terms = weight * rows.floats("objective") * rows.floats("sampler_weight") / counts[known.update, known.source]
    total = float(terms.sum())
    # Where terms cancel, their rounding is all that is left of the sum.
    return -total / updates if abs(total) > 1e-3 * float(np.abs(terms).sum()) or total == 0 else None
