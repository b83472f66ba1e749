"""One learner's pool: its own rollouts as sampled, everybody else's in its own vocabulary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hacpo.algorithm.rollouts import Rollout, in_order, supports
from hacpo.algorithm.support import Support, to_column
from hacpo.artifacts.list_columns import Flags, Ints, ListColumn
from hacpo.artifacts.problem_rows import Asked
from hacpo.artifacts.tables import POOL
from hacpo.errors import ArtifactError
from hacpo.settings.agents import PromptSettings
from hacpo.tokens.context_length import context_length, vocabulary_rows
from hacpo.tokens.prompts import PromptTokenizer, prompt_token_ids
from hacpo.tokens.retokenize import Retokenized, TextTokenizer, retokenize_all
from hacpo.tokens.stopping import ended_by_eos
from hacpo.tokens.terminals import Terminals, terminal_map

NO_LIMIT = 1 << 31
"""Tokens of a sequence, or of a vocabulary, where there is no limit: ids are int32."""


class SourceTokenizer(Protocol):
    """What is asked of the tokenizer of an agent whose responses are retokenised for another.

    Attributes:
        terminals: the tokens that end its responses.
    """

    terminals: Terminals

    def holds_control(self, token_ids: Sequence[int]) -> bool:
        """Whether one of these tokens is in no text."""


class LearnerTokenizer(TextTokenizer, PromptTokenizer, Protocol):
    """A tokenizer for prompts and responses.

    Attributes:
        terminals: the tokens that end its responses.
    """

    terminals: Terminals


@dataclass(frozen=True)
class TextRoute:
    """How a source's responses reach a learner with another tokenizer: as text."""

    source_tokenizer: SourceTokenizer
    learner_tokenizer: LearnerTokenizer

    @cached_property
    def terminals(self) -> dict[int, int]:
        """The source's terminal tokens -> the learner's that stand for them."""
        return terminal_map(self.source_tokenizer.terminals, self.learner_tokenizer.terminals)

    def _stands_for(self, terminal: int) -> int:
        """The learner's token for one that ended a response of the source."""
        return self.terminals.get(terminal, self.learner_tokenizer.terminals.turn_end)

    def retokenised(self, rollout: Rollout, room: int, *, score_eos: bool) -> Retokenized:
        """One rollout of the source in the learner's tokens.

        A control token within the response is in no text, and a sum over the source's tokens would count what the
        learner's cannot: such a response is `not_representable`. One that is nothing but EOS becomes the learner's
        where EOS is not scored, and is not empty.

        Args:
            rollout: the response.
            room: most tokens that it may take.
            score_eos: as in `build_pool`.
        """
        return self.all_retokenised(
            [rollout.token_ids], [rollout.text], [_ended(rollout)], [room], score_eos=score_eos
        )[0]

    def all_retokenised(
        self,
        token_ids: Sequence[list[int]],
        texts: Sequence[str],
        ended: Sequence[bool],
        rooms: Sequence[int],
        *,
        score_eos: bool,
    ) -> list[Retokenized]:
        """The same of each of many rollouts: its tokens, its text, whether an EOS ended it, and its room."""
        settled: dict[int, Retokenized] = {}
        terminals: list[int | None] = []
        for row, (sampled, text, over, room) in enumerate(zip(token_ids, texts, ended, rooms, strict=True)):
            body = sampled[:-1] if over else sampled
            terminal = self._stands_for(sampled[-1]) if over else None
            if terminal is not None and not body and not score_eos:
                settled[row] = Retokenized([terminal], "kept" if room >= 1 else "too_long", True)
            elif text and self.source_tokenizer.holds_control(body):
                settled[row] = Retokenized([], "not_representable", False)
            else:
                terminals.append(terminal if score_eos else None)
        sent = [row for row in range(len(texts)) if row not in settled]
        made = retokenize_all(
            [texts[row] for row in sent],
            terminals=terminals,
            tokenizer=self.learner_tokenizer,
            rooms=[rooms[row] for row in sent],
        )
        settled |= dict(zip(sent, made, strict=True))
        return [settled[row] for row in range(len(texts))]


@dataclass(frozen=True)
class Limits:
    """What a learner can take.

    Attributes:
        tokens: longest prompt plus response.
        vocabulary: its model has rows for the token ids below this.
    """

    tokens: int = NO_LIMIT
    vocabulary: int = NO_LIMIT

    @classmethod
    def of(cls, config: Mapping[str, Any], max_tokens: int | None) -> Limits:
        """Of a model whose config.json has this content, and of `pool.max_tokens`."""
        rows, lengths = vocabulary_rows(config), (context_length(config), max_tokens)
        return cls(
            min((length for length in lengths if length is not None), default=NO_LIMIT),
            NO_LIMIT if rows is None else rows,
        )


