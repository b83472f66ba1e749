"""One learner's pool: its own rollouts as sampled, everybody else's in its own vocabulary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from hacpo.algorithm.rollouts import Row, in_order
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

    source: SourceTokenizer
    learner: LearnerTokenizer

    @cached_property
    def terminals(self) -> dict[int, int]:
        """The source's terminal tokens -> the learner's that stand for them."""
        return terminal_map(self.source.terminals, self.learner.terminals)

    def retokenised(self, row: Row, room: int, *, score_eos: bool) -> Retokenized:
        """One rollout of the source in the learner's tokens.

        A control token within the response is in no text, and a sum over the source's tokens would count what the
        learner's cannot: such a response is `not_representable`. One that is nothing but EOS becomes the learner's
        where EOS is not scored, and is not empty.

        Args:
            row: the rollout.
            room: most tokens that the response may take.
            score_eos: as in `build_pool`.
        """
        token_ids, terminal = row["token_ids"], None
        if _ended(row):
            *token_ids, last = token_ids
            terminal = self.terminals.get(last, self.learner.terminals.turn_end)
            if not token_ids and not score_eos:
                return Retokenized([terminal], "kept" if room >= 1 else "too_long", True)
        if row["text"] and self.source.holds_control(token_ids):
            return Retokenized([], "not_representable", False)
        return retokenize(row["text"], terminal=terminal if score_eos else None, tokenizer=self.learner, room=room)


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
    problems: Sequence[Mapping[str, Any]],
    rollouts: Mapping[str, Sequence[Row]],
    *,
    learner: str,
    group_size: int,
    routes: Mapping[str, TextRoute],
    prompt_settings: PromptSettings,
    limits: Limits,
    score_eos: bool,
    on_progress: OnProgress | None = None,
) -> list[Row]:
    """Rows of the pool table, by problem, agent and sample.

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
    ordered = in_order([row["problem_id"] for row in problems], rollouts, group_size, where=f"pool of {learner}")
    prompts = {row["problem_id"]: row["prompt_token_ids"] for row in rollouts[learner]}
    if routes:
        _check_prompts(problems, prompts, next(iter(routes.values())).learner, learner, prompt_settings)
    rows = []
    for number, (source, row) in enumerate(ordered, start=1):
        prompt = prompts[row["problem_id"]]
        room = limits.tokens - len(prompt)
        if source in routes:
            result = routes[source].retokenised(row, room, score_eos=score_eos)
        else:
            own = source == learner
            result = as_sampled(row, Limits() if own else replace(limits, tokens=room), score_eos=score_eos)
        rows.append(
            {
                **_about(source, learner, row, score_eos=score_eos, retokenised=source in routes),
                "prompt_token_ids": prompt,
                "token_ids": result.token_ids,
                "learner_tokens": len(result.token_ids),
                "status": result.status,
                "roundtrip": result.roundtrip,
                "as_sampled": source not in routes,
                "learner_terminal": result.token_ids[-1] if result.token_ids and _scores_eos(row, score_eos) else None,
            }
        )
        if on_progress and number % 256 == 0:
            on_progress(number, len(ordered))
    return rows


def _check_prompts(
    problems: Sequence[Mapping[str, Any]],
    prompts: Mapping[str, list[int]],
    tokenizer: PromptTokenizer,
    learner: str,
    settings: PromptSettings,
) -> None:
    for row in problems:
        if prompt_token_ids(tokenizer, row, settings) != prompts[row["problem_id"]]:
            raise ArtifactError(
                "the learner's template renders this prompt differently than when it was sampled",
                where=f"problem {row['problem_id']!r} of {learner}",
                remedy="repeat generate",
            )


def _about(source: str, learner: str, row: Row, *, score_eos: bool, retokenised: bool) -> Row:
    """The columns that say what the source sampled.

    Where its sampling was truncated, the learner is restricted to the tokens that it kept; in other tokens that means
    nothing, and whole vocabularies are compared. Own rollouts have their `support` beside them.
    """
    scored = scored_tokens(row, score_eos=score_eos)
    support, logprobs = row.get("support"), row["logprobs"][:scored]
    if retokenised and support is not None:
        logprobs = [*logprobs, *row["support_logprob"][:scored]]
    return {
        "rollout_id": row["rollout_id"],
        "problem_id": row["problem_id"],
        "sample": row["sample"],
        "source": source,
        "is_self": source == learner,
        "reward": row["reward"],
        # fsum: exactly rounded, so an audit gets the same sum in any order.
        "source_logprob": math.fsum(logprobs),
        "source_tokens": scored,
        "text_bytes": len(row["text"].encode("utf-8")),
        "source_terminal": row["token_ids"][-1] if _scores_eos(row, score_eos) else None,
        "support": None if support is None or retokenised or source == learner else support.head(scored),
    }


def scored_tokens(row: Row, *, score_eos: bool) -> int:
    """How many of a response's sampled tokens are scored: all, or all but the EOS that ended it.

    A response that is nothing but EOS keeps it: without a token it could not be scored at all.
    """
    return len(row["token_ids"]) - (_ended(row) and not _scores_eos(row, score_eos))


def _ended(row: Row) -> bool:
    """Whether a rollout's last token is an EOS, and there is one (an engine may return nothing)."""
    return bool(row["token_ids"]) and ended_by_eos(row)


def _scores_eos(row: Row, score_eos: bool) -> bool:
    return _ended(row) and (score_eos or len(row["token_ids"]) == 1)


def as_sampled(row: Row, limits: Limits, *, score_eos: bool) -> Retokenized:
    """One rollout in the token ids that were sampled, control tokens included.

    Models of one family differ in how many rows they have beyond their common tokenizer's: an id that the learner has
    no row for makes a response `not_representable`.

    Args:
        row: the rollout.
        limits: most tokens that the response may take, and the learner's rows.
        score_eos: as in `build_pool`.
    """
    token_ids = row["token_ids"][: scored_tokens(row, score_eos=score_eos)]
    if not token_ids:
        return Retokenized([], "empty", True)
    if max(token_ids) >= limits.vocabulary:
        return Retokenized([], "not_representable", False)
    return Retokenized(token_ids, "kept" if len(token_ids) <= limits.tokens else "too_long", True)
