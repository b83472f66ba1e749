"""What truncated sampling kept (`hacpo.algorithm.support`), as far as files alone can tell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hacpo.algorithm.support import from_column
from hacpo.artifacts.list_columns import Flags, Ints, ListColumn
from hacpo.tools.audit.audit_run import AuditRun
from hacpo.tools.audit.rows import Rows

CHECK = "support"
"""Name of the invariant in every finding of this module."""


def check_support(run: AuditRun, rows: Rows, tokens: ListColumn, masses: ListColumn, agent: str) -> None:
    """One set of kept ids per sampled token, this token in it, and the mass it holds; nothing where nothing was cut.

    Args:
        tokens, masses: columns `token_ids` and `support_logprob`.
    """
    truncates = run.settings.agents[agent].sampling.truncates
    for column in ("support", "support_logprob"):
        present = np.asarray(pc.is_valid(rows.arrow(column)))
        wanted = "a value: top_k or top_p cut what was sampled from" if truncates else "null: nothing was cut"
        rows.require(CHECK, column, present == truncates, wanted, shown=np.where(present, "a value", "null"))
    if not truncates:
        return
    good = np.isfinite(masses.values) & (masses.values <= 0)
    fine = (masses.lengths == tokens.lengths) & ListColumn(masses.lengths, good).all_true()
    rows.require(CHECK, "support_logprob", fine, "a finite number not above 0 for each token", shown=masses)
    column = rows.arrow("support")
    kept = np.asarray(pc.fill_null(pc.list_value_length(column), 0), dtype=np.int64)
    counted = pa.array([f"{count} sets" for count in kept.tolist()])
    rows.require(CHECK, "support", kept == tokens.lengths, "a set of ids for each token", shown=counted)
    ids = ListColumn.of(pc.list_flatten(column))
    _require_all(rows, kept, ~_ascending(ids), "ids in ascending order, each once", "another order")
    if (kept == tokens.lengths).all():
        others = ListColumn(ids.lengths, ids.values != np.repeat(tokens.values, ids.lengths)).all_true()
        _require_all(rows, kept, others, "the sampled token among those that were kept", "not among them")


def _require_all(rows: Rows, kept: Ints, bad: Flags, expected: str, found: str) -> None:
    """What holds for every set of a response's ids; `bad` is of all sets one after another."""
    rows.require(CHECK, "support", ListColumn(kept, ~bad).all_true(), expected, shown=found)


def _ascending(ids: ListColumn) -> Flags:
    steps = np.diff(ids.values.astype(np.int64), prepend=0)
    first: Any = ids.starts[ids.lengths > 0]
    steps[first] = ids.values[first].astype(np.int64) + 1
    return ListColumn(ids.lengths, steps > 0).all_true()


def check_pooled_support(rows: Rows, mine: Flags, kept: Flags, column: Any, index: Ints, scored: Ints) -> None:
    """A source's responses in a learner's pool: its support where others keep its token ids, else none.

    Args:
        mine: the source's rows.
        kept: rows of others' responses that keep the ids that were sampled.
        column: `support` of the source's rollouts.
        index: of each row, which of them it is.
        scored: of each rollout, how many of its tokens are scored.
    """
    present = np.asarray(pc.is_valid(rows.arrow("support")))
    wanted = kept & np.asarray(pc.is_valid(column))[index]
    rows.require(
        CHECK,
        "support",
        present == wanted,
        np.where(wanted, "what the source kept", "null: own, retokenised, or not truncated"),
        where=mine,
        shown=np.where(present, "a value", "null"),
    )
    both = np.flatnonzero(mine & present & wanted)
    if not len(both):
        return
    pooled, sampled = from_column(rows.arrow("support")), from_column(column)
    same = np.ones(len(rows), dtype=np.bool_)
    for row in both:
        source = sampled[index[row]]
        same[row] = source is not None and pooled[row] == source.head(int(scored[index[row]]))
    rows.require(CHECK, "support", same, "the ids that the source kept", shown="others", where=mine)
