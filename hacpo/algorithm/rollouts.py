"""Bringing the rollouts and rewards of several agents into one order: problem, agent, sample.

Responses stay in Arrow columns while they are many; `Rollout` is one that is looked at.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hacpo.algorithm.support import Support, from_column
from hacpo.errors import ArtifactError


@dataclass(frozen=True)
class Rollout:
    """One response as its agent sampled it; the fields are columns of the rollouts table.

    Attributes:
        reward: of its verdict; NaN where that is not known.
    """

    rollout_id: str
    problem_id: str
    sample: int
    token_ids: list[int]
    text: str
    finish_reason: str
    stop_string: str | None
    logprobs: list[float]
    reward: float = math.nan
    support_logprob: list[float] | None = None
    support: Support | None = None


class Rollouts:
    """An agent's rollouts, from which one is taken at a time.

    Args:
        table: columns of the rollouts table, and `reward` if there is one.
    """

    def __init__(self, table: pa.Table) -> None:
        names = [name for name in Rollout.__dataclass_fields__ if name in table.column_names and name != "support"]
        self._columns = {name: table[name] for name in names}
        self._support = supports(table)

    def __getitem__(self, row: int) -> Rollout:
        values = {name: column[row].as_py() for name, column in self._columns.items()}
        return Rollout(**values, support=self._support[row])


def supports(table: pa.Table) -> list[Support | None]:
    """Each row's support, kept flat; None where the table has no such column."""
    return from_column(table["support"]) if "support" in table.column_names else [None] * len(table)


def rollout_id(step: int, agent: str, problem: str, sample: int, *, side: bool = False) -> str:
    """Identity of one response in a run: `0007/ada/<problem>/003`, of a side sample `0007/ada/<problem>/side-003`."""
    return f"{_whose(step, agent)}/{problem}/{_which(sample, side)}"


def rollout_ids(step: int, agent: str, problem_ids: Any, samples: int, *, side: bool = False) -> Any:
    """The same of every response of an agent, by problem and sample: Arrow strings, [P * samples].

    Args:
        problem_ids: Arrow strings, [P].
    """
    problems = problem_ids.take(pa.array(np.repeat(np.arange(len(problem_ids)), samples)))
    which = pa.array([_which(sample, side) for sample in range(samples)] * len(problem_ids), pa.string())
    return pc.binary_join_element_wise(_whose(step, agent), problems, which, "/")


def problem_of(identity: str) -> str:
    """The problem that a response's `rollout_id` names, in which there may be slashes too."""
    return "/".join(identity.split("/")[2:-1])


def _whose(step: int, agent: str) -> str:
    return f"{step:04d}/{agent}"


def _which(sample: int, side: bool) -> str:
    return f"{'side-' if side else ''}{sample:03d}"


def check_whole(
    rollouts: pa.Table,
    problems: Sequence[str],
    step: int,
    agent: str,
    *,
    side: bool = False,
    where: object,
    remedy: str,
) -> None:
    """Every problem of the step has the same number of responses, all of them this agent's and this step's.

    Args:
        rollouts: rollout_id, step, agent, problem_id and sample; ids are unique.
        problems: the step's problems.
        side: whether they are a side sample.
        where: the table, and `remedy` what makes it again, for the message.

    Raises:
        ArtifactError: rows are missing, or are another agent's, another step's or of other problems.
    """
    known = set(problems)
    samples = range((pc.max(rollouts["sample"]).as_py() or 0) + 1)
    wanted = {rollout_id(step, agent, problem, sample, side=side): None for problem in problems for sample in samples}
    names = ("rollout_id", "step", "agent", "problem_id", "sample")
    for identity, of_step, whose, problem, sample in zip(*(rollouts[name].to_pylist() for name in names), strict=True):
        if problem not in known:
            what = "the rollouts are of other problems than the step's prompts"
            raise ArtifactError(what, where=where, found=repr(problem), remedy=remedy)
        if (of_step, whose, identity) != (step, agent, rollout_id(step, agent, problem, sample, side=side)):
            raise ArtifactError(
                "holds rows of another agent or step",
                where=where,
                expected=f"step {step}, {agent}",
                found=f"{identity!r} of step {of_step}, {whose}",
                remedy=remedy,
            )
        wanted.pop(identity, None)
    if wanted:
        each = f"{len(samples)} responses to each of {len(problems)} problems"
        raise ArtifactError(
            "rows are missing", where=where, expected=each, found=f"no {next(iter(wanted))!r}", remedy=remedy
        )


def of_first_problems(problem_ids: Any, limit: int | None) -> Any:
    """Which rows are of the first `limit` problems: Arrow booleans; all if None.

    Args:
        problem_ids: of each row, an Arrow column.
    """
    return pc.is_in(problem_ids, value_set=pc.unique(problem_ids)[:limit])


