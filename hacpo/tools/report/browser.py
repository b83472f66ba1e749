"""The rollouts that the page embeds: a fair sample of problems, within a byte budget, safe to put into HTML.

What models wrote is hostile text. It reaches the page only inside JSON whose `<`, `>` and `&` are escaped, in a script
block of a type that browsers do not run, and the page's script shows it with `textContent` alone.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hacpo.algorithm.advantage_table import best_responses
from hacpo.artifacts import tables
from hacpo.artifacts.layout import Layout
from hacpo.artifacts.problem_rows import ScheduledProblem
from hacpo.artifacts.run_files import RunFiles
from hacpo.artifacts.tables import Row
from hacpo.settings.root import ReportSettings
from hacpo.settings.verification import VerificationSettings
from hacpo.tools.inspect.step_view import Response, Use, punished_best, read_responses

RESPONSE_FIELDS = ("sample", "text", "cut", "verdict", "reward", "extracted", "finish_reason", "tokens", "learners")
"""What an embedded response is, by position. `cut`: characters left out; `learners`: one entry per agent, null where
the response is not in its pool."""

LEARNER_FIELDS = (
    "status",
    "baseline",
    "advantage",
    "omega",
    "effective_advantage",
    "guarded",
    "update",
    "ratio",
    "lower",
    "upper",
    "clipped",
    "is_weight",
    "objective",
)
"""What a learner made of a response, by position; null where the stage has not run."""

FILTERS = {
    "disagree": "agents disagree (success rates at least 50 points apart)",
    "partner_only": "one agent failed every time, another did not",
    "unsolved": "nobody solved it",
    "no_signal": "no signal (all rewards equal)",
    "punished": "a correct answer was pushed down",
    "silenced": "a partner's answer was silenced by a clip bound",
    "trouble": "cut off, unanswered, or the verifier gave up",
}
"""Flags of a problem, and what the page calls them."""

_GRADED_FILTERS = {
    "disagree": "agents disagree (mean rewards at least 0.5 apart)",
    "partner_only": "one agent never earned more than 0, another did",
    "unsolved": "nobody earned more than 0",
    "punished": "one of the best answers was pushed down",
}
"""What it calls them where a function grades the answers."""

_LEAST_CHARACTERS = 80


@dataclass(frozen=True)
class Problem:
    """A problem with the responses to it, by agent."""

    name: str
    problem: str
    answer: str
    groups: dict[str, list[Response]]

    @property
    def responses(self) -> list[Response]:
        """Of all agents."""
        return [response for group in self.groups.values() for response in group]

    def judged(self) -> list[list[tuple[float, float]]]:
        """Of each learner (reward, effective advantage) of what it learns from."""
        by_learner: dict[str, list[tuple[float, float]]] = {}
        for response in self.responses:
            for use in response.uses:
                if use.worth is not None and response.reward is not None:
                    pair = response.reward, use.worth.effective_advantage
                    by_learner.setdefault(use.learner, []).append(pair)
        return list(by_learner.values())


@dataclass(frozen=True)
class Embedded:
    """What goes into the page.

    Attributes:
        index: step -> its problems with success rates and flags, for the lists and filters.
        payloads: step -> the JSON text of its problems and responses.
        steps_there: how many steps have rollouts at all.
        problems_there: problems of a step of the run.
        shortened: whether the byte budget left out problems or text.
    """

    index: Sequence[Row]
    payloads: dict[int, str]
    steps_there: int
    problems_there: int
    shortened: bool

    @property
    def most_problems(self) -> int:
        """Of a step."""
        return max((len(step["problems"]) for step in self.index), default=0)


def filters(verification: VerificationSettings) -> dict[str, str]:
    """`FILTERS` in the words that fit the rewards."""
    return FILTERS if verification.is_binary else FILTERS | _GRADED_FILTERS


def script_json(value: object) -> str:
    """JSON that can stand in a script block: no `<`, `>` or `&`, so no tag and no comment can begin or end in it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def embed(
    layout: Layout, run: str, agents: Sequence[str], schedule: pa.Table | None, settings: ReportSettings
) -> Embedded:
    """Choose and read the rollouts to show.

    Steps are spread evenly over those that have rollouts, the first and the last always among them; of each the first
    problems are taken. (The schedule is shuffled, so the first problems are a fair sample.)

    Args:
        schedule: the schedule table; None if there is none yet.

    Raises:
        ArtifactError: a table is damaged or belongs to another run.
    """
    counts = Counter([] if schedule is None else schedule["step"].to_pylist())
    sampled = [step for step in sorted(counts) if any(layout.rollouts(step, agent).exists() for agent in agents)]
    wanted = spaced(sampled, settings.browser_steps if settings.problems_per_step else 0)
    share = settings.browser_mebibytes * 2**20 / max(len(wanted), 1)
    index, payloads, shortened = [], {}, False
    for step in wanted:
        assert schedule is not None
        rows = schedule.filter(pc.equal(schedule["step"], step)).sort_by("position")
        shown = ScheduledProblem.of(rows.slice(0, settings.problems_per_step))
        problems = read_problems(layout, run, step, agents, shown)
        texts, shorter = _fit(problems, settings.max_characters, share)
        shortened |= shorter or len(texts) < len(problems)
        payloads[step] = "[" + ",".join(texts) + "]"
        index.append({"step": step, "problems": [_entry(problem) for problem in problems[: len(texts)]]})
    most = max((counts[step] for step in sampled), default=0)
    return Embedded(index, payloads, len(sampled), most, shortened)


