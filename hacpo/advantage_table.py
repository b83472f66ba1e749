"""From the rewards of one step to the rows of the capability and advantages tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hacpo.advantage import GUARD_TOLERANCE, UNIFORM_TOLERANCE, step_advantages
from hacpo.capability import accuracy, extend_window, smoothed
from hacpo.config import AdvantageSettings, CapabilitySettings
from hacpo.rollouts import Row, reward_array


def capability_rows(
    rewards: Mapping[str, Sequence[float]], previous: Mapping[str, Sequence[float]], settings: CapabilitySettings
) -> list[Row]:
    """Rows of the capability table (eq. 8, 9).

    Args:
        rewards: agent -> rewards of its own responses in this step.
        previous: agent -> window of the step before; empty at step 1.
    """
    rows = []
    for agent, values in rewards.items():
        now = accuracy(values, settings.metric)
        window = extend_window(previous.get(agent, ()), now, settings.window)
        rows.append(
            {"agent": agent, "accuracy": now, "window": list(window), "capability": smoothed(window, settings.floor)}
        )
    return rows


def advantage_columns(
    ordered: Sequence[tuple[str, Row]],
    *,
    learner: str,
    agents: Sequence[str],
    group_size: int,
    capabilities: Mapping[str, float],
    settings: AdvantageSettings,
    capability_settings: CapabilitySettings,
) -> dict[str, Any]:
    """Columns of the advantages table of one learner.

    Args:
        ordered: (agent, verdict row) of every response of the step, by problem, agent, sample.
        agents: whose responses this learner learns from: all, or itself alone.
        capabilities: agent -> smoothed capability.
    """
    rows = [(agent, row) for agent, row in ordered if agent in agents]
    rewards = reward_array(rows, len(rows) // (len(agents) * group_size), len(agents), group_size)
    values = step_advantages(
        rewards,
        learner=list(agents).index(learner),
        capability_n=np.array([capabilities[agent] for agent in agents]),
        settings=settings,
        capability_settings=capability_settings,
    )
    return {
        "rollout_id": [row["rollout_id"] for _, row in rows],
        "problem_id": [row["problem_id"] for _, row in rows],
        "source": [agent for agent, _ in rows],
        "is_self": [agent == learner for agent, _ in rows],
        "reward": [row["reward"] for _, row in rows],
        **{
            name: getattr(values, name).ravel()
            for name in ("baseline", "sigma", "advantage", "omega", "effective_advantage", "uniform", "guarded")
        },
    }


def advantage_summary(columns: Mapping[str, Any]) -> dict[str, float]:
    """What a reader should watch in one learner's advantages: dead groups, baselines above 1, and what they do.

    A group is a problem with all responses that this learner learns from; it is live if its rewards differ. Shares of
    groups are about the learner's own baseline mu^(k), in force on its own responses. The best responses of a live
    group are those whose reward nothing in the group exceeds: with 0/1 rewards the correct ones, and with graded
    rewards still those that no baseline should punish. A share of nothing is 0; `live_groups` tells it from a true 0.

    Args:
        columns: of the advantages table of one learner and step.

    Returns:
        `groups`, `live_groups`: counts;
        `uniform`: share of groups that are not live;
        `baseline_above_one`: share of live groups with mu^(k) above 1 before the guard (rewards beyond 0/1 are not
            guarded, and 1 means nothing special to them);
        `guarded`: share of live groups in which the guard replaced mu^(k);
        `punished_correct`: share of the best responses of live groups with a negative advantage; `punished_correct_own`
            and `punished_correct_cross` by whose they are;
        `advantage_max`: largest |effective advantage|;
        `omega_cross`: the factor on cross responses, averaged.
        Without cross responses the two keys about them are absent.
    """
    problem, reward, own, baseline, advantage, uniform, guarded = (
        np.asarray(columns[name])
        for name in ("problem_id", "reward", "is_self", "baseline", "advantage", "uniform", "guarded")
    )
    # mu^(k) is the same on all own responses to a problem: the first stands for its group.
    first = np.flatnonzero(own)[np.unique(problem[own], return_index=True)[1]]
    live_first = first[~uniform[first]]
    best = ~uniform & _best(problem, reward.astype(np.float64))
    punished = advantage < 0
    summary = {
        "groups": float(len(first)),
        "live_groups": float(len(live_first)),
        "uniform": _share(uniform[first]),
        "baseline_above_one": _share(guarded[live_first] | (baseline[live_first] > 1 + GUARD_TOLERANCE)),
        "guarded": _share(guarded[live_first]),
        "punished_correct": _share(punished[best]),
        "punished_correct_own": _share(punished[best & own]),
        "advantage_max": float(np.abs(columns["effective_advantage"]).max()),
    }
    if not own.all():
        summary["punished_correct_cross"] = _share(punished[best & ~own])
        summary["omega_cross"] = float(np.asarray(columns["omega"])[~own].mean())
    return summary


def _best(problem: NDArray[Any], reward: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether no reward of the same problem is higher, up to the tolerance by which rewards count as equal; [rows]."""
    _, group = np.unique(problem, return_inverse=True)
    highest, largest = np.full(group.max() + 1, -np.inf), np.zeros(group.max() + 1)
    np.maximum.at(highest, group, reward)
    np.maximum.at(largest, group, np.abs(reward))
    return np.asarray(highest[group] - reward <= UNIFORM_TOLERANCE * largest[group])


def _share(flags: NDArray[np.bool_]) -> float:
    return float(flags.mean()) if flags.size else 0.0