def first_problems(table: pa.Table, limit: int | None) -> pa.Table:
    """The rows of the first `limit` problems, in order; all if None."""
    return table if limit is None else table.filter(of_first_problems(table["problem_id"], limit))


def with_rewards(rollouts: pa.Table, verdicts: pa.Table) -> pa.Table:
    """Every rollout with its `reward`, joined by rollout_id.

    Raises:
        ArtifactError: a rollout has no verdict, or a verdict no rollout.
    """
    place = pc.index_in(rollouts["rollout_id"], value_set=verdicts["rollout_id"])
    # Ids are unique on both sides.
    if place.null_count or len(rollouts) != len(verdicts):
        alone = set(rollouts["rollout_id"].to_pylist()) ^ set(verdicts["rollout_id"].to_pylist())
        raise ArtifactError(
            "rollouts and verdicts do not belong together",
            found=f"{min(alone)!r} in only one of them",
            remedy="repeat verify",
        )
    return rollouts.append_column("reward", verdicts["reward"].take(place))


def in_order(
    problem_ids: Sequence[str], per_agent: Mapping[str, pa.Table], group_size: int, *, where: object
) -> dict[str, npt.NDArray[np.int64]]:
    """Agent -> the row of its table of every response, by problem and sample, [P * group_size].

    Args:
        problem_ids: the step's problems in batch order, [P].
        per_agent: every agent's responses, with problem_id and sample, in any order.
        group_size: responses per problem and agent.
        where: for the message.

    Raises:
        ArtifactError: an agent lacks a response, or has one too many.
    """
    known = pa.array(problem_ids, pa.string())
    order = {}
    for agent, table in per_agent.items():
        rows = _rows_in_order(known, table, group_size)
        if rows is None:
            raise _misfit(problem_ids, per_agent, group_size, where)
        order[agent] = rows
    return order


def _rows_in_order(problem_ids: Any, table: pa.Table, group_size: int) -> npt.NDArray[np.int64] | None:
    """An agent's part of `in_order`; None where it has not just one response of each."""
    position = pc.index_in(table["problem_id"], value_set=problem_ids)
    sample = np.asarray(table["sample"], dtype=np.int64)
    wanted = len(problem_ids) * group_size
    if len(table) != wanted or position.null_count or not ((sample >= 0) & (sample < group_size)).all():
        return None
    place = np.asarray(position, dtype=np.int64) * group_size + sample
    rows = np.full(wanted, -1, np.int64)
    rows[place] = np.arange(wanted)
    return rows if (rows >= 0).all() else None


def _misfit(
    problem_ids: Sequence[str], per_agent: Mapping[str, pa.Table], group_size: int, where: object
) -> ArtifactError:
    """The error that names a response which `in_order` lacks, or has too many."""
    drawn = Counter(
        (problem, agent, sample)
        for agent, table in per_agent.items()
        for problem, sample in zip(table["problem_id"].to_pylist(), table["sample"].to_pylist(), strict=True)
    )
    wanted = {
        (problem, agent, sample) for problem in problem_ids for agent in per_agent for sample in range(group_size)
    }
    odd = sorted(drawn.keys() ^ wanted) or [key for key, times in drawn.items() if times > 1] or [next(iter(drawn))]
    problem, agent, sample = odd[0]
    return ArtifactError(
        f"{'unexpected or repeated' if odd[0] in drawn else 'no'} response {sample} of {agent} to problem {problem!r}",
        where=where,
        expected=f"{len(problem_ids) * len(per_agent) * group_size} responses",
        found=drawn.total(),
        remedy="repeat generate and verify of this step",
    )


def ordered_responses(
    problem_ids: Sequence[str], per_agent: Mapping[str, pa.Table], group_size: int, *, where: object
) -> pa.Table:
    """The agents' tables as one, by problem, agent and sample, with `source`; arguments and errors: see `in_order`."""
    order = in_order(problem_ids, per_agent, group_size, where=where)
    starts = np.cumsum([0, *map(len, per_agent.values())])
    # [P, N, G]: each agent's responses to a problem follow the agent's before it.
    rows_png = np.stack(
        [start + rows.reshape(-1, group_size) for start, rows in zip(starts, order.values(), strict=False)], axis=1
    )
    source = np.broadcast_to(np.arange(len(order))[:, None], rows_png.shape)
    every = pa.concat_tables(per_agent.values()).combine_chunks().take(pa.array(rows_png.ravel()))
    return every.append_column("source", pa.array(list(order), pa.string()).take(pa.array(source.ravel())))


def reward_array(responses: pa.Table, agents: int, group_size: int) -> npt.NDArray[np.float64]:
    """Rewards of responses in order as float64 [problems, agents, group_size]."""
    return np.asarray(responses["reward"].to_numpy(), dtype=np.float64).reshape(-1, agents, group_size)
