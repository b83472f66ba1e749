"""A learner's pool against rollouts and verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hacpo.algorithm.pooling import Limits
from hacpo.algorithm.rollouts import rollout_ids
from hacpo.artifacts import tables
from hacpo.artifacts.list_columns import Flags, Ints, ListColumn
from hacpo.pipeline.catalogue import POOL_STAGE
from hacpo.tokens.retokenize import Status
from hacpo.tools.audit.audit_run import AuditRun
from hacpo.tools.audit.inputs import Batch
from hacpo.tools.audit.lists import Taken
from hacpo.tools.audit.metrics_files import check_metrics
from hacpo.tools.audit.responses import Floats, Responses
from hacpo.tools.audit.rows import Rows
from hacpo.tools.audit.supports import check_pooled_support
from hacpo.tools.audit.table_checks import read

TOLERANCE = 1e-9
"""Of capability, baseline, sigma, omega and advantages (absolute, and relative above 1), and of sums and ratios
(relative): rounding of another order of additions."""

STATUSES = get_args(Status)


@dataclass(frozen=True)
class PoolOrder:
    """The order of a learner's pool: by problem, source, sample.

    Attributes:
        ids: rollout_id, [M]; Arrow strings.
        problem: index of each row's problem.
        source: index of each row's source.
        response: index of each row among its source's responses.
    """

    ids: Any
    problem: Ints
    source: Ints
    response: Ints

    @classmethod
    def of(cls, step: int, problem_ids: Any, sources: Sequence[str], group_size: int) -> PoolOrder:
        """Of a step's problems."""
        shape = (len(problem_ids), len(sources), group_size)
        problem, source, sample = (part.ravel() for part in np.indices(shape))
        every = pa.concat_arrays([rollout_ids(step, name, problem_ids, group_size) for name in sources])
        response = problem * group_size + sample
        ids = every.take(pa.array(source * (len(problem_ids) * group_size) + response))
        return cls(ids, problem, source, response)

    def gather(self, per_source: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Values of every source's responses, in the pool's order."""
        return np.stack(per_source)[self.source, self.response]


def check_pool(
    run: AuditRun,
    batch: Batch,
    learner: str,
    responses: Mapping[str, Responses | None],
    rewards: Mapping[str, Floats | None],
) -> tuple[Rows, PoolOrder] | None:
    """Check a learner's pool; returns its rows in order."""
    step, sources = batch.step, run.sources(learner)
    content = read(run, tables.POOL, step, learner)
    if content is None:
        run.skip(f"what follows from {learner}'s pool", "it cannot be read")
        return None
    order = PoolOrder.of(step, batch.problem_ids, sources, run.settings.responses_per_prompt)
    rows = Rows(run, content, "rollout_id", order.ids)
    check_shared_columns(run, rows, batch, order, learner)
    rows.equal("pool", "sample", order.response % run.settings.responses_per_prompt)
    for number, source in enumerate(sources):
        _check_source(rows, order, number, source, responses[source], rewards[source])
    own = responses[learner]
    if own is not None:
        _check_prompts(run, rows, order, own)
    for number, source in enumerate(sources):
        _check_passage(run, rows, order, number, source, learner, responses[source])
    _check_status(run, rows, learner)
    rows.equal(
        "pool", "learner_terminal", _last_tokens(rows), note="the last token id, where the source's end is scored"
    )
    if rows.complete:
        metrics = _pool_metrics(rows)
        absent = {f"status.{status}" for status in STATUSES} - metrics.keys()
        check_metrics(run, POOL_STAGE, step, metrics, learner, absent=absent)
    return rows, order


def check_shared_columns(run: AuditRun, rows: Rows, batch: Batch, order: PoolOrder, learner: str) -> None:
    """Columns that pool and advantages share."""
    sources = run.sources(learner)
    check = rows.content.table.name
    rows.equal(check, "problem_id", batch.problem_ids.take(pa.array(order.problem)))
    rows.equal(check, "source", pa.array(sources, pa.string()).take(pa.array(order.source)))
    rows.equal(check, "is_self", pa.array(order.source == sources.index(learner)))


def _check_source(
    rows: Rows, order: PoolOrder, number: int, source: str, responses: Responses | None, rewards: Floats | None
) -> None:
    """Columns that repeat what a source's tables say."""
    mine = order.source == number
    if rewards is not None:
        rows.close("pool", "reward", rewards[order.response], where=mine, note=f"{source}'s verdicts")
    if responses is None:
        return
    mine = mine & responses.present[order.response]
    note = f"of {source}'s rollouts"
    rows.equal("pool", "source_tokens", responses.scored[order.response], where=mine, note=note)
    rows.equal("pool", "text_bytes", responses.text_bytes[order.response], where=mine, note=note)
    terminal = responses.terminal.take(pa.array(order.response))
    rows.equal("pool", "source_terminal", terminal, where=mine, note=f"the scored token that ended it, {note}")
    ids_kept = rows.flags("as_sampled")
    for where, sums, of in (
        (ids_kept, responses.source_logprob, "logprobs"),
        (~ids_kept, responses.whole_logprob, "logprobs and support_logprob"),
    ):
        rows.close(
            "pool",
            "source_logprob",
            sums[order.response],
            relative=TOLERANCE,
            absolute=1e-12,
            where=mine & where,
            note=f"sum over the scored tokens of {source}'s {of}",
        )
    check_pooled_support(
        rows, mine, ids_kept & ~rows.flags("is_self"), responses.support, order.response, responses.scored
    )


def _check_prompts(run: AuditRun, rows: Rows, order: PoolOrder, own: Responses) -> None:
    """Prompts as the learner sampled from them."""
    first = order.problem * run.settings.responses_per_prompt
    prompts = rows.lists("prompt_token_ids")
    rows.require(
        "pool",
        "prompt_token_ids",
        prompts.same_as(own.prompts, first),
        Taken(own.prompts, first),
        where=own.present[first],
        shown=prompts,
        note="the learner's own prompt for the problem",
    )


def _check_passage(
    run: AuditRun,
    rows: Rows,
    order: PoolOrder,
    number: int,
    source: str,
    learner: str,
    responses: Responses | None,
) -> None:
    """How a source's responses came into the learner's tokens: as sampled where the tokenizers are the same."""
    mine = order.source == number
    shared: bool | None = source == learner
    if not shared and run.settings.pool.retokenise == "auto":
        shared = run.same_tokenizer(learner, source)
        if shared is None:
            run.skip(f"whether {learner} and {source} share token ids", "a tokenizer cannot be read")
            return
    other = "retokenise: always" if run.settings.pool.retokenise == "always" else "another tokenizer"
    why = f"{learner} and {source} have the same tokenizer" if shared else other
    rows.equal("pool", "as_sampled", shared, where=mine, note=why)
    if not shared:
        _check_terminals(rows, mine, source)
    elif responses is not None:
        _check_as_sampled(run, rows, order, mine, learner if source != learner else None, responses)


def _check_terminals(rows: Rows, mine: Flags, source: str) -> None:
    """Each of the source's terminal tokens is one of the learner's throughout."""
    sampled, learned = rows.arrow("source_terminal"), rows.arrow("learner_terminal")
    both = mine & rows.present & np.asarray(pc.is_valid(sampled)) & np.asarray(pc.is_valid(learned))
    ends, stands = (np.asarray(pc.fill_null(column, -1)) for column in (sampled, learned))
    for end in np.unique(ends[both]).tolist():
        where = both & (ends == end)
        one = int(stands[where][0])
        note = f"what stands for {source}'s {end} in the responses before"
        rows.require("pool", "learner_terminal", stands == one, one, where=where, note=note)


def _check_as_sampled(
    run: AuditRun, rows: Rows, order: PoolOrder, mine: Flags, learner: str | None, responses: Responses
) -> None:
    """Responses that keep the tokens that were sampled; `learner`: whose limits count, None for its own responses."""
    mine = mine & responses.present[order.response]
    sampled, tokens = responses.tokens.heads(responses.scored), rows.lists("token_ids")
    fits = np.full(len(sampled), True)
    long = np.full(len(rows), False)
    if learner is not None:
        limits = Limits.of(run.config(learner), run.settings.pool.max_tokens)
        fits = ListColumn(sampled.lengths, sampled.values < limits.vocabulary).all_true()
        long = rows.lists("prompt_token_ids").lengths + sampled.lengths[order.response] > limits.tokens
    wanted = np.where(long, "too_long", "kept")
    wanted[~fits[order.response]] = "not_representable"
    wanted[sampled.lengths[order.response] == 0] = "empty"
    note = "own responses are always used" if learner is None else "of the tokens that were sampled"
    rows.equal("pool", "status", pa.array(wanted.tolist()), where=mine, note=note)
    rows.equal("pool", "roundtrip", pa.array(fits[order.response]), where=mine, note="nothing was retokenised")
    rows.require(
        "pool",
        "token_ids",
        tokens.same_as(sampled, order.response),
        Taken(sampled, order.response),
        where=mine & fits[order.response],
        shown=tokens,
        note="own responses keep the tokens that were sampled" if learner is None else note,
    )


def _last_tokens(rows: Rows) -> Any:
    """The last token of every response that the learner has and of which the source's end is scored."""
    return rows.lists("token_ids").last(np.asarray(pc.is_valid(rows.arrow("source_terminal"))))


def _check_status(run: AuditRun, rows: Rows, learner: str) -> None:
    """Which responses can be used, as far as that follows without a tokenizer."""
    status, counts = rows.arrow("status"), rows.ints("learner_tokens")
    known = np.asarray(pc.is_in(status, value_set=pa.array(STATUSES)))
    rows.require("pool", "status", known, " or ".join(STATUSES))
    lengths = rows.lists("token_ids").lengths
    rows.equal("pool", "learner_tokens", lengths, note="number of token_ids")
    kept = np.asarray(pc.equal(status, "kept"))
    own = rows.flags("is_self")
    rows.require("pool", "status", (counts > 0) | ~kept, "not kept: it has no token")
    most = Limits.of(run.config(learner), run.settings.pool.max_tokens).tokens
    long = rows.lists("prompt_token_ids").lengths + lengths > most
    rows.require("pool", "status", ~(long & kept) | own, f"too_long: more than {most} tokens")


def _pool_metrics(rows: Rows) -> dict[str, float | None]:
    status = rows.arrow("status").to_pylist()
    metrics: dict[str, float | None] = {f"status.{name}": count for name, count in Counter(status).items()}
    cross = ~rows.flags("is_self")
    kept = cross & np.asarray(pc.equal(rows.arrow("status"), "kept"))
    if cross.any():
        metrics["as_sampled"] = float(rows.flags("as_sampled")[cross].mean())
        metrics["roundtrip"] = float(rows.flags("roundtrip")[cross].mean())
    source_tokens = int(rows.ints("source_tokens")[kept].sum())
    if kept.any() and source_tokens:
        metrics["token_ratio"] = int(rows.ints("learner_tokens")[kept].sum()) / source_tokens
    return metrics
