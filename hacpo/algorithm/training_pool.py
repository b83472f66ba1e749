"""What a learner trains on in a step: its pool, advantages and own log-probabilities, in columns.

Rows are made for one forward pass at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hacpo.algorithm.rollouts import of_first_problems, supports
from hacpo.algorithm.sampler_correction import sequence_log_weight, truncated_weight
from hacpo.algorithm.support import Support
from hacpo.errors import ArtifactError


@dataclass(frozen=True)
class TrainingRow:
    """One response to learn from.

    Attributes:
        source: who sampled it; `is_self`: the learner itself.
        prompt_token_ids, token_ids: in the learner's vocabulary; the latter are scored.
        source_logprob: sum of the log-probabilities that the ratio divides by, of `source_tokens` tokens.
        text_bytes: UTF-8 bytes of the text.
        effective_advantage: A of own, omega A of cross responses.
        sampler_weight: from the sampler's to the training stack's distribution; 1 for cross responses.
        old_logprobs: per token, under the learner before this step's updates; None for cross responses.
        support: the tokens that log-probabilities are restricted to; None: to nothing.
    """

    source: str
    is_self: bool
    prompt_token_ids: list[int]
    token_ids: list[int]
    source_logprob: float
    source_tokens: int
    text_bytes: int
    effective_advantage: float
    sampler_weight: float
    old_logprobs: list[float] | None
    support: Support | None


@dataclass(frozen=True)
class TrainingPool:
    """Responses to learn from, usable or not.

    Attributes:
        table: columns of the pool table and of `TrainingRow`, without `support`, and `selected`; `old_logprobs` may
            have one value more than a response has tokens, that of an EOS which is not scored.
        support: of each row.
    """

    table: pa.Table
    support: Sequence[Support | None]

    def __len__(self) -> int:
        """Rows."""
        return len(self.table)

    @property
    def selected(self) -> NDArray[np.bool_]:
        """Which rows are trained on, usable or not."""
        return np.asarray(self.table["selected"], dtype=np.bool_)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of prompt and response of each row."""
        return list_lengths(self.table["prompt_token_ids"]) + list_lengths(self.table["token_ids"])

    def rows(self, numbers: Iterable[int]) -> list[TrainingRow]:
        """Some of the rows."""
        return [self._row(number) for number in numbers]

    def _row(self, number: int) -> TrainingRow:
        names = [name for name in TrainingRow.__dataclass_fields__ if name != "support"]
        values = {name: self.table[name][number].as_py() for name in names}
        old = values["old_logprobs"]
        scored = old if old is None else old[: len(values["token_ids"])]
        return TrainingRow(**{**values, "old_logprobs": scored}, support=self.support[number])

    def divided_by(self, sums: Mapping[int, float]) -> TrainingPool:
        """With other log-probabilities to divide by, sums over the learner's tokens, of the rows with these numbers."""
        table, numbers = self.table, list(sums)
        for name, values in (
            ("source_logprob", list(sums.values())),
            ("source_tokens", table["learner_tokens"].take(pa.array(numbers, pa.int64()))),
        ):
            column = table[name].to_numpy().copy()
            column[numbers] = values
            table = table.set_column(table.column_names.index(name), name, pa.array(column))
        return replace(self, table=table)

    def of_first_problems(self, limit: int | None) -> TrainingPool:
        """The rows of the first `limit` problems; all if None."""
        if limit is None:
            return self
        chosen = of_first_problems(self.table["problem_id"], limit)
        numbers = np.flatnonzero(chosen).tolist()
        return TrainingPool(self.table.filter(chosen), [self.support[number] for number in numbers])


def list_lengths(column: Any) -> NDArray[np.int64]:
    """Length of each list of an Arrow column."""
    return np.asarray(pc.list_value_length(column), dtype=np.int64)


