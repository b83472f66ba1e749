"""advantage: every agent's capability, and what each rollout is worth to each learner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from hacpo.pipeline.command_line import main_of
from hacpo.pipeline.options import LimitOption, OutOption, PipelineFolder, SetOption, StepOption
from hacpo.pipeline.stage import Stage, open_stage


def advantage(
    context: typer.Context,
    pipeline: PipelineFolder,
    step: StepOption,
    learner: Annotated[str | None, typer.Option("--learner", help="Only this learner (needs --out).")] = None,
    out: OutOption = None,
    limit: LimitOption = None,
    overrides: SetOption = None,
) -> None:
    """Write capability/step=<step> and advantages/step=<step>/learner=<name> for every learner."""
    from hacpo import schema
    from hacpo.advantage_table import (
        advantage_columns,
        advantage_summary,
        capabilities_used,
        capability_rows,
        capability_summary,
    )
    from hacpo.errors import SettingsError
    from hacpo.layout import partition
    from hacpo.pipeline import lessons
    from hacpo.rollouts import Row, first_problems, in_order, reward_array

    with open_stage(
        "advantage", context.obj, pipeline, step=step, out=out, limit=limit, overrides=overrides or (), steps_from=1
    ) as stage:
        settings = stage.settings
        agents = list(settings.agents)
        if learner is not None and (learner not in agents or out is None):
            raise SettingsError(
                f"--learner {learner} cannot be used here", expected=f"one of {', '.join(agents)}, together with --out"
            )
        problems = stage.read(stage.inputs.prompts(step), schema.SCHEDULE, "prepare", step=step).to_pylist()[:limit]
        verdicts = {
            agent: first_problems(
                stage.read(
                    stage.inputs.verdicts(step, agent),
                    schema.VERDICTS,
                    "verify",
                    columns=["rollout_id", "reward", "problem_id", "sample"],
                    step=step,
                    agent=agent,
                ).to_pylist(),
                limit,
            )
            for agent in agents
        }
        group_size = settings.responses_per_prompt
        problem_ids = [row["problem_id"] for row in problems]
        ordered = in_order(problem_ids, verdicts, group_size, where=f"verdicts of step {step}")

        previous: dict[str, Row] = {}
        if step > 1:
            table = stage.read(stage.inputs.capability(step - 1), schema.CAPABILITY, "advantage", step=step - 1)
            previous = {row["agent"]: row for row in table.to_pylist()}
        rewards = reward_array(ordered, len(problems), len(agents), group_size)
        rows = capability_rows(
            {agent: rewards[:, number] for number, agent in enumerate(agents)},
            previous,
            settings.algorithm.capability,
            _oracle(stage, problem_ids),
        )
        with (
            schema.atomic(stage.outputs.capability(step).parent) as capability,
            schema.atomic(stage.outputs.advantages(step, "x").parent) as advantages,
        ):
            capability.mkdir()
            stage.write(capability / "capability.parquet", schema.CAPABILITY, rows, step=step)
            advantages.mkdir()
            for name in agents if learner is None else [learner]:
                columns = advantage_columns(
                    ordered,
                    learner=name,
                    agents=agents if settings.algorithm.rollouts.share else [name],
                    group_size=group_size,
                    capabilities=capabilities_used(rows, settings.algorithm.advantage),
                    settings=settings.algorithm.advantage,
                    capability_settings=settings.algorithm.capability,
                )
                stage.write(
                    advantages / partition(step, learner=name).split("/")[1],
                    schema.ADVANTAGES,
                    columns,
                    step=step,
                    learner=name,
                    rows_per_shard=settings.storage.rows_per_shard,
                )
                stage.metrics |= {f"{name}.{key}": value for key, value in advantage_summary(columns).items()}
        stage.metrics |= capability_summary(
            rows, settings.algorithm.capability, share=settings.algorithm.rollouts.share
        )
        stage.summary = ", ".join(f"{row['agent']} {row['capability']:.3f}" for row in rows)
    if out is None:
        for line in lessons.remarks(stage.pipeline, step):
            stage.session.progress.remark(line)


def _oracle(stage: Stage, problem_ids: Sequence[str]) -> dict[str, float] | None:
    """Every agent's capability as the oracle says it: the given table, or a side sample; None without one."""
    from hacpo import schema
    from hacpo.advantage_table import side_sample_capability
    from hacpo.oracle import capabilities_of_step
    from hacpo.rollouts import first_problems, in_order

    settings, agents, step = stage.settings.algorithm.capability, list(stage.settings.agents), stage.step
    if settings.oracle_table is not None:
        return capabilities_of_step(stage.pipeline.root / settings.oracle_table, step, agents)
    if settings.oracle_samples is None:
        return None
    columns = ["rollout_id", "reward", "problem_id", "sample"]
    capabilities = {}
    for agent in agents:
        path = stage.inputs.side_verdicts(step, agent)
        table = stage.read(path, schema.SIDE_VERDICTS, "side_verify", columns=columns, step=step, agent=agent)
        rows = {agent: first_problems(table.to_pylist(), stage.limit)}
        ordered = in_order(problem_ids, rows, settings.oracle_samples, where=path)
        capabilities[agent] = side_sample_capability([row["reward"] for _, row in ordered], settings)
    return capabilities


if __name__ == "__main__":
    main_of(advantage)
