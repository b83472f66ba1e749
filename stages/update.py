"""update: one agent learns from its pool, and the step's checkpoint is written."""

from __future__ import annotations

import typer

from hacpo.pipeline.command_line import main_of
from hacpo.pipeline.options import AgentOption, LimitOption, OutOption, PipelineFolder, SetOption, StepOption
from hacpo.pipeline.stage import open_stage


def update(
    context: typer.Context,
    pipeline: PipelineFolder,
    step: StepOption,
    agent: AgentOption,
    out: OutOption = None,
    limit: LimitOption = None,
    overrides: SetOption = None,
) -> None:
    """Write updates/step=<step>/agent=<name>/trace.parquet and checkpoints/step=<step>/agent=<name>."""
    from hacpo import schema
    from hacpo.rollouts import first_problems, training_rows

    with open_stage(
        "update",
        context.obj,
        pipeline,
        step=step,
        agent=agent,
        out=out,
        limit=limit,
        overrides=overrides or (),
        steps_from=1,
    ) as stage:
        from hacpo.engines.checkpoint import load_model, policy_hash, save_model
        from hacpo.engines.loading import open_model
        from hacpo.engines.trainer import Trainer
        from hacpo.updates import plan_updates, shuffle_seed

        settings = stage.settings
        loss = settings.algorithm.loss
        sampler_cap = loss.sampler_correction_cap if loss.sampler_correction == "truncated" else None
        pool = stage.read(stage.inputs.pool(step, agent), schema.POOL, "pool", step=step, learner=agent)
        advantages = stage.read(
            stage.inputs.advantages(step, agent),
            schema.ADVANTAGES,
            "advantage",
            columns=["rollout_id", "effective_advantage"],
            step=step,
            learner=agent,
        )
        own = stage.read(
            stage.inputs.rollouts(step, agent),
            schema.ROLLOUTS,
            "generate",
            columns=["rollout_id", "logprobs", *(["sampler_logprobs"] if sampler_cap is not None else [])],
            step=step,
            agent=agent,
        )
        rows = training_rows(
            pool.to_pylist(), advantages.to_pylist(), own.to_pylist(), sampler_cap=sampler_cap, where=stage.title
        )
        rows = first_problems(rows, limit)

        before = stage.inputs.checkpoint(step - 1, agent)
        tokenizer, model, _ = open_model(
            stage.session.models,
            agent,
            before,
            settings.engine,
            stage.pipeline.checkpoint_command(step - 1, agent),
        )
        stage.session.models.discard(agent)
        trainer = Trainer(
            model,
            tokenizer.pad_token_id,
            settings.algorithm,
            settings.optimizer,
            settings.sampling.temperature,
            initial_model=load_model(stage.inputs.checkpoint(0, agent), settings.engine) if loss.kl_coef else None,
        )
        if (before / "trainer").is_dir():
            trainer.load(before / "trainer")
        plan = plan_updates(
            rows,
            updates=settings.updates_per_step,
            order=loss.minibatch_order,
            seed=shuffle_seed(settings.seed, step, agent) if loss.shuffle else None,
        )
        trace, metrics = trainer.train(plan, stage.progress)
        order = {row["rollout_id"]: number for number, row in enumerate(rows)}
        trace.sort(key=lambda row: (order[row["rollout_id"]], row["update"]))

        with (
            schema.atomic(stage.outputs.checkpoint(step, agent)) as checkpoint,
            schema.atomic(stage.outputs.trace(step, agent).parent) as updates,
        ):
            checkpoint.mkdir()
            save_model(model, checkpoint, like=before)
            trainer.save(checkpoint / "trainer")
            policy = policy_hash(checkpoint)
            updates.mkdir()
            stage.write(updates / "trace.parquet", schema.TRACE, trace, step=step, agent=agent)
        if out is None:
            stage.session.models.keep(agent, policy, settings.engine, model)
        stage.metrics |= metrics
        stage.metrics |= {"updates": len(plan.rows), "tokens": sum(row["learner_tokens"] for row in rows)}
        stage.summary = f"{len(plan.rows)} updates on {len(trace)} responses, loss {metrics['loss']:+.4f}"


if __name__ == "__main__":
    main_of(update)
