"""From the rewards of one step to the rows of the capability and advantages tables."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from hacpo.algorithm.capability import accuracy, capability_ratio, extend_window, scores, smoothed
from hacpo.algorithm.capability_error import accuracy_covariance, ratio_interval, smoothed_covariance
from hacpo.algorithm.group_advantage import GUARD_TOLERANCE, UNIFORM_TOLERANCE, step_advantages
from hacpo.algorithm.rollouts import reward_array
from hacpo.errors import ArtifactError
from hacpo.settings.algorithm import AdvantageSettings, CapabilitySettings


@dataclass(frozen=True)
class CapabilityRow:
    """An agent's row of the capability table; the fields are its columns (docs/artifacts.md)."""

    agent: str
    accuracy: float
    window: list[float]
    capability: float
    accuracy_all: float
    window_all: list[float]
    window_covariance: list[list[float]]
    standard_error: float | None
    oracle: float | None


def capability_by_agent(
    table: pa.Table, agents: Collection[str] | None = None, *, where: object = None
) -> dict[str, CapabilityRow]:
    """Agent -> its row of a capability table.

    Args:
        agents: whose rows these must be; None: anybody's.
        where: what the table is called in messages.

    Raises:
        ArtifactError: they are others', or hold no variances of theirs.
    """
    rows = {row["agent"]: CapabilityRow(**row) for row in table.to_pylist()}
    if agents is None:
        return rows
    if rows.keys() != set(agents):
        of_run, of_table = (", ".join(sorted(names)) for names in (agents, rows))
        raise ArtifactError("holds other agents than the run", where=where, expected=of_run, found=of_table[:80])
    for number, agent in enumerate(sorted(agents)):
        for step in rows[agent].window_covariance:
            if step and (len(step) != len(agents) or step[number] < 0):
                remedy = "`hacpo audit` says what else is damaged"
                raise ArtifactError(f"window_covariance of {agent} is none", where=where, remedy=remedy)
    return rows


def capability_rows(
    rewards: Mapping[str, ArrayLike],
    previous: Mapping[str, CapabilityRow],
    settings: CapabilitySettings,
    oracle: Mapping[str, float] | None = None,
) -> list[CapabilityRow]:
    """Rows of the capability table (eq. 9), with what the estimate may be off by (`hacpo.algorithm.capability_error`).

    Args:
        rewards: agent -> rewards of its own responses in this step, [P, G]; all agents answered the same problems, in
            the same order.
        previous: agent -> its row of the step before; empty at step 1.
        oracle: agent -> its capability as an oracle says it; None without one.

    Returns:
        Rows in the order of `rewards`. Within `window_covariance` agents stand by name, so that their order in
        params.yaml has no influence on a row.
    """
    every = {agent: np.asarray(values, dtype=np.float64) for agent, values in rewards.items()}
    used = {agent: values[:, : settings.samples] for agent, values in every.items()}
    names = sorted(rewards)
    covariance = accuracy_covariance(np.stack([scores(used[agent], settings.metric) for agent in names]))
    rows = []
    for agent in rewards:
        number = names.index(agent)
        last = previous.get(agent)
        now, now_all = (accuracy(values[agent], settings.metric) for values in (used, every))
        window = extend_window(last.window if last else (), now, settings.window)
        window_all = extend_window(last.window_all if last else (), now_all, settings.window)
        covariances = [*(last.window_covariance if last else ()), covariance[number]][-settings.window :]
        smooth = smoothed_covariance(covariances)
        rows.append(
            CapabilityRow(
                agent=agent,
                accuracy=now,
                window=list(window),
                capability=smoothed(window, settings.floor),
                accuracy_all=now_all,
                window_all=list(window_all),
                window_covariance=covariances,
                standard_error=math.sqrt(smooth[number]) if smooth else None,
                oracle=oracle[agent] if oracle else None,
            )
        )
    return rows


