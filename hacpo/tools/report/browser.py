"""The rollouts that the page embeds: a fair sample of problems, within a byte budget, safe to put into HTML.

What models wrote is hostile text. It reaches the page only inside JSON whose `<`, `>` and `&` are escaped, in a script
block of a type that browsers do not run, and the page's script shows it with `textContent` alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from hacpo.algorithm.group_advantage import UNIFORM_TOLERANCE
from hacpo.artifacts import tables
from hacpo.artifacts.layout import Layout
from hacpo.artifacts.run_files import RunFiles
from hacpo.settings.root import ReportSettings
from hacpo.settings.verification import VerificationSettings
from hacpo.tools.report.collect import gather

Row = dict[str, Any]

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
class Embedded:
    """What goes into the page.

    Attributes:
        index: step -> its problems with success rates and flags, for the lists and filters.
        payloads: step -> the JSON text of its problems and responses.
        steps_there: how many steps have rollouts at all.
        problems_there: problems of a step of the run.
        shortened: whether the byte budget left out problems or text.
    """

    index: list[Row]
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
    return FILTERS if verification.is_math else FILTERS | _GRADED_FILTERS


def script_json(value: object) -> str:
    """JSON that can stand in a script block: no `<`, `>` or `&`, so no tag and no comment can begin or end in it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def embed(
    layout: Layout, run: str, agents: Sequence[str], schedule: Sequence[Row], settings: ReportSettings
) -> Embedded:
    """Choose and read the rollouts to show.

    Steps are spread evenly over those that have rollouts, the first and the last always among them; of each the first
    problems are taken. (The schedule is shuffled, so the first problems are a fair sample.)

    Raises:
        ArtifactError: a table is damaged or belongs to another run.
    """
    by_step: dict[int, list[Row]] = {}
    for row in schedule:
        by_step.setdefault(row["step"], []).append(row)
    sampled = [step for step in sorted(by_step) if any(layout.rollouts(step, agent).exists() for agent in agents)]
    wanted = spaced(sampled, settings.browser_steps if settings.problems_per_step else 0)
    share = settings.browser_mebibytes * 2**20 / max(len(wanted), 1)
    index, payloads, shortened = [], {}, False
    for step in wanted:
        rows = sorted(by_step[step], key=lambda row: row["position"])[: settings.problems_per_step]
        problems = read_problems(layout, run, step, agents, rows)
        texts, kept = _fit(problems, settings.max_characters, share)
        shortened |= kept < len(problems) or any(response["cut_early"] for response in _responses(problems[:kept]))
        payloads[step] = "[" + ",".join(texts) + "]"
        index.append({"step": step, "problems": [_entry(problem, len(agents)) for problem in problems[:kept]]})
    most = max((len(by_step[step]) for step in sampled), default=0)
    return Embedded(index, payloads, len(sampled), most, shortened)