def training_pool(
    pool: pa.Table, advantages: pa.Table, own: pa.Table, *, sampler_cap: float | None, where: object
) -> TrainingPool:
    """A pool joined with its advantages and the learner's log-probabilities.

    Args:
        pool: the pool table.
        advantages: rollout_id, effective_advantage and selected of the same responses.
        own: the learner's rollouts: rollout_id, logprobs, support and, with a `sampler_cap`, sampler_logprobs.
        sampler_cap: largest weight of an own response (`hacpo.algorithm.sampler_correction`); None: every weight is 1.
        where: for messages.

    Raises:
        ArtifactError: the tables do not hold the same responses, or not the same tokens of them.
    """
    ids = pool["rollout_id"]
    _check_together(ids, ids.filter(pool["is_self"]), advantages["rollout_id"], own["rollout_id"], where)
    at = pc.index_in(ids, value_set=advantages["rollout_id"])
    worth, selected = advantages["effective_advantage"].take(at), pc.fill_null(advantages["selected"].take(at), True)
    place = pc.index_in(ids, value_set=own["rollout_id"])
    old = own["logprobs"].take(place)
    _check_tokens(ids, pool["token_ids"], old, where)
    own_rows = [(row, number) for row, number in enumerate(place.to_pylist()) if number is not None]
    scored = list_lengths(pool["token_ids"])
    support, own_support, weights = supports(pool), supports(own), np.ones(len(pool))
    for row, number in own_rows:
        positions, as_sampled = int(scored[row]), own_support[number]
        support[row] = as_sampled and as_sampled.head(positions)
        if sampler_cap is not None:
            logprobs, sampler = (own[name][number].as_py()[:positions] for name in ("logprobs", "sampler_logprobs"))
            weights[row] = truncated_weight(sequence_log_weight(logprobs, sampler), sampler_cap)
    _check_support(ids, scored, support, where)
    table = pool.drop_columns([name for name in ("support",) if name in pool.column_names])
    added = {"effective_advantage": worth, "sampler_weight": pa.array(weights), "old_logprobs": old}
    for name, column in {**added, "selected": selected}.items():
        table = table.append_column(name, column)
    return TrainingPool(table, support)


def _check_together(ids: Any, own_ids: Any, advantage_ids: Any, rollout_ids: Any, where: object) -> None:
    """The tables hold the same responses."""
    pooled, of_self, worth, old = (set(column.to_pylist()) for column in (ids, own_ids, advantage_ids, rollout_ids))
    alone = (worth ^ pooled) | (old ^ of_self)
    if alone:
        raise ArtifactError(
            "pool, advantages and rollouts do not belong together",
            where=where,
            found=f"{min(alone)!r} in only one of them",
            remedy="repeat pool and advantage of this step",
        )


def _check_tokens(ids: Any, token_ids: Any, old: Any, where: object) -> None:
    """As many tokens as log-probabilities, or one less: the EOS that the pool left out (`importance.score_eos`)."""
    scored, sampled = list_lengths(token_ids), np.asarray(pc.fill_null(pc.list_value_length(old), -1), dtype=np.int64)
    odd = np.flatnonzero((sampled >= 0) & ((sampled - scored < 0) | (sampled - scored > 1)))
    if len(odd):
        raise ArtifactError(
            "pool and rollouts do not hold the same tokens",
            where=where,
            expected=f"{sampled[odd[0]]} tokens of {ids[int(odd[0])].as_py()!r}, or one less",
            found=scored[odd[0]],
            remedy="repeat pool of this step",
        )


def _check_support(ids: Any, scored: NDArray[np.int64], support: Sequence[Support | None], where: object) -> None:
    """A set of kept ids for each token."""
    for row, (tokens, kept) in enumerate(zip(scored.tolist(), support, strict=True)):
        if tokens and kept is not None and len(kept) != tokens:
            raise ArtifactError(
                "support does not fit the tokens",
                where=where,
                expected=f"{tokens} sets of kept ids for {ids[row].as_py()!r}",
                found=len(kept),
                remedy="run `hacpo audit`, which says which table is damaged",
            )
