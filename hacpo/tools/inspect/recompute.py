"""One step's advantages and update terms, as the files have them and as other settings would have made them.

Nothing is sampled and no model is asked: rewards come from the verdicts, log-probabilities from the trace. Those of
later updates are of the model as it was then, after updates under the run's own settings.

Legend: `_r` responses in a learner's advantages table, `_u` rows of its trace (a response in an update).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hacpo.algorithm.advantage_table import (
    CapabilityRow,
    advantage_columns,
    capabilities_used,
    capability_by_agent,
    capability_rows,
    side_sample_capability,
)
from hacpo.algorithm.rollouts import ordered_responses, reward_array
from hacpo.algorithm.trace import trace_columns
from hacpo.algorithm.updates import pool_slots, scheduled, shuffle_seeds
from hacpo.artifacts import parquet, tables
from hacpo.data.oracle_table import capabilities_of_step
from hacpo.errors import ArtifactError
from hacpo.settings.algorithm import AlgorithmSettings
from hacpo.settings.root import Settings
from hacpo.tools.inspect.question import Question, check_made_with
from hacpo.tools.inspect.step_reader import StepReader

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Capabilities = dict[str, CapabilityRow]
"""Agent -> its row of the capability table."""

_POOLED = (
    "rollout_id",
    "problem_id",
    "source",
    "is_self",
    "source_logprob",
    "source_tokens",
    "learner_tokens",
    "text_bytes",
    "status",
)


@dataclass(frozen=True)
class Updates:
    """Rows of a learner's trace; every array is [U]."""

    response_u: NDArray[np.int64]
    """Index of the row's response in the advantages table."""
    update_u: NDArray[np.int64]
    ratio_u: Floats
    lower_u: Floats
    upper_u: Floats
    clipped_u: Flags
    is_weight_u: Floats
    objective_u: Floats
    """NaN where it cannot be known."""
    sampler_weight_u: Floats
    row_weight_u: Floats
    """What the response counts for in its update: 1 over its source's responses, or over all (`loss.aggregation`)."""
    known_u: Flags
    """False where `clipped` and `objective` cannot be known: own responses with token-level ratios whose advantage
    changed its sign."""
    token_level_u: Flags
    """Own responses with a ratio per token, of which `ratio` is the mean."""
    likelihood_u: Flags
    """Cross responses whose likelihood is raised, whatever their ratio and advantage."""

    def taken(self, chosen_u: Flags) -> Updates:
        """Only the chosen rows."""
        return Updates(**{spec.name: getattr(self, spec.name)[chosen_u] for spec in fields(self)})


@dataclass(frozen=True)
class Numbers:
    """What one learner made of a step's responses; every array is [R]."""

    rollout_id: list[str]
    source: list[str]
    is_self: Flags
    reward: Floats
    baseline: Floats
    sigma: Floats
    advantage: Floats
    omega: Floats
    effective_advantage: Floats
    uniform: Flags
    guarded: Flags
    updates: Updates | None
    """None if the learner has not updated yet."""

    @property
    def gradient_weight_u(self) -> Floats:
        """d(objective of the update) / d(log-ratio) of each row of the trace: 0 if clipped, else ratio times is_weight
        times effective advantage (is_weight alone where likelihood is raised), times what the row counts for; NaN with
        token-level ratios, which have one each."""
        updates = self.updates
        assert updates is not None
        pull_u = updates.ratio_u * updates.is_weight_u * self.effective_advantage[updates.response_u]
        pull_u = np.where(updates.likelihood_u, updates.is_weight_u, pull_u)
        pull_u = np.where(updates.clipped_u, 0.0, pull_u) * updates.row_weight_u * updates.sampler_weight_u
        return np.where(updates.token_level_u, np.nan, pull_u)


@dataclass(frozen=True)
class WhatIf:
    """A step before (the files) and after (recomputed).

    Attributes:
        question: the settings on both sides.
        capability: agent -> its row of the capability table, before and after.
        learners: learner -> (before, after).
        reader: the step, and which tables are missing.
    """

    question: Question
    capability: tuple[Capabilities, Capabilities]
    learners: dict[str, tuple[Numbers, Numbers]]
    reader: StepReader


@dataclass(frozen=True)
class _Step:
    """Inputs that all learners share."""

    question: Question
    reader: StepReader
    responses: pa.Table
    group_size: int
    capability_before: Capabilities
    capability_after: Capabilities


