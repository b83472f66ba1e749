"""The answer to a what-if question as plain values, and the texts that it quotes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hacpo.artifacts import tables
from hacpo.tools.inspect.comparison import QUANTILES, Change, Comparison, capability_differences
from hacpo.tools.inspect.recompute import WhatIf
from hacpo.tools.inspect.step_reader import StepReader, rows_where
from hacpo.tools.inspect.what_if_view import DRIFT


def read_texts(reader: StepReader, rollout_ids: Sequence[str]) -> dict[str, str]:
    """rollout_id -> text, of responses whose rollouts are there."""
    texts: dict[str, str] = {}
    if not rollout_ids:
        return texts
    for agent in reader.pipeline.settings.agents:
        table = reader.optional(tables.ROLLOUTS, agent, ["rollout_id", "text"])
        texts |= {row["rollout_id"]: row["text"] for row in rows_where(table, "rollout_id", list(rollout_ids))}
    return texts


def as_tree(
    result: WhatIf,
    comparisons: Mapping[str, Sequence[Comparison]],
    changed: Mapping[str, Sequence[Change]],
    texts: Mapping[str, str],
) -> dict[str, Any]:
    """What `hacpo what-if --json` prints (docs/inspect.md)."""
    question = result.question
    return {
        "run": question.pipeline.run,
        "step": result.reader.step,
        "settings": {key: {"before": was, "after": asked} for key, (was, asked) in question.changed.items()},
        "kept": list(question.kept),
        "note": DRIFT,
        "quantiles": list(QUANTILES),
        "capability": {
            agent: {"before": asdict(was), "after": asdict(now)}
            for agent, (was, now) in capability_differences(*result.capability).items()
        },
        "learners": {
            learner: {
                **{part.kind: _part(part) for part in parts},
                "most_changed": [
                    {**asdict(change), "text": texts.get(change.rollout_id)} for change in changed[learner]
                ],
            }
            for learner, parts in comparisons.items()
        },
        "missing": [asdict(table) for table in result.reader.missing],
    }


def _part(part: Comparison) -> dict[str, Any]:
    tree = asdict(part)
    del tree["kind"]
    tree["shares"] = {name: {"before": was, "after": now} for name, (was, now) in part.shares.items()}
    return tree
