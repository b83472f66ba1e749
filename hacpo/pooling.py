"""One learner's pool: its own rollouts as sampled, everybody else's in its own vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hacpo.config import PromptSettings
from hacpo.errors import ArtifactError
from hacpo.prompts import PromptTokenizer, prompt_token_ids
from hacpo.retokenize import Retokenized, TextTokenizer, retokenize
from hacpo.rollouts import Row, in_order
from hacpo.stopping import ended_by_eos


class LearnerTokenizer(TextTokenizer, PromptTokenizer, Protocol):
    """A tokenizer for prompts and responses."""


def build_pool(
    problems: Sequence[Mapping[str, Any]],
    rollouts: Mapping[str, Sequence[Row]],
    *,
    learner: str,
    group_size: int,
    tokenizer: LearnerTokenizer | None,
    prompt_settings: PromptSettings,
    max_tokens: int | None,
    score_eos: bool,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Rows of the pool table, by problem, agent and sample.

    Args:
        problems: the step's prompts in order.
        rollouts: source -> its rollouts, each with its reward; the learner's own always among them.
        learner: who will train on them.
        prompt_settings: the learner's.
        group_size: responses per problem and source.
        tokenizer: the learner's; may be None if there are only own rollouts.
        max_tokens: longest prompt plus response that the learner can take; None is no limit. Own responses were sampled
            within it and are kept whatever they are, unless they have no token at all.
        score_eos: whether the EOS that ends a response is part of it, on the source's and on the learner's side.

    Raises:
        ArtifactError: rollouts are missing or do not fit together.
    """
    ordered = in_order([row["problem_id"] for row in problems], rollouts, group_size, where=f"pool of {learner}")
    prompts = {row["problem_id"]: row["prompt_token_ids"] for row in rollouts[learner]}
    if tokenizer is not None:
        for row in problems:
            if prompt_token_ids(tokenizer, row, prompt_settings) != prompts[row["problem_id"]]:
                raise ArtifactError(
                    "the learner's template renders this prompt differently than when it was sampled",
                    where=f"problem {row['problem_id']!r} of {learner}",
                    remedy="repeat generate",
                )
    rows = []
    for number, (source, row) in enumerate(ordered, start=1):
        prompt = prompts[row["problem_id"]]
        scored = scored_tokens(row, score_eos=score_eos)
        result = Retokenized(row["token_ids"][:scored], "kept" if scored else "empty", True)
        if source != learner:
            assert tokenizer is not None
            room = 1 << 31 if max_tokens is None else max_tokens - len(prompt)
            result = in_learners_tokens(row, tokenizer, room, score_eos=score_eos)
        rows.append(
            {
                "rollout_id": row["rollout_id"],
                "problem_id": row["problem_id"],
                "sample": row["sample"],
                "source": source,
                "is_self": source == learner,
                "reward": row["reward"],
                "prompt_token_ids": prompt,
                "token_ids": result.token_ids,
                # fsum: exactly rounded, so an audit gets the same sum in any order.
                "source_logprob": math.fsum(row["logprobs"][:scored]),
                "source_tokens": scored,
                "learner_tokens": len(result.token_ids),
                "text_bytes": len(row["text"].encode("utf-8")),
                "status": result.status,
                "roundtrip": result.roundtrip,
            }
        )
        if on_progress and number % 256 == 0:
            on_progress(number, len(ordered))
    return rows


def scored_tokens(row: Row, *, score_eos: bool) -> int:
    """How many of a response's sampled tokens are scored: all, or all but the EOS that ended it.

    A response that is nothing but EOS keeps it: without a token it could not be scored at all.
    """
    sampled = len(row["token_ids"])
    return sampled if score_eos or sampled < 2 or not ended_by_eos(row) else sampled - 1


def in_learners_tokens(row: Row, tokenizer: LearnerTokenizer, room: int, *, score_eos: bool) -> Retokenized:
    """A cross response; without scored EOS, one that is nothing but EOS becomes the learner's EOS and is not empty."""
    stopped = ended_by_eos(row)
    if stopped and not score_eos and len(row["token_ids"]) == 1:
        return Retokenized([tokenizer.eos_token_id], "kept" if room >= 1 else "too_long", True)
    return retokenize(row["text"], stopped=stopped and score_eos, tokenizer=tokenizer, room=room)
