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
    import pyarrow as pa

    from hacpo.artifacts.problem_rows import ScheduledProblem
    from hacpo.artifacts.tables import Table
    from hacpo.engines.interface import SampledResponse, SamplingParameters, SamplingRequest, ScoredResponse, Scorer
    from hacpo.tokens.tokenizers import ChatTokenizer

Key = tuple["ScheduledProblem", int]
"""A problem, and which of the responses to it."""
_TOLD = ("token_ids", "prompt_token_ids", "finish_reason", "logprobs", "sampler_logprobs")
"""Columns that the metrics are made of."""


@stage_command(GENERATE, side=SIDE_GENERATE)
def generate(stage: Stage) -> None:
    """Write rollouts/step=<step>/agent=<name>; with --side, side_rollouts/step=<step>/agent=<name>."""
    from hacpo.artifacts import tables
    from hacpo.artifacts.problem_rows import ScheduledProblem
    from hacpo.engines.response_store import remove_saved

    table = tables.SIDE_ROLLOUTS if stage.spec.side else tables.ROLLOUTS
    samples = _responses_per_prompt(stage)
    problems = ScheduledProblem.of(stage.read(tables.PROMPTS).slice(0, stage.limit))
    keys = [(problem, sample) for problem in problems for sample in range(samples)]
    if stage.make(table, len(keys), lambda rows: _drawn(stage, table, keys, rows)):
        remove_saved(stage.outputs.saved(table.name, stage.step, stage.mine))
        stage.metrics |= _numbers(stage.made(table, _TOLD))
        stage.summary = f"{len(keys)} rollouts, {stage.metrics['tokens']} tokens"


def _drawn(stage: Stage, table: Table, keys: Sequence[Key], rows: range) -> dict[str, Any]:
    """Some rows of the table of rollouts. Whole blocks are sampled and rescored together, whatever part of them is
    asked for, so that nothing depends on who makes which rows."""
    from hacpo.engines.interface import SamplingRequest
    from hacpo.pipeline.execution.sampling import blocks_around, open_asking_tokenizer, open_sampler
    from hacpo.seeds import derive_seed
    from hacpo.tokens.prompts import prompt_with_room

    step, agent, settings = stage.step, stage.mine, stage.settings
    tokenizer = open_asking_tokenizer(stage, step - 1)
    around = blocks_around(rows, settings.engine.save_every, len(keys))
    problems = {problem.problem_id: problem for problem, _ in keys[around.start : around.stop]}
    asked = settings.agents[agent].prompt
    prompts = {name: prompt_with_room(tokenizer, problem, asked) for name, problem in problems.items()}
    engine, sampler = open_sampler(stage, step - 1, table)
    requests = [
        SamplingRequest(
            prompts[problem.problem_id],
            derive_seed(settings.seed, stage.name, step, agent, problem.problem_id, sample),
        )
        for problem, sample in keys[around.start : around.stop]
    ]
    parameters = _parameters(stage)
    begun = time.perf_counter()
    responses = sampler.sample(requests, parameters, stage.progress)
    engine.release_memory()
    sampled = time.perf_counter()
    behaviour = _rescored(engine.scorer, requests, responses, parameters, settings.engine.save_every)
    stage.metrics |= engine.metrics
    for name, seconds in (
        ("sampling_seconds", sampled - begun),
        ("scoring_seconds", time.perf_counter() - sampled),
    ):
        stage.metrics[name] = round(stage.metrics.get(name, 0.0) + seconds, 4)
    mine = slice(rows.start - around.start, rows.stop - around.start)
    named = [(problem.problem_id, sample) for problem, sample in keys[rows.start : rows.stop]]
    columns = _columns(stage, named, requests[mine], responses[mine], behaviour[mine], tokenizer)
    return {**columns, "policy": [engine.policy] * len(rows)}


def _rescored(
    scorer: Scorer,
    requests: Sequence[SamplingRequest],
    responses: Sequence[SampledResponse],
    parameters: SamplingParameters,
    together: int,
) -> list[ScoredResponse]:
    """What the training stack says of the responses, block by block."""
    from hacpo.engines.interface import rescored

    scored: list[ScoredResponse] = []
    for start in range(0, len(requests), together):
        block = slice(start, start + together)
        pairs = zip(requests[block], responses[block], strict=True)
        scored += rescored(
            scorer,
            [(request.prompt_token_ids, response.token_ids) for request, response in pairs],
            parameters,
            [response.support for response in responses[block]],
        )
    return scored


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
    keys: Sequence[tuple[str, int]],
    requests: Sequence[SamplingRequest],
    responses: Sequence[SampledResponse],
    behaviour: Sequence[ScoredResponse],
    tokenizer: ChatTokenizer,
) -> dict[str, Any]:
    """Rows of the table of rollouts but for `policy`, [R]; `behaviour` is what the training stack says of the
    tokens."""
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


def _numbers(rollouts: pa.Table) -> dict[str, float]:
    """Of the metrics, what follows from the rollouts."""
    import pyarrow.compute as pc

    from hacpo.algorithm.sampler_correction import sampler_metrics
    from hacpo.artifacts.list_columns import ListColumn

    tokens = {name: pc.sum(pc.list_value_length(rollouts[name])).as_py() for name in ("token_ids", "prompt_token_ids")}
    return {
        "rollouts": len(rollouts),
        "tokens": tokens["token_ids"],
        "prompt_tokens": tokens["prompt_token_ids"],
        "truncated": pc.sum(pc.equal(rollouts["finish_reason"], "length")).as_py() / len(rollouts),
        **sampler_metrics(*(ListColumn.of(rollouts[name]).arrays() for name in ("logprobs", "sampler_logprobs"))),
    }


if __name__ == "__main__":
    main_of(generate)
