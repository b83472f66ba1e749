"""verify: reward every rollout of one agent, by its answer or by a function of the user's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hacpo.errors import ArtifactError
from hacpo.pipeline.catalogue import SIDE_VERIFY, VERIFY
from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.execution.stage import Stage
from hacpo.pipeline.execution.stage_command import stage_command

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from hacpo.artifacts.problem_rows import Problem
    from hacpo.artifacts.tables import Table


@stage_command(VERIFY, side=SIDE_VERIFY)
def verify(stage: Stage) -> None:
    """Write verdicts/step=<step>/agent=<name>; with --side, side_verdicts/step=<step>/agent=<name>."""
    import numpy as np

    from hacpo.algorithm.rollouts import check_whole, of_first_problems
    from hacpo.artifacts import tables
    from hacpo.artifacts.tables import ROLLOUTS, SIDE_ROLLOUTS, SIDE_VERDICTS, VERDICTS
    from hacpo.verifying.verifier import VERDICT, check_error_rate, verdicts_in

    drawn, judged = (SIDE_ROLLOUTS, SIDE_VERDICTS) if stage.spec.side else (ROLLOUTS, VERDICTS)
    prompts = stage.read(tables.PROMPTS)
    answers = dict(zip(prompts["problem_id"].to_pylist(), prompts["answer"].to_pylist(), strict=True))
    rollouts = stage.read(drawn, columns=["rollout_id", "step", "agent", "problem_id", "sample"])
    check_whole(
        rollouts,
        list(answers),
        stage.step,
        stage.mine,
        side=stage.spec.side,
        where=stage.place(drawn),
        remedy=f"repeat `{stage.made_by(drawn)}`",
    )
    chosen = np.flatnonzero(of_first_problems(rollouts["problem_id"], stage.limit))

    def content(rows: range) -> dict[str, Any]:
        return _judged(stage, drawn, answers, chosen[rows.start : rows.stop])

    if not stage.make(judged, len(chosen), content):
        return
    verdicts = verdicts_in(stage.made(judged, VERDICT))
    place = stage.outputs.path(judged, stage.step, stage.mine)
    check_error_rate(verdicts, stage.settings.verification, where=place)
    counts = Counter(verdict.verdict for verdict in verdicts)
    stage.metrics |= {f"verdict.{name}": count for name, count in sorted(counts.items())}
    stage.metrics["accuracy"] = sum(verdict.reward for verdict in verdicts) / len(verdicts)
    stage.summary = f"mean reward {stage.metrics['accuracy']:.3f}, " + ", ".join(
        f"{count} {name}" for name, count in counts.most_common()
    )


def _judged(stage: Stage, drawn: Table, answers: Mapping[str, str], rows: npt.NDArray[np.int64]) -> dict[str, Any]:
    """The verdicts on some rows of the rollouts."""
    import pyarrow as pa

    from hacpo.verifying.verifier import Request

    settings = stage.settings
    columns = ["rollout_id", "problem_id", "sample", "text", "finish_reason"]
    first = range(int(rows[0]), int(rows[-1]) + 1)
    rollouts = pa.concat_tables(stage.shards(drawn, columns=columns, rows=first)).take(pa.array(rows - first.start))
    problems = {} if settings.verification.is_math else _problems(stage, answers)
    names = ("rollout_id", "text", "finish_reason", "problem_id")
    requests = [
        Request(identity, text, finish_reason, answers[problem], problems.get(problem))
        for identity, text, finish_reason, problem in zip(*(rollouts[name].to_pylist() for name in names), strict=True)
    ]
    with stage.session.verifier(settings.verification, stage.root) as verifier:
        verdicts = verifier.verify(requests, on_progress=stage.progress)
    return {
        **{name: rollouts[name].combine_chunks() for name in ("rollout_id", "problem_id", "sample")},
        "reward": [verdict.reward for verdict in verdicts],
        "verdict": [verdict.verdict for verdict in verdicts],
        "extracted": [verdict.extracted for verdict in verdicts],
        "answer": [request.answer for request in requests],
        "message": [verdict.message for verdict in verdicts],
    }


def _problems(stage: Stage, answers: Mapping[str, str]) -> dict[str, Problem]:
    """The rows of the training set that the step's prompts are of: what scorers and functions are given."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from hacpo.artifacts import tables
    from hacpo.artifacts.problem_rows import Problem

    every = stage.read(tables.PROBLEMS, stage.settings.data.train)
    asked = every.filter(pc.is_in(every["problem_id"], value_set=pa.array(list(answers), pa.string())))
    problems = {problem.problem_id: problem for problem in Problem.of(asked)}
    if answers.keys() - problems.keys():
        raise ArtifactError(
            "the step's prompts are of problems that are not in the training set",
            where=stage.inputs.problems(stage.settings.data.train),
            found=repr(min(answers.keys() - problems.keys())),
            remedy=f"repeat `{stage.made_by(tables.PROBLEMS)}`",
        )
    return problems


if __name__ == "__main__":
    main_of(verify)