def build_pool(
    problems: Sequence[Asked],
    rollouts: Mapping[str, pa.Table],
    *,
    learner: str,
    group_size: int,
    routes: Mapping[str, TextRoute],
    prompt_settings: PromptSettings,
    limits: Limits,
    score_eos: bool,
) -> pa.Table:
    """The rows of the pool table of some problems, by problem, agent and sample.

    Args:
        problems: prompts of the step, in order.
        rollouts: source -> its rollouts, each with its reward; the learner's own always among them.
        learner: who will train on them.
        group_size: responses per problem and source.
        routes: source -> how its responses are retokenised; those of others keep the token ids that were sampled,
            because their tokenizer is the learner's (section 3.3 of the paper).
        prompt_settings: the learner's.
        limits: what the learner can take. Own responses were sampled within them and are kept whatever they are, unless
            they have no token at all.
        score_eos: whether the EOS that ends a response is part of it, on the source's and on the learner's side.

    Raises:
        ArtifactError: rollouts are missing or do not fit together.
    """
    order = in_order([asked.problem_id for asked in problems], rollouts, group_size, where=f"pool of {learner}")
    # Of any of a problem's responses: they have one prompt.
    last = pa.array(order[learner].reshape(-1, group_size).max(axis=1))
    prompts = _one_piece(rollouts[learner]["prompt_token_ids"]).take(last)
    if routes:
        _check_prompts(problems, prompts, next(iter(routes.values())).learner_tokenizer, learner, prompt_settings)
    repeated = pa.array(np.repeat(np.arange(len(problems)), group_size))
    parts, kept_of = [], []
    for source, rows in order.items():
        part, kept = _part(
            rollouts[source].take(pa.array(rows)),
            prompts.take(repeated),
            source=source,
            own=source == learner,
            route=routes.get(source),
            limits=limits,
            score_eos=score_eos,
        )
        parts.append(part)
        kept_of.append(kept)
    # From [N, P, G], one agent after the other, to [P, N, G].
    count = len(problems) * group_size
    rows_npg = np.arange(len(parts) * count).reshape(len(parts), len(problems), group_size)
    rows = rows_npg.transpose(1, 0, 2).ravel()
    table = pa.concat_tables(parts).take(pa.array(rows)).combine_chunks()
    flat = [support for kept in kept_of for support in (kept or [None] * count)]
    field = POOL.schema.field("support")
    column = to_column([flat[row] for row in rows]) if any(kept_of) else pa.nulls(len(rows), field.type)
    return table.append_column(field, column).select(POOL.schema.names)


def _part(
    table: pa.Table,
    prompts: Any,
    *,
    source: str,
    own: bool,
    route: TextRoute | None,
    limits: Limits,
    score_eos: bool,
) -> tuple[pa.Table, list[Support | None] | None]:
    """A source's rollouts as rows of the pool, all but their support, and that; None where no row has one.

    Where its sampling was truncated, the learner is restricted to the tokens that it kept; in other tokens that means
    nothing, and whole vocabularies are compared. Own rollouts have their `support` beside them.
    """
    token_ids = ListColumn.of(_one_piece(table["token_ids"]))
    # As `ended_by_eos`; an engine may also have returned nothing.
    by_eos = pc.and_(pc.equal(table["finish_reason"], "stop"), pc.is_null(table["stop_string"]))
    ended = np.asarray(by_eos) & (token_ids.lengths > 0)
    # A response that is nothing but EOS keeps it: without a token it could not be scored at all.
    scores_eos = ended & (score_eos | (token_ids.lengths == 1))
    scored = token_ids.lengths - (ended & ~scores_eos)
    room = limits.tokens - np.asarray(pc.list_value_length(prompts), dtype=np.int64)
    if route is None:
        result = _all_as_sampled(token_ids, scored, None if own else room, NO_LIMIT if own else limits.vocabulary)
    else:
        result = _all_retokenised(route, token_ids, table["text"], ended, room, score_eos)
    has_support = "support" in table.column_names and table["support"].null_count < len(table)
    added = table["support_logprob"] if route is not None and has_support else None
    columns = {
        **{name: table[name] for name in ("rollout_id", "problem_id", "sample", "reward")},
        "source": pa.repeat(source, len(table)),
        "is_self": pa.repeat(own, len(table)),
        "prompt_token_ids": prompts,
        "token_ids": result.token_ids.column(POOL.schema.field("token_ids").type),
        "source_logprob": pa.array(_sums(ListColumn.of(_one_piece(table["logprobs"])), scored, added), pa.float64()),
        "source_tokens": pa.array(scored, pa.int32()),
        "learner_tokens": pa.array(result.token_ids.lengths, pa.int32()),
        "text_bytes": pc.binary_length(table["text"]),
        "status": result.status,
        "roundtrip": result.roundtrip,
        "as_sampled": pa.repeat(route is None, len(table)),
        "source_terminal": token_ids.last(scores_eos),
        "learner_terminal": result.token_ids.last(scores_eos),
    }
    schema = pa.schema([field for field in POOL.schema if field.name != "support"])
    part = pa.table({name: columns[name] for name in schema.names}, schema=schema)
    if own or route is not None or not has_support:
        return part, None
    heads = zip(supports(table), scored.tolist(), strict=True)
    return part, [None if support is None else support.head(count) for support, count in heads]