def spaced(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of the steps, evenly, the first and the last among them (the last alone if `most` is 1)."""
    if len(steps) <= most:
        return list(steps)
    if most < 2:
        return list(steps[-1:]) if most else []
    return [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]


def read_problems(layout: Layout, run: str, step: int, agents: Sequence[str], scheduled: Sequence[Row]) -> list[Row]:
    """The scheduled problems with every response to them and what each learner made of it."""
    ids = [row["problem_id"] for row in scheduled]

    def rows(table: tables.Table, columns: Sequence[str], key: str, wanted: Iterable[str]) -> list[Row]:
        places = [(step, agent) for agent in agents]
        return gather(RunFiles(run, layout), table, places, columns).filter(pl.col(key).is_in(list(wanted))).to_dicts()

    texts = ["rollout_id", "problem_id", "sample", "text", "finish_reason"]
    responses = rows(tables.ROLLOUTS, texts, "problem_id", ids)
    keys = [response["rollout_id"] for response in responses]
    judged = ["rollout_id", "reward", "verdict", "extracted"]
    verdicts = {row["rollout_id"]: row for row in rows(tables.VERDICTS, judged, "rollout_id", keys)}
    learners: dict[tuple[str, str], Row] = {}
    for table, columns in (
        (tables.POOL, ["rollout_id", "status", "source_tokens"]),
        (
            tables.ADVANTAGES,
            ["rollout_id", "is_self", "baseline", "advantage", "omega", "effective_advantage", "guarded"],
        ),
        (
            tables.TRACE,
            ["rollout_id", "update", "ratio", "lower", "upper", "clipped", "is_weight", "objective"],
        ),
    ):
        for row in rows(table, columns, "rollout_id", keys):
            learners.setdefault((row["rollout_id"], row["by"]), {}).update(row)
    for response in responses:
        name = response["rollout_id"]
        response.update(verdicts.get(name, {"reward": None, "verdict": None, "extracted": None}))
        response["learners"] = [learners.get((name, agent)) for agent in agents]
        pooled = [entry for entry in response["learners"] if entry and "source_tokens" in entry]
        response["tokens"] = pooled[0]["source_tokens"] if pooled else None
    grouped: dict[str, list[list[Row]]] = {problem: [[] for _ in agents] for problem in ids}
    for response in sorted(responses, key=lambda response: int(response["sample"])):
        agent = response["rollout_id"].split("/")[1]
        grouped[response["problem_id"]][list(agents).index(agent)].append(response)
    return [
        {
            "id": row["problem_id"],
            "problem": row["problem"],
            "answer": row["answer"],
            "agents": grouped[row["problem_id"]],
        }
        for row in scheduled
    ]


def flags(problem: Row) -> list[str]:
    """Which of `FILTERS` a problem matches."""
    responses = _responses([problem])
    rates = [rate for rate in _rates(problem) if rate is not None]
    rewards = [response["reward"] for response in responses if response["reward"] is not None]
    used = [entry for response in responses for entry in response["learners"] if entry]
    holds = {
        "disagree": len(rates) > 1 and max(rates) - min(rates) >= 0.5,
        "partner_only": len(rates) > 1 and min(rates) <= 0 < max(rates),
        "unsolved": bool(rewards) and max(rewards) <= 0,
        "no_signal": bool(rewards) and _unbeaten(min(rewards), rewards),
        "punished": _punished(responses),
        "silenced": any(
            entry.get("clipped") and not entry.get("is_self", True) and entry.get("effective_advantage")
            for entry in used
        ),
        "trouble": any(
            r["verdict"] not in ("correct", "wrong", None) or r["finish_reason"] == "length" for r in responses
        ),
    }
    return [name for name in FILTERS if holds[name]]


def _punished(responses: Sequence[Row]) -> bool:
    """Whether a learner was pushed away from a response that none of those it learns from beats."""
    for entries in zip(*(response["learners"] for response in responses), strict=True):
        group = [
            (response["reward"], entry.get("effective_advantage") or 0.0)
            for response, entry in zip(responses, entries, strict=True)
            if entry and response["reward"] is not None
        ]
        rewards = [reward for reward, _ in group]
        live = bool(rewards) and not _unbeaten(min(rewards), rewards)
        if live and any(worth < 0 and _unbeaten(reward, rewards) for reward, worth in group):
            return True
    return False


def _unbeaten(reward: float, rewards: Sequence[float]) -> bool:
    """Whether none of `rewards` is higher, by the rule that says when the rewards of a problem are equal."""
    return max(rewards) - reward <= UNIFORM_TOLERANCE * max(map(abs, rewards))


def _responses(problems: Iterable[Row]) -> list[Row]:
    return [response for problem in problems for group in problem["agents"] for response in group]


def _rates(problem: Row) -> list[float | None]:
    """Mean reward of each agent's responses."""
    groups = [[r["reward"] for r in group if r["reward"] is not None] for group in problem["agents"]]
    return [math.fsum(rewards) / len(rewards) if rewards else None for rewards in groups]


def _entry(problem: Row, agents: int) -> Row:
    rates = [None if rate is None else round(rate, 4) for rate in _rates(problem)]
    assert len(rates) == agents
    return {"id": problem["id"], "problem": problem["problem"][:160], "rates": rates, "flags": flags(problem)}


def _fit(problems: Sequence[Row], characters: int, budget: float) -> tuple[list[str], int]:
    """JSON of as many problems as fit into the budget, at least one: if need be with shorter texts."""
    texts: list[str] = []
    used = 0
    for problem in problems:
        limit = characters
        text = _encode(problem, limit, characters)
        while not texts and len(text.encode()) > budget and limit > _LEAST_CHARACTERS:
            limit = max(limit // 2, _LEAST_CHARACTERS)
            text = _encode(problem, limit, characters)
        used += len(text.encode())
        if texts and used > budget:
            break
        texts.append(text)
    return texts, len(texts)


def _encode(problem: Row, limit: int, characters: int) -> str:
    for response in _responses([problem]):
        response["cut"] = max(len(response["text"]) - limit, 0)
        response["cut_early"] = limit < characters and response["cut"] > 0
    return script_json(
        {
            "id": problem["id"],
            "problem": problem["problem"][: max(limit, 400)],
            "answer": problem["answer"][:400],
            "agents": [[_packed(response, limit) for response in group] for group in problem["agents"]],
        }
    )


def _packed(response: Mapping[str, Any], limit: int) -> list[Any]:
    shown = {
        **response,
        "text": response["text"][:limit],
        "extracted": None if response["extracted"] is None else response["extracted"][:400],
        "learners": [
            None if entry is None else [_rounded(entry.get(name)) for name in LEARNER_FIELDS]
            for entry in response["learners"]
        ],
    }
    return [_rounded(shown[name]) for name in RESPONSE_FIELDS]


def _rounded(value: Any) -> Any:
    """Floats to five significant digits (the tables have all of them); what JSON cannot say becomes null."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None
