"""warmup: every agent's checkpoint before training, made from scratch or taken from a folder, a file or the hub."""

from __future__ import annotations

from pathlib import Path

from hacpo.pipeline.catalogue import WARMUP
from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.execution.stage import Stage
from hacpo.pipeline.execution.stage_command import stage_command
from hacpo.seeds import derive_seed
from hacpo.settings.agents import ModelWarmupSettings


@stage_command(WARMUP)
def warmup(stage: Stage) -> None:
    """Write checkpoints/step=0000/agent=<name>: train a tiny model (--limit N: for N steps), or take a model from a
    folder, a GGUF file or the hub, and train it where `warmup` says so (--limit N: for N steps)."""
    from hacpo.artifacts.tables import CHECKPOINT
    from hacpo.engines.models.adapter import check_adapter

    agent = stage.mine
    settings = stage.settings.agents[agent]
    assert stage.settings.start_seed is not None  # `params.load` fills it in
    seed = derive_seed(stage.settings.start_seed, stage.name, agent)
    with stage.replacing(CHECKPOINT) as scratch:
        if settings.model is not None:
            from hacpo.engines.models.first_checkpoint import start_from_model

            stage.summary = start_from_model(agent, settings, stage.root, scratch, stage.progress)
            if settings.adapter is not None:
                check_adapter(scratch, settings.adapter, f"agents.{agent}.adapter")
            if settings.warmup is not None:
                stage.metrics |= _warmed_up(stage, settings.warmup, seed, scratch)
                steps, loss = stage.metrics["steps"], stage.metrics["loss"]
                stage.summary += f", warmed up for {steps} steps, final loss {loss:.3f}"
        elif settings.tiny is not None:
            import torch

            from hacpo.engines.training.warm_start import warm_start

            if settings.adapter is not None:
                check_adapter(settings.tiny, settings.adapter, f"agents.{agent}.adapter")
            torch.set_num_threads(stage.settings.engine.threads or torch.get_num_threads())
            stage.metrics |= warm_start(
                agent,
                settings.tiny,
                seed,
                scratch,
                on_progress=lambda done, total, loss: stage.progress(done, total, loss=loss),
                limit=stage.limit,
            )
            stage.summary = f"made from scratch, final loss {stage.metrics['loss']:.3f}"
        stage.note_policy(scratch)


def _warmed_up(stage: Stage, settings: ModelWarmupSettings, seed: int, folder: Path) -> dict[str, float]:
    """Train the model in a folder; returns the numbers of it."""
    import torch

    from hacpo.engines.training.model_warmup import warm_up

    torch.set_num_threads(stage.settings.engine.threads or torch.get_num_threads())
    return warm_up(
        stage.mine,
        settings,
        seed,
        folder,
        on_progress=lambda done, total, loss: stage.progress(done, total, loss=loss),
        limit=stage.limit,
    )


if __name__ == "__main__":
    main_of(warmup)
