"""One learner's pool: its own rollouts as sampled, everybody else's in its own vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hacpo.config import PromptSettings
from hacpo.errors import ArtifactError
from hacpo.prompts import messages
from hacpo.retokenize import TextTokenizer, retokenize
from hacpo.rollouts import Row, in_order


class PromptTokenizer(TextTokenizer, Protocol):
    """A tokenizer that can also render prompts."""

    def render(self, problem_id: str, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a prompt."""


def build_pool(
    problems: Sequence[Mapping[str, Any]],
    rollouts: Mapping[str, Sequence[Row]],
    *,
    learner: str,
    group_size: int,
    tokenizer: PromptTokenizer | None,
    prompt_settings: PromptSettings,
    max_tokens: int | None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Rows of the pool table, by problem, agent and sample.

    Args:
        problems: the step's prompts in order.
        rollouts: source -> its rollouts, each with its reward; the learner's own always among them.
        learner: who will train on them.
        group_size: responses per problem and source.
        tokenizer: the learner's; may be None if there are only own rollouts.
        max_tokens: longest prompt plus response that the learner can take; None is no limit. Own responses were sampled
            within it and are always kept.

    Raises:
        ArtifactError: rollouts are missing or do not fit together.
    """
    ordered = in_order([row["problem_id"] for row in problems], rollouts, group_size, where=f"pool of {learner}")
    prompts = {row["problem_id"]: row["prompt_token_ids"] for row in rollouts[learner]}
    if tokenizer is not None:
        for row in problems:
            rendered = tokenizer.render(row["problem_id"], messages(row["problem_id"], row["problem"], prompt_settings))
            if rendered != prompts[row["problem_id"]]:
                raise ArtifactError(
                    "the learner's template renders this prompt differently than when it was sampled",
                    where=f"problem {row['problem_id']!r} of {learner}",
                    remedy="repeat generate",
                )
    rows = []
    for number, (source, row) in enumerate(ordered, start=1):
        prompt = prompts[row["problem_id"]]
        token_ids, status, roundtrip = row["token_ids"], "kept", True
        if source != learner:
            assert tokenizer is not None
            room = 1 << 31 if max_tokens is None else max_tokens - len(prompt)
            result = retokenize(row["text"], stopped=row["finish_reason"] == "stop", tokenizer=tokenizer, room=room)
            token_ids, status, roundtrip = result.token_ids, result.status, result.roundtrip
        rows.append(
            {
                "rollout_id": row["rollout_id"],
                "problem_id": row["problem_id"],
                "sample": row["sample"],
                "source": source,
                "is_self": source == learner,
                "reward": row["reward"],
                "prompt_token_ids": prompt,
                "token_ids": token_ids,
                # fsum: exactly rounded, so an audit gets the same sum in any order.
                "source_logprob": math.fsum(row["logprobs"]),
                "source_tokens": len(row["token_ids"]),
                "learner_tokens": len(token_ids),
                "text_bytes": len(row["text"].encode("utf-8")),
                "status": status,
                "roundtrip": roundtrip,
            }
        )
        if on_progress and number % 256 == 0:
            on_progress(number, len(ordered))
    return rows
