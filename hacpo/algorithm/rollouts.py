"""Bringing the rollouts and rewards of several agents into one order: problem, agent, sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hacpo.algorithm.sampler_correction import sequence_log_weight, truncated_weight
from hacpo.errors import ArtifactError

Row = dict[str, Any]


def rollout_id(step: int, agent: str, problem: str, sample: int, *, side: bool = False) -> str:
    """Identity of one response in a run: `0007/ada/<problem>/003`, of a side sample `0007/ada/<problem>/side-003`."""
    return f"{step:04d}/{agent}/{problem}/{'side-' if side else ''}{sample:03d}"


def check_whole(
    rollouts: Sequence[Row],
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
    samples = range(max((row["sample"] for row in rollouts), default=0) + 1)
    wanted = {rollout_id(step, agent, problem, sample, side=side): None for problem in problems for sample in samples}
    for row in rollouts:
        mine = (row["step"], row["agent"]) == (step, agent)
        named = rollout_id(step, agent, row["problem_id"], row["sample"], side=side) == row["rollout_id"]
        if row["problem_id"] not in known:
            what = "the rollouts are of other problems than the step's prompts"
            raise ArtifactError(what, where=where, found=repr(row["problem_id"]), remedy=remedy)
        if not (mine and named):
            found = f"{row['rollout_id']!r} of step {row['step']}, {row['agent']}"
            raise ArtifactError(
                "holds rows of another agent or step",
                where=where,
                expected=f"step {step}, {agent}",
                found=found,
                remedy=remedy,
            )
        wanted.pop(row["rollout_id"], None)
    if wanted:
        each = f"{len(samples)} responses to each of {len(problems)} problems"
        raise ArtifactError(
            "rows are missing", where=where, expected=each, found=f"no {next(iter(wanted))!r}", remedy=remedy
        )


def first_problems(rows: Sequence[Row], limit: int | None) -> list[Row]:
    """The rows of the first `limit` problems, in order; all if None."""
    if limit is None:
        return list(rows)
    problems = set(list(dict.fromkeys(row["problem_id"] for row in rows))[:limit])
    return [row for row in rows if row["problem_id"] in problems]


def with_rewards(rollouts: Sequence[Row], verdicts: Sequence[Row]) -> list[Row]:
    """Every rollout with its `reward`, joined by rollout_id.

    Raises:
        ArtifactError: a rollout has no verdict, or a verdict no rollout.
    """
    rewards = {row["rollout_id"]: row["reward"] for row in verdicts}
    alone = rewards.keys() ^ {row["rollout_id"] for row in rollouts}
    if alone:
        raise ArtifactError(
            "rollouts and verdicts do not belong together",
            found=f"{min(alone)!r} in only one of them",
            remedy="repeat verify",
        )
    return [{**row, "reward": rewards[row["rollout_id"]]} for row in rollouts]


def training_rows(
    pool: Sequence[Row],
    advantages: Sequence[Row],
    own: Sequence[Row],
    *,
    sampler_cap: float | None,
    where: object,
) -> list[Row]:
    """Rows of the pool with their `effective_advantage` and `sampler_weight`, own ones with their `old_logprobs`, and
    all with the `support` that they are restricted to (`hacpo.algorithm.support`; None: to nothing).

    Args:
        own: the learner's rollouts: rollout_id, logprobs, support and, with a `sampler_cap`, sampler_logprobs.
        sampler_cap: largest weight of an own response (`hacpo.algorithm.sampler_correction`); None: every weight is 1.

    Raises:
        ArtifactError: the tables do not hold the same responses, or not the same tokens of them.
    """
    worth = {row["rollout_id"]: row["effective_advantage"] for row in advantages}
    old = {row["rollout_id"]: row for row in own}
    alone = (worth.keys() ^ {row["rollout_id"] for row in pool}) | (
        old.keys() ^ {row["rollout_id"] for row in pool if row["is_self"]}
    )
    if alone:
        raise ArtifactError(
            "pool, advantages and rollouts do not belong together",
            where=where,
            found=f"{min(alone)!r} in only one of them",
            remedy="repeat pool and advantage of this step",
        )
    rows = [
        {
            **row,
            "effective_advantage": worth[row["rollout_id"]],
            **_own_columns(row, old.get(row["rollout_id"]), sampler_cap, where),
        }
        for row in pool
    ]
    for row in rows:
        tokens, support = len(row["token_ids"]), row.get("support")
        if tokens and support is not None and len(support) != tokens:
            raise ArtifactError(
                "support does not fit the tokens",
                where=where,
                expected=f"{tokens} sets of kept ids for {row['rollout_id']!r}",
                found=len(support),
                remedy="run `hacpo audit`, which says which table is damaged",
            )
    return rows


def _own_columns(row: Row, rollout: Row | None, sampler_cap: float | None, where: object) -> Row:
    if rollout is None:
        return {"old_logprobs": None, "sampler_weight": 1.0}
    support = rollout.get("support")
    scored = len(row["token_ids"])  # without the EOS that pool left out, if it did (`importance.score_eos`)
    if not 0 <= len(rollout["logprobs"]) - scored <= 1:
        raise ArtifactError(
            "pool and rollouts do not hold the same tokens",
            where=where,
            expected=f"{len(rollout['logprobs'])} tokens of {row['rollout_id']!r}, or one less",
            found=scored,
            remedy="repeat pool of this step",
        )
    logprobs, weight = rollout["logprobs"][:scored], 1.0
    if sampler_cap is not None:
        log_weight = sequence_log_weight(logprobs, rollout["sampler_logprobs"][:scored])
        weight = truncated_weight(log_weight, sampler_cap)
    return {"old_logprobs": logprobs, "sampler_weight": weight, "support": support and support.head(scored)}


def in_order(
    problem_ids: Sequence[str], per_agent: Mapping[str, Sequence[Row]], group_size: int, *, where: object
) -> list[tuple[str, Row]]:
    """(agent, row) of every rollout, by problem, agent and sample.

    Args:
        problem_ids: the step's problems in batch order.
        per_agent: every agent's rows, with problem_id and sample, in any order.
        group_size: responses per problem and agent.
        where: for the message.

    Raises:
        ArtifactError: an agent lacks a response, or has one too many.
    """
    found = {(row["problem_id"], agent, row["sample"]): row for agent, rows in per_agent.items() for row in rows}
    wanted = [
        (problem, agent, sample) for problem in problem_ids for agent in per_agent for sample in range(group_size)
    ]
    total = sum(len(rows) for rows in per_agent.values())
    odd = sorted(found.keys() ^ set(wanted))
    if odd or total != len(wanted):
        problem, agent, sample = odd[0] if odd else next(iter(found))
        raise ArtifactError(
            f"{'unexpected or repeated' if (problem, agent, sample) in found else 'no'} response {sample} of {agent} "
            f"to problem {problem!r}",
            where=where,
            expected=f"{len(wanted)} responses",
            found=total,
            remedy="repeat generate and verify of this step",
        )
    return [(key[1], found[key]) for key in wanted]


def reward_array(
    rows: Sequence[tuple[str, Row]], problems: int, agents: int, group_size: int
) -> npt.NDArray[np.float64]:
    """Rewards as float64 [problems, agents, group_size] from rows in order."""
    return np.array([row["reward"] for _, row in rows], dtype=np.float64).reshape(problems, agents, group_size)
