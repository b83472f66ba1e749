"""From the rewards of one step to the rows of the capability and advantages tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hacpo.advantage import step_advantages
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
    """What a reader should watch: dead groups, baselines above 1, guarded rows, correct answers that are punished.

    Returns:
        `uniform`: share of rows without signal; `baseline_above_one`: share of live rows measured against more than 1;
        `guarded`: share of all rows; `punished_correct`: share of rewards above 0.5 in live groups with a negative
        advantage;
        `omega_cross`: the factor on cross rows, averaged (absent without cross rows).
    """
    live = ~np.asarray(columns["uniform"])
    cross = ~np.asarray(columns["is_self"])
    correct = live & (np.asarray(columns["reward"]) > 0.5)
    summary = {
        "uniform": float(1 - live.mean()),
        "baseline_above_one": float((columns["baseline"][live] > 1).mean()) if live.any() else 0.0,
        "guarded": float(np.asarray(columns["guarded"]).mean()),
        "punished_correct": float((columns["advantage"][correct] < 0).mean()) if correct.any() else 0.0,
    }
    if cross.any():
        summary["omega_cross"] = float(columns["omega"][cross].mean())
    return summary
