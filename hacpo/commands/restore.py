"""restore: train a pruned checkpoint again, from the nearest one that is there."""

from __future__ import annotations

from typing import Annotated

import typer

from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.options import AgentOption, PipelineFolder


def restore(
    pipeline: PipelineFolder,
    step: Annotated[int, typer.Option("--step", help="Step of the checkpoint.", show_default=False)],
    agent: AgentOption,
) -> None:
    """Repeat an agent's updates up to a step, and put the checkpoint back if it is the same to the bit.

    The next `hacpo run` or `hacpo prune` removes it again unless the retention settings keep it.
    """
    from hacpo.errors import SettingsError
    from hacpo.pipeline.project import Pipeline
    from hacpo.pipeline.running.by_hand import restore_by_hand

    opened = Pipeline.open(pipeline)
    if agent not in opened.settings.agents:
        known = ", ".join(opened.settings.agents)
        raise SettingsError(f"no agent {agent!r} in params.yaml", where=pipeline, expected=f"one of {known}")
    if not 1 <= step <= opened.settings.steps:
        raise SettingsError(
            "--step is out of range", where=pipeline, expected=f"1 to {opened.settings.steps}", found=step
        )
    again = restore_by_hand(opened, agent, step)
    print(f"{opened.layout.checkpoint(step, agent)}: {'trained again, the same to the bit' if again else 'is there'}")


if __name__ == "__main__":
    main_of(restore)
