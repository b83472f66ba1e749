"""prune: remove the checkpoints that the retention settings let go."""

from __future__ import annotations

from typing import Annotated

import typer

from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.options import PipelineFolder


def prune(
    pipeline: PipelineFolder,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False,
) -> None:
    """Do by hand what `hacpo run` does after each step; for those who use `dvc repro`.

    What stays is put in DVC's cache as `retention.cache` says.
    """
    from hacpo.phrases import mebibytes, ranges
    from hacpo.pipeline.project import Pipeline
    from hacpo.pipeline.retention.rule import rule_text
    from hacpo.pipeline.running.by_hand import prune_by_hand

    opened = Pipeline.open(pipeline)
    retention = opened.settings.retention
    made = prune_by_hand(opened, dry_run=dry_run)
    plans, done = made.plans, made.done
    for remark in made.told:
        print(f"{opened.run}: {remark}")
    cached = f"step{'s' if len(made.cached) > 1 else ''} {ranges(made.cached)}" if made.cached else "none"
    if retention.keeps_all:
        print(f"{opened.run}: every checkpoint is kept; `retention` in params.yaml says which may go")
        print(f"in DVC's cache: {cached}")
        return
    print(f"{opened.run}: {rule_text(retention)}; {f'step {done}' if done >= 0 else 'nothing'} is done and recorded")
    for plan in plans:
        stay = ", ".join(f"{step} ({why})" for step, why in plan.stay.items())
        size = mebibytes(sum(plan.go.values()))
        done_or_not = "would go" if dry_run else "are gone"
        going = f"steps {ranges(list(plan.go))} {done_or_not}, {size}" if plan.go else "none goes"
        print(f"{plan.agent}: {going}; kept: {stay or 'none'}")
    print(f"in DVC's cache: {cached}")
    count, size = sum(len(plan.go) for plan in plans), mebibytes(sum(sum(plan.go.values()) for plan in plans))
    print(f"{count} checkpoints, {size} {'would be' if dry_run else 'are'} free")
    if count and not dry_run:
        print("From now on `dvc repro --allow-missing`: without it, DVC trains what is missing again")


if __name__ == "__main__":
    main_of(prune)
