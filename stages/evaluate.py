"""evaluate: one agent answers the held-out problems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hacpo.pipeline.catalogue import EVALUATE
from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.execution.stage import Stage
from hacpo.pipeline.execution.stage_command import stage_command

if TYPE_CHECKING:
    from hacpo.artifacts.problem_rows import Problem
    from hacpo.engines.interface import SampledResponse, Sampler
    from hacpo.tokens.tokenizers import ChatTokenizer
    from hacpo.verifying.verifier import Request, Verdict

Asked = Sequence[tuple["Problem", int]]
"""The problems of a benchmark, each with the number of a response to it."""


@stage_command(EVALUATE)
def evaluate(stage: Stage) -> None:
    """Write evaluations/step=<step>/agent=<name>; step 0 is the start."""
    from hacpo.artifacts import tables
    from hacpo.artifacts.problem_rows import Problem
    from hacpo.engines.response_store import remove_saved
    from hacpo.verifying.verifier import VERDICT, check_error_rate, verdicts_in

    settings = stage.settings
    asked: dict[str, Asked] = {}
    for name, benchmark in sorted(settings.evaluation.benchmarks.items()):
        problems = Problem.of(stage.read(tables.PROBLEMS, benchmark.data).slice(0, stage.limit))
        asked[name] = [(problem, sample) for problem in problems for sample in range(benchmark.samples)]
    if not stage.make(tables.EVALUATIONS, sum(map(len, asked.values())), lambda rows: _answered(stage, asked, rows)):
        return
    remove_saved(stage.outputs.saved(tables.EVALUATIONS.name, stage.step, stage.mine))
    made = stage.made(tables.EVALUATIONS, ["token_count", *VERDICT])
    verdicts, counts = verdicts_in(made), made["token_count"].to_pylist()
    for name, mine in _places(asked):
        own = slice(mine.start, mine.stop)
        stage.metrics |= {f"{name}.{key}": value for key, value in _numbers(stage, name, verdicts[own]).items()}
        stage.metrics[f"{name}.tokens"] = sum(counts[own])
    check_error_rate(verdicts, settings.verification, where=stage.outputs.evaluation(stage.step, stage.mine))
    stage.summary = ", ".join(
        f"{name} {stage.metrics[f'{name}.accuracy']:.3f}" for name in settings.evaluation.benchmarks
    )


def _places(asked: Mapping[str, Asked]) -> Iterator[tuple[str, range]]:
    """Which rows of the table a benchmark has."""
    start = 0
    for name, one in asked.items():
        yield name, range(start, start + len(one))
        start += len(one)


def _answered(stage: Stage, asked: Mapping[str, Asked], rows: range) -> dict[str, list[Any]]:
    """Some rows of the table. Whole blocks of a benchmark are sampled together, whatever part of them is asked for."""
    from hacpo.artifacts import tables
    from hacpo.pipeline.execution.sampling import blocks_around, open_asking_tokenizer, open_sampler

    columns: dict[str, list[Any]] = {name: [] for name in tables.EVALUATIONS.schema.names}
    # First of all: a reward function that cannot be used must not cost the sampling.
    with stage.session.verifier(stage.settings.verification, stage.root) as verifier:
        tokenizer = open_asking_tokenizer(stage, stage.step)
        engine, sampler = open_sampler(stage, stage.step, tables.EVALUATIONS)
        for name, place in _places(asked):
            first, end = max(rows.start - place.start, 0), min(rows.stop - place.start, len(place))
            if first >= end:
                continue
            around = blocks_around(range(first, end), stage.settings.engine.save_every, len(place))
            drawn = _answers(stage, name, asked[name][around.start : around.stop], tokenizer, sampler)
            mine, responses = asked[name][first:end], drawn[first - around.start : end - around.start]
            texts = [tokenizer.decode(response.token_ids) for response in responses]
            verdicts = verifier.verify(_requests(mine, texts, responses))
            for column, values in _columns(name, mine, texts, responses, verdicts).items():
                columns[column] += values
    engine.release_memory()
    stage.metrics |= engine.metrics
    return columns


def _answers(
    stage: Stage, name: str, asked: Asked, tokenizer: ChatTokenizer, sampler: Sampler
) -> list[SampledResponse]:
    """The agent's responses to a benchmark."""
    from hacpo.engines.interface import SamplingParameters, SamplingRequest
    from hacpo.seeds import derive_seed
    from hacpo.tokens.prompts import prompt_with_room

    settings = stage.settings
    agent, benchmark = settings.agents[stage.mine], settings.evaluation.benchmarks[name]
    prompts = {
        problem.problem_id: prompt_with_room(tokenizer, problem, agent.prompt)
        for problem in {problem.problem_id: problem for problem, _ in asked}.values()
    }
    requests = [
        SamplingRequest(
            prompts[problem.problem_id],
            # Not the step's number: the same random streams at every step make curves comparable.
            derive_seed(settings.seed, stage.name, name, stage.mine, problem.problem_id, sample),
        )
        for problem, sample in asked
    ]
    parameters = SamplingParameters(
        benchmark.temperature,
        benchmark.max_new_tokens or agent.sampling.max_new_tokens,
        benchmark.top_p,
        benchmark.top_k,
        agent.sampling.stop,
    )
    return sampler.sample(requests, parameters, stage.progress)


def _requests(asked: Asked, texts: Sequence[str], responses: Sequence[SampledResponse]) -> list[Request]:
    """What the verifier is asked."""
    from hacpo.verifying.verifier import Request

    return [
        Request(f"{problem.problem_id}/{sample}", text, response.finish_reason, problem.answer, problem)
        for (problem, sample), text, response in zip(asked, texts, responses, strict=True)
    ]


def _columns(
    name: str,
    asked: Asked,
    texts: Sequence[str],
    responses: Sequence[SampledResponse],
    verdicts: Sequence[Verdict],
) -> dict[str, list[Any]]:
    """The benchmark's rows of the table, [A] with A = P * samples."""
    return {
        "benchmark": [name] * len(asked),
        "problem_id": [problem.problem_id for problem, _ in asked],
        "sample": [sample for _, sample in asked],
        "text": list(texts),
        "token_count": [len(response.token_ids) for response in responses],
        "finish_reason": [response.finish_reason for response in responses],
        **{
            column: [getattr(verdict, column) for verdict in verdicts]
            for column in ("reward", "verdict", "extracted", "message")
        },
    }


def _numbers(stage: Stage, name: str, verdicts: Sequence[Verdict]) -> dict[str, float]:
    """The benchmark's metrics, from the verdicts on its answers by problem and sample."""
    from hacpo.evaluation.metrics import summary

    samples = stage.settings.evaluation.benchmarks[name].samples
    by_problem = [verdicts[start : start + samples] for start in range(0, len(verdicts), samples)]
    return summary(by_problem, votes=not stage.settings.verification.is_function)


if __name__ == "__main__":
    main_of(evaluate)
