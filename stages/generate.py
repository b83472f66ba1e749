"""generate: one agent samples its responses to the step's prompts, and its training stack rescores them.

The column `logprobs` holds what the training stack says of the sampled tokens (`engines.interface.rescored`), whichever
engine sampled them; what that engine said itself is in `sampler_logprobs`.
"""

from __future__ import annotations

import time

from hacpo.pipeline.catalogue import GENERATE, SIDE_GENERATE
from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.execution.stage import Stage
from hacpo.pipeline.execution.stage_command import stage_command
from hacpo.pipeline.records.elsewhere import checkpoint_command


@stage_command(GENERATE, side=SIDE_GENERATE)
def generate(stage: Stage) -> None:
    """Write rollouts/step=<step>/agent=<name>; with --side, side_rollouts/step=<step>/agent=<name>."""
    from hacpo.algorithm.rollouts import rollout_id
    from hacpo.algorithm.sampler_correction import sampler_metrics
    from hacpo.algorithm.support import to_column
    from hacpo.artifacts import tables
    from hacpo.engines.from_checkpoint import open_engine, open_tokenizer
    from hacpo.engines.interface import SamplingParameters, SamplingRequest, rescored
    from hacpo.engines.response_store import SavingSampler
    from hacpo.errors import SettingsError
    from hacpo.seeds import derive_seed
    from hacpo.tokens.prompts import check_template, prompt_token_ids
    from hacpo.tokens.stopping import stop_string

    step, agent, side = stage.step, stage.mine, stage.spec.side
    settings, mine = stage.settings, stage.settings.agents[agent]
    table = tables.SIDE_ROLLOUTS if side else tables.ROLLOUTS
    samples = settings.algorithm.capability.oracle_samples if side else settings.responses_per_prompt
    if samples is None:
        raise SettingsError("--side needs algorithm.capability.oracle_samples", where=stage.pipeline.folder)
    problems = stage.read(tables.PROMPTS).slice(0, stage.limit).to_pylist()
    checkpoint = stage.checkpoint(step - 1)
    made_by = checkpoint_command(stage.pipeline, step - 1, agent)
    # Before the weights: what a template refuses must not cost loading them.
    tokenizer = open_tokenizer(stage.session.models, checkpoint, made_by)
    check_template(tokenizer, agent, mine.prompt)
    prompts = {row["problem_id"]: prompt_token_ids(tokenizer, row, mine.prompt) for row in problems}
    engine = open_engine(
        stage.session.models,
        agent,
        checkpoint,
        settings.engine,
        made_by,
        stage.pipeline.folder,
        stage.outputs.merged(f"{agent}-{stage.name}"),
    )
    stage.check_policy(step - 1, engine.policy)
    keys = [(row["problem_id"], sample) for row in problems for sample in range(samples)]
    requests = [
        SamplingRequest(prompts[problem], derive_seed(settings.seed, stage.name, step, agent, problem, sample))
        for problem, sample in keys
    ]
    sampling = mine.sampling
    sampler = SavingSampler(
        engine.sampler, engine.policy, settings.engine, stage.outputs.saved(table.name, step, agent)
    )
    begun = time.perf_counter()
    parameters = SamplingParameters(
        sampling.temperature, sampling.max_new_tokens, sampling.top_p, sampling.top_k, sampling.stop, record=True
    )
    responses = sampler.sample(requests, parameters, stage.progress)
    engine.rest()
    sampled = time.perf_counter()
    behaviour = rescored(
        engine.scorer,
        [(request.prompt_token_ids, response.token_ids) for request, response in zip(requests, responses, strict=True)],
        parameters,
        [response.support for response in responses],
    )
    logprobs = [response.logprobs for response in behaviour]
    scored = time.perf_counter()
    texts = [tokenizer.decode(response.token_ids) for response in responses]
    stage.write(
        table,
        {
            "rollout_id": [rollout_id(step, agent, problem, sample, side=side) for problem, sample in keys],
            "step": [step] * len(keys),
            "agent": [agent] * len(keys),
            "problem_id": [problem for problem, _ in keys],
            "sample": [sample for _, sample in keys],
            "prompt_token_ids": [list(request.prompt_token_ids) for request in requests],
            "token_ids": [response.token_ids for response in responses],
            "text": texts,
            "finish_reason": [response.finish_reason for response in responses],
            "sampler_logprobs": [response.logprobs for response in responses],
            "logprobs": logprobs,
            "policy": [engine.policy] * len(keys),
            "stop_string": [
                stop_string(
                    text,
                    response.token_ids,
                    response.finish_reason,
                    stop=sampling.stop,
                    eos_token_ids=tokenizer.stop_token_ids,
                )
                for text, response in zip(texts, responses, strict=True)
            ],
            "support": to_column([response.support for response in behaviour]),
            "support_logprob": [response.support_logprob for response in behaviour],
        },
        rows_per_shard=settings.storage.rows_per_shard,
    )
    sampler.forget()
    tokens = sum(len(response.token_ids) for response in responses)
    stage.metrics |= {
        **engine.metrics,
        "sampling_seconds": round(sampled - begun, 4),
        "scoring_seconds": round(scored - sampled, 4),
        "rollouts": len(responses),
        "tokens": tokens,
        "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "truncated": sum(response.finish_reason == "length" for response in responses) / len(responses),
        **sampler_metrics(logprobs, [response.logprobs for response in responses]),
    }
    stage.summary = f"{len(responses)} rollouts, {tokens} tokens"


if __name__ == "__main__":
    main_of(generate)
