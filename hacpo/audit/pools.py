"""A learner's pool and its advantages against rollouts, verdicts and capabilities."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hacpo import schema
from hacpo.advantage import step_advantages
from hacpo.advantage_table import advantage_summary, capability_rows
from hacpo.audit.inputs import Batch
from hacpo.audit.lists import Flags, Ints, Taken
from hacpo.audit.metrics import check_metrics
from hacpo.audit.responses import Floats, Responses, response_ids
from hacpo.audit.run import AuditRun
from hacpo.audit.tables import Rows, read
from hacpo.errors import HacpoError
from hacpo.rollouts import Row

TOLERANCE = 1e-9
"""Of capability, baseline, sigma, omega and advantages (absolute, and relative above 1), and of sums and ratios
(relative): rounding of another order of additions."""

STATUSES = ("kept", "too_long", "empty", "not_representable", "error")


@dataclass(frozen=True)
class PoolOrder:
    """The order of a learner's pool: by problem, source, sample.

    Attributes:
        ids: rollout_id, [M]; Arrow strings.
        problem: index of each row's problem.
        source: index of each row's source.
        response: index of each row among its source's responses.
    """

    ids: Any
    problem: Ints
    source: Ints
    response: Ints

    @classmethod
    def of(cls, step: int, problem_ids: Any, sources: Sequence[str], group_size: int) -> PoolOrder:
        """Of a step's problems."""
        shape = (len(problem_ids), len(sources), group_size)
        problem, source, sample = (part.ravel() for part in np.indices(shape))
        every = pa.concat_arrays([response_ids(step, name, problem_ids, group_size) for name in sources])
        response = problem * group_size + sample
        ids = every.take(pa.array(source * (len(problem_ids) * group_size) + response))
        return cls(ids, problem, source, response)

    def gather(self, per_source: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Values of every source's responses, in the pool's order."""
        return np.stack(per_source)[self.source, self.response]


@dataclass(frozen=True)
class Pool:
    """What advantages and trace must fit to, [M] in the pool's order; NaN and -1 where it cannot be told."""

    order: PoolOrder
    present: Flags
    is_self: Flags
    kept: Flags
    source_logprob: Floats
    source_tokens: Ints
    learner_tokens: Ints
    text_bytes: Ints
    effective_advantage: Floats


def check_pool(
    run: AuditRun,
    batch: Batch,
    learner: str,
    responses: Mapping[str, Responses | None],
    rewards: Mapping[str, Floats | None],
) -> tuple[Rows, PoolOrder] | None:
    """Check a learner's pool; returns its rows in order."""
    step, sources = batch.step, run.sources(learner)
    content = read(run, run.layout.pool(step, learner), schema.POOL, step=step, learner=learner)
    if content is None:
        run.skip(f"what follows from {learner}'s pool", "it cannot be read")
        return None
    order = PoolOrder.of(step, batch.problem_ids, sources, run.settings.responses_per_prompt)
    rows = Rows(run, content, "rollout_id", order.ids)
    _check_columns(run, rows, batch, order, learner)
    rows.equal("pool", "sample", order.response % run.settings.responses_per_prompt)
    for number, source in enumerate(sources):
        _check_source(rows, order, number, source, responses[source], rewards[source])
    own = responses[learner]
    if own is not None:
        _check_own_tokens(run, rows, order, sources.index(learner), own)
    _check_status(run, rows, learner)
    if rows.complete:
        check_metrics(run, "pool", step, learner, _pool_metrics(rows))
    return rows, order


def _check_columns(run: AuditRun, rows: Rows, batch: Batch, order: PoolOrder, learner: str) -> None:
    """Columns that pool and advantages share."""
    sources = run.sources(learner)
    check = rows.content.table.name
    rows.equal(check, "problem_id", batch.problem_ids.take(pa.array(order.problem)))
    rows.equal(check, "source", pa.array(sources, pa.string()).take(pa.array(order.source)))
    rows.equal(check, "is_self", pa.array(order.source == sources.index(learner)))


def _check_source(
    rows: Rows, order: PoolOrder, number: int, source: str, responses: Responses | None, rewards: Floats | None
) -> None:
    """Columns that repeat what a source's tables say."""
    mine = order.source == number
    if rewards is not None:
        rows.close("pool", "reward", rewards[order.response], where=mine, note=f"{source}'s verdicts")
    if responses is None:
        return
    mine = mine & responses.present[order.response]
    note = f"of {source}'s rollouts"
    rows.equal("pool", "source_tokens", responses.scored[order.response], where=mine, note=note)
    rows.equal("pool", "text_bytes", responses.text_bytes[order.response], where=mine, note=note)
    rows.close(
        "pool",
        "source_logprob",
        responses.source_logprob[order.response],
        relative=TOLERANCE,
        absolute=1e-12,
        where=mine,
        note=f"sum over the scored tokens of {source}'s logprobs",
    )


def _check_own_tokens(run: AuditRun, rows: Rows, order: PoolOrder, number: int, own: Responses) -> None:
    """Prompts as the learner sampled from them, and own responses in the tokens that were sampled."""
    group = run.settings.responses_per_prompt
    first = order.problem * group
    prompts = rows.lists("prompt_token_ids")
    rows.require(
        "pool",
        "prompt_token_ids",
        prompts.same_as(own.prompts, first),
        Taken(own.prompts, first),
        where=own.present[first],
        found=prompts,
        note="the learner's own prompt for the problem",
    )
    mine = (order.source == number) & own.present[order.response]
    sampled, tokens = own.tokens.heads(own.scored), rows.lists("token_ids")
    rows.require(
        "pool",
        "token_ids",
        tokens.same_as(sampled, order.response),
        Taken(sampled, order.response),
        where=mine,
        found=tokens,
        note="own responses keep the tokens that were sampled",
    )
    rows.equal("pool", "roundtrip", True, where=mine, note="own responses are not retokenised")


def _check_status(run: AuditRun, rows: Rows, learner: str) -> None:
    """Which responses can be used, as far as that follows without a tokenizer."""
    status, counts = rows.arrow("status"), rows.ints("learner_tokens")
    known = np.asarray(pc.is_in(status, value_set=pa.array(STATUSES)))
    rows.require("pool", "status", known, " or ".join(STATUSES))
    lengths = rows.lists("token_ids").lengths
    rows.equal("pool", "learner_tokens", lengths, note="number of token_ids")
    kept = np.asarray(pc.equal(status, "kept"))
    own = rows.flags("is_self")
    rows.require("pool", "status", (counts > 0) | ~kept, "not kept: it has no token")
    wanted = np.where(rows.ints("source_tokens") > 0, "kept", "empty")
    rows.equal("pool", "status", pa.array(wanted.tolist()), where=own, note="own responses are always used")
    limits = [limit for limit in (run.settings.pool.max_tokens, run.context_length(learner)) if limit is not None]
    if limits:
        long = rows.lists("prompt_token_ids").lengths + lengths > min(limits)
        rows.require("pool", "status", ~(long & kept) | own, f"too_long: more than {min(limits)} tokens")


def _pool_metrics(rows: Rows) -> dict[str, float | None]:
    status = rows.arrow("status").to_pylist()
    metrics: dict[str, float | None] = {f"status.{name}": count for name, count in Counter(status).items()}
    cross = ~rows.flags("is_self")
    kept = cross & np.asarray(pc.equal(rows.arrow("status"), "kept"))
    if cross.any():
        metrics["roundtrip"] = float(rows.flags("roundtrip")[cross].mean())
    source_tokens = int(rows.ints("source_tokens")[kept].sum())
    if kept.any() and source_tokens:
        metrics["token_ratio"] = int(rows.ints("learner_tokens")[kept].sum()) / source_tokens
    return metrics


# --- capability and advantages --------------------------------------------------------------------------------------


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
    _check_columns(run, rows, batch, order, learner)
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