def side_sample_capability(rewards: ArrayLike, settings: CapabilitySettings) -> float:
    """An agent's capability from a side sample: the mean of that step alone, at least the floor.

    A sample large enough to be an oracle needs no smoothing, and a window would add what the agent was before.

    Args:
        rewards: of all responses of the sample, any shape.
    """
    return smoothed([accuracy(rewards, settings.metric)], settings.floor)


def capabilities_used(rows: Iterable[CapabilityRow], settings: AdvantageSettings) -> dict[str, float | None]:
    """Agent -> the capability that omega is made of, in the baseline and in the discrepancy coefficient alike; None
    where an oracle's is asked for and there is none.

    Args:
        rows: of the capability table.
    """
    return {row.agent: row.oracle if settings.baseline == "oracle" else row.capability for row in rows}


def capability_summary(
    rows: Iterable[CapabilityRow], settings: CapabilitySettings, *, coupled: bool
) -> dict[str, float]:
    """What the capability table says of each agent, and how sure it is; keys as in the stage's metrics.

    Args:
        rows: of the table.
        coupled: whether agents learn from each other's responses or rewards, so that omega is used.

    Returns:
        `<agent>.accuracy`, `<agent>.capability`; `<agent>.standard_error` of the capability, where it is known;
        with `samples`, `<agent>.accuracy_error` and `<agent>.capability_error`: the estimate from the first m responses
        to each problem minus that from all;
        with an oracle, `<agent>.oracle` and `<agent>.oracle_error`: the estimate minus what the oracle says;
        with `coupled`, for every two agents `<of>.<relative to>.omega`, and where it is known its 95 % interval, `_low`
        and `_high`; with an oracle `_oracle`.
    """
    bounds = {"ratio_min": settings.ratio_min, "ratio_max": settings.ratio_max}
    rows = sorted(rows, key=lambda row: row.agent)  # as `window_covariance` lists them
    capability_n = [row.capability for row in rows]
    covariance_nn = [smoothed_covariance(row.window_covariance) for row in rows]
    summary: dict[str, float] = {}
    for k, row in enumerate(rows):
        name = row.agent
        summary |= {f"{name}.accuracy": row.accuracy, f"{name}.capability": row.capability}
        if row.standard_error is not None:
            summary[f"{name}.standard_error"] = row.standard_error
        if settings.samples is not None:
            summary[f"{name}.accuracy_error"] = row.accuracy - row.accuracy_all
            summary[f"{name}.capability_error"] = row.capability - smoothed(row.window_all, settings.floor)
        if row.oracle is not None:
            summary |= {f"{name}.oracle": row.oracle, f"{name}.oracle_error": row.capability - row.oracle}
        for j, other in enumerate(rows if coupled else ()):
            if j == k:
                continue
            key = f"{name}.{other.agent}.omega"
            summary[key] = capability_ratio(of=capability_n[k], relative_to=capability_n[j], **bounds)
            if row.oracle is not None and other.oracle is not None:
                summary[f"{key}_oracle"] = capability_ratio(of=row.oracle, relative_to=other.oracle, **bounds)
            if covariance_nn[k] and covariance_nn[j]:
                summary[f"{key}_low"], summary[f"{key}_high"] = ratio_interval(
                    capability_n, covariance_nn, k, j, **bounds
                )
    return summary


