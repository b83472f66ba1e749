"""agreement: how far one agent's responses to a problem agree with each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from hacpo.pipeline.catalogue import AGREEMENT_STAGE
from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.execution.stage import Stage
from hacpo.pipeline.execution.stage_command import stage_command


@stage_command(AGREEMENT_STAGE)
def agreement(stage: Stage) -> None:
    """Write agreement/step=<step>/agent=<name>: per problem the answers given, and the share of the most frequent."""
    from hacpo.artifacts.tables import AGREEMENT, PROMPTS, VERDICTS

    problem_ids = stage.read(PROMPTS, columns=["problem_id"])["problem_id"].to_pylist()[: stage.limit]
    verdicts = stage.read(VERDICTS, columns=["problem_id", "extracted"])
    rows = agreements(problem_ids, verdicts["problem_id"].to_pylist(), verdicts["extracted"].to_pylist())
    stage.write(AGREEMENT, rows)
    stage.metrics["agreement"] = sum(row["agreement"] for row in rows) / len(rows)
    stage.summary = f"agreement {stage.metrics['agreement']:.3f}"


def agreements(
    problem_ids: Iterable[str], answered: Iterable[str], extracted: Iterable[str | None]
) -> list[dict[str, Any]]:
    """Per problem: responses, different answers among them, and the share of responses that give the most frequent one.

    A response without an answer agrees with no other.

    Args:
        problem_ids: the problems.
        answered: the problem of each response, others among them.
        extracted: its answer.
    """
    answers: dict[str, list[str | None]] = {problem_id: [] for problem_id in problem_ids}
    for problem_id, answer in zip(answered, extracted, strict=True):
        if problem_id in answers:
            answers[problem_id].append(answer)
    rows = []
    for problem_id, given in answers.items():
        counts = Counter(answer for answer in given if answer is not None)
        most = max(counts.values(), default=0)
        rows.append(
            {"problem_id": problem_id, "responses": len(given), "answers": len(counts), "agreement": most / len(given)}
        )
    return rows


if __name__ == "__main__":
    main_of(agreement)
