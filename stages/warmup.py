"""warmup: every agent's checkpoint before training, made from scratch or taken from a model folder."""

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
    """Write checkpoints/step=0000/agent=<name>: train a tiny model (--limit N: for N steps), or copy a model folder."""
    from hacpo import schema

    with open_stage(
        "warmup", context.obj, pipeline, agent=agent, out=out, limit=limit, overrides=overrides or ()
    ) as stage:
        settings = stage.settings.agents[agent]
        with schema.atomic(stage.outputs.checkpoint(0, agent)) as scratch:
            scratch.mkdir()
            if settings.model is not None:
                from hacpo.engines.chat_templates import settle_chat
                from hacpo.engines.checkpoint import copy_model_folder
                from hacpo.errors import ModelError

                source = stage.pipeline.root / settings.model
                if not source.is_dir():
                    raise ModelError(
                        "the model folder is missing", where=source, remedy=f"correct agents.{agent}.model"
                    )
                template = None if settings.chat_template is None else stage.pipeline.root / settings.chat_template
                if template is not None and not template.is_file():
                    raise ModelError(
                        "the chat template is missing", where=template, remedy=f"correct agents.{agent}.chat_template"
                    )
                copy_model_folder(source, scratch)
                stage.summary = ", ".join([f"taken from {settings.model}", *settle_chat(scratch, source, template)])
            elif settings.tiny is not None:
                import torch

                from hacpo.engines.warmup import warm_start
                from hacpo.seeds import derive_seed

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


if __name__ == "__main__":
    main_of(warmup)
