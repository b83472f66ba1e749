"""evaluate: one agent answers the held-out problems."""

from __future__ import annotations

from typing import Any

from hacpo.pipeline.catalogue import EVALUATE
from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.execution.stage import Stage
from hacpo.pipeline.execution.stage_command import stage_command
from hacpo.pipeline.records.elsewhere import checkpoint_command


@stage_command(EVALUATE)
def evaluate(stage: Stage) -> None:
    """Write evaluations/step=<step>/agent=<name>; step 0 is the start."""
    from hacpo.artifacts import tables
    from hacpo.engines.from_checkpoint import open_engine, open_tokenizer
    from hacpo.engines.interface import SamplingParameters, SamplingRequest
    from hacpo.engines.response_store import SavingSampler
    from hacpo.evaluation.metrics import summary
    from hacpo.seeds import derive_seed
    from hacpo.tokens.prompts import check_template, prompt_token_ids
    from hacpo.verifying.verifier import Request, Verdict, Verifier, check_error_rate

    step, agent = stage.step, stage.mine
    settings, mine = stage.settings, stage.settings.agents[agent]
    columns: dict[str, list[Any]] = {name: [] for name in tables.EVALUATIONS.schema.names}
    judged: list[Verdict] = []
    # First of all: a reward function that cannot be used must not cost the sampling.
    with Verifier(settings.verification, stage.pipeline.root) as verifier:
        checkpoint = stage.checkpoint(step)
        made_by = checkpoint_command(stage.pipeline, step, agent)
        tokenizer = open_tokenizer(stage.session.models, checkpoint, made_by)
        check_template(tokenizer, agent, mine.prompt)
        engine = open_engine(
            stage.session.models,
            agent,
            checkpoint,
            settings.engine,
            made_by,
            stage.pipeline.folder,
            stage.outputs.merged(f"{agent}-{stage.name}"),
        )
        stage.check_policy(step, engine.policy)
        sampler = SavingSampler(
            engine.sampler, engine.policy, settings.engine, stage.outputs.saved(tables.EVALUATIONS.name, step, agent)
        )
        for name, benchmark in sorted(settings.evaluation.benchmarks.items()):
            problems = stage.read(tables.PROBLEMS, benchmark.data).slice(0, stage.limit).to_pylist()
            asked = [(problem, sample) for problem in problems for sample in range(benchmark.samples)]
            prompts = {problem["problem_id"]: prompt_token_ids(tokenizer, problem, mine.prompt) for problem in problems}
            responses = sampler.sample(
                [
                    SamplingRequest(
                        prompts[problem["problem_id"]],
                        # Not the step's number: the same random streams at every step make curves comparable.
                        derive_seed(settings.seed, stage.name, name, agent, problem["problem_id"], sample),
                    )
                    for problem, sample in asked
                ],
                SamplingParameters(
                    benchmark.temperature,
                    benchmark.max_new_tokens or mine.sampling.max_new_tokens,
                    benchmark.top_p,
                    benchmark.top_k,
                    mine.sampling.stop,
                ),
                stage.progress,
            )
            texts = [engine.tokenizer.decode(response.token_ids) for response in responses]
            verdicts = verifier.verify(
                [
                    Request(
                        f"{problem['problem_id']}/{sample}",
                        text,
                        response.finish_reason,
                        problem["answer"],
                        problem,
                    )
                    for (problem, sample), text, response in zip(asked, texts, responses, strict=True)
                ]
            )
            answered: dict[str, list[Any]] = {
                "benchmark": [name] * len(asked),
                "problem_id": [problem["problem_id"] for problem, _ in asked],
                "sample": [sample for _, sample in asked],
                "text": texts,
                "token_count": [len(response.token_ids) for response in responses],
                "finish_reason": [response.finish_reason for response in responses],
                **{
                    column: [getattr(verdict, column) for verdict in verdicts]
                    for column in ("reward", "verdict", "extracted", "message")
                },
            }
            for column, values in answered.items():
                columns[column] += values
            judged += verdicts
            starts = range(0, len(asked), benchmark.samples)
            each = [verdicts[start : start + benchmark.samples] for start in starts]
            numbers = summary(each, votes=settings.verification.is_math)
            stage.metrics |= {f"{name}.{key}": value for key, value in numbers.items()}
            stage.metrics[f"{name}.tokens"] = sum(answered["token_count"])
    engine.rest()
    stage.metrics |= engine.metrics
    stage.write(tables.EVALUATIONS, columns, rows_per_shard=settings.storage.rows_per_shard)
    sampler.forget()
    check_error_rate(judged, settings.verification, where=stage.outputs.evaluation(step, agent))
    stage.summary = ", ".join(
        f"{name} {stage.metrics[f'{name}.accuracy']:.3f}" for name in settings.evaluation.benchmarks
    )


if __name__ == "__main__":
    main_of(evaluate)
