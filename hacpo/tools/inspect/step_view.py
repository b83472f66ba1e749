"""Responses of a step with their verdicts and what every learner made of them, joined from the step's tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike

from hacpo.algorithm.advantage_table import best_responses
from hacpo.artifacts import tables
from hacpo.artifacts.tables import Row
from hacpo.tools.inspect.step_reader import rows_where

Read = Callable[[tables.Table, str, Sequence[str]], pa.Table | None]
"""(table, agent or learner, columns) -> a step's table; None if it is not there yet."""


@dataclass(frozen=True)
class Worth:
    """A response's row in a learner's advantages table."""

    baseline: float
    sigma: float
    advantage: float
    omega: float
    effective_advantage: float
    uniform: bool
    guarded: bool


@dataclass(frozen=True)
class Terms:
    """What a response did in one update: its row in a learner's trace. Log-probabilities are means per scored token."""

    update: int
    learner_logprob: float
    source_logprob: float
    ratio: float
    lower: float
    upper: float
    clipped: bool
    is_weight: float
    objective: float


@dataclass(frozen=True)
class Use:
    """What one learner made of a response; a part is None or empty where its table is not there yet."""

    learner: str
    is_self: bool
    status: str | None
    """Of the pool; `not selected` where it is kept there and the learner does not train on it."""
    roundtrip: bool | None
    learner_tokens: int | None
    worth: Worth | None
    updates: tuple[Terms, ...]


@dataclass(frozen=True)
class Response:
    """One response; verdict, reward and extracted are None where it is not verified yet."""

    rollout_id: str
    agent: str
    sample: int
    text: str
    finish_reason: str
    tokens: int
    verdict: str | None
    reward: float | None
    extracted: str | None
    uses: tuple[Use, ...]


def read_responses(
    read: Read, agents: Sequence[str], learners: Sequence[str], problems: Sequence[str]
) -> dict[str, list[Response]]:
    """problem_id -> every response to it, by agent and sample, with what each learner made of it.

    Args:
        problems: the `problem_id`s that are wanted.

    Raises:
        ArtifactError: a table is damaged or belongs to another run.
    """
    rows: list[tuple[str, Row, Row]] = []
    for agent in agents:
        drawn = ["rollout_id", "problem_id", "sample", "token_ids", "text", "finish_reason"]
        table = read(tables.ROLLOUTS, agent, drawn)
        if table is not None:
            counted = pc.list_value_length(table["token_ids"])
            table = table.drop_columns("token_ids").append_column("tokens", counted)
        judged = read(tables.VERDICTS, agent, ["rollout_id", "problem_id", "reward", "verdict", "extracted"])
        verdicts = {row["rollout_id"]: row for row in rows_where(judged, "problem_id", problems)}
        own = sorted(rows_where(table, "problem_id", problems), key=lambda row: int(row["sample"]))
        rows += [(agent, row, verdicts.get(row["rollout_id"], {})) for row in own]
    uses = {learner: _uses(read, learner, problems) for learner in learners}
    responses: dict[str, list[Response]] = {name: [] for name in problems}
    for agent, row, verdict in rows:
        responses[row["problem_id"]].append(_response(row, agent, verdict, uses))
    return responses


def _response(row: Row, agent: str, verdict: Row, uses: dict[str, dict[str, Use]]) -> Response:
    name = row["rollout_id"]
    drawn = {key: value for key, value in row.items() if key != "problem_id"}
    return Response(
        **drawn,
        agent=agent,
        verdict=verdict.get("verdict"),
        reward=verdict.get("reward"),
        extracted=verdict.get("extracted"),
        uses=tuple(by_rollout[name] for by_rollout in uses.values() if name in by_rollout),
    )


def _uses(read: Read, learner: str, problems: Sequence[str]) -> dict[str, Use]:
    """rollout_id -> what `learner` made of it, for the problems' responses that are in any of its tables."""
    pooled = ["rollout_id", "problem_id", "is_self", "status", "roundtrip", "learner_tokens"]
    worth_columns = ["rollout_id", "problem_id", "is_self", "selected", *Worth.__dataclass_fields__]
    pool, worth = (
        {row["rollout_id"]: row for row in rows_where(read(table, learner, columns), "problem_id", problems)}
        for table, columns in ((tables.POOL, pooled), (tables.ADVANTAGES, worth_columns))
    )
    terms: dict[str, list[Terms]] = {}
    trace = read(tables.TRACE, learner, ["rollout_id", *Terms.__dataclass_fields__])
    for row in rows_where(trace, "rollout_id", list(pool.keys() | worth.keys())):
        values = {name: row[name] for name in Terms.__dataclass_fields__}
        terms.setdefault(row["rollout_id"], []).append(Terms(**values))
    return {
        name: Use(
            learner=learner,
            is_self=(pool.get(name) or worth[name])["is_self"],
            status=_status(pool.get(name, {}), worth.get(name, {})),
            roundtrip=pool[name]["roundtrip"] if name in pool else None,
            learner_tokens=pool[name]["learner_tokens"] if name in pool else None,
            worth=Worth(**{key: worth[name][key] for key in Worth.__dataclass_fields__}) if name in worth else None,
            updates=tuple(terms.get(name, ())),
        )
        for name in {**pool, **worth}
    }


def _status(pooled: Row, worth: Row) -> str | None:
    status: str | None = pooled.get("status")
    return "not selected" if status == "kept" and worth.get("selected") is False else status


def punished_best(rewards: ArrayLike, effective: ArrayLike) -> int:
    """How many of a learner's responses to one problem are as good as its best, and pushed down all the same; none
    where all are equally good.

    Args:
        rewards: of every response that it learns from.
        effective: their effective advantages.
    """
    rewards_r, effective_r = (np.asarray(column, dtype=np.float64) for column in (rewards, effective))
    best = best_responses(np.zeros(len(rewards_r)), rewards_r)
    return 0 if best.all() else int((best & (effective_r < 0)).sum())
