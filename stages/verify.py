"""verify: reward every rollout of one agent, by its answer or by a function of the user's."""

from __future__ import annotations

from collections import Counter

import typer

from hacpo.pipeline.command_line import main_of
from hacpo.pipeline.options import (
    AgentOption,
    LimitOption,
    OutOption,
    PipelineFolder,
    SetOption,
    SideOption,
    StepOption,
)
from hacpo.pipeline.stage import open_stage


def verify(
    context: typer.Context,
    pipeline: PipelineFolder,
    step: StepOption,
    agent: AgentOption,
    side: SideOption = False,
    out: OutOption = None,
    limit: LimitOption = None,
    overrides: SetOption = None,
) -> None:
    """Write verdicts/step=<step>/agent=<name>; with --side, side_verdicts/step=<step>/agent=<name>."""
    from hacpo import schema
    from hacpo.errors import ArtifactError
    from hacpo.reward import Request, Verifier, check_error_rate
    from hacpo.rollouts import check_whole, first_problems

    made_by = "side_generate" if side else "generate"
    with open_stage(
        "side_verify" if side else "verify",
        context.obj,
        pipeline,
        step=step,
        agent=agent,
        out=out,
        limit=limit,
        overrides=overrides or (),
        steps_from=1,
    ) as stage:
        prompts = stage.read(stage.inputs.prompts(step), schema.SCHEDULE, "prepare", step=step).to_pylist()
        answers = {row["problem_id"]: row["answer"] for row in prompts}
        source = (stage.inputs.side_rollouts if side else stage.inputs.rollouts)(step, agent)
        target = (stage.outputs.side_verdicts if side else stage.outputs.verdicts)(step, agent)
        rollouts = stage.read(
            source,
            schema.SIDE_ROLLOUTS if side else schema.ROLLOUTS,
            made_by,
            columns=["rollout_id", "step", "agent", "problem_id", "sample", "text", "finish_reason"],
            step=step,
            agent=agent,
        ).to_pylist()
        check_whole(
            rollouts,
            list(answers),
            step,
            agent,
            side=side,
            where=source,
            remedy=f"repeat `{stage.pipeline.command(made_by, step, agent=agent)}`",
        )
        rollouts = first_problems(rollouts, limit)
        settings = stage.settings
        problems = {}
        if not settings.verification.is_math:
            path = stage.inputs.problems(settings.data.train)
            rows = stage.read(path, schema.PROBLEMS, "prepare").to_pylist()
            problems = {row["problem_id"]: row for row in rows if row["problem_id"] in answers}
            if answers.keys() - problems.keys():
                raise ArtifactError(
                    "the step's prompts are of problems that are not in the training set",
                    where=path,
                    found=repr(min(answers.keys() - problems.keys())),
                    remedy=f"repeat `{stage.pipeline.command('prepare')}`",
                )
        requests = [
            Request(
                row["rollout_id"],
                row["text"],
                row["finish_reason"],
                answers[row["problem_id"]],
                problems.get(row["problem_id"]),
            )
            for row in rollouts
        ]
        with Verifier(settings.verification, stage.pipeline.root) as verifier:
            verdicts = verifier.verify(requests, on_progress=stage.progress)
        stage.write(
            target,
            schema.SIDE_VERDICTS if side else schema.VERDICTS,
            {
                "rollout_id": [row["rollout_id"] for row in rollouts],
                "reward": [verdict.reward for verdict in verdicts],
                "verdict": [verdict.verdict for verdict in verdicts],
                "extracted": [verdict.extracted for verdict in verdicts],
                "answer": [request.answer for request in requests],
                "problem_id": [row["problem_id"] for row in rollouts],
                "sample": [row["sample"] for row in rollouts],
                "message": [verdict.message for verdict in verdicts],
            },
            step=step,
            agent=agent,
            rows_per_shard=settings.storage.rows_per_shard,
        )
        check_error_rate(verdicts, settings.verification, where=target)
        counts = Counter(verdict.verdict for verdict in verdicts)
        stage.metrics |= {f"verdict.{name}": count for name, count in sorted(counts.items())}
        stage.metrics["accuracy"] = sum(verdict.reward for verdict in verdicts) / len(verdicts)
        stage.summary = f"mean reward {stage.metrics['accuracy']:.3f}, " + ", ".join(
            f"{count} {name}" for name, count in counts.most_common()
        )


if __name__ == "__main__":
    main_of(verify)