def advantage_columns(
    responses: pa.Table,
    *,
    learner: str,
    agents: Sequence[str],
    sources: Sequence[str],
    group_size: int,
    capabilities: Mapping[str, float | None],
    settings: AdvantageSettings,
    capability_settings: CapabilitySettings,
) -> dict[str, Any]:
    """Columns of the advantages table of one learner.

    Args:
        responses: rollout_id, problem_id, source and reward of every response of the step, by problem, agent, sample.
        agents: whose rewards this learner's responses are measured against: all, or its own alone.
        sources: whose responses it learns from, and which are the table's rows: some of `agents`.
        capabilities: agent -> what omega is made of: its smoothed capability; under `baseline: oracle` the oracle's.
    """
    used = _of(responses, agents)
    values = step_advantages(
        reward_array(used, len(agents), group_size),
        learner=list(agents).index(learner),
        capability_n=np.array([capabilities[agent] for agent in agents]),
        settings=settings,
        capability_settings=capability_settings,
    )
    rows, learned_n = _of(used, sources), [agent in sources for agent in agents]
    return {
        **{name: rows[name] for name in ("rollout_id", "problem_id", "source")},
        "is_self": np.asarray(pc.equal(rows["source"], learner)),
        "reward": rows["reward"],
        **{
            name: getattr(values, name)[:, learned_n].ravel()
            for name in ("baseline", "sigma", "advantage", "omega", "effective_advantage", "uniform", "guarded")
        },
    }


def _of(responses: pa.Table, agents: Sequence[str]) -> pa.Table:
    of_agents = pc.is_in(responses["source"], value_set=pa.array(agents, pa.string()))
    return responses if pc.all(of_agents).as_py() else responses.filter(of_agents).combine_chunks()


def advantage_summary(columns: Mapping[str, Any]) -> dict[str, float]:
    """What a reader should watch in one learner's advantages: dead groups, baselines above 1, and what they do.

    A group is a problem with all responses whose rewards this learner's are measured against; it is live if these
    differ. Shares of groups are about the learner's own baseline mu^(k), in force on its own responses. The best
    responses of a live group are those of the learner's rows whose reward no other row of the group exceeds, where
    these differ: with 0/1 rewards the correct ones, and with graded rewards still those that no baseline should punish.
    A share of nothing is 0; `live_groups` tells it from a true 0.

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
        `omega_cross`: the factor on cross responses, averaged;
        `selected_own`, `selected_cross`: counts of the rows that are trained on, where that is not all of them.
        Without cross responses the two keys about them are absent.
    """
    # A number for each problem: a million names would be as many Python objects, and take seconds to sort.
    problem = _numbered(columns["problem_id"])
    reward, own, baseline, advantage, uniform, guarded = (
        np.asarray(columns[name]) for name in ("reward", "is_self", "baseline", "advantage", "uniform", "guarded")
    )
    # mu^(k) is the same on all own responses to a problem: the first stands for its group.
    first = np.flatnonzero(own)[np.unique(problem[own], return_index=True)[1]]
    live_first = first[~uniform[first]]
    best = ~uniform & better_responses(problem, reward.astype(np.float64))
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
    if "selected" in columns:
        selected = np.asarray(columns["selected"])
        summary |= {"selected_own": float(selected[own].sum()), "selected_cross": float(selected[~own].sum())}
    return summary


def _numbered(problem_ids: Any) -> NDArray[np.int64]:
    """Problem ids, an Arrow column, as numbers: the same for the same problem."""
    codes = pc.index_in(problem_ids, value_set=pc.unique(problem_ids))
    return np.asarray(codes, dtype=np.int64)


def best_responses(problem: NDArray[Any], reward: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether no reward of the same problem is higher, up to the tolerance by which rewards count as equal; [rows]."""
    _, group = np.unique(problem, return_inverse=True)
    highest, largest = np.full(group.max() + 1, -np.inf), np.zeros(group.max() + 1)
    np.maximum.at(highest, group, reward)
    np.maximum.at(largest, group, np.abs(reward))
    return np.asarray(highest[group] - reward <= UNIFORM_TOLERANCE * largest[group])


def better_responses(problem: NDArray[Any], reward: NDArray[np.float64]) -> NDArray[np.bool_]:
    """The best responses to a problem that has worse ones too, [rows]: where all are equally good none is among them.

    In a live group that can be so where a learner's rows are its own alone, and others' rewards are compared with.
    """
    return best_responses(problem, reward) & ~best_responses(problem, -reward)


def _share(flags: NDArray[np.bool_]) -> float:
    return float(flags.mean()) if flags.size else 0.0
