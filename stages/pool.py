"""pool: everything one learner trains on in a step, in its own vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hacpo.pipeline.catalogue import POOL_STAGE
from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.execution.stage import Stage
from hacpo.pipeline.execution.stage_command import stage_command

if TYPE_CHECKING:
    from hacpo.algorithm.pooling import Limits, TextRoute

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


@stage_command(POOL_STAGE)
def pool(stage: Stage) -> None:
    """Write pool/step=<step>/learner=<name>: rollouts of equal tokenizers as sampled, the others retokenised."""
    import pyarrow.compute as pc

    from hacpo.algorithm.pooling import Limits, build_pool
    from hacpo.algorithm.rollouts import first_problems, with_rewards
    from hacpo.artifacts import tables
    from hacpo.artifacts.problem_rows import ScheduledProblem

    settings, learner = stage.settings, stage.mine
    sources = settings.learned_from(learner)
    problems = ScheduledProblem.of(stage.read(tables.PROMPTS).slice(0, stage.limit))
    rollouts = {}
    for source in sources:
        columns = [*_NEEDED, *(("prompt_token_ids",) if source == learner else ())]
        table = stage.read(tables.ROLLOUTS, source, columns=columns)
        rewards = stage.read(tables.VERDICTS, source, columns=["rollout_id", "reward"])
        rollouts[source] = first_problems(with_rewards(table, rewards), stage.limit)
    table = build_pool(
        problems,
        rollouts,
        learner=learner,
        group_size=settings.responses_per_prompt,
        routes=_routes(stage, learner, sources),
        prompt_settings=settings.agents[learner].prompt,
        limits=_limits(stage, learner) if len(sources) > 1 else Limits(),
        score_eos=settings.algorithm.importance.score_eos,
        on_progress=stage.progress,
    )
    stage.write(
        tables.POOL,
        table,
        rows_per_shard=settings.storage.rows_per_shard,
    )
    counts = Counter(table["status"].to_pylist())
    stage.metrics |= {f"status.{name}": count for name, count in sorted(counts.items())}
    about = table.select(["is_self", "status", "as_sampled", "roundtrip", "learner_tokens", "source_tokens"])
    cross = about.filter(pc.invert(about["is_self"]))
    if len(cross):
        stage.metrics |= {name: pc.sum(cross[name]).as_py() / len(cross) for name in ("as_sampled", "roundtrip")}
        kept = cross.filter(pc.equal(cross["status"], "kept"))
        if len(kept):
            tokens = [pc.sum(kept[name]).as_py() for name in ("learner_tokens", "source_tokens")]
            stage.metrics["token_ratio"] = tokens[0] / tokens[1]
    stage.summary = f"{len(table)} rollouts, " + ", ".join(f"{n} {name}" for name, n in counts.most_common())


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
