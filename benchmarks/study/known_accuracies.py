"""Groups of responses to problems of known accuracies: drawn and given to the project's own functions, and by hand.

Legend: `_s` steps, `_p` problems, `_n` agents, `_g` samples of a group, `_o` outcomes: how many of each agent's
responses to a problem are right. The learner is the first agent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hacpo.algorithm.advantage_table import capability_by_agent, capability_rows
from hacpo.algorithm.capability import omega_matrix
from hacpo.algorithm.group_advantage import GUARD_TOLERANCE, step_advantages
from hacpo.seeds import derive_seed
from hacpo.settings.algorithm import AdvantageSettings, CapabilitySettings
from hacpo.settings.recipes import RECIPES

Floats = NDArray[np.float64]

GROUP_SIZE = 8
BASELINES = ("capability", "oracle", "joint", "own", "shrunk")
QUANTITIES = ("bias", "sd", "punished", "guarded", "omega")


@dataclass(frozen=True)
class Case:
    """Steps of one distribution of problems.

    Attributes:
        kinds: accuracies of all agents on each kind of problem, the learner's first.
        guard: `advantage.baseline_guard`; the paper has none.
        problems: of a step.
        window: K, steps that capabilities average over.
    """

    name: str
    kinds: tuple[tuple[float, ...], ...]
    guard: bool = False
    problems: int = 32
    window: int = 5

    @property
    def capability(self) -> CapabilitySettings:
        """The shipped settings, but for the window."""
        return CapabilitySettings.model_validate({**RECIPES["hacpo"]["capability"], "window": self.window})

    def advantage(self, baseline: str) -> AdvantageSettings:
        """The shipped settings, but for baseline and guard."""
        changes = {"baseline": baseline, "baseline_guard": self.guard}
        return AdvantageSettings.model_validate({**RECIPES["hacpo"]["advantage"], **changes})

    @property
    def known_n(self) -> Floats:
        """Every agent's accuracy over all problems, at least the floor: the capabilities of an oracle."""
        return np.maximum(np.mean(self.kinds, axis=0), self.capability.floor)


_CONSTANT = ((0.84, 0.4), (0.42, 0.2))
_COMPLEMENTARY = ((0.75, 0.2), (0.2, 0.75))
_UNEVEN = ((0.84, 0.2), (0.84, 0.6))
CASES = (
    Case("ratio 1 everywhere", ((0.7, 0.7), (0.3, 0.3))),
    Case("ratio 2.1 everywhere", _CONSTANT),
    Case("ratio 2.1 everywhere, omega from one step of 4 problems", _CONSTANT, problems=4, window=1),
    Case("three agents, ratios 2.1 and 4.2 everywhere", ((0.84, 0.4, 0.2), (0.42, 0.2, 0.1))),
    Case("complementary agents", _COMPLEMENTARY),
    Case("strong learner, uneven partner", _UNEVEN),
    Case("strong learner, uneven partner, guard", _UNEVEN, guard=True),
    Case("weak uneven learner, strong partner", ((0.2, 0.84), (0.6, 0.84))),
    Case("ratio 20, omega_max acts", ((0.9, 0.045),)),
    Case("ratio 1/20, omega_min acts", ((0.045, 0.9),)),
    Case("partner near zero", ((0.5, 0.01),)),
    Case("partner near zero, guard", ((0.5, 0.01),), guard=True),
    Case("partner always wrong", ((0.5, 0.0),)),
)
"""Accuracies of `complementary agents` are about those of tiny agents in families that they work out and in families
that they guess at (pipelines/study/pairs/model.yaml). omega is 2.1 and not 2 so that no baseline is exactly 1, where
the least error of an estimate would decide."""


@dataclass(frozen=True)
class Groups:
    """What became of groups; every field has one number for each of them, in any shape.

    Attributes:
        error: mu^(k) - p_k.
        at_stake: 1 where the learner has a right answer and the rewards differ, else 0.
        punished: 1 where a right answer gets a negative advantage as well.
        guarded: 1 where the guard acted.
        omega: omega^(k,j) of the first other agent.
        weight: share of all groups.
    """

    error: Floats
    at_stake: Floats
    punished: Floats
    guarded: Floats
    omega: Floats
    weight: Floats

    def quantity(self, name: str) -> float:
        """One of `QUANTITIES` over all groups; NaN for a share of nothing."""
        weight = self.weight / self.weight.sum()
        mean = {key: float((weight * getattr(self, key)).sum()) for key in ("error", "at_stake", "punished")}
        if name == "bias":
            return mean["error"]
        if name == "sd":
            return math.sqrt(float((weight * (self.error - mean["error"]) ** 2).sum()))
        if name == "punished":
            return mean["punished"] / mean["at_stake"] if mean["at_stake"] else math.nan
        return float((weight * getattr(self, name)).sum())

    def part(self, chosen: Any) -> Groups:
        """Some of the groups."""
        return Groups(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})


# --- simulated -------------------------------------------------------------------------------------------------------


