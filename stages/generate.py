"""generate: one agent samples its responses to the step's prompts, and its training stack rescores them."""

from __future__ import annotations

import typer

from hacpo.pipeline.command_line import main_of
from hacpo.pipeline.options import AgentOption, LimitOption, OutOption, PipelineFolder, SetOption, StepOption
from hacpo.pipeline.stage import open_stage


def generate(
    context: typer.Context,
    pipeline: PipelineFolder,
    step: StepOption,
    agent: AgentOption,
    out: OutOption = None,
    limit: LimitOption = None,
    overrides: SetOption = None,
) -> None:
    """Write rollouts/step=<step>/agent=<name>."""
    from hacpo import schema
    from hacpo.layout import step_dir

    with open_stage(
        "generate",
        context.obj,
        pipeline,
        step=step,
        agent=agent,
        out=out,
        limit=limit,
        overrides=overrides or (),
        steps_from=1,
    ) as stage:
        from hacpo.engines.base import SamplingParameters, SamplingRequest
        from hacpo.engines.loading import open_engine
        from hacpo.engines.saved import SavingSampler
        from hacpo.prompts import messages
        from hacpo.sampler_correction import sampler_metrics
        from hacpo.seeds import derive_seed

        settings = stage.settings
        problems = stage.read(stage.inputs.prompts(step), schema.SCHEDULE, "prepare", step=step).to_pylist()[:limit]
        engine = open_engine(
            stage.session.models,
            agent,
            stage.inputs.checkpoint(step - 1, agent),
            settings.engine,
            stage.pipeline.checkpoint_command(step - 1, agent),
        )
        prompts = {
            row["problem_id"]: engine.tokenizer.render(
                row["problem_id"], messages(row["problem_id"], row["problem"], settings.prompt)
            )
            for row in problems
        }
        keys = [(row["problem_id"], sample) for row in problems for sample in range(settings.responses_per_prompt)]
        requests = [
            SamplingRequest(prompts[problem], derive_seed(settings.seed, "generate", step, agent, problem, sample))
            for problem, sample in keys
        ]
        sampling = settings.sampling
        sampler = SavingSampler(
            engine.sampler, engine.policy, settings.engine, stage.outputs.saved("rollouts", step, agent)
        )
        responses = sampler.sample(
            requests,
            SamplingParameters(sampling.temperature, sampling.max_new_tokens, sampling.top_p),
            stage.progress,
        )
        logprobs = engine.scorer.score(
            [
                (request.prompt_token_ids, response.token_ids)
                for request, response in zip(requests, responses, strict=True)
            ],
            temperature=sampling.temperature,
        )
        stage.write(
            stage.outputs.rollouts(step, agent),
            schema.ROLLOUTS,
            {
                "rollout_id": [f"{step_dir(step)[5:]}/{agent}/{problem}/{sample:03d}" for problem, sample in keys],
                "step": [step] * len(keys),
                "agent": [agent] * len(keys),
                "problem_id": [problem for problem, _ in keys],
                "sample": [sample for _, sample in keys],
                "prompt_token_ids": [list(request.prompt_token_ids) for request in requests],
                "token_ids": [response.token_ids for response in responses],
                "text": [engine.tokenizer.decode(response.token_ids) for response in responses],
                "finish_reason": [response.finish_reason for response in responses],
                "sampler_logprobs": [response.logprobs for response in responses],
                "logprobs": logprobs,
                "policy": [engine.policy] * len(keys),
            },
            step=step,
            agent=agent,
            rows_per_shard=settings.storage.rows_per_shard,
        )
        sampler.forget()
        tokens = sum(len(response.token_ids) for response in responses)
        stage.metrics |= {
            **engine.metrics,
            "rollouts": len(responses),
            "tokens": tokens,
            "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
            "truncated": sum(response.finish_reason == "length" for response in responses) / len(responses),
            **sampler_metrics(logprobs, [response.logprobs for response in responses]),
        }
        stage.summary = f"{len(responses)} rollouts, {tokens} tokens"


if __name__ == "__main__":
    main_of(generate)
