"""One learner's pool: its own rollouts as sampled, everybody else's in its own vocabulary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import pyarrow as pa

from hacpo.algorithm.rollouts import Rollout, Rollouts, in_order
from hacpo.algorithm.support import Support, to_column
from hacpo.artifacts.problem_rows import Asked
from hacpo.artifacts.tables import POOL
from hacpo.callbacks import OnProgress
from hacpo.errors import ArtifactError
from hacpo.settings.agents import PromptSettings
from hacpo.tokens.context_length import context_length, vocabulary_rows
from hacpo.tokens.prompts import PromptTokenizer, prompt_token_ids
from hacpo.tokens.retokenize import Retokenized, TextTokenizer, retokenize
from hacpo.tokens.stopping import ended_by_eos
from hacpo.tokens.terminals import Terminals, terminal_map

NO_LIMIT = 1 << 31
"""Tokens of a sequence, or of a vocabulary, where there is no limit: ids are int32."""

_ROWS_AT_ONCE = 256
"""Rows of a pool that are held as Python objects before they become columns."""


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
        token_ids, terminal = rollout.token_ids, None
        if _ended(rollout):
            *token_ids, last = token_ids
            terminal = self.terminals.get(last, self.learner_tokenizer.terminals.turn_end)
            if not token_ids and not score_eos:
                return Retokenized([terminal], "kept" if room >= 1 else "too_long", True)
        if rollout.text and self.source_tokenizer.holds_control(token_ids):
            return Retokenized([], "not_representable", False)
        terminal = terminal if score_eos else None
        return retokenize(rollout.text, terminal=terminal, tokenizer=self.learner_tokenizer, room=room)


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


@dataclass(frozen=True)
class PoolRow:
    """One response in a learner's pool; the fields are the columns of the pool table."""

    rollout_id: str
    problem_id: str
    sample: int
    source: str
    is_self: bool
    reward: float
    prompt_token_ids: list[int]
    token_ids: list[int]
    source_logprob: float
    source_tokens: int
    learner_tokens: int
    text_bytes: int
    status: str
    roundtrip: bool
    as_sampled: bool
    source_terminal: int | None
    learner_terminal: int | None
    support: Support | None


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
    on_progress: OnProgress | None = None,
) -> pa.Table:
    """The pool table, by problem, agent and sample.

    Args:
        problems: the step's prompts in order.
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
    rows_of = in_order([asked.problem_id for asked in problems], rollouts, group_size, where=f"pool of {learner}")
    ordered = [
        (source, row)
        for start in range(0, len(problems) * group_size, group_size)
        for source, order in rows_of.items()
        for row in order[start : start + group_size].tolist()
    ]
    prompts = _prompts(rollouts[learner])
    if routes:
        _check_prompts(problems, prompts, next(iter(routes.values())).learner_tokenizer, learner, prompt_settings)
    of_source = {source: Rollouts(table) for source, table in rollouts.items()}
    blocks: list[pa.Table] = []
    supports: list[Support | None] = []
    rows: list[PoolRow] = []
    for number, (source, at) in enumerate(ordered, start=1):
        rollout = of_source[source][at]
        prompt = prompts[rollout.problem_id]
        room = limits.tokens - len(prompt)
        if source in routes:
            result = routes[source].retokenised(rollout, room, score_eos=score_eos)
        else:
            own = source == learner
            result = as_sampled(rollout, Limits() if own else replace(limits, tokens=room), score_eos=score_eos)
        retokenised = source in routes
        rows.append(_pooled(rollout, source, learner, prompt, result, score_eos=score_eos, retokenised=retokenised))
        if len(rows) == _ROWS_AT_ONCE or number == len(ordered):
            supports += [row.support for row in rows]
            blocks.append(_columns(rows))
            rows = []
        if on_progress and number % 256 == 0:
            on_progress(number, len(ordered))
    # In one piece, so that the same rows are the same bytes in a file.
    table = pa.concat_tables([_columns([]), *blocks]).combine_chunks()
    return table.append_column(POOL.schema.field("support"), to_column(supports))


def _columns(rows: Sequence[PoolRow]) -> pa.Table:
    """Rows as columns of the pool table, all but their support."""
    schema = pa.schema([field for field in POOL.schema if field.name != "support"])
    return pa.table({name: [getattr(row, name) for row in rows] for name in schema.names}, schema=schema)


def _prompts(own: pa.Table) -> dict[str, list[int]]:
    """Problem -> the learner's prompt, of any of its responses."""
    rows = {problem: row for row, problem in enumerate(own["problem_id"].to_pylist())}
    return {problem: own["prompt_token_ids"][row].as_py() for problem, row in rows.items()}


