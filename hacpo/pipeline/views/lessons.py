"""Steps that taught a learner nothing: which they were, and what is said of them while a run is made.

A problem teaches a learner only where the rewards of the responses that it learns from differ. A step without such a
problem costs as much as any other, and nothing in its numbers looks broken. All that is said here follows from metrics
files that stages have left; it decides no file, so no stage depends on what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hacpo.evaluation.measure import measure
from hacpo.phrases import ranges
from hacpo.pipeline.catalogue import ADVANTAGE, GENERATE, VERIFY
from hacpo.pipeline.noted import numbers
from hacpo.pipeline.project import Pipeline
from hacpo.verifying.judgement import GAVE_UP

_ZERO_STEPS = 3
"""An agent may well earn nothing in a step or two; from here on it is worth a word."""

_FROM_OTHERS = "it learns from the others' responses alone"
_FROM_NOTHING_GOOD = "it learns only what not to answer"
"""Without the others' responses, but with their rewards to be measured against."""


def silent(pipeline: Pipeline, step: int, learner: str) -> bool:
    """Whether the step's advantages are there, and not one of its problems has unequal rewards for the learner, nor any
    response of others that was chosen for it."""
    found = numbers(pipeline.layout, ADVANTAGE, step)
    return found.get(f"{learner}.live_groups") == 0 and not found.get(f"{learner}.selected_cross")


def remarks(pipeline: Pipeline, step: int) -> list[str]:
    """What is to be said once a step's advantages are there; mostly nothing.

    One line for the learners whom this step teaches nothing, unless the step before was like that too: a standstill is
    reported where it begins, and again where it begins anew. And one for an agent whose own rewards are all 0 for the
    third step running, unless it stands still anyway.
    """
    agents = list(pipeline.settings.agents)
    begun = [agent for agent in agents if silent(pipeline, step, agent) and not silent(pipeline, step - 1, agent)]
    rollouts = pipeline.settings.algorithm.rollouts
    shared = rollouts.coupled
    lines = [
        f"step {step} teaches {_listed(learners)} nothing: {_reason(pipeline, step, agents if shared else learners)}. "
        f"Its problems: `{pipeline.command('show', step)}`. Said again only after a step that teaches something."
        for learners in ([begun] if shared else [[agent] for agent in begun])
        if learners
    ]
    steps = range(step - _ZERO_STEPS + 1, step + 1)
    for agent in agents:
        earned = [_earned_nothing(pipeline, at, agent) for at in (steps[0] - 1, *steps)]
        if earned == [False, *[True] * _ZERO_STEPS] and not all(silent(pipeline, at, agent) for at in steps):
            lines.append(
                f"{agent} has earned no reward in steps {ranges(steps)}: "
                f"{_FROM_OTHERS if rollouts.share else _FROM_NOTHING_GOOD}. "
                f"{_cause(pipeline, step, [agent])}. The last of them: `{pipeline.command('show', step)}`."
            )
    return lines


def summary(pipeline: Pipeline) -> list[str]:
    """One line for the learners that the same steps of the run taught nothing."""
    trained = range(1, pipeline.settings.steps + 1)
    measured = [step for step in trained if numbers(pipeline.layout, ADVANTAGE, step)]
    learners: dict[tuple[int, ...], list[str]] = {}
    for agent in pipeline.settings.agents:
        learners.setdefault(tuple(step for step in measured if silent(pipeline, step, agent)), []).append(agent)
    return [
        f"{len(nothing)} of {len(measured)} steps taught {_listed(names)} nothing, "
        f"all rewards of a problem being equal: {ranges(nothing)} (`{pipeline.command('show', nothing[-1])}`)"
        for nothing, names in learners.items()
        if nothing
    ]


def _reason(pipeline: Pipeline, step: int, sources: Sequence[str]) -> str:
    """Why no problem has unequal rewards, and what to look at."""
    mean = sum(numbers(pipeline.layout, VERIFY, step, agent).get("accuracy", 0.0) for agent in sources) / len(sources)
    word = measure(pipeline.settings.verification)
    return f"all responses to a problem have the same reward ({word} {mean:.3f}). {_cause(pipeline, step, sources)}"


def _cause(pipeline: Pipeline, step: int, sources: Sequence[str]) -> str:
    """The likeliest cause in what was sampled and how it was judged, with the setting to look at."""
    settings, counts = pipeline.settings, _verdicts(pipeline, step, sources)
    responses = sum(counts.values())
    cut = sum(numbers(pipeline.layout, GENERATE, step, agent).get("truncated", 0.0) for agent in sources) / len(sources)
    gave_up = sum(counts.get(verdict, 0) for verdict in GAVE_UP)
    if 2 * cut >= 1:
        limits = {str(settings.agents[agent].sampling.max_new_tokens): None for agent in sources}
        return f"{100 * cut:.0f} % of them were cut off: look at sampling.max_new_tokens, {', '.join(limits)} here"
    if responses and 2 * gave_up >= responses:
        return (
            f"{gave_up} of {responses} could not be judged: look at their messages in the verdicts, and at verification"
        )
    if settings.verification.is_function:
        return f"Look at what the reward function {settings.verification.reward} makes of them, and at prompt"
    return _cause_of_verdicts(counts, responses)


def _cause_of_verdicts(counts: Mapping[str, int], responses: int) -> str:
    """The same where answers count, where responses are whole and could be judged."""
    correct, unanswered = counts.get("correct", 0), counts.get("no_answer", 0)
    if responses and correct == responses:
        return "All are correct: nothing is left to learn from these problems, look at data"
    if responses and 2 * unanswered >= responses:
        return f"{unanswered} of {responses} have no answer in a box: look at prompt, and at the model's template"
    if not correct:
        return "None is correct: look at prompt and verification, or at whether the problems are too hard (data)"
    return "Every problem is always solved or never: look at data, sampling.group_size and sampling.temperature"


def _verdicts(pipeline: Pipeline, step: int, sources: Sequence[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for agent in sources:
        for key, value in numbers(pipeline.layout, VERIFY, step, agent).items():
            if key.startswith("verdict."):
                name = key.removeprefix("verdict.")
                counts[name] = counts.get(name, 0) + int(value)
    return counts


def _earned_nothing(pipeline: Pipeline, step: int, agent: str) -> bool:
    """Whether an agent's rewards of a step are there and all 0."""
    found = numbers(pipeline.layout, VERIFY, step, agent)
    return found.get("accuracy") == 0 and not found.get("verdict.correct")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
