"""prepare: collect the problems, and schedule which of them every step trains on."""

from __future__ import annotations

import typer

from hacpo.pipeline.command_line import main_of
from hacpo.pipeline.options import LimitOption, OutOption, PipelineFolder, SetOption
from hacpo.pipeline.stage import open_stage


def prepare(
    context: typer.Context,
    pipeline: PipelineFolder,
    out: OutOption = None,
    limit: LimitOption = None,
    overrides: SetOption = None,
) -> None:
    """Write data/<set>/<split>.parquet, schedule.parquet and each step's prompts."""
    from hacpo import problems, schema
    from hacpo.layout import step_dir

    with open_stage("prepare", context.obj, pipeline, out=out, limit=limit, overrides=overrides or ()) as stage:
        settings = stage.settings
        sets = {
            name: problems.load(name, source, stage.pipeline.root)[: stage.limit]
            for name, source in settings.data.sets.items()
        }
        schedule = problems.schedule(
            sets[settings.data.train], steps=settings.steps, prompts=settings.batch.prompts, seed=settings.seed
        )
        with schema.atomic(stage.outputs.data) as scratch:
            for name, rows in sets.items():
                stage.write(scratch / f"{name}.parquet", schema.PROBLEMS, rows, without=("seed", "steps", "batch"))
        stage.write(stage.outputs.schedule, schema.SCHEDULE, schedule)
        with schema.atomic(stage.outputs.root / "prompts") as scratch:
            for step in range(1, settings.steps + 1):
                rows = [row for row in schedule if row["step"] == step]
                stage.write(scratch / step_dir(step), schema.SCHEDULE, rows, step=step, without=("steps", "data"))
        stage.metrics |= {f"problems.{name}": len(rows) for name, rows in sets.items()}
        stage.metrics["scheduled"] = len(schedule)
        epochs = len(schedule) / len(sets[settings.data.train])
        stage.summary = f"{settings.steps} steps x {settings.batch.prompts} prompts, {epochs:.2f} epochs"


if __name__ == "__main__":
    main_of(prepare)
