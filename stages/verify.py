"""verify: reward every rollout of one agent, by its answer or by a function of the user's."""

from __future__ import annotations

from collections import Counter

from hacpo.errors import ArtifactError
from hacpo.pipeline.catalogue import SIDE_VERIFY, VERIFY
from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.execution.stage import Stage
from hacpo.pipeline.execution.stage_command import stage_command


@stage_command(VERIFY, side=SIDE_VERIFY)
def verify(stage: Stage) -> None:
    """Write verdicts/step=<step>/agent=<name>; with --side, side_verdicts/step=<step>/agent=<name>."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from hacpo.algorithm.rollouts import check_whole, first_problems
    from hacpo.artifacts import tables
    from hacpo.artifacts.problem_rows import Problem
    from hacpo.artifacts.tables import ROLLOUTS, SIDE_ROLLOUTS, SIDE_VERDICTS, VERDICTS
    from hacpo.verifying.verifier import Request, check_error_rate

    settings, step, agent, side = stage.settings, stage.step, stage.mine, stage.spec.side
    prompts = stage.read(tables.PROMPTS)
    answers = dict(zip(prompts["problem_id"].to_pylist(), prompts["answer"].to_pylist(), strict=True))
    drawn, judged = (SIDE_ROLLOUTS, SIDE_VERDICTS) if side else (ROLLOUTS, VERDICTS)
    columns = ["rollout_id", "step", "agent", "problem_id", "sample", "text", "finish_reason"]
    rollouts = stage.read(drawn, columns=columns)
    check_whole(
        rollouts,
        list(answers),
        step,
        agent,
        side=side,
        where=stage.place(drawn),
        remedy=f"repeat `{stage.made_by(drawn)}`",
    )
    rollouts = first_problems(rollouts, stage.limit)
    problems: dict[str, Problem] = {}
    if not settings.verification.is_math:
        every = stage.read(tables.PROBLEMS, settings.data.train)
        asked = every.filter(pc.is_in(every["problem_id"], value_set=pa.array(list(answers), pa.string())))
        problems = {problem.problem_id: problem for problem in Problem.of(asked)}
        if answers.keys() - problems.keys():
            raise ArtifactError(
                "the step's prompts are of problems that are not in the training set",
                where=stage.inputs.problems(settings.data.train),
                found=repr(min(answers.keys() - problems.keys())),
                remedy=f"repeat `{stage.made_by(tables.PROBLEMS)}`",
            )
    names = ("rollout_id", "text", "finish_reason", "problem_id")
    requests = [
        Request(identity, text, finish_reason, answers[problem], problems.get(problem))
        for identity, text, finish_reason, problem in zip(*(rollouts[name].to_pylist() for name in names), strict=True)
    ]
    with stage.session.verifier(settings.verification, stage.root) as verifier:
        verdicts = verifier.verify(requests, on_progress=stage.progress)
    stage.write(
        judged,
        {
            **{name: rollouts[name].combine_chunks() for name in ("rollout_id", "problem_id", "sample")},
            "reward": [verdict.reward for verdict in verdicts],
            "verdict": [verdict.verdict for verdict in verdicts],
            "extracted": [verdict.extracted for verdict in verdicts],
            "answer": [request.answer for request in requests],
            "message": [verdict.message for verdict in verdicts],
        },
        rows_per_shard=settings.storage.rows_per_shard,
    )
    check_error_rate(verdicts, settings.verification, where=stage.outputs.path(judged, step, agent))
    counts = Counter(verdict.verdict for verdict in verdicts)
    stage.metrics |= {f"verdict.{name}": count for name, count in sorted(counts.items())}
    stage.metrics["accuracy"] = sum(verdict.reward for verdict in verdicts) / len(verdicts)
    stage.summary = f"mean reward {stage.metrics['accuracy']:.3f}, " + ", ".join(
        f"{count} {name}" for name, count in counts.most_common()
    )


if __name__ == "__main__":
    main_of(verify)