def recompute(question: Question, step: int, learners: Sequence[str]) -> WhatIf:
    """Recompute a step under the question's settings.

    Raises:
        MissingInputError: verdicts or advantages of the step (or, for another capability window or metric, verdicts of
            earlier steps) are not there. A missing trace only leaves out what follows from it.
        ArtifactError: a table is damaged, or tables do not fit together.
        SettingsError: the files were made with other settings than params.yaml has now, or the step is out of range.
    """
    reader = StepReader(question.pipeline, step)
    common = _read_step(question, reader)
    numbers = {learner: _one_learner(common, learner) for learner in learners}
    return WhatIf(question, (common.capability_before, common.capability_after), numbers, reader)


def _read_step(question: Question, reader: StepReader) -> _Step:
    layout, step, as_run = question.pipeline.layout, reader.step, question.as_run
    agents = list(as_run.agents)
    group_size = as_run.responses_per_prompt
    responses = _responses(question, reader)
    path = layout.capability(step)
    before = capability_by_agent(reader.required(tables.CAPABILITY), agents, where=path)
    check_made_with(path, as_run)
    settings = question.settings.algorithm.capability
    rewards = _by_agent(responses, agents, group_size)
    rows = capability_rows(rewards, _rows_before(question, reader), settings, _oracle(question, reader))
    return _Step(question, reader, responses, group_size, before, {row.agent: row for row in rows})


def _responses(question: Question, reader: StepReader) -> pa.Table:
    """Reward of every response of a step, in order."""
    columns = ["rollout_id", "reward", "problem_id", "sample"]
    verdicts = {agent: reader.required(tables.VERDICTS, agent, columns) for agent in question.as_run.agents}
    problem_ids = [asked.problem_id for asked in reader.problems()]
    where = f"verdicts of step {reader.step}"
    return ordered_responses(problem_ids, verdicts, question.as_run.responses_per_prompt, where=where)


def _by_agent(responses: pa.Table, agents: Sequence[str], group_size: int) -> dict[str, Floats]:
    """Every agent's own rewards, [P, G], from its verdicts in order."""
    rewards = reward_array(responses, len(agents), group_size)
    return {agent: rewards[:, number] for number, agent in enumerate(agents)}


def _oracle(question: Question, reader: StepReader) -> dict[str, float] | None:
    """Every agent's capability as the asked oracle says it; None without one."""
    settings, agents = question.settings.algorithm.capability, list(question.as_run.agents)
    if settings.oracle_table is not None:
        return capabilities_of_step(question.pipeline.root / settings.oracle_table, reader.step, agents)
    if settings.oracle_samples is None:
        return None
    capabilities = {}
    for agent in agents:
        table = reader.required(tables.SIDE_VERDICTS, agent, ["reward", "sample"])
        asked = table.filter(pc.less(table["sample"], settings.oracle_samples))
        capabilities[agent] = side_sample_capability(asked["reward"].to_numpy(), settings)
    return capabilities


def _rows_before(question: Question, reader: StepReader) -> Capabilities:
    """Every agent's row of the step before: its file's, or, where another window, metric or number of samples is asked
    about, from the verdicts."""
    if reader.step == 1:
        return {}
    keys, agents = ("window", "metric", "samples"), list(question.as_run.agents)
    if not {f"algorithm.capability.{key}" for key in keys} & question.changed.keys():
        earlier = StepReader(question.pipeline, reader.step - 1)
        where = question.pipeline.layout.capability(earlier.step)
        return capability_by_agent(earlier.required(tables.CAPABILITY), agents, where=where)
    settings = question.settings.algorithm.capability
    rows: Capabilities = {}
    for step in range(max(1, reader.step - settings.window + 1), reader.step):
        earlier = StepReader(question.pipeline, step)
        rewards = _by_agent(_responses(question, earlier), agents, question.as_run.responses_per_prompt)
        rows = {row.agent: row for row in capability_rows(rewards, rows, settings)}
    return rows


def _one_learner(common: _Step, learner: str) -> tuple[Numbers, Numbers]:
    """Before and after of one learner."""
    question, reader = common.question, common.reader
    layout, step = question.pipeline.layout, reader.step
    path = layout.advantages(step, learner)
    table = reader.required(tables.ADVANTAGES, learner)
    check_made_with(path, question.as_run)
    before = _numbers(table)
    settings = question.settings.algorithm
    columns = advantage_columns(
        common.responses,
        learner=learner,
        agents=question.settings.compared_with(learner),
        sources=question.settings.learned_from(learner),
        group_size=common.group_size,
        capabilities=capabilities_used(common.capability_after.values(), settings.advantage),
        settings=settings.advantage,
        capability_settings=settings.capability,
    )
    after = _numbers(parquet.to_arrow(tables.ADVANTAGES, columns))
    path = layout.trace(step, learner)
    trace = reader.optional(tables.TRACE, learner)
    if trace is None:
        return before, after
    check_made_with(path, question.as_run)
    path = layout.pool(step, learner)
    algorithm = question.as_run.algorithm
    # Only a batch that was dealt by length needs to know how long prompts are.
    needed = (*_POOLED, "prompt_token_ids") if algorithm.loss.minibatch_order == "balanced" else _POOLED
    pool = reader.required(tables.POOL, learner, needed)
    check_made_with(path, question.as_run)
    selected = table.select(["rollout_id", "selected"])
    weight_u = _row_weights(question.as_run, algorithm, pool, selected, trace, step, learner)
    before = replace(before, updates=_as_run(trace, before, weight_u, algorithm))
    asked_u = _row_weights(question.as_run, settings, pool, selected, trace, step, learner)
    return before, replace(after, updates=_as_asked(question, pool, trace, before, after, asked_u))


