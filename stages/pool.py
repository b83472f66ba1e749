"""pool: everything one learner trains on in a step, in its own vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hacpo.pipeline.catalogue import POOL_STAGE
from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.execution.stage import Stage
from hacpo.pipeline.execution.stage_command import stage_command

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from hacpo.algorithm.pooling import Limits, TextRoute
    from hacpo.artifacts.problem_rows import ScheduledProblem
    from hacpo.artifacts.row_stream import Pieces, RowStream

_NEEDED = (
    "rollout_id",
    "problem_id",
    "sample",
    "token_ids",
    "text",
    "finish_reason",
    "stop_string",
    "logprobs",
    "support",
    "support_logprob",
)
_TOLD = ("is_self", "status", "as_sampled", "roundtrip", "learner_tokens", "source_tokens")
"""Columns that the metrics are made of."""
_ROWS_AT_ONCE = 4096
"""Rows of the pool that are in memory at the same time."""


@stage_command(POOL_STAGE)
def pool(stage: Stage) -> None:
    """Write pool/step=<step>/learner=<name>: rollouts of equal tokenizers as sampled, the others retokenised."""
    from hacpo.artifacts import tables
    from hacpo.artifacts.problem_rows import ScheduledProblem

    settings, learner = stage.settings, stage.mine
    sources = settings.learned_from(learner)
    problems = ScheduledProblem.of(stage.read(tables.PROMPTS).slice(0, stage.limit))
    known = _known(stage, [asked.problem_id for asked in problems], sources)
    if stage.make(
        tables.POOL,
        len(problems) * len(sources) * settings.responses_per_prompt,
        lambda rows: _pooled(stage, problems, known, rows),
    ):
        _tell(stage, stage.made(tables.POOL, _TOLD))


@dataclass(frozen=True)
class _Known:
    """What is known of a source's rollouts before they are read: the rewards of all, and by problem and sample which
    rows they are."""

    rewards: pa.ChunkedArray
    rows: npt.NDArray[np.int64]


def _known(stage: Stage, problem_ids: Sequence[str], sources: Sequence[str]) -> dict[str, _Known]:
    """Source -> what is known of its rollouts of these problems: what identifies them is read, to check that all are
    there."""
    import numpy as np
    import pyarrow as pa

    from hacpo.algorithm.rollouts import in_order, of_first_problems, with_rewards
    from hacpo.artifacts import tables

    every, chosen = {}, {}
    for source in sources:
        ids = stage.read(tables.ROLLOUTS, source, columns=["rollout_id", "problem_id", "sample"])
        every[source] = with_rewards(ids, stage.read(tables.VERDICTS, source, columns=["rollout_id", "reward"]))
        chosen[source] = np.flatnonzero(of_first_problems(every[source]["problem_id"], stage.limit))
    known = {source: every[source].take(pa.array(rows)) for source, rows in chosen.items()}
    order = in_order(problem_ids, known, stage.settings.responses_per_prompt, where=f"pool of {stage.mine}")
    return {source: _Known(every[source]["reward"], chosen[source][order[source]]) for source in sources}


def _pooled(stage: Stage, problems: Sequence[ScheduledProblem], known: Mapping[str, _Known], rows: range) -> Pieces:
    """Some rows of the pool, made a few problems at a time."""
    from hacpo.algorithm.pooling import Limits, build_pool
    from hacpo.artifacts.row_stream import Pieces

    settings, learner, group_size = stage.settings, stage.mine, stage.settings.responses_per_prompt
    per_problem = len(known) * group_size
    mine = range(rows.start // per_problem, -(-rows.stop // per_problem))
    at_once = max(_ROWS_AT_ONCE // per_problem, 1)
    rollouts = {
        source: _stream(stage, source, known[source], range(mine.start * group_size, mine.stop * group_size))
        for source in known
    }
    routes = _routes(stage, learner, list(known))
    limits = _limits(stage, learner) if len(known) > 1 else Limits()

    def pieces() -> Iterator[pa.Table]:
        for start in range(mine.start, mine.stop, at_once):
            some = problems[start : min(start + at_once, mine.stop)]
            piece = build_pool(
                some,
                {source: stream.take(len(some) * group_size) for source, stream in rollouts.items()},
                learner=learner,
                group_size=group_size,
                routes=routes,
                prompt_settings=settings.agents[learner].prompt,
                limits=limits,
                score_eos=settings.algorithm.importance.score_eos,
            )
            made = range(start * per_problem, (start + len(some)) * per_problem)
            stage.progress(min(made.stop, rows.stop) - rows.start, len(rows))
            first, end = max(rows.start, made.start), min(rows.stop, made.stop)
            yield piece.slice(first - made.start, end - first)

    return Pieces(len(rows), pieces())


def _stream(stage: Stage, source: str, known: _Known, responses: range) -> RowStream:
    """A source's responses with their rewards, by problem and sample, each read when its turn comes.

    Args:
        responses: which of them.
    """
    from hacpo.artifacts import tables
    from hacpo.artifacts.row_stream import RowStream

    columns = [*_NEEDED, *(("prompt_token_ids",) if source == stage.mine else ())]
    wanted = known.rows[responses.start : responses.stop]
    span = range(int(wanted.min()), int(wanted.max()) + 1)
    shards = stage.shards(tables.ROLLOUTS, source, columns=columns, rows=span)
    return RowStream(_rewarded(shards, known.rewards.slice(span.start)), wanted - span.start)


def _rewarded(shards: Iterable[pa.Table], rewards: pa.ChunkedArray) -> Iterator[pa.Table]:
    """Each part of a table with its rows' rewards, which are those of the whole."""
    start = 0
    for shard in shards:
        yield shard.append_column("reward", rewards.slice(start, len(shard)))
        start += len(shard)


def _tell(stage: Stage, about: pa.Table) -> None:
    """The metrics and the summary, from the pool's columns."""
    import pyarrow.compute as pc

    counts = Counter(about["status"].to_pylist())
    stage.metrics |= {f"status.{name}": count for name, count in sorted(counts.items())}
    cross = about.filter(pc.invert(about["is_self"]))
    if len(cross):
        stage.metrics |= {name: pc.sum(cross[name]).as_py() / len(cross) for name in ("as_sampled", "roundtrip")}
        kept = cross.filter(pc.equal(cross["status"], "kept"))
        if len(kept):
            tokens = [pc.sum(kept[name]).as_py() for name in ("learner_tokens", "source_tokens")]
            stage.metrics["token_ratio"] = tokens[0] / tokens[1]
    stage.summary = f"{len(about)} rollouts, " + ", ".join(f"{n} {name}" for name, n in counts.most_common())


def _limits(stage: Stage, learner: str) -> Limits:
    """What the learner's model can take of the others' responses."""
    from hacpo.algorithm.pooling import Limits
    from hacpo.artifacts.model_folder import read_mapping

    return Limits.of(read_mapping(stage.start(learner) / "config.json"), stage.settings.pool.max_tokens)


def _routes(stage: Stage, learner: str, sources: Sequence[str]) -> dict[str, TextRoute]:
    """How the responses of each source with another tokenizer become the learner's tokens."""
    from hacpo.algorithm.pooling import TextRoute
    from hacpo.tokens.same_tokenizer import same_tokenizer

    own_start = stage.start(learner)
    always = stage.settings.pool.retokenise == "always"
    return {
        source: TextRoute(stage.open_tokenizer(source), stage.open_tokenizer(learner))
        for source in sources
        if source != learner and (always or not same_tokenizer(own_start, stage.start(source)))
    }


if __name__ == "__main__":
    main_of(pool)
