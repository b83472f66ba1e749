"""generate: one agent samples its responses to the step's prompts, and its training stack rescores them.

The column `logprobs` holds what the training stack says of the sampled tokens, whichever engine sampled them:
`engines.interface.rescored` hands them to `engines.transformers.TransformersEngine`, and that batch by batch to
`engines.training.logprobs`: `score` to `token_logprobs`, by which agents are trained too; under `top_k` or `top_p`
`score_truncated` to `support_scores`, which computes the same within what was kept, and says what that was. What the
sampling engine said itself is in `sampler_logprobs`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hacpo.errors import SettingsError
from hacpo.pipeline.catalogue import GENERATE, SIDE_GENERATE
from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.execution.stage import Stage
from hacpo.pipeline.execution.stage_command import stage_command

if TYPE_CHECKING:
    from hacpo.engines.interface import SampledResponse, SamplingParameters, SamplingRequest, ScoredResponse
    from hacpo.tokens.tokenizers import ChatTokenizer

Key = tuple[str, int]
"""A problem's id, and which of the responses to it."""


@stage_command(GENERATE, side=SIDE_GENERATE)
def generate(stage: Stage) -> None:
    """Write rollouts/step=<step>/agent=<name>; with --side, side_rollouts/step=<step>/agent=<name>."""
    from hacpo.artifacts import tables
    from hacpo.artifacts.problem_rows import ScheduledProblem
    from hacpo.engines.interface import SamplingRequest, rescored
    from hacpo.pipeline.execution.sampling import open_asking_tokenizer, open_sampler
    from hacpo.seeds import derive_seed
    from hacpo.tokens.prompts import prompt_with_room

    step, agent, settings = stage.step, stage.mine, stage.settings
    table = tables.SIDE_ROLLOUTS if stage.spec.side else tables.ROLLOUTS
    samples = _responses_per_prompt(stage)
    problems = ScheduledProblem.of(stage.read(tables.PROMPTS).slice(0, stage.limit))
    tokenizer = open_asking_tokenizer(stage, step - 1)
    asked = settings.agents[agent].prompt
    prompts = {problem.problem_id: prompt_with_room(tokenizer, problem, asked) for problem in problems}
    engine, sampler = open_sampler(stage, step - 1, table)
    keys = [(problem.problem_id, sample) for problem in problems for sample in range(samples)]
    requests = [
        SamplingRequest(prompts[problem], derive_seed(settings.seed, stage.name, step, agent, problem, sample))
        for problem, sample in keys
    ]
    parameters = _parameters(stage)
    begun = time.perf_counter()
    responses = sampler.sample(requests, parameters, stage.progress)
    engine.release_memory()
    sampled = time.perf_counter()
    behaviour = rescored(
        engine.scorer,
        [(request.prompt_token_ids, response.token_ids) for request, response in zip(requests, responses, strict=True)],
        parameters,
        [response.support for response in responses],
    )
    scored = time.perf_counter()
    columns = _columns(stage, keys, requests, responses, behaviour, tokenizer)
    columns["policy"] = [engine.policy] * len(keys)
    stage.write(table, columns, rows_per_shard=settings.storage.rows_per_shard)
    sampler.remove_saved()
    stage.metrics |= engine.metrics
    stage.metrics |= {"sampling_seconds": round(sampled - begun, 4), "scoring_seconds": round(scored - sampled, 4)}
    stage.metrics |= _numbers(requests, responses, behaviour)
    stage.summary = f"{len(responses)} rollouts, {stage.metrics['tokens']} tokens"


def _responses_per_prompt(stage: Stage) -> int:
    """G, or S of a side sample."""
    if not stage.spec.side:
        return stage.settings.responses_per_prompt
    samples = stage.settings.algorithm.capability.oracle_samples
    if samples is None:
        raise SettingsError("--side needs algorithm.capability.oracle_samples", where=stage.folder)
    return samples


def _parameters(stage: Stage) -> SamplingParameters:
    from hacpo.engines.interface import SamplingParameters

    sampling = stage.settings.agents[stage.mine].sampling
    return SamplingParameters(
        sampling.temperature, sampling.max_new_tokens, sampling.top_p, sampling.top_k, sampling.stop, record=True
    )


def _columns(
    stage: Stage,
    keys: Sequence[Key],
    requests: Sequence[SamplingRequest],
    responses: Sequence[SampledResponse],
    behaviour: Sequence[ScoredResponse],
    tokenizer: ChatTokenizer,
) -> dict[str, Any]:
    """The table of rollouts but for `policy`, [R] with R = P * samples; `behaviour` is what the training stack says of
    the tokens."""
    from hacpo.algorithm.rollouts import rollout_id
    from hacpo.algorithm.support import to_column
    from hacpo.tokens.stopping import stop_string

    step, agent, side = stage.step, stage.mine, stage.spec.side
    stop = stage.settings.agents[agent].sampling.stop
    texts = [tokenizer.decode(response.token_ids) for response in responses]
    return {
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
        "logprobs": [response.logprobs for response in behaviour],
        "stop_string": [
            stop_string(
                text, response.token_ids, response.finish_reason, stop=stop, eos_token_ids=tokenizer.stop_token_ids
            )
            for text, response in zip(texts, responses, strict=True)
        ],
        "support": to_column([response.support for response in behaviour]),
        "support_logprob": [response.support_logprob for response in behaviour],
    }


def _numbers(
    requests: Sequence[SamplingRequest], responses: Sequence[SampledResponse], behaviour: Sequence[ScoredResponse]
) -> dict[str, float]:
    """Of the metrics, what follows from the rollouts."""
    from hacpo.algorithm.sampler_correction import sampler_metrics

    return {
        "rollouts": len(responses),
        "tokens": sum(len(response.token_ids) for response in responses),
        "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "truncated": sum(response.finish_reason == "length" for response in responses) / len(responses),
        **sampler_metrics([response.logprobs for response in behaviour], [response.logprobs for response in responses]),
    }


if __name__ == "__main__":
    main_of(generate)