def _numbers(table: pa.Table) -> Numbers:
    """Of an advantages table."""
    floats = ("baseline", "sigma", "advantage", "omega", "effective_advantage")
    return Numbers(
        rollout_id=table["rollout_id"].to_pylist(),
        source=table["source"].to_pylist(),
        reward=_column(table, "reward").astype(np.float64),
        **{name: _column(table, name) for name in (*floats, "is_self", "uniform", "guarded")},
        updates=None,
    )


def _column(table: pa.Table, name: str) -> NDArray[Any]:
    return np.asarray(table[name].to_numpy())


def places_of(names: Sequence[str], among: Sequence[str]) -> NDArray[np.int64]:
    """Index of each name among others; -1 where it is not one of them."""
    index = {name: number for number, name in enumerate(among)}
    return np.array([index.get(name, -1) for name in names], dtype=np.int64)


def _as_run(trace: pa.Table, before: Numbers, row_weight_u: Floats, algorithm: AlgorithmSettings) -> Updates:
    """The trace as the file has it."""
    response_u = places_of(trace["rollout_id"].to_pylist(), before.rollout_id)
    if (response_u < 0).any():
        lost = trace["rollout_id"][int(np.argmin(response_u))]
        raise ArtifactError("a response of the trace is not in the advantages", found=lost, remedy="run `hacpo audit`")
    return Updates(
        response_u=response_u,
        update_u=_column(trace, "update").astype(np.int64),
        **{
            f"{name}_u": _column(trace, name)
            for name in ("ratio", "lower", "upper", "clipped", "is_weight", "objective", "sampler_weight")
        },
        row_weight_u=row_weight_u,
        known_u=np.ones(len(trace), dtype=np.bool_),
        token_level_u=_column(trace, "is_self") & (algorithm.importance.level == "token"),
        likelihood_u=~_column(trace, "is_self") & (algorithm.clip.cross == "likelihood"),
    )


def _as_asked(
    question: Question, pool: pa.Table, trace: pa.Table, before: Numbers, after: Numbers, row_weight_u: Floats
) -> Updates:
    """The trace under the asked settings; responses that these do not use are left out.

    Args:
        row_weight_u: of every row of the trace.
    """
    assert before.updates is not None
    position_u = places_of(trace["rollout_id"].to_pylist(), after.rollout_id)
    used_u = position_u >= 0
    trace = trace.filter(pa.array(used_u))
    old = before.updates.taken(used_u)
    response_u = position_u[used_u]
    place_u = pc.index_in(trace["rollout_id"], value_set=pool["rollout_id"])
    if place_u.null_count:
        lost = trace["rollout_id"].filter(pc.is_null(place_u))[0]
        raise ArtifactError("a response of the trace is not in the pool", found=lost, remedy="run `hacpo audit`")
    rows = pool.take(place_u)
    is_self_u = _column(trace, "is_self")
    source_logprob_u, source_tokens_u = _divisor(question, rows, trace)
    settings = question.settings.algorithm
    columns = trace_columns(
        learner_logprob=_column(trace, "learner_logprob"),
        source_logprob=source_logprob_u,
        learner_tokens=_column(rows, "learner_tokens"),
        source_tokens=source_tokens_u,
        text_bytes=_column(rows, "text_bytes"),
        is_self=is_self_u,
        effective_advantage=after.effective_advantage[response_u],
        update=old.update_u,
        importance=settings.importance,
        clip=settings.clip,
    )
    asked = replace(
        old,
        response_u=response_u,
        **{
            f"{name}_u": np.asarray(getattr(columns, name))
            for name in ("ratio", "lower", "upper", "clipped", "is_weight", "objective")
        },
        row_weight_u=row_weight_u[used_u],
        token_level_u=~columns.known,
        likelihood_u=~is_self_u & (settings.clip.cross == "likelihood"),
    )
    was_u = before.effective_advantage[old.response_u]
    now_u = after.effective_advantage[response_u]
    if question.same_ratio:
        asked = _settled(asked, old, was_u, now_u)
    return _token_level(asked, old, was_u, now_u, is_self_u) if settings.importance.level == "token" else asked


