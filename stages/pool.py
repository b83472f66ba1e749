"""pool: everything one learner trains on in a step, in its own vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from hacpo.pipeline.catalogue import POOL_STAGE
from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.execution.stage import Stage
from hacpo.pipeline.execution.stage_command import stage_command

if TYPE_CHECKING:
    import pyarrow as pa

    from hacpo.algorithm.pooling import Limits, TextRoute
    from hacpo.artifacts.row_stream import RowStream

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
    import pyarrow as pa

    from hacpo.algorithm.pooling import Limits, build_pool
    from hacpo.artifacts import tables
    from hacpo.artifacts.problem_rows import ScheduledProblem
    from hacpo.artifacts.row_stream import Pieces

    settings, learner, group_size = stage.settings, stage.mine, stage.settings.responses_per_prompt
    sources = settings.learned_from(learner)
    problems = ScheduledProblem.of(stage.read(tables.PROMPTS).slice(0, stage.limit))
    rollouts = _rollouts(stage, [asked.problem_id for asked in problems], sources)
    routes = _routes(stage, learner, sources)
    limits = _limits(stage, learner) if len(sources) > 1 else Limits()
    per_problem = len(sources) * group_size
    rows, at_once = len(problems) * per_problem, max(_ROWS_AT_ONCE // per_problem, 1)
    told: list[pa.Table] = []

    def pieces() -> Iterator[pa.Table]:
        for start in range(0, len(problems), at_once):
            some = problems[start : start + at_once]
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
            told.append(piece.select(_TOLD))
            stage.progress((start + len(some)) * per_problem, rows)
            yield piece

    stage.write(
        tables.POOL,
        Pieces(rows, pieces()),
        rows_per_shard=settings.storage.rows_per_shard,
    )
    _tell(stage, pa.concat_tables(told))


def _rollouts(stage: Stage, problem_ids: Sequence[str], sources: Sequence[str]) -> dict[str, RowStream]:
    """Source -> its rollouts of these problems with their rewards, by problem and sample.

    What identifies them is read at once, to check that all are there; the rest when its turn comes.
    """
    import numpy as np
    import pyarrow as pa

    from hacpo.algorithm.rollouts import in_order, of_first_problems, with_rewards
    from hacpo.artifacts import tables
    from hacpo.artifacts.row_stream import RowStream

    every, chosen = {}, {}
    for source in sources:
        ids = stage.read(tables.ROLLOUTS, source, columns=["rollout_id", "problem_id", "sample"])
        every[source] = with_rewards(ids, stage.read(tables.VERDICTS, source, columns=["rollout_id", "reward"]))
        chosen[source] = np.flatnonzero(of_first_problems(every[source]["problem_id"], stage.limit))
    known = {source: every[source].take(pa.array(rows)) for source, rows in chosen.items()}
    order = in_order(problem_ids, known, stage.settings.responses_per_prompt, where=f"pool of {stage.mine}")
    streams = {}
    for source in sources:
        columns = [*_NEEDED, *(("prompt_token_ids",) if source == stage.mine else ())]
        shards = _rewarded(stage.shards(tables.ROLLOUTS, source, columns=columns), every[source]["reward"])
        streams[source] = RowStream(shards, chosen[source][order[source]])
    return streams


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
