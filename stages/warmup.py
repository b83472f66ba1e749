"""warmup: every agent's checkpoint before training, made from scratch or taken from a folder or the hub."""

from __future__ import annotations

import typer

from hacpo.pipeline.command_line import main_of
from hacpo.pipeline.options import AgentOption, LimitOption, OutOption, PipelineFolder, SetOption
from hacpo.pipeline.stage import open_stage


def warmup(
    context: typer.Context,
    pipeline: PipelineFolder,
    agent: AgentOption,
    out: OutOption = None,
    limit: LimitOption = None,
    overrides: SetOption = None,
) -> None:
    """Write checkpoints/step=0000/agent=<name>: train a tiny model (--limit N: for N steps), or take a model from a
    folder or the hub."""
    from hacpo import schema

    with open_stage(
        "warmup", context.obj, pipeline, agent=agent, out=out, limit=limit, overrides=overrides or ()
    ) as stage:
        from hacpo.engines.adapter import check_adapter
        from hacpo.weights import policy_hash

        settings = stage.settings.agents[agent]
        with schema.atomic(stage.outputs.checkpoint(0, agent)) as scratch:
            scratch.mkdir()
            if settings.model is not None:
                from hacpo.engines.starting import start_from_model

                stage.summary = start_from_model(agent, settings, stage.pipeline.root, scratch, stage.progress)
                if settings.adapter is not None:
                    check_adapter(scratch, settings.adapter, f"agents.{agent}.adapter")
            elif settings.tiny is not None:
                import torch

                from hacpo.engines.warmup import warm_start
                from hacpo.seeds import derive_seed

                if settings.adapter is not None:
                    check_adapter(settings.tiny, settings.adapter, f"agents.{agent}.adapter")
                torch.set_num_threads(stage.settings.engine.threads or torch.get_num_threads())
                stage.metrics |= warm_start(
                    agent,
                    settings.tiny,
                    derive_seed(stage.settings.seed, "warmup", agent),
                    scratch,
                    on_progress=lambda done, total, loss: stage.progress(done, total, loss=loss),
                    limit=stage.limit,
                )
                stage.summary = f"made from scratch, final loss {stage.metrics['loss']:.3f}"
            stage.policy = policy_hash(scratch)


if __name__ == "__main__":
    main_of(warmup)