def _divisor(question: Question, rows: pa.Table, trace: pa.Table) -> tuple[Floats, NDArray[np.int64]]:
    """Mean log-probability that each ratio divides by, and its tokens: the trace's own, or, where the run divided by
    the learner's old policy and the question by the source's, the pool's."""
    is_self_u = _column(trace, "is_self")
    learner_u, source_u = (_column(rows, name).astype(np.int64) for name in ("learner_tokens", "source_tokens"))
    as_run = question.as_run.algorithm.importance.reference
    if as_run == question.settings.algorithm.importance.reference:
        # Under `reference: self` the trace's mean of a cross response is over the learner's tokens.
        return _column(trace, "source_logprob"), source_u if as_run == "source" else learner_u
    pooled_u = _column(rows, "source_logprob") / np.maximum(source_u, 1)
    return np.where(is_self_u, _column(trace, "source_logprob"), pooled_u), source_u


def _settled(asked: Updates, old: Updates, was_u: Floats, now_u: Floats) -> Updates:
    """A ratio on its bound may fall on the other side by the rounding of a mean: where nothing that decides about
    clipping has changed, the file's flag stands."""
    same_u = np.sign(was_u) == np.sign(now_u)
    for name in ("ratio_u", "lower_u", "upper_u"):
        same_u &= np.isclose(getattr(asked, name), getattr(old, name), rtol=1e-12, atol=0.0)
    near_u = same_u & (
        np.isclose(old.ratio_u, old.lower_u, rtol=1e-12, atol=0.0)
        | np.isclose(old.ratio_u, old.upper_u, rtol=1e-12, atol=0.0)
    )
    return replace(asked, clipped_u=np.where(near_u, old.clipped_u, asked.clipped_u))


def _token_level(asked: Updates, old: Updates, was_u: Floats, now_u: Floats, is_self_u: Flags) -> Updates:
    """Own responses with token-level ratios: no file has these, but a term min(r A, clip(r) A) is proportional to A as
    long as A keeps its sign, and clipping depends on that sign alone."""
    same_u = np.sign(was_u) == np.sign(now_u)
    known_u = ~is_self_u | same_u | (now_u == 0)
    scale_u = np.divide(now_u, was_u, out=np.ones_like(now_u), where=was_u != 0)
    scaled_u = np.where(now_u == 0, 0.0, np.where(known_u, old.objective_u * scale_u, np.nan))
    kept_u = old.clipped_u & (now_u != 0)  # without an advantage nothing is clipped
    return replace(
        asked,
        ratio_u=np.where(is_self_u, old.ratio_u, asked.ratio_u),
        clipped_u=np.where(is_self_u, kept_u, asked.clipped_u),
        objective_u=np.where(is_self_u, scaled_u, asked.objective_u),
        known_u=known_u,
    )


def _row_weights(
    as_run: Settings,
    asked: AlgorithmSettings,
    pool: pa.Table,
    selected: pa.Table,
    trace: pa.Table,
    step: int,
    learner: str,
) -> Floats:
    """What each row of the trace counts for in its update (eq. 47), the step cut into updates as the run cut it.

    Args:
        selected: rollout_id and selected of the advantages.
    """
    loss = as_run.algorithm.loss
    updates = as_run.updates_per_pass
    chosen = selected["selected"].take(pc.index_in(pool["rollout_id"], value_set=selected["rollout_id"]))
    slots_pb = pool_slots(
        pool,
        updates=updates,
        order=loss.minibatch_order,
        ranks=loss.ranks,
        seeds=shuffle_seeds(as_run, step, learner),
        selected_b=np.asarray(pc.fill_null(chosen, True), dtype=np.bool_),
        by_group=as_run.algorithm.rollouts.select == "sample",
    )
    seen = scheduled(pool["source"], slots_pb, updates)
    weights = []
    for source, update in zip(trace["source"].to_pylist(), trace["update"].to_pylist(), strict=True):
        counts = seen[update] if 0 <= update < len(seen) else {}
        if source not in counts:
            raise ArtifactError(
                f"update {update} of {learner} in step {step} saw no response of {source}",
                where="trace",
                remedy="run `hacpo audit`",
            )
        total = sum(count for name, count in counts.items() if asked.rollouts.share or name == learner)
        factor = 1.0 if source == learner else asked.loss.cross_weight
        weights.append(factor / {"sum": counts[source], "mean": total}[asked.loss.aggregation])
    return np.array(weights, dtype=np.float64)
