"""Which checkpoints of a run stay on disk: a rule on step numbers, without files.

A checkpoint is kept or goes as a whole, its optimizer included: DVC knows it by one hash, which a folder without its
`trainer/` would no longer have. Step 0 always stays (every agent's tokenizer, the KL penalty and every repetition start
there), and so does the newest step that is done, which the next one continues from.
"""

from __future__ import annotations

from collections.abc import Mapping

from hacpo.evaluation.values import best_step
from hacpo.settings.root import RetentionSettings


def kept_steps(
    retention: RetentionSettings, steps_done: int, results: Mapping[int, float] | None = None
) -> dict[int, str]:
    """The steps of 0 to `steps_done` whose checkpoints of one agent stay, each with the reasons in words.

    Args:
        steps_done: the last step that is done with all that is made from its predecessor's checkpoint: rollouts, update
            and evaluation. What comes after it is not decided here, and stays.
        results: step -> the agent's result on the benchmark `keep_best`; only needed for that, steps that were not
            evaluated may be missing. Results beyond `steps_done` do not count.

    Before results are known (an estimate): `keep_best` keeps at most one step more than the same rule without it.
    """
    steps = range(max(steps_done, 0) + 1)
    if retention.keeps_all:
        return dict.fromkeys(steps, "nothing is pruned")
    reasons: dict[int, list[str]] = {step: [] for step in steps}
    reasons[0].append("start")
    reasons[steps[-1]].append("newest")
    if retention.keep_last is not None:
        for step in steps[-retention.keep_last :]:
            reasons[step].append(f"keep_last {retention.keep_last}")
    if retention.keep_every is not None:
        for step in steps[:: retention.keep_every]:
            reasons[step].append(f"keep_every {retention.keep_every}")
    if retention.keep_best is not None:
        best = best_step({step: value for step, value in (results or {}).items() if step <= steps_done})
        if best is not None:
            reasons[best].append(f"keep_best {retention.keep_best}")
    return {step: ", ".join(words) for step, words in reasons.items() if words}


def rule_text(retention: RetentionSettings) -> str:
    """The rules in force, as `keep_last 2, keep_best heldout`."""
    rules = {name: value for name, value in retention.model_dump(exclude={"cache"}).items() if value is not None}
    return ", ".join(f"{name} {value}" for name, value in rules.items())
