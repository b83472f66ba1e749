"""update: one agent learns from its pool, and the step's checkpoint is written."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacpo.engines.training.processes import launched, place
from hacpo.errors import MissingInputError
from hacpo.pipeline.catalogue import UPDATE
from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.execution.stage import Stage
from hacpo.pipeline.execution.stage_command import stage_command

if TYPE_CHECKING:
    from hacpo.algorithm.training_pool import TrainingPool


@stage_command(UPDATE)
def update(stage: Stage) -> None:
    """Write updates/step=<step>/agent=<name>/trace.parquet and checkpoints/step=<step>/agent=<name>."""
    from hacpo.artifacts import tables

    settings, step, agent = stage.settings, stage.step, stage.mine
    launcher = settings.launcher
    before = stage.checkpoint(step - 1)
    optimizer_state = _optimizer_state(stage, before)
    if launcher.world_size > 1 and place() is None and not launched():
        stage.launch()
        stage.metrics["processes"] = launcher.world_size
        stage.summary = f"{_summary(stage)}, {launcher.world_size} processes"
        return
    import torch

    from hacpo.algorithm.updates import plan_updates, shuffle_seeds
    from hacpo.engines.models.checkpoint import resolve_device, save_model
    from hacpo.engines.training.repeatable import repeatable_kernels
    from hacpo.engines.training.trainer import Trainer
    from hacpo.engines.training.world import joined

    loss = settings.algorithm.loss
    pool = _pool(stage)
    dtype = getattr(torch, settings.engine.dtype)
    device = resolve_device(settings.engine)
    with repeatable_kernels(device), joined(launcher, device, fsdp=settings.fsdp, dtype=dtype) as world:
        pad_token_id, model, initial = _models(stage, before, leads=world.leads)
        trainer = Trainer(
            model,
            pad_token_id,
            settings.algorithm,
            settings.optimizer,
            settings.agents[agent].sampling.temperature,
            initial_model=initial,
            world=world,
            dtype=dtype,
            device=device,
        )
        if optimizer_state is not None:
            trainer.load(optimizer_state, _updates_before(stage))
        plan = plan_updates(
            pool.table,
            updates=settings.updates_per_pass,
            order=loss.minibatch_order,
            ranks=loss.ranks,
            seeds=shuffle_seeds(settings, step, agent),
            selected_b=pool.selected,
            by_group=settings.algorithm.rollouts.select == "sample",
        )
        begun = time.perf_counter()
        trace, metrics = trainer.train(plan, pool, stage.progress)
        stage.metrics["train_seconds"] = round(time.perf_counter() - begun, 4)
        weights = trainer.whole_weights()
        if not world.leads:
            trainer.save(None)
            return
        with stage.replacing(tables.CHECKPOINT) as checkpoint, stage.replacing(tables.TRACE):
            save_model(trainer.model, checkpoint, like=before, weights=weights)
            trainer.save(checkpoint / "trainer")
            policy = stage.note_policy(checkpoint)
            stage.write(tables.TRACE, trace)
    if stage.in_place and not settings.fsdp:
        stage.session.models.keep(agent, policy, settings.engine, model)
    stage.metrics |= metrics
    tokens = int(pool.table["learner_tokens"].to_numpy()[pool.selected].sum()) * settings.algorithm.rollouts.passes
    stage.metrics |= {"updates": len(plan.rows), "tokens": tokens}
    stage.summary = _summary(stage)


def _pool(stage: Stage) -> TrainingPool:
    """The agent's pool with its advantages and its own log-probabilities, as training reads it."""
    from hacpo.algorithm.training_pool import training_pool
    from hacpo.artifacts import tables

    loss = stage.settings.algorithm.loss
    sampler_cap = loss.sampler_correction_cap if loss.sampler_correction == "truncated" else None
    pool = stage.read(tables.POOL)
    advantages = stage.read(tables.ADVANTAGES, columns=["rollout_id", "effective_advantage", "selected"])
    of_sampler = ["sampler_logprobs"] if sampler_cap is not None else []
    own = stage.read(tables.ROLLOUTS, columns=["rollout_id", "logprobs", "support", *of_sampler])
    joined = training_pool(pool, advantages, own, sampler_cap=sampler_cap, where=stage.title)
    return joined.of_first_problems(stage.limit)


def _optimizer_state(stage: Stage, before: Path) -> Path | None:
    """Where the optimizer's state after the step before is; None at a start that brings none.

    Raises:
        MissingInputError: the checkpoint before was made by an update, and lacks it: AdamW's averages, the place in the
            learning rate's schedule and float32 masters would begin anew.
    """
    from hacpo.artifacts.tables import CHECKPOINT

    folder = before / "trainer"
    if folder.is_dir():
        return folder
    if stage.step > 1 and before.is_dir():
        made_by = stage.made_by(CHECKPOINT, step=stage.step - 1)
        raise MissingInputError(
            "the optimizer's state, which every update writes, is missing", where=folder, remedy=f"run `{made_by}`"
        )
    return None


def _updates_before(stage: Stage) -> int | None:
    """How many updates the agent has behind it, all under these settings; None where that is not known: after a start
    that brings a state of its own, or is not here, and where other settings are asked about."""
    start = stage.checkpoint(0) if stage.step > 1 else None
    if start is None or stage.overrides or not start.is_dir() or (start / "trainer").exists():
        return None
    return (stage.step - 1) * stage.settings.updates_per_step


def _models(stage: Stage, before: Path, *, leads: bool) -> tuple[int, Any, Any]:
    """Filler token, model to train and the initial one of a KL penalty; models None where the first process has them.

    Args:
        leads: this is the first process, or the only one.
    """
    from hacpo.artifacts.tables import CHECKPOINT
    from hacpo.engines.from_checkpoint import open_to_train
    from hacpo.engines.models.checkpoint import load_model

    tokenizer, model, policy = open_to_train(
        stage.session.models,
        stage.mine,
        before,
        stage.settings.engine,
        stage.made_by(CHECKPOINT, step=stage.step - 1),
        fsdp=stage.settings.fsdp,
    )
    if not leads:
        return tokenizer.pad_token_id, None, None
    stage.check_policy(stage.step - 1, policy)
    _settle_adapter(stage, model, before)
    penalised = stage.settings.algorithm.loss.kl_coef > 0
    if penalised and stage.step > 1:
        stage.check_policy(0)
    initial = load_model(stage.checkpoint(0), stage.settings.engine) if penalised else None
    return tokenizer.pad_token_id, model, initial


def _settle_adapter(stage: Stage, model: Any, before: Path) -> None:
    """Give the model its adapter before the first step, if the agent trains one."""
    from hacpo.engines.models.adapter import settle_adapter
    from hacpo.seeds import derive_seed

    settle_adapter(
        model,
        stage.settings.agents[stage.mine].adapter,
        step=stage.step,
        before=before,
        base=stage.checkpoint(0).relative_to(stage.root),
        seed=derive_seed(stage.settings.seed, "adapter", stage.mine),
        where=f"agents.{stage.mine}.adapter",
    )


def _summary(stage: Stage) -> str:
    numbers = stage.metrics
    responses = numbers.get("own.rows", 0) + numbers.get("cross.rows", 0)
    return f"{numbers['updates']:.0f} updates on {responses:.0f} responses, loss {numbers['loss']:+.4f}"


if __name__ == "__main__":
    main_of(update)
