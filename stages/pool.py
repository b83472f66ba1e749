"""pool: everything one learner trains on in a step, in its own vocabulary."""

from __future__ import annotations

from collections import Counter

import typer

from hacpo.pipeline.command_line import main_of
from hacpo.pipeline.options import LearnerOption, LimitOption, OutOption, PipelineFolder, SetOption, StepOption
from hacpo.pipeline.stage import open_stage

_NEEDED = ("rollout_id", "problem_id", "sample", "token_ids", "text", "finish_reason", "stop_string", "logprobs")


def pool(
    context: typer.Context,
    pipeline: PipelineFolder,
    step: StepOption,
    learner: LearnerOption,
    out: OutOption = None,
    limit: LimitOption = None,
    overrides: SetOption = None,
) -> None:
    """Write pool/step=<step>/learner=<name>: own rollouts as sampled, the others' retokenised."""
    from hacpo import schema
    from hacpo.pooling import build_pool
    from hacpo.rollouts import first_problems, with_rewards

    with open_stage(
        "pool",
        context.obj,
        pipeline,
        step=step,
        agent=learner,
        out=out,
        limit=limit,
        overrides=overrides or (),
        steps_from=1,
    ) as stage:
        settings = stage.settings
        sources = list(settings.agents) if settings.algorithm.rollouts.share else [learner]
        problems = stage.read(stage.inputs.prompts(step), schema.SCHEDULE, "prepare", step=step).to_pylist()[:limit]
        rollouts = {}
        for source in sources:
            table = stage.read(
                stage.inputs.rollouts(step, source),
                schema.ROLLOUTS,
                "generate",
                columns=[*_NEEDED, *(("prompt_token_ids",) if source == learner else ())],
                step=step,
                agent=source,
            )
            rewards = stage.read(
                stage.inputs.verdicts(step, source),
                schema.VERDICTS,
                "verify",
                columns=["rollout_id", "reward"],
                step=step,
                agent=source,
            )
            rollouts[source] = first_problems(with_rewards(table.to_pylist(), rewards.to_pylist()), limit)
        tokenizer, max_tokens = None, None
        if len(sources) > 1:
            tokenizer = stage.open_tokenizer(learner)
            limits = [tokenizer.context_length, settings.pool.max_tokens]
            max_tokens = min((most for most in limits if most is not None), default=None)
        rows = build_pool(
            problems,
            rollouts,
            learner=learner,
            group_size=settings.responses_per_prompt,
            tokenizer=tokenizer,
            prompt_settings=settings.agents[learner].prompt,
            max_tokens=max_tokens,
            score_eos=settings.algorithm.importance.score_eos,
            on_progress=stage.progress,
        )
        stage.write(
            stage.outputs.pool(step, learner),
            schema.POOL,
            rows,
            step=step,
            learner=learner,
            rows_per_shard=settings.storage.rows_per_shard,
        )
        counts = Counter(row["status"] for row in rows)
        cross = [row for row in rows if not row["is_self"]]
        stage.metrics |= {f"status.{name}": count for name, count in sorted(counts.items())}
        if cross:
            stage.metrics["roundtrip"] = sum(row["roundtrip"] for row in cross) / len(cross)
            kept = [row for row in cross if row["status"] == "kept"]
            if kept:
                stage.metrics["token_ratio"] = sum(row["learner_tokens"] for row in kept) / sum(
                    row["source_tokens"] for row in kept
                )
        stage.summary = f"{len(rows)} rollouts, " + ", ".join(f"{n} {name}" for name, n in counts.most_common())


if __name__ == "__main__":
    main_of(pool)
