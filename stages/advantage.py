"""advantage: every agent's capability, and what each rollout is worth to each learner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from hacpo.errors import SettingsError
from hacpo.pipeline.catalogue import ADVANTAGE
from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.execution.stage import Stage
from hacpo.pipeline.execution.stage_command import stage_command

if TYPE_CHECKING:
    import pyarrow as pa

    from hacpo.algorithm.advantage_table import CapabilityRow
    from hacpo.artifacts.tables import Table

_REWARDED = ("rollout_id", "reward", "problem_id", "sample")


@stage_command(ADVANTAGE)
def advantage(
    stage: Stage,
    learner: Annotated[str | None, typer.Option("--learner", help="Only this learner (needs --out).")] = None,
) -> None:
    """Write capability/step=<step> and advantages/step=<step>/learner=<name> for every learner."""
    from hacpo.algorithm.advantage_table import (
        advantage_columns,
        advantage_summary,
        capabilities_used,
        capability_rows,
        capability_summary,
    )
    from hacpo.algorithm.rollouts import ordered_responses, reward_array
    from hacpo.algorithm.selection import selection
    from hacpo.artifacts import tables
    from hacpo.pipeline.views import lessons

    settings, step, limit = stage.settings, stage.step, stage.limit
    agents = list(settings.agents)
    whole_run = stage.in_place
    if learner is not None and (learner not in agents or whole_run):
        raise SettingsError(
            f"--learner {learner} cannot be used here", expected=f"one of {', '.join(agents)}, together with --out"
        )
    problem_ids = stage.read(tables.PROMPTS)["problem_id"].to_pylist()[:limit]
    group_size = settings.responses_per_prompt
    responses = ordered_responses(
        problem_ids,
        {agent: _first(stage, tables.VERDICTS, agent) for agent in agents},  # which nobody holds on to
        group_size,
        where=f"verdicts of step {step}",
    )
    rewards = reward_array(responses, len(agents), group_size)
    rows = capability_rows(
        {agent: rewards[:, number] for number, agent in enumerate(agents)},
        _rows_before(stage, agents) if step > 1 else {},
        settings.algorithm.capability,
        _oracle(stage, problem_ids),
    )
    with stage.replacing(tables.CAPABILITY), stage.replacing(tables.ADVANTAGES):
        stage.write(tables.CAPABILITY, [vars(row) for row in rows])
        for name in agents if learner is None else [learner]:
            columns = advantage_columns(
                responses,
                learner=name,
                agents=settings.compared_with(name),
                sources=settings.learned_from(name),
                group_size=group_size,
                capabilities=capabilities_used(rows, settings.algorithm.advantage),
                settings=settings.algorithm.advantage,
                capability_settings=settings.algorithm.capability,
            )
            columns |= selection(columns, settings.algorithm.rollouts, step=step, learner=name)
            stage.write(
                tables.ADVANTAGES,
                columns,
                whose=name,
                rows_per_shard=settings.storage.rows_per_shard,
            )
            stage.metrics |= {f"{name}.{key}": value for key, value in advantage_summary(columns).items()}
    stage.metrics |= capability_summary(
        rows, settings.algorithm.capability, coupled=settings.algorithm.rollouts.coupled
    )
    stage.summary = ", ".join(f"{row.agent} {row.capability:.3f}" for row in rows)
    if whole_run:
        stage.remarks = lessons.remarks


def _rows_before(stage: Stage, agents: Sequence[str]) -> dict[str, CapabilityRow]:
    """Every agent's row of the capability table of the step before."""
    from hacpo.algorithm.advantage_table import capability_by_agent
    from hacpo.artifacts import tables

    before = stage.step - 1
    where = stage.place(tables.CAPABILITY, step=before)
    return capability_by_agent(stage.read(tables.CAPABILITY, step=before), agents, where=where)


def _oracle(stage: Stage, problem_ids: Sequence[str]) -> dict[str, float] | None:
    """Every agent's capability as the oracle says it: the given table, or a side sample; None without one."""
    from hacpo.algorithm.advantage_table import side_sample_capability
    from hacpo.algorithm.rollouts import ordered_responses
    from hacpo.artifacts import tables
    from hacpo.data.oracle_table import capabilities_of_step

    settings, agents, step = stage.settings.algorithm.capability, list(stage.settings.agents), stage.step
    if settings.oracle_table is not None:
        return capabilities_of_step(stage.root / settings.oracle_table, step, agents)
    if settings.oracle_samples is None:
        return None
    capabilities = {}
    for agent in agents:
        drawn = {agent: _first(stage, tables.SIDE_VERDICTS, agent)}
        where = stage.place(tables.SIDE_VERDICTS, agent)
        responses = ordered_responses(problem_ids, drawn, settings.oracle_samples, where=where)
        capabilities[agent] = side_sample_capability(responses["reward"].to_numpy(), settings)
    return capabilities


def _first(stage: Stage, table: Table, agent: str) -> pa.Table:
    """An agent's rewards, of the first problems where the stage is limited to these."""
    from hacpo.algorithm.rollouts import first_problems

    return first_problems(stage.read(table, agent, columns=_REWARDED), stage.limit)


if __name__ == "__main__":
    main_of(advantage)
