"""prepare: collect the problems, and schedule which of them every step trains on."""

from __future__ import annotations

from hacpo.pipeline.catalogue import PREPARE
from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.execution.stage import Stage
from hacpo.pipeline.execution.stage_command import stage_command


@stage_command(PREPARE)
def prepare(stage: Stage) -> None:
    """Write data/<set>/<split>.parquet, schedule.parquet and each step's prompts."""
    from hacpo.artifacts import tables
    from hacpo.data import problems

    settings = stage.settings
    sets = {name: problems.load(name, source, stage.root)[: stage.limit] for name, source in settings.data.sets.items()}
    schedule = problems.schedule(
        sets[settings.data.train], steps=settings.steps, prompts=settings.batch.prompts, seed=settings.seed
    )
    with stage.replacing(tables.PROBLEMS):
        for name, content in sets.items():
            stage.write(tables.PROBLEMS, [vars(row) for row in content], whose=name)
    stage.write(tables.SCHEDULE, [vars(row) for row in schedule])
    with stage.replacing(tables.PROMPTS):
        for step in range(1, settings.steps + 1):
            rows = [vars(row) for row in schedule if row.step == step]
            stage.write(tables.PROMPTS, rows, step=step)
    stage.metrics |= {f"problems.{name}": len(rows) for name, rows in sets.items()}
    stage.metrics["scheduled"] = len(schedule)
    epochs = len(schedule) / len(sets[settings.data.train])
    stage.summary = f"{settings.steps} steps x {settings.batch.prompts} prompts, {epochs:.2f} epochs"


if __name__ == "__main__":
    main_of(prepare)
