"""Which responses each update of a step sees; no model is needed to know it, so an audit can tell."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hacpo.algorithm.dealing import Flags, Ints, balanced, self_first, slots_of_ranks
from hacpo.algorithm.training_pool import list_lengths
from hacpo.seeds import derive_seed
from hacpo.settings.root import Settings


@dataclass(frozen=True)
class UpdatePlan:
    """Which responses each update sees.

    Attributes:
        rows: per update, numbers of the pool's usable rows in the order in which they are computed.
        counts: per update, source -> responses scheduled, the unusable ones included (the denominators of the means).
    """

    rows: list[list[int]]
    counts: list[dict[str, int]]


def update_slots(
    problem_b: Ints,
    source_b: Ints,
    length_b: Ints,
    *,
    learner: int,
    updates: int,
    order: str,
    ranks: int = 1,
    seed: int | None,
) -> Ints:
    """The update that sees each row of a pool (`plan_updates` says by what rule), -1 if none does, [B].

    Args:
        problem_b: number of each row's problem, from 0 in the pool's order; unusable rows count too.
        source_b: number of the agent that sampled it, from 0 in the order of agents.
        length_b: tokens of prompt and response; `balanced` alone needs them.
        learner: the learner's number.
        updates, order, ranks, seed: as for `plan_updates`.

    Raises:
        DataError: the rows cannot be dealt evenly to the ranks.
    """
    shuffled = list(range(int(problem_b.max()) + 1)) if len(problem_b) else []
    if seed is not None:
        random.Random(seed).shuffle(shuffled)
    place_b = np.argsort(np.array(shuffled, dtype=np.int64))[problem_b]
    if order == "balanced":
        dealt = balanced(place_b, source_b, length_b, learner, ranks)
        return slots_of_ranks(dealt, ranks=ranks, updates=updates)
    if order == "self_first" and ranks > 1:
        return slots_of_ranks(self_first(place_b, source_b, learner), ranks=ranks, updates=updates)

    def cut(first: int, share: int) -> Ints:
        ends = [index * len(shuffled) // share for index in range(1, share + 1)]
        return first + np.searchsorted(ends, place_b, side="right") if share else np.full(len(place_b), -1)

    if order == "mixed":
        return cut(0, updates)
    own_b = source_b == learner
    own, total = int(own_b.sum()), len(own_b)
    own_share = updates if own == total else max(1, round(updates * own / total))
    return np.where(own_b, cut(0, own_share), cut(own_share, updates - own_share))


def plan_updates(
    pool: pa.Table,
    *,
    updates: int,
    order: str,
    ranks: int = 1,
    seeds: Sequence[int | None],
    selected_b: Flags | None = None,
    by_group: bool = False,
) -> UpdatePlan:
    """Split a step's pool into its updates; rows of similar length share a forward pass.

    Args:
        pool: columns of the pool table; otherwise as for `pool_slots`.

    Raises:
        DataError: the rows cannot be dealt evenly to the ranks.
    """
    slots_pb = pool_slots(
        pool, updates=updates, order=order, ranks=ranks, seeds=seeds, selected_b=selected_b, by_group=by_group
    )
    kept = np.asarray(pc.equal(pool["status"], "kept"))
    lengths = list_lengths(pool["prompt_token_ids"]) + list_lengths(pool["token_ids"])
    parts = [
        np.flatnonzero(kept & (slots == update)) for slots, pass_ in _each_update(slots_pb, updates) for update in pass_
    ]
    # Less padding, and still the same order every time.
    by_length = [part[np.argsort(lengths[part], kind="stable")].tolist() for part in parts]
    return UpdatePlan(by_length, scheduled(pool["source"], slots_pb, updates))


def pool_slots(
    pool: pa.Table,
    *,
    updates: int,
    order: str,
    ranks: int = 1,
    seeds: Sequence[int | None],
    selected_b: Flags | None = None,
    by_group: bool = False,
) -> Ints:
    """The update that sees each row of a pool in each pass over it, -1 if none does, [passes, B].

    Prompts are shuffled, or taken in the pool's order. `mixed`: they are cut into `updates` equal parts, each with all
    responses to its prompts. `self_first`: the first updates see only own responses, the later ones only cross
    responses, in proportion to their number; with several ranks, each of them deals with its own part of that order.
    `balanced`: agent after agent, dealt to the ranks by length (`hacpo.algorithm.dealing` has both orders).

    Args:
        pool: every row in table order (by problem, agent and sample), unusable ones too: problem_id, source, is_self,
            and for `balanced` prompt_token_ids and source_tokens.
        updates: number of updates of one pass; those of a later pass are counted on from it.
        order: `LossSettings.minibatch_order`.
        ranks: ranks that `self_first` and `balanced` deal the responses to.
        seeds: of each pass's shuffle (`shuffle_seeds`); None does not shuffle.
        selected_b: the rows that are trained on; None: all.
        by_group: groups (one agent's responses to a problem) are shuffled and cut in place of prompts.

    Raises:
        DataError: the rows cannot be dealt evenly to the ranks.
    """
    own = np.flatnonzero(pool["is_self"])
    source_b, length_b = _numbered(pool["source"]), np.zeros(len(pool), np.int64)
    if order == "balanced":
        length_b = list_lengths(pool["prompt_token_ids"]) + np.asarray(pool["source_tokens"], dtype=np.int64)
    problem_b = _numbered(pool["problem_id"])
    names = pc.unique(pool["source"]).to_pylist()
    return step_slots(
        group_numbers(problem_b, source_b, names, selected_b) if by_group else problem_b,
        source_b,
        length_b,
        learner=int(source_b[own[0]]) if len(own) else -1,
        updates=updates,
        order=order,
        ranks=ranks,
        seeds=seeds,
        selected_b=selected_b,
    )


def group_numbers(problem_b: Ints, source_b: Ints, names: Sequence[str], selected_b: Flags | None) -> Ints:
    """Number of each row's group among those that rows are selected of, [B]: by problem, then by the source's name, so
    that the order of agents has no part in it; 0 for rows that are not selected.

    Args:
        names: of the sources, by their number.
    """
    place_n = np.argsort(np.argsort(np.array(names, dtype=np.str_)))
    key_b = problem_b * len(names) + place_n[source_b]
    chosen_b = np.ones(len(key_b), dtype=np.bool_) if selected_b is None else selected_b
    numbers_b = np.zeros(len(key_b), dtype=np.int64)
    numbers_b[chosen_b] = np.unique(key_b[chosen_b], return_inverse=True)[1]
    return numbers_b


def step_slots(
    problem_b: Ints,
    source_b: Ints,
    length_b: Ints,
    *,
    learner: int,
    updates: int,
    order: str,
    ranks: int = 1,
    seeds: Sequence[int | None],
    selected_b: Flags | None = None,
) -> Ints:
    """`update_slots` of each pass, every pass's updates counted on from those before, [passes, B].

    Args:
        problem_b: number of what is shuffled and cut: each row's problem, or its group.
        updates: number of updates of one pass.
        seeds: of each pass's shuffle; the others as for `update_slots`.
        selected_b: the rows that are trained on, the others are in no update; None: all.

    Raises:
        DataError: the rows cannot be dealt evenly to the ranks.
    """
    chosen = np.arange(len(problem_b)) if selected_b is None else np.flatnonzero(selected_b)
    slots_pb = np.full((len(seeds), len(problem_b)), -1)
    parts = (problem_b[chosen], source_b[chosen], length_b[chosen])
    for number, seed in enumerate(seeds):
        slots = update_slots(*parts, learner=learner, updates=updates, order=order, ranks=ranks, seed=seed)
        slots_pb[number, chosen] = np.where(slots < 0, -1, slots + number * updates)
    return slots_pb


def scheduled(sources: Any, slots_pb: Ints, updates: int) -> list[dict[str, int]]:
    """Per update, source -> responses that it sees, the unusable ones included.

    Args:
        sources: of each row of the pool, an Arrow column.
        slots_pb: the update that sees each row in each pass.
        updates: of one pass.
    """
    return [
        dict(Counter(sources.filter(pa.array(slots == update)).to_pylist()))
        for slots, pass_ in _each_update(slots_pb, updates)
        for update in pass_
    ]


def _each_update(slots_pb: Ints, updates: int) -> Iterator[tuple[Ints, range]]:
    """Of each pass, the rows' slots and the numbers of its updates."""
    for number, slots in enumerate(slots_pb):
        yield slots, range(number * updates, (number + 1) * updates)


def _numbered(names: Any) -> Ints:
    """Each name of an Arrow column as a number, in the order in which they first occur."""
    return np.asarray(pc.index_in(names, value_set=pc.unique(names)), dtype=np.int64)


def shuffle_seeds(settings: Settings, step: int, agent: str) -> list[int | None]:
    """Seeds of the shuffle of prompts in each pass of a step; None where `loss.shuffle` is off."""
    rollouts, loss = settings.algorithm.rollouts, settings.algorithm.loss
    first = derive_seed(settings.seed, "update", step, agent)
    later = [derive_seed(settings.seed, "update", step, agent, number) for number in range(1, rollouts.passes)]
    return [first, *later] if loss.shuffle else [None] * rollouts.passes
