"""Which runs repeat each other, and in which settings such groups differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from hacpo.errors import SettingsError
from hacpo.pipeline.views.made_otherwise import MEANINGLESS
from hacpo.settings import params

SEEDS = ("seed", "start_seed")
_APART_FROM = (*SEEDS, *MEANINGLESS)
"""What of a run's settings tells it from no other."""

_OF_THE_SEED = "algorithm.rollouts.draw_seed"
"""Follows from `seed` where it is not given."""

Unit = tuple[int, int]
"""`seed` and `start_seed` of a run: runs of two groups that have both in common are a pair."""


@dataclass(frozen=True)
class Group:
    """Runs of the same settings but for seeds.

    Attributes:
        base: what it is compared within; empty where no sweep made it.
        name: what it is called.
        runs: seeds -> the run's results.
        settings: dotted key -> value, of the first run.
    """

    base: str
    name: str
    runs: Mapping[Unit, pl.DataFrame]
    settings: Mapping[str, Any]

    @property
    def agents(self) -> list[str]:
        """Whose results there are."""
        return list(dict.fromkeys(next(iter(self.runs.values()))["agent"]))


def groups_of(results: pl.DataFrame) -> list[Group]:
    """The groups of some results, in their order: by what a sweep, or the user, called them; else by their settings.

    Runs that bear the same name and the same seeds, but not the same settings, are groups of their own.

    Raises:
        SettingsError: two groups of a base would have one name.
    """
    frames_of: dict[tuple[str, str, str], dict[str, pl.DataFrame]] = {}
    for (run,), frame in results.group_by("run", maintain_order=True):
        base, variant, settings = frame["base"][0], frame["variant"][0], frame["settings"][0]
        own = variant if variant != run else ""
        key = (base, own, "" if own else _apart_from_seeds(settings))
        frames_of.setdefault(key, {})[str(run)] = frame
    groups, named = [], set[tuple[str, str]]()
    for (base, variant, _), frames in frames_of.items():
        for name, runs in _distinct(variant, frames):
            first = next(iter(runs.values()))
            if (base, name) in named:
                remedy = "name one of them: NAME=RUN"
                raise SettingsError("a run, and a group of others, have this name", where=name, remedy=remedy)
            named.add((base, name))
            groups.append(Group(base, name, runs, _leaves(first["settings"][0])))
    return groups


def _distinct(variant: str, frames: Mapping[str, pl.DataFrame]) -> list[tuple[str, dict[Unit, pl.DataFrame]]]:
    """Runs by their seeds; where two have the same, as groups by the names of the runs."""
    runs = {(int(frame["seed"][0]), int(frame["start_seed"][0])): frame for frame in frames.values()}
    if len(runs) == len(frames):
        return [(variant or next(iter(frames)), runs)]
    return [(name, {(int(frame["seed"][0]), int(frame["start_seed"][0])): frame}) for name, frame in frames.items()]


def _apart_from_seeds(settings: str) -> str:
    return json.dumps(_leaves(settings), sort_keys=True)


def _leaves(settings: str) -> dict[str, Any]:
    tree = params.leaves({key: value for key, value in json.loads(settings).items() if key not in _APART_FROM})
    return {key: value for key, value in tree.items() if key != _OF_THE_SEED}


def differences(groups: Sequence[Group]) -> list[tuple[str, list[Any]]]:
    """(dotted key, each group's value) of every setting in which they differ; null where a group has no such key."""
    keys = sorted({key for group in groups for key in group.settings})
    rows = [(key, [group.settings.get(key) for group in groups]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]
