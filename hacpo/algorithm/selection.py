"""Which of the responses that agents share a learner trains on, where a recipe does not take all of them.

Success-gated transfer (SGT, arXiv 2605.07244), `select: rescue`: all of the learner's own responses and, for a problem
that none of them solves and others do, one of the others' right responses, drawn at random. Where the gate is shut, no
response of another agent is learned from. A response is right if its reward is above 0.

Sampled sharing (SAPO, arXiv 2509.08721), `select: sample`: of groups, which are an agent's responses to one problem, I
of the learner's own and J of all the other agents', drawn at random without putting back. Groups of others whose
advantages are all 0 teach nothing and are left out before the draw; there may be fewer than J.

What is drawn has the smallest of keys that are hashes of names: a draw depends on the run's seed, the step, the learner
and the names of what is drawn from, not on the order of agents or on how work is spread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hacpo.seeds import derive_seed
from hacpo.settings.algorithm import RolloutUse

Flags = NDArray[np.bool_]
Group = tuple[str, str]
"""Problem and source."""


def selection(columns: Mapping[str, Any], settings: RolloutUse, *, step: int, learner: str) -> dict[str, Flags]:
    """The column `selected` of a learner's advantages, for those that have one: which rows it trains on.

    Args:
        columns: rollout_id, problem_id, source, is_self, reward and effective_advantage of every row.

    Returns:
        No column where a learner trains on all of them.
    """
    if settings.select == "all":
        return {}
    problem, source, rollout = (_texts(columns[name]) for name in ("problem_id", "source", "rollout_id"))
    own, reward, worth = (np.asarray(columns[name]) for name in ("is_self", "reward", "effective_advantage"))
    draw = (settings.draw_seed or 0, "select", step, learner)
    if settings.select == "rescue":
        rescued = set(_rescues(problem, rollout, own, reward > 0, draw))
        return {"selected": own | np.array([identity in rescued for identity in rollout], dtype=np.bool_)}
    groups: dict[Group, bool] = {}
    for name, whose, teaches in zip(problem, source, worth != 0, strict=True):
        groups[name, whose] = groups.get((name, whose), False) or bool(teaches)
    mine = [group for group in groups if group[1] == learner]
    external = [group for group, teaches in groups.items() if group[1] != learner and teaches]
    wanted = settings.groups_drawn(len(mine))
    chosen = {
        group for part, count in zip((mine, external), wanted, strict=True) for group in _drawn(part, count, draw)
    }
    return {"selected": np.array([group in chosen for group in zip(problem, source, strict=True)], dtype=np.bool_)}


def _rescues(
    problem: Sequence[str], rollout: Sequence[str], own: Flags, right: Flags, draw: tuple[int | str, ...]
) -> Iterable[str]:
    """One right response of the others to each problem of which the learner has none."""
    solved = {name for name, mine, well in zip(problem, own, right, strict=True) if mine and well}
    others: dict[str, list[str]] = {}
    for name, identity, mine, well in zip(problem, rollout, own, right, strict=True):
        if well and not mine and name not in solved:
            others.setdefault(name, []).append(identity)
    for candidates in others.values():
        yield min(candidates, key=lambda identity: (derive_seed(*draw, identity), identity))


def _drawn(groups: Sequence[Group], count: int, draw: tuple[int | str, ...]) -> list[Group]:
    return sorted(groups, key=lambda group: (derive_seed(*draw, *group), group))[:count]


def _texts(column: Any) -> list[str]:
    values: list[str] = column.to_pylist()
    return values
