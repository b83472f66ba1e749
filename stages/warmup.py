"""warmup: every agent's checkpoint before training, made from scratch or taken from a folder or the hub."""

from __future__ import annotations

from hacpo.pipeline.catalogue import WARMUP
from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.execution.stage import Stage
from hacpo.pipeline.execution.stage_command import stage_command


@stage_command(WARMUP)
def warmup(stage: Stage) -> None:
    """Write checkpoints/step=0000/agent=<name>: train a tiny model (--limit N: for N steps), or take a model from a
    folder or the hub."""
    from hacpo.artifacts.tables import CHECKPOINT
    from hacpo.engines.models.adapter import check_adapter

    agent = stage.mine
    settings = stage.settings.agents[agent]
    with stage.replacing(CHECKPOINT) as scratch:
        if settings.model is not None:
            from hacpo.engines.models.first_checkpoint import start_from_model

            stage.summary = start_from_model(agent, settings, stage.root, scratch, stage.progress)
            if settings.adapter is not None:
                check_adapter(scratch, settings.adapter, f"agents.{agent}.adapter")
        elif settings.tiny is not None:
            import torch

            from hacpo.engines.training.warm_start import warm_start
            from hacpo.seeds import derive_seed

            if settings.adapter is not None:
                check_adapter(settings.tiny, settings.adapter, f"agents.{agent}.adapter")
            torch.set_num_threads(stage.settings.engine.threads or torch.get_num_threads())
            assert stage.settings.start_seed is not None  # `params.load` fills it in
            stage.metrics |= warm_start(
                agent,
                settings.tiny,
                derive_seed(stage.settings.start_seed, stage.name, agent),
                scratch,
                on_progress=lambda done, total, loss: stage.progress(done, total, loss=loss),
                limit=stage.limit,
            )
            stage.summary = f"made from scratch, final loss {stage.metrics['loss']:.3f}"
        stage.note_policy(scratch)


if __name__ == "__main__":
    main_of(warmup)