def _check_prompts(
    problems: Sequence[Asked],
    prompts: Mapping[str, list[int]],
    tokenizer: PromptTokenizer,
    learner: str,
    settings: PromptSettings,
) -> None:
    for asked in problems:
        if prompt_token_ids(tokenizer, asked, settings) != prompts[asked.problem_id]:
            raise ArtifactError(
                "the learner's template renders this prompt differently than when it was sampled",
                where=f"problem {asked.problem_id!r} of {learner}",
                remedy="repeat generate",
            )


def _pooled(
    rollout: Rollout,
    source: str,
    learner: str,
    prompt: list[int],
    result: Retokenized,
    *,
    score_eos: bool,
    retokenised: bool,
) -> PoolRow:
    """A rollout's row in the learner's pool.

    Where its sampling was truncated, the learner is restricted to the tokens that it kept; in other tokens that means
    nothing, and whole vocabularies are compared. Own rollouts have their `support` beside them.
    """
    scored = scored_tokens(rollout, score_eos=score_eos)
    support, logprobs = rollout.support, rollout.logprobs[:scored]
    if retokenised and support is not None:
        logprobs = [*logprobs, *(rollout.support_logprob or [])[:scored]]
    ends = _scores_eos(rollout, score_eos)
    return PoolRow(
        rollout_id=rollout.rollout_id,
        problem_id=rollout.problem_id,
        sample=rollout.sample,
        source=source,
        is_self=source == learner,
        reward=rollout.reward,
        prompt_token_ids=prompt,
        token_ids=result.token_ids,
        # fsum: exactly rounded, so an audit gets the same sum in any order.
        source_logprob=math.fsum(logprobs),
        source_tokens=scored,
        learner_tokens=len(result.token_ids),
        text_bytes=len(rollout.text.encode("utf-8")),
        status=result.status,
        roundtrip=result.roundtrip,
        as_sampled=not retokenised,
        source_terminal=rollout.token_ids[-1] if ends else None,
        learner_terminal=result.token_ids[-1] if result.token_ids and ends else None,
        support=None if support is None or retokenised or source == learner else support.head(scored),
    )


def scored_tokens(rollout: Rollout, *, score_eos: bool) -> int:
    """How many of a response's sampled tokens are scored: all, or all but the EOS that ended it.

    A response that is nothing but EOS keeps it: without a token it could not be scored at all.
    """
    return len(rollout.token_ids) - (_ended(rollout) and not _scores_eos(rollout, score_eos))


def _ended(rollout: Rollout) -> bool:
    """Whether a rollout's last token is an EOS, and there is one (an engine may return nothing)."""
    return bool(rollout.token_ids) and ended_by_eos(rollout.finish_reason, rollout.stop_string)


def _scores_eos(rollout: Rollout, score_eos: bool) -> bool:
    return _ended(rollout) and (score_eos or len(rollout.token_ids) == 1)


def as_sampled(rollout: Rollout, limits: Limits, *, score_eos: bool) -> Retokenized:
    """One rollout in the token ids that were sampled, control tokens included.

    Models of one family differ in how many rows they have beyond their common tokenizer's: an id that the learner has
    no row for makes a response `not_representable`.

    Args:
        rollout: the response.
        limits: most tokens that the response may take, and the learner's rows.
        score_eos: as in `build_pool`.
    """
    token_ids = rollout.token_ids[: scored_tokens(rollout, score_eos=score_eos)]
    if not token_ids:
        return Retokenized([], "empty", True)
    if max(token_ids) >= limits.vocabulary:
        return Retokenized([], "not_representable", False)
    return Retokenized(token_ids, "kept" if len(token_ids) <= limits.tokens else "too_long", True)
