"""plan: check params.yaml and stamp the run's DVC files."""

from __future__ import annotations

from hacpo.pipeline.command_line import main_of
from hacpo.pipeline.options import PipelineFolder


def plan(pipeline: PipelineFolder) -> None:
    """Write the run's dvc.yaml files: safe to repeat, and needed after changing agents, steps or evaluation.every."""
    from hacpo.config import overridden
    from hacpo.pipeline.bookkeeping import repair_locks
    from hacpo.pipeline.plan import stamp
    from hacpo.pipeline.project import Pipeline

    opened = Pipeline.open(pipeline)
    changed = stamp(opened)
    for lock in repair_locks(opened):
        print(f"removed {lock}: it was cut off by a kill; its stages are restored from DVC's cache or run again")
    settings = opened.settings
    updates = settings.updates_per_step
    print(
        f"{opened.run}: {settings.steps} steps, {len(settings.agents)} agents, {settings.algorithm.recipe}, "
        f"{settings.batch.prompts} prompts x {settings.responses_per_prompt} responses and {updates} updates "
        f"per agent and step; {len(changed)} DVC files changed"
    )
    overrides = overridden(settings.algorithm)
    if overrides:
        print(f"overriding the recipe: {', '.join(overrides)}")


if __name__ == "__main__":
    main_of(plan)