def spaced(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of the steps, evenly, the first and the last among them (the last alone if `most` is 1)."""
    if len(steps) <= most:
        return list(steps)
    if most < 2:
        return list(steps[-1:]) if most else []
    return [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]


def read_problems(
    layout: Layout, run: str, step: int, agents: Sequence[str], scheduled: Sequence[ScheduledProblem]
) -> list[Problem]:
    """The scheduled problems with every response to them and what each learner made of it."""
    files = RunFiles(run, layout)

    def read(table: tables.Table, whose: str, columns: Sequence[str]) -> pa.Table | None:
        return files.read(table, step, whose, columns=columns) if files.has(table, step, whose) else None

    responses = read_responses(read, agents, agents, [asked.problem_id for asked in scheduled])
    return [
        Problem(
            asked.problem_id,
            asked.problem,
            asked.answer,
            {agent: [each for each in responses[asked.problem_id] if each.agent == agent] for agent in agents},
        )
        for asked in scheduled
    ]


def flags(problem: Problem) -> list[str]:
    """Which of `FILTERS` a problem matches."""
    rates = [rate for rate in _rates(problem) if rate is not None]
    rewards = [response.reward for response in problem.responses if response.reward is not None]
    uses = [use for response in problem.responses for use in response.uses if use.worth is not None]
    holds = {
        "disagree": len(rates) > 1 and max(rates) - min(rates) >= 0.5,
        "partner_only": len(rates) > 1 and min(rates) <= 0 < max(rates),
        "unsolved": bool(rewards) and max(rewards) <= 0,
        "no_signal": bool(rewards) and bool(best_responses(np.zeros(len(rewards)), np.array(rewards)).all()),
        "punished": any(punished_best(*zip(*pairs, strict=True)) for pairs in problem.judged()),
        "silenced": any(
            use.updates and use.updates[-1].clipped and not use.is_self and use.worth and use.worth.effective_advantage
            for use in uses
        ),
        "trouble": any(
            response.verdict not in ("correct", "wrong", None) or response.finish_reason == "length"
            for response in problem.responses
        ),
    }
    return [name for name in FILTERS if holds[name]]


def _rates(problem: Problem) -> list[float | None]:
    """Mean reward of each agent's responses."""
    groups = [[r.reward for r in group if r.reward is not None] for group in problem.groups.values()]
    return [math.fsum(rewards) / len(rewards) if rewards else None for rewards in groups]


def _entry(problem: Problem) -> Row:
    rates = [None if rate is None else round(rate, 4) for rate in _rates(problem)]
    return {"id": problem.name, "problem": problem.problem[:160], "rates": rates, "flags": flags(problem)}


def _fit(problems: Sequence[Problem], characters: int, budget: float) -> tuple[list[str], bool]:
    """JSON of as many problems as fit into the budget, at least one: if need be with shorter texts, which the second
    value tells."""
    texts: list[str] = []
    used, shorter = 0, False
    for problem in problems:
        limit = characters
        text = _encode(problem, limit)
        while not texts and len(text.encode()) > budget and limit > _LEAST_CHARACTERS:
            limit = max(limit // 2, _LEAST_CHARACTERS)
            text = _encode(problem, limit)
            shorter = any(len(response.text) > limit for response in problem.responses)
        used += len(text.encode())
        if texts and used > budget:
            break
        texts.append(text)
    return texts, shorter


def _encode(problem: Problem, limit: int) -> str:
    agents = list(problem.groups)
    return script_json(
        {
            "id": problem.name,
            "problem": problem.problem[: max(limit, 400)],
            "answer": problem.answer[:400],
            "agents": [[_packed(response, agents, limit) for response in group] for group in problem.groups.values()],
        }
    )


def _packed(response: Response, agents: Sequence[str], limit: int) -> list[Any]:
    uses = {use.learner: _learned(use) for use in response.uses}
    shown = {
        **vars(response),
        "text": response.text[:limit],
        "cut": max(len(response.text) - limit, 0),
        "extracted": None if response.extracted is None else response.extracted[:400],
        "learners": [
            [_rounded(uses[agent].get(name)) for name in LEARNER_FIELDS] if agent in uses else None for agent in agents
        ],
    }
    return [_rounded(shown[name]) for name in RESPONSE_FIELDS]


def _learned(use: Use) -> Row:
    """What a learner made of a response, in the update that it was in last."""
    worth = {} if use.worth is None else vars(use.worth)
    return {"status": use.status, **worth, **(vars(use.updates[-1]) if use.updates else {})}


def _rounded(value: Any) -> Any:
    """Floats to five significant digits (the tables have all of them); what JSON cannot say becomes null."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None