@dataclass(frozen=True)
class _Results:
    """What became of a source's responses, as columns (`Retokenized`)."""

    token_ids: ListColumn
    status: Any
    roundtrip: Any


def _all_retokenised(
    route: TextRoute, token_ids: ListColumn, texts: Any, ended: Flags, room: Ints, score_eos: bool
) -> _Results:
    results = route.all_retokenised(
        token_ids.lists(), texts.to_pylist(), ended.tolist(), room.tolist(), score_eos=score_eos
    )
    return _Results(
        ListColumn.of(pa.array([result.token_ids for result in results], POOL.schema.field("token_ids").type)),
        pa.array([result.status for result in results], pa.string()),
        pa.array([result.roundtrip for result in results], pa.bool_()),
    )


def _all_as_sampled(token_ids: ListColumn, scored: Ints, room: Ints | None, vocabulary: int) -> _Results:
    """Responses in the token ids that were sampled, control tokens included.

    Models of one family differ in how many rows they have beyond their common tokenizer's: an id that the learner has
    no row for makes a response `not_representable`.

    Args:
        scored: how many tokens of each response count.
        room: most tokens that each may take; None: any number.
        vocabulary: the learner has rows for the ids below this.
    """
    heads = token_ids.heads(scored)
    beyond = heads.any_true(heads.values >= vocabulary)
    fits = np.ones(len(scored), np.bool_) if room is None else scored <= room
    # The first that holds, in this order.
    code = np.select([scored == 0, beyond, ~fits], [1, 2, 3], 0)
    names = pa.array(["kept", "empty", "not_representable", "too_long"], pa.string())
    return _Results(heads.heads(np.where(beyond, 0, scored)), names.take(pa.array(code)), pa.array(~beyond))


def _sums(logprobs: ListColumn, scored: Ints, added: Any | None) -> list[float]:
    """Sum of each response's scored log-probabilities, and of what is added to them for its support.

    fsum: exactly rounded, so an audit gets the same sum in any order.
    """
    values, starts = logprobs.values.tolist(), logprobs.starts.tolist()
    counts = scored.tolist()
    if added is None:
        return [math.fsum(values[start : start + count]) for start, count in zip(starts, counts, strict=True)]
    return [
        math.fsum([*values[start : start + count], *(more or [])[:count]])
        for start, count, more in zip(starts, counts, added.to_pylist(), strict=True)
    ]


def _one_piece(column: Any) -> Any:
    """A column as one Arrow array."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _check_prompts(
    problems: Sequence[Asked],
    prompts: Any,
    tokenizer: PromptTokenizer,
    learner: str,
    settings: PromptSettings,
) -> None:
    for asked, prompt in zip(problems, prompts.to_pylist(), strict=True):
        if prompt_token_ids(tokenizer, asked, settings) != prompt:
            raise ArtifactError(
                "the learner's template renders this prompt differently than when it was sampled",
                where=f"problem {asked.problem_id!r} of {learner}",
                remedy="repeat generate",
            )


def _ended(rollout: Rollout) -> bool:
    """Whether a rollout's last token is an EOS, and there is one (an engine may return nothing)."""
    return bool(rollout.token_ids) and ended_by_eos(rollout.finish_reason, rollout.stop_string)