def simulated(case: Case, steps: int) -> dict[str, Groups]:
    """Groups of every baseline, each [steps, problems]; problem p is of kind p modulo the number of kinds."""
    accuracy_pn = np.array([case.kinds[number % len(case.kinds)] for number in range(case.problems)])
    random = np.random.default_rng(derive_seed("theory", case.name))
    shape = (steps, *accuracy_pn.shape, GROUP_SIZE)
    rewards_spng = (random.random(shape) < accuracy_pn[None, :, :, None]).astype(np.float64)
    estimated_sn = _capabilities(case, rewards_spng)
    found = {}
    for baseline in BASELINES:
        capability_sn = np.broadcast_to(case.known_n, estimated_sn.shape) if baseline == "oracle" else estimated_sn
        each = [
            _groups(case, baseline, rewards_png, capability_n, accuracy_pn[:, 0])
            for rewards_png, capability_n in zip(rewards_spng, capability_sn, strict=True)
        ]
        found[baseline] = Groups(*(np.stack([getattr(one, field.name) for one in each]) for field in fields(Groups)))
    return found


def _capabilities(case: Case, rewards_spng: Floats) -> Floats:
    """Every agent's smoothed capability in every step, [S, N], each step's window going on from the one before."""
    names = [str(number) for number in range(rewards_spng.shape[2])]
    previous, capability_sn = {}, []
    for rewards_png in rewards_spng:
        rows = capability_rows({name: rewards_png[:, int(name)] for name in names}, previous, case.capability)
        previous = capability_by_agent(pa.Table.from_pylist([vars(row) for row in rows]))
        capability_sn.append([row.capability for row in rows])
    return np.array(capability_sn)


def _groups(case: Case, baseline: str, rewards_png: Floats, capability_n: Floats, accuracy_p: Floats) -> Groups:
    """Groups of one step as the learner, the first agent, sees them."""
    found = step_advantages(
        rewards_png,
        learner=0,
        capability_n=capability_n,
        settings=case.advantage(baseline),
        capability_settings=case.capability,
    )
    right_pg = rewards_png[:, 0] == 1.0
    at_stake_p = right_pg.any(axis=1) & ~found.uniform[:, 0, 0]
    # A baseline that is 1 on paper may come out a rounding above it.
    punished_p = at_stake_p & (right_pg & (found.advantage[:, 0] < -GUARD_TOLERANCE)).any(axis=1)
    return Groups(
        error=found.baseline[:, 0, 0] - accuracy_p,
        at_stake=at_stake_p.astype(np.float64),
        punished=punished_p.astype(np.float64),
        guarded=found.guarded[:, 0, 0].astype(np.float64),
        omega=np.full(len(accuracy_p), omega_matrix(capability_n, case.capability)[0, 1]),
        weight=np.ones(len(accuracy_p)),
    )


# --- by hand ---------------------------------------------------------------------------------------------------------


def closed_form(case: Case, baseline: str, kinds: Sequence[Sequence[float]], group_size: int = GROUP_SIZE) -> Groups:
    """Every outcome of a group with its probability as weight: how many of each agent's responses are right.

    Written from the formulas, without the functions that `simulated` looks at.

    Args:
        kinds: accuracies on the kinds of problems that are looked at, equally frequent.
    """
    capability, agents = case.capability, len(kinds[0])
    omega_n = np.clip(case.known_n[0] / case.known_n, capability.ratio_min, capability.ratio_max)
    right_on = np.indices((group_size + 1,) * agents).reshape(agents, -1).T
    mean_on = right_on / group_size
    right_o = right_on.sum(axis=1)
    mu_o = {
        "capability": (mean_on * omega_n).mean(axis=1),
        "oracle": (mean_on * omega_n).mean(axis=1),
        "joint": mean_on.mean(axis=1),
        "own": mean_on[:, 0],
        "shrunk": _shrunk(mean_on, omega_n, group_size, case.advantage("shrunk").kappa),
    }[baseline]
    above_o = mu_o > 1.0 + GUARD_TOLERANCE
    guarded_o = above_o & case.guard
    mu_o = np.where(guarded_o, mean_on[:, 0], mu_o)
    at_stake_o = (right_on[:, 0] > 0) & (right_o < agents * group_size)
    each = [
        Groups(
            error=mu_o - kind[0],
            at_stake=at_stake_o.astype(np.float64),
            punished=(at_stake_o & above_o & ~guarded_o).astype(np.float64),
            guarded=guarded_o.astype(np.float64),
            omega=np.full(len(mu_o), omega_n[1]),
            weight=np.prod([_binomial(group_size, p)[right_on[:, j]] for j, p in enumerate(kind)], axis=0),
        )
        for kind in kinds
    ]
    return Groups(*(np.concatenate([getattr(one, field.name) for one in each]) for field in fields(Groups)))


def _shrunk(mean_on: Floats, omega_n: Floats, group_size: int, kappa: float) -> Floats:
    joint_o = np.minimum(1.0, mean_on * omega_n).mean(axis=1)
    return np.asarray((group_size * mean_on[:, 0] + kappa * joint_o) / (group_size + kappa))


def _binomial(trials: int, p: float) -> Floats:
    """Probability of each number of successes."""
    return np.array([math.comb(trials, right) * p**right * (1 - p) ** (trials - right) for right in range(trials + 1)])
