"""Every kind of single-value corruption of a finished run is found by the check it concerns, and named.

Each case changes one thing in a copy of the run and says what the audit must say of it: check, file, row, column and,
where they can be known, the expected and the found value. DVC's locks would notice nearly all of it first, so the cases
look at the other checks, and then that the lock finds it too.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import Cli
from hacpo.pipeline.project import Pipeline
from hacpo.tools.audit.findings import Finding
from hacpo.tools.audit.walk import audit
from tests.tampering import Sandbox

ANY: Any = object()
"""Whatever value."""


@dataclass(frozen=True)
class Named:
    """What a finding must say; `file` below `artifacts/small`, or from the project's root with a leading slash."""

    check: str
    file: str
    row: Any = ""
    column: str = ""
    expected: Any = ANY
    found: Any = ANY

    def is_said_by(self, finding: Finding) -> bool:
        wanted = Path(self.file[1:]) if self.file.startswith("/") else Path("artifacts/small") / self.file
        return (
            finding.check == self.check
            and wanted in (finding.file, finding.file.parent)
            and _same(self.row, finding.row)
            and re.sub(r"\[\d+\]$", "", finding.column) == self.column
            and _same(self.expected, finding.expected)
            and _same(self.found, finding.found)
        )


def _same(wanted: Any, value: Any) -> bool:
    if wanted is ANY:
        return True
    if isinstance(wanted, re.Pattern):
        return wanted.search(str(value)) is not None
    if isinstance(wanted, float) and isinstance(value, float):
        return math.isclose(wanted, value, rel_tol=1e-9, abs_tol=1e-15)
    return bool(wanted == value)


@dataclass(frozen=True)
class Case:
    """One kind of corruption.

    Attributes:
        tamper: does it, and returns what must be found.
        texts, deep: the step whose texts are read, or the one that is repeated; None: arithmetic alone.
    """

    name: str
    tamper: Callable[[Sandbox], Named | list[Named]]
    texts: int | None
    deep: int | None


CASES: list[Case] = []


def case(
    *, texts: int | None = None, deep: int | None = None
) -> Callable[[Callable[[Sandbox], Named | list[Named]]], Callable[[Sandbox], Named | list[Named]]]:
    def add(tamper: Callable[[Sandbox], Named | list[Named]]) -> Callable[[Sandbox], Named | list[Named]]:
        CASES.append(Case(tamper.__name__, tamper, texts, deep))
        return tamper

    return add


def edited(check: str, table: str, column: str, change: Callable[[Any], Any], where: Any = lambda row: True) -> Any:
    """A case that changes one value and finds it in that very place, with the old value as the expected one."""

    def tamper(sandbox: Sandbox) -> Named:
        row = sandbox.edit(table, column, change, where)
        return Named(check, row["table"], row[_key(row)], column, expected=row[column], found=row["new"])

    return tamper


def _key(row: dict[str, Any]) -> str:
    return next(name for name in ("rollout_id", "agent", "problem_id") if name in row)


def add_edits(check: str, table: str, edits: dict[str, Any]) -> None:
    """One case for each column; a value may be (change, which rows)."""
    for column, edit in edits.items():
        change, where = edit if isinstance(edit, tuple) else (edit, lambda row: True)
        name = f"{'trace' if table == TRACE else table.split('/', maxsplit=1)[0]}.{column}"
        CASES.append(Case(name, edited(check, table, column, change, where), None, None))


def is_own(row: dict[str, Any]) -> bool:
    return bool(row["is_self"])


def is_cross(row: dict[str, Any]) -> bool:
    return not row["is_self"]


def is_live(row: dict[str, Any]) -> bool:
    return not row["uniform"] and row["advantage"] != 0


def in_last_digits(value: float) -> float:
    return value * (1 + 1e-6)


# --- rollouts --------------------------------------------------------------------------------------------------------

ROLLOUTS, BEFORE, VERDICTS = (f"{name}/step=0001/agent=ada" for name in ("rollouts", "checkpoints", "verdicts"))
POOL, ADVANTAGES = (f"{name}/step=0001/learner=ada" for name in ("pool", "advantages"))
TRACE = "updates/step=0001/agent=ada/trace.parquet"
CAPABILITY = "capability/step=0001/capability.parquet"

add_edits(
    "rollouts",
    ROLLOUTS,
    {
        "step": lambda step: step + 1,
        "agent": lambda _: "bo",
        "problem_id": lambda name: f"{name}0",
        "sample": lambda sample: sample + 1,
    },
)
add_edits("policy", ROLLOUTS, {"policy": lambda policy: policy[:-1] + ("0" if policy[-1] != "0" else "1")})


@case(texts=1)
def edited_text_of_the_same_length(sandbox: Sandbox) -> Named:
    row = sandbox.edit(ROLLOUTS, "text", lambda text: text[:-1] + "?")
    return Named("text", ROLLOUTS, row["rollout_id"], "text", row["text"], row["new"])


@case()
def edited_text_of_another_length(sandbox: Sandbox) -> Named:
    row = sandbox.edit(ROLLOUTS, "text", lambda text: f"{text}?")
    size = len(row["text"].encode())
    return Named("pool", POOL, row["rollout_id"], "text_bytes", size + 1, size)


@case()
def edited_token(sandbox: Sandbox) -> Named:
    """Own responses keep their tokens, so pool and rollouts contradict each other."""
    row = sandbox.edit(ROLLOUTS, "token_ids", lambda ids: [ids[0] + 1, *ids[1:]])
    return Named("pool", POOL, row["rollout_id"], "token_ids", row["new"], row["token_ids"])


@case(texts=1)
def edited_token_against_its_text(sandbox: Sandbox) -> Named:
    row = sandbox.edit(ROLLOUTS, "token_ids", lambda ids: [ids[0] + 1, *ids[1:]])
    return Named("text", ROLLOUTS, row["rollout_id"], "text", found=row["text"])


@case(texts=1)
def token_outside_the_vocabulary(sandbox: Sandbox) -> Named:
    row = sandbox.edit(ROLLOUTS, "token_ids", lambda ids: [-7, *ids[1:]])
    return Named("text", ROLLOUTS, row["rollout_id"], "text", None, row["text"])


@case(deep=1)
def token_that_no_model_can_score(sandbox: Sandbox) -> Named:
    sandbox.edit(ROLLOUTS, "token_ids", lambda ids: [-7, *ids[1:]])
    return Named("replay", ROLLOUTS, expected=re.compile("can score"), found=re.compile("Error"))


@case()
def edited_logprob(sandbox: Sandbox) -> Named:
    """The pool's sum is exact, so a change of 1e-4 in one token shows."""
    row = sandbox.edit(ROLLOUTS, "logprobs", lambda values: [values[0] - 1e-4, *values[1:]])
    return Named("pool", POOL, row["rollout_id"], "source_logprob", math.fsum(row["new"]), math.fsum(row["logprobs"]))


@case(deep=1)
def edited_logprob_rescored(sandbox: Sandbox) -> Named:
    row = sandbox.edit(ROLLOUTS, "logprobs", lambda values: [values[0] - 1e-6, *values[1:]])
    return Named("replay", ROLLOUTS, row["rollout_id"], "logprobs", row["logprobs"][0], row["new"][0])


@case()
def edited_sampler_logprob(sandbox: Sandbox) -> Named:
    row = sandbox.edit(ROLLOUTS, "sampler_logprobs", lambda values: [values[0] - 0.1, *values[1:]])
    return Named("rollouts", ROLLOUTS, row["rollout_id"], "sampler_logprobs", row["logprobs"], row["new"])


@case()
def edited_sampler_logprob_within_rounding(sandbox: Sandbox) -> Named:
    """Too small a change for a look at one response, and yet the metrics of all of them tell."""
    sandbox.edit(ROLLOUTS, "sampler_logprobs", lambda values: [values[0] - 1e-5, *values[1:]])
    return Named("metrics", "metrics/generate/step=0001/ada.json", column="sampler_difference_mean")


@case()
def logprobs_cut_short(sandbox: Sandbox) -> Named:
    row = sandbox.edit(ROLLOUTS, "logprobs", lambda values: values[:-1])
    return Named("rollouts", ROLLOUTS, row["rollout_id"], "logprobs", "as many as token_ids")


@case()
def logprob_above_zero(sandbox: Sandbox) -> Named:
    row = sandbox.edit(ROLLOUTS, "logprobs", lambda values: [-values[0], *values[1:]])
    return Named("rollouts", ROLLOUTS, row["rollout_id"], "logprobs", "finite numbers not above 0", row["new"])


@case()
def logprob_that_is_no_number(sandbox: Sandbox) -> Named:
    row = sandbox.edit(ROLLOUTS, "logprobs", lambda values: [math.nan, *values[1:]])
    return Named("rollouts", ROLLOUTS, row["rollout_id"], "logprobs", "finite numbers not above 0")


@case()
def edited_prompt_of_one_response(sandbox: Sandbox) -> Named:
    row = sandbox.edit(
        ROLLOUTS, "prompt_token_ids", lambda ids: [*ids[:-1], ids[-1] - 1], lambda row: row["sample"] == 2
    )
    expected = "the same prompt for all responses to a problem"
    return Named("rollouts", ROLLOUTS, row["rollout_id"], "prompt_token_ids", expected, row["new"])


@case(texts=1)
def edited_prompt_rendered_anew(sandbox: Sandbox) -> Named:
    row = sandbox.edit(ROLLOUTS, "prompt_token_ids", lambda ids: [*ids[:-1], ids[-1] - 1])
    return Named("prompt", ROLLOUTS, row["rollout_id"], "prompt_token_ids", row["prompt_token_ids"], row["new"])


@case()
def stop_turned_into_length(sandbox: Sandbox) -> Named:
    """It has fewer tokens than the limit, so nothing cut it."""
    row = sandbox.edit(
        ROLLOUTS,
        "finish_reason",
        lambda _: "length",
        lambda r: r["finish_reason"] == "stop" and len(r["token_ids"]) < 26,
    )
    return Named("rollouts", ROLLOUTS, row["rollout_id"], "finish_reason", re.compile("^stop"), "length")


@case()
def length_turned_into_stop(sandbox: Sandbox) -> Named:
    row = sandbox.edit("rollouts", "finish_reason", lambda _: "stop", lambda row: row["finish_reason"] == "length")
    table = row["table"].replace("rollouts", "verdicts")
    return Named("verdicts", table, row["rollout_id"], "verdict", re.compile("another than truncated"), "truncated")


@case()
def two_rollouts_swapped_between_agents(sandbox: Sandbox) -> list[Named]:
    """Everything but the names of one response of each agent to the same problem; the pools keep the old ones."""
    ada, bo = (sandbox.rows(f"rollouts/step=0001/agent={agent}")[0] for agent in ("ada", "bo"))
    content = ("prompt_token_ids", "token_ids", "text", "finish_reason", "sampler_logprobs", "logprobs", "policy")
    for name, here, there in (("ada", ada, bo), ("bo", bo, ada)):

        def swap(rows: list[Any], here: Any = here, there: Any = there) -> list[Any]:
            return [{**here, **{column: there[column] for column in content}}, *rows[1:]]

        sandbox.rewrite(sandbox.shards(f"rollouts/step=0001/agent={name}")[0], swap)
    return [
        Named("policy", ROLLOUTS, ada["rollout_id"], "policy", ada["policy"], bo["policy"]),
        Named("pool", POOL, ada["rollout_id"], "token_ids", bo["token_ids"], ada["token_ids"]),
        Named("policy", "rollouts/step=0001/agent=bo", bo["rollout_id"], "policy", bo["policy"], ada["policy"]),
    ]


@case()
def two_responses_to_one_problem_swapped(sandbox: Sandbox) -> Named:
    """Texts, tokens and log-probabilities of samples 0 and 1 of one agent."""
    first, second = sandbox.rows(ROLLOUTS)[:2]
    names = ("rollout_id", "sample")

    def swap(rows: list[Any]) -> list[Any]:
        return [
            {**second, **{name: first[name] for name in names}},
            {**first, **{name: second[name] for name in names}},
            *rows[2:],
        ]

    sandbox.rewrite(sandbox.shards(ROLLOUTS)[0], swap)
    return Named("pool", POOL, first["rollout_id"], "source_logprob", math.fsum(second["logprobs"]))


# --- verdicts --------------------------------------------------------------------------------------------------------

add_edits(
    "verdicts",
    VERDICTS,
    {
        "reward": (lambda _: 1.0, lambda row: row["verdict"] == "wrong"),
        "answer": lambda answer: f"{answer}0",
        "problem_id": lambda name: f"{name}0",
        "sample": lambda sample: sample + 1,
    },
)


@case(texts=1)
def reward_flipped_everywhere(sandbox: Sandbox) -> list[Named]:
    """Verdict, reward and what pool and advantages repeat of it: the mean does not fit, and the text says otherwise."""
    row = sandbox.edit(VERDICTS, "verdict", lambda _: "correct", lambda row: row["verdict"] == "wrong")
    name = row["rollout_id"]
    rewards = [entry["reward"] for entry in sandbox.rows(VERDICTS)]
    repeats = [f"{kind}/step=0001/learner={learner}" for kind in ("pool", "advantages") for learner in ("ada", "bo")]
    for table in (VERDICTS, *repeats):
        sandbox.edit(table, "reward", lambda _: 1.0, lambda row: row["rollout_id"] == name)
    mean = sum(rewards) / len(rewards)
    return [
        Named("capability", CAPABILITY, "ada", "accuracy", mean + 1 / len(rewards), mean),
        Named("verdict", VERDICTS, name, "verdict", "wrong", "correct"),
        Named("verdict", VERDICTS, name, "reward", 0.0, 1.0),
    ]


@case(texts=1)
def another_verdict_without_reward(sandbox: Sandbox) -> list[Named]:
    row = sandbox.edit(VERDICTS, "verdict", lambda _: "no_answer", lambda row: row["verdict"] == "wrong")
    return [
        Named("verdict", VERDICTS, row["rollout_id"], "verdict", "wrong", "no_answer"),
        Named("metrics", "metrics/verify/step=0001/ada.json", column="verdict.wrong"),
    ]


@case(texts=1)
def edited_extracted_answer(sandbox: Sandbox) -> Named:
    row = sandbox.edit(VERDICTS, "extracted", lambda text: f"{text}0", lambda row: row["extracted"] is not None)
    return Named("verdict", VERDICTS, row["rollout_id"], "extracted", row["extracted"], row["new"])


@case()
def a_word_that_is_no_verdict(sandbox: Sandbox) -> Named:
    row = sandbox.edit(VERDICTS, "verdict", lambda _: "right")
    return Named("verdicts", VERDICTS, row["rollout_id"], "verdict", re.compile("correct or wrong"), "right")


# --- capability and advantages ---------------------------------------------------------------------------------------

add_edits("capability", CAPABILITY, {"accuracy": lambda value: value + 1e-6, "capability": in_last_digits})


@case()
def edited_window_entry(sandbox: Sandbox) -> Named:
    table = "capability/step=0002/capability.parquet"
    row = sandbox.edit(table, "window", lambda window: [window[0] + 1 / 32, *window[1:]])
    return Named("capability", table, row["agent"], "window", row["window"], row["new"])


add_edits(
    "advantages",
    ADVANTAGES,
    {
        "problem_id": lambda name: f"{name}0",
        "source": lambda _: "cy",
        "is_self": lambda flag: not flag,
        "reward": lambda reward: 1.0 - reward,
        "baseline": (in_last_digits, lambda row: row["baseline"] > 0),
        "sigma": (in_last_digits, is_live),
        "advantage": (in_last_digits, is_live),
        "omega": (in_last_digits, is_cross),
        "effective_advantage": (in_last_digits, is_live),
        "uniform": lambda flag: not flag,
        "guarded": lambda flag: not flag,
    },
)


@case()
def omega_of_the_other_direction(sandbox: Sandbox) -> Named:
    """omega is (source, learner): its inverse is the likeliest mistake."""
    row = sandbox.edit(ADVANTAGES, "omega", lambda omega: 1 / omega, lambda row: row["omega"] != 1)
    return Named("advantages", ADVANTAGES, row["rollout_id"], "omega", row["omega"], 1 / row["omega"])


# --- pools -----------------------------------------------------------------------------------------------------------

add_edits(
    "pool",
    POOL,
    {
        "problem_id": lambda name: f"{name}0",
        "sample": lambda sample: sample + 1,
        "source": lambda _: "cy",
        "is_self": lambda flag: not flag,
        "reward": lambda reward: 1.0 - reward,
        "prompt_token_ids": lambda ids: ids[1:],
        "source_logprob": lambda value: value * (1 + 1e-8),
        "source_tokens": lambda count: count + 1,
        "learner_tokens": lambda count: count + 1,
        "text_bytes": lambda count: count + 1,
        "token_ids": (lambda ids: [ids[0] + 1, *ids[1:]], is_own),
        "roundtrip": (lambda flag: not flag, is_own),
        "status": (lambda _: "empty", is_own),
        "as_sampled": lambda flag: not flag,
        "source_terminal": (lambda token: token + 1, lambda row: row["source_terminal"] is not None),
        "learner_terminal": (lambda _: None, lambda row: row["learner_terminal"] is not None),
    },
)


@case()
def response_that_ends_in_another_token_than_the_others(sandbox: Sandbox) -> Named:
    """Which token stands for which is decided once for two agents."""

    def is_later(row: dict[str, Any]) -> bool:
        return is_cross(row) and row["sample"] == 3 and bool(row["token_ids"]) and row["learner_terminal"] is not None

    row = sandbox.edit(POOL, "token_ids", lambda ids: [*ids[:-1], 7], is_later)
    sandbox.edit(POOL, "learner_terminal", lambda _: 7, lambda other: other["rollout_id"] == row["rollout_id"])
    return Named("pool", POOL, row["rollout_id"], "learner_terminal", row["learner_terminal"], 7)


@case()
def kept_turned_into_too_long(sandbox: Sandbox) -> Named:
    """The trace holds a row that the pool says was not used."""
    row = sandbox.edit(POOL, "status", lambda _: "too_long", lambda row: is_cross(row) and row["status"] == "kept")
    return Named("rows", TRACE, row["rollout_id"], "rollout_id", "no such row", "a row")


CROSS = {
    "token_ids": (lambda ids: [ids[0] + 1, *ids[1:]], is_cross),
    "roundtrip": (lambda flag: not flag, is_cross),
    "status": (lambda _: "not_representable", is_cross),
}
for column, (change, where) in CROSS.items():
    CASES.append(Case(f"pool.{column} of a cross response", edited("retokenise", POOL, column, change, where), 1, None))


# --- traces ----------------------------------------------------------------------------------------------------------


def clip_bound_of(update: int) -> float:
    """1 - delta + m delta_step with the recipe's 0.2 and 0.025."""
    return min(1.0, 1 - 0.2 + update * 0.025)


add_edits(
    "trace",
    TRACE,
    {
        "source": lambda _: "cy",
        "is_self": lambda flag: not flag,
        "update": lambda update: (update + 1) % 4,
        "source_logprob": in_last_digits,
        "ratio": in_last_digits,
        "upper": in_last_digits,
        "clipped": lambda flag: not flag,
        "is_weight": in_last_digits,
        "objective": (in_last_digits, lambda row: row["objective"] != 0),
        "sampler_weight": in_last_digits,
    },
)


@case()
def clip_bound_from_another_update(sandbox: Sandbox) -> Named:
    row = sandbox.edit(TRACE, "lower", lambda lower: lower + 0.025, is_cross)
    expected = clip_bound_of(row["update"])
    return Named("trace", TRACE, row["rollout_id"], "lower", expected, clip_bound_of(row["update"] + 1))


@case()
def edited_learner_logprob(sandbox: Sandbox) -> Named:
    """The recorded ratio does not follow from it."""
    row = sandbox.edit(TRACE, "learner_logprob", in_last_digits, lambda row: row["update"] == 3)
    return Named("trace", TRACE, row["rollout_id"], "ratio", found=row["ratio"])


@case(deep=1)
def edited_learner_logprob_and_all_that_follows_from_it(sandbox: Sandbox) -> list[Named]:
    """An own response that the clip does not touch, after the first update: only a model can tell."""
    worth = {row["rollout_id"]: row["effective_advantage"] for row in sandbox.rows(ADVANTAGES)}
    lengths = {row["rollout_id"]: row["learner_tokens"] for row in sandbox.rows(POOL)}

    def fits(row: dict[str, Any]) -> bool:
        inside = row["lower"] + 1e-3 < row["ratio"] < row["upper"] - 1e-3
        return row["is_self"] and row["update"] > 0 and inside and worth[row["rollout_id"]] != 0

    row = sandbox.edit(TRACE, "learner_logprob", lambda value: value - 1e-6, fits)
    name = row["rollout_id"]
    ratio = math.exp(row["new"] - row["source_logprob"])
    assert lengths[name] > 0
    for column, value in (("ratio", ratio), ("objective", ratio * worth[name])):
        sandbox.edit(TRACE, column, lambda _, value=value: value, lambda row: row["rollout_id"] == name)
    return [
        Named("replay", TRACE, name, "learner_logprob", row["learner_logprob"], row["new"]),
        Named("replay", TRACE, name, "ratio", row["ratio"], ratio),
        Named("metrics", "metrics/update/step=0001/ada.json", column="own.ratio_mean"),
    ]


# --- problems, schedule, evaluations ---------------------------------------------------------------------------------

add_edits(
    "data", "data/arithmetic/train.parquet", {"answer": lambda answer: f"{answer}0", "problem": lambda t: f"{t} "}
)
add_edits(
    "schedule",
    "schedule.parquet",
    {
        "step": lambda step: step + 1,
        "position": lambda position: position + 1,
        "problem": lambda text: f"{text} ",
        "answer": lambda answer: f"{answer}0",
    },
)
add_edits("prompts", "prompts/step=0001", {"answer": lambda answer: f"{answer}0", "problem": lambda text: f"{text} "})


@case()
def two_scheduled_problems_swapped(sandbox: Sandbox) -> Named:
    names = ("problem_id", "problem", "answer")
    first, second = sandbox.rows("schedule.parquet")[:2]

    def swap(rows: list[Any]) -> list[Any]:
        return [
            {**first, **{name: second[name] for name in names}},
            {**second, **{name: first[name] for name in names}},
            *rows[2:],
        ]

    sandbox.rewrite(sandbox.shards("schedule.parquet")[0], swap)
    column = "problem_id"
    return Named("schedule", "schedule.parquet", second[column], column, first[column], second[column])


EVALUATIONS = "evaluations/step=0002/agent=bo"


def answer_name(row: dict[str, Any]) -> str:
    return f"{row['benchmark']}/{row['problem_id']}/{row['sample']}"


@case()
def evaluation_reward_flipped(sandbox: Sandbox) -> Named:
    row = sandbox.edit(EVALUATIONS, "reward", lambda reward: 1.0 - reward)
    return Named("evaluations", EVALUATIONS, answer_name(row), "reward", row["reward"], row["new"])


@case(texts=2)
def evaluation_made_correct(sandbox: Sandbox) -> list[Named]:
    row = sandbox.edit(EVALUATIONS, "verdict", lambda _: "correct", lambda row: row["verdict"] == "wrong")
    sandbox.edit(EVALUATIONS, "reward", lambda _: 1.0, lambda other: answer_name(other) == answer_name(row))
    return [
        Named("verdict", EVALUATIONS, answer_name(row), "verdict", "wrong", "correct"),
        Named("metrics", "metrics/evaluate/step=0002/bo.json", column="heldout.accuracy"),
    ]


@case()
def evaluation_token_count(sandbox: Sandbox) -> Named:
    sandbox.edit(EVALUATIONS, "token_count", lambda count: count - 1, lambda row: row["token_count"] > 2)
    return Named("metrics", "metrics/evaluate/step=0002/bo.json", column="heldout.tokens")


@case(deep=2)
def evaluation_text_with_the_same_answer(sandbox: Sandbox) -> Named:
    """The verdict stays, so only answering again tells."""
    row = sandbox.edit(EVALUATIONS, "text", lambda text: f" {text}", lambda row: row["verdict"] == "wrong")
    return Named("replay", EVALUATIONS, answer_name(row), "text", row["text"], row["new"])


# --- rows and files --------------------------------------------------------------------------------------------------

TABLES = {
    "rollouts": ROLLOUTS,
    "verdicts": VERDICTS,
    "pool": POOL,
    "advantages": ADVANTAGES,
    "trace": TRACE,
    "capability": CAPABILITY,
    "evaluations": EVALUATIONS,
}


def row_name(row: dict[str, Any]) -> str:
    return answer_name(row) if "benchmark" in row else str(row[_key(row)])


def dropped_row(table: str) -> Callable[[Sandbox], Named]:
    def tamper(sandbox: Sandbox) -> Named:
        shard = sandbox.shards(table)[-1]
        name = row_name(pq.read_table(shard).to_pylist()[-1])
        sandbox.rewrite(shard, lambda rows: rows[:-1])
        return Named("rows", table, name, expected="a row", found="no such row")

    return tamper


def repeated_row(table: str) -> Callable[[Sandbox], Named]:
    def tamper(sandbox: Sandbox) -> Named:
        shard = sandbox.shards(table)[-1]
        sandbox.rewrite(shard, lambda rows: [*rows, rows[-1]])
        return Named("keys", table, ANY, expected="this row once", found="twice")

    return tamper


def replaced_row(table: str) -> Callable[[Sandbox], Named]:
    """As many rows as before, so that counting alone does not tell."""

    def tamper(sandbox: Sandbox) -> Named:
        shard = sandbox.shards(table)[0]
        name = row_name(pq.read_table(shard).to_pylist()[1])
        sandbox.rewrite(shard, lambda rows: [rows[0], rows[0], *rows[2:]])
        return Named("rows", table, name, expected="a row", found="no such row")

    return tamper


for name, table in TABLES.items():
    CASES.append(Case(f"dropped row of {name}", dropped_row(table), None, None))
    CASES.append(Case(f"repeated row of {name}", repeated_row(table), None, None))
    CASES.append(Case(f"row of {name} replaced by another", replaced_row(table), None, None))


@case()
def rows_in_another_order(sandbox: Sandbox) -> Named:
    rows = sandbox.rows(ADVANTAGES)
    sandbox.rewrite(sandbox.shards(ADVANTAGES)[0], lambda rows: [rows[1], rows[0], *rows[2:]])
    expected = "rows by problem, agent and sample"
    return Named("rows", ADVANTAGES, rows[1]["rollout_id"], "rollout_id", expected, "another order")


@case()
def dropped_row_of_the_schedule(sandbox: Sandbox) -> Named:
    sandbox.rewrite(sandbox.shards("schedule.parquet")[0], lambda rows: rows[:-1])
    return Named("schedule", "schedule.parquet", expected="16 rows", found="15 rows")


@case()
def dropped_problem(sandbox: Sandbox) -> Named:
    sandbox.rewrite(sandbox.shards("data/arithmetic/train.parquet")[0], lambda rows: rows[:-1])
    return Named("data", "data/arithmetic/train.parquet", expected="64 rows", found="63 rows")


@case()
def a_shard_from_another_step(sandbox: Sandbox) -> Named:
    source, target = (sandbox.shards(f"rollouts/step={step}/agent=ada")[0] for step in ("0002", "0001"))
    shutil.copyfile(source, target)
    return Named(
        "metadata",
        f"{ROLLOUTS}/part-00000.parquet",
        column="hacpo.partition",
        expected="step=0001/agent=ada",
        found="step=0002/agent=ada",
    )


@case()
def a_shard_of_another_agent(sandbox: Sandbox) -> Named:
    source, target = (sandbox.shards(f"verdicts/step=0001/agent={agent}")[1] for agent in ("bo", "ada"))
    shutil.copyfile(source, target)
    return Named(
        "metadata",
        f"{VERDICTS}/part-00001.parquet",
        column="hacpo.partition",
        expected="step=0001/agent=ada",
        found="step=0001/agent=bo",
    )


@case()
def a_shard_of_another_agent_with_forged_metadata(sandbox: Sandbox) -> list[Named]:
    source, target = (sandbox.shards(f"verdicts/step=0001/agent={agent}")[1] for agent in ("bo", "ada"))
    metadata, lost = pq.read_schema(target).metadata, pq.read_table(target).to_pylist()
    forged = pq.read_table(source).replace_schema_metadata(metadata)
    pq.write_table(forged, target, compression="zstd", write_page_checksum=True)
    return [
        Named("rows", VERDICTS, lost[0]["rollout_id"], expected="a row", found="no such row"),
        Named("rows", VERDICTS, forged["rollout_id"][0].as_py(), "rollout_id", "no such row", "a row"),
    ]


@case()
def a_table_of_another_kind(sandbox: Sandbox) -> Named:
    shutil.copyfile(sandbox.shards(VERDICTS)[0], sandbox.shards(ADVANTAGES)[0])
    return Named("metadata", ADVANTAGES, column="hacpo.schema", expected="advantages/1", found="verdicts/1")


@case()
def a_table_of_another_run(sandbox: Sandbox) -> Named:
    reforged(sandbox.shards(POOL)[0], b"hacpo.run", b"other")
    return Named("metadata", POOL, column="hacpo.run", expected="small", found="other")


def reforged(shard: Path, key: bytes, value: bytes) -> None:
    """Change one entry of a file's metadata."""
    table = pq.read_table(shard)
    metadata = {**table.schema.metadata, key: value}
    pq.write_table(table.replace_schema_metadata(metadata), shard, compression="zstd", write_page_checksum=True)


@case()
def a_setting_in_one_file(sandbox: Sandbox) -> Named:
    shard = sandbox.shards(ADVANTAGES)[1]
    settings = json.loads(pq.read_schema(shard).metadata[b"hacpo.settings"])
    settings["algorithm"]["advantage"]["epsilon"] = 1e-5
    reforged(shard, b"hacpo.settings", json.dumps(settings, sort_keys=True, ensure_ascii=False).encode())
    column = "hacpo.settings algorithm.advantage.epsilon"
    return Named("metadata", f"{ADVANTAGES}/{shard.name}", column=column, expected=1e-6, found=1e-5)


@case()
def a_column_of_another_type(sandbox: Sandbox) -> Named:
    shard = sandbox.shards(POOL)[0]
    table = pq.read_table(shard)
    at = table.schema.get_field_index("source_logprob")
    less = table["source_logprob"].cast(pa.float32())
    pq.write_table(table.set_column(at, "source_logprob", less), shard, compression="zstd", write_page_checksum=True)
    return Named("columns", POOL, column="source_logprob", expected=pa.float64(), found=pa.float32())


@case()
def a_column_left_out(sandbox: Sandbox) -> Named:
    shard = sandbox.shards(TRACE)[0]
    pq.write_table(pq.read_table(shard).drop_columns(["objective"]), shard, compression="zstd")
    return Named("columns", TRACE, column="objective", found="no such column")


@case()
def a_truncated_file(sandbox: Sandbox) -> Named:
    shard = sandbox.shards(POOL)[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    return Named("files", f"{POOL}/{shard.name}", expected="a whole Parquet file", found=re.compile("damaged"))


@case()
def a_flipped_bit(sandbox: Sandbox) -> Named:
    shard = sandbox.shards(ADVANTAGES)[2]
    sandbox.flip(shard, 40)
    return Named("files", f"{ADVANTAGES}/{shard.name}", expected="a whole Parquet file", found=re.compile("damaged"))


@case()
def a_dropped_file(sandbox: Sandbox) -> Named:
    shard = sandbox.shards(ROLLOUTS)[1]
    lost = pq.read_table(shard)["rollout_id"][0].as_py()
    shard.unlink()
    return Named("rows", ROLLOUTS, lost, expected="a row", found="no such row")


@case()
def a_dropped_table(sandbox: Sandbox) -> Named:
    shutil.rmtree(sandbox.artifacts / VERDICTS)
    return Named("files", VERDICTS, expected=re.compile("later ones were made from it"), found="missing")


def policy_of_the_other(sandbox: Sandbox, folder: str, key: str) -> Named:
    """Note bo's hash as ada's."""
    ada, bo = (sandbox.artifacts / f"metrics/{folder}/{agent}.json" for agent in ("ada", "bo"))
    noted, other = json.loads(ada.read_text()), json.loads(bo.read_text())[key]
    ada.write_text(json.dumps({**noted, key: other}, indent=2, sort_keys=True) + "\n")
    return Named("policy", f"metrics/{folder}/ada.json", column=key, expected=noted[key], found=other)


@case()
def a_policy_noted_for_other_weights(sandbox: Sandbox) -> Named:
    return policy_of_the_other(sandbox, "update/step=0002", "policy")


@case()
def a_hash_noted_for_another_config(sandbox: Sandbox) -> Named:
    return policy_of_the_other(sandbox, "warmup/step=0000", "policy_config")


@case()
def a_dropped_metrics_file(sandbox: Sandbox) -> Named:
    (sandbox.artifacts / "metrics/update/step=0001/ada.json").unlink()
    return Named("metrics", "metrics/update/step=0001/ada.json", found="no such file")


@case()
def a_dropped_metric(sandbox: Sandbox) -> Named:
    path = sandbox.artifacts / "metrics/verify/step=0001/ada.json"
    metrics = json.loads(path.read_text())
    accuracy = metrics.pop("accuracy")
    path.write_text(json.dumps(metrics))
    return Named("metrics", "metrics/verify/step=0001/ada.json", "", "accuracy", accuracy, "no such key")


@case()
def a_count_of_what_is_not_there(sandbox: Sandbox) -> Named:
    path = sandbox.artifacts / "metrics/verify/step=0001/ada.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "verdict.error": 9}))
    return Named("metrics", "metrics/verify/step=0001/ada.json", "", "verdict.error", "no such key", 9)


@case()
def metrics_of_an_evaluation_that_never_was(sandbox: Sandbox) -> Named:
    """Steps are evaluated every second time; the report would show it as a point of the curve."""
    path = sandbox.artifacts / "metrics/evaluate/step=0001/ada.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"heldout.accuracy": 1.0}))
    return Named("unknown", "metrics/evaluate/step=0001/ada.json", expected="nothing", found="a file")


@case()
def metrics_of_a_second_start(sandbox: Sandbox) -> Named:
    path = sandbox.artifacts / "metrics/warmup/step=0002"
    path.mkdir()
    (path / "ada.json").write_text("{}")
    return Named("unknown", "metrics/warmup/step=0002", expected="nothing", found="a folder")


@case()
def the_last_steps_tables_dropped(sandbox: Sandbox) -> list[Named]:
    """Its checkpoints and evaluations cannot have come from nothing."""
    tables = ["rollouts", "verdicts", "pool", "advantages", "updates", "capability"]
    for table in tables:
        shutil.rmtree(sandbox.artifacts / table / "step=0002")
    missing = {"found": "missing", "expected": re.compile("later ones were made from it")}
    return [
        Named("files", "updates/step=0002/agent=ada/trace.parquet", **missing),
        Named("files", "rollouts/step=0002/agent=bo", **missing),
    ]


@case()
def problems_and_schedule_dropped(sandbox: Sandbox) -> list[Named]:
    shutil.rmtree(sandbox.artifacts / "data")
    (sandbox.artifacts / "schedule.parquet").unlink()
    return [
        Named("files", "schedule.parquet", expected="the schedule table", found="no such file"),
        Named("files", "data/arithmetic/train.parquet", expected="the problems table", found="no such file"),
    ]


@case()
def a_table_in_one_file(sandbox: Sandbox) -> Named:
    """Same rows and metadata as its shards, but where readers look for a folder."""
    folder = sandbox.artifacts / ROLLOUTS
    whole = pa.concat_tables([pq.read_table(shard) for shard in sandbox.shards(ROLLOUTS)])
    metadata = {**whole.schema.metadata, b"hacpo.shard": b"0/1"}
    shutil.rmtree(folder)
    pq.write_table(whole.replace_schema_metadata(metadata), folder)
    return Named("unknown", ROLLOUTS, expected="nothing", found="a file")


@case(texts=1)
def a_column_twice(sandbox: Sandbox) -> Named:
    shard = sandbox.shards(VERDICTS)[0]
    table = pq.read_table(shard)
    pq.write_table(table.append_column("reward", table["reward"]), shard)
    return Named("columns", f"{VERDICTS}/part-00000.parquet", "", "reward", "this column once", "twice")


@case()
def a_leftover_file(sandbox: Sandbox) -> Named:
    (sandbox.artifacts / "rollouts/step=0001/agent=ada/part-00000.parquet.bak").write_text("x")
    return Named("unknown", f"{ROLLOUTS}/part-00000.parquet.bak", expected="nothing", found="a file")


@case()
def a_leftover_agent(sandbox: Sandbox) -> Named:
    shutil.copytree(sandbox.artifacts / ROLLOUTS, sandbox.artifacts / "rollouts/step=0001/agent=cy")
    return Named("unknown", "rollouts/step=0001/agent=cy", expected="nothing", found="a folder")


# --- checkpoints -----------------------------------------------------------------------------------------------------


@case()
def one_bit_of_the_weights(sandbox: Sandbox) -> Named:
    """The next step's rollouts name the hash of the weights that sampled them."""
    sandbox.flip(sandbox.artifacts / BEFORE / "model.safetensors", -5)
    table = "rollouts/step=0002/agent=ada"
    row = sandbox.rows(table)[0]
    return Named("policy", table, row["rollout_id"], "policy", found=row["policy"])


@case(deep=2)
def one_bit_of_the_last_weights(sandbox: Sandbox) -> Named:
    """Nothing was sampled from them; the update that made them tells."""
    sandbox.flip(sandbox.artifacts / "checkpoints/step=0002/agent=bo/model.safetensors", -5)
    return Named("replay", "checkpoints/step=0002/agent=bo/model.safetensors", ANY, "element")


@case(deep=1)
def one_bit_of_the_optimizer(sandbox: Sandbox) -> Named:
    sandbox.flip(sandbox.artifacts / BEFORE / "trainer" / "optimizer.safetensors", -5)
    return Named("replay", f"{BEFORE}/trainer/optimizer.safetensors", ANY, "element")


@case()
def edited_config(sandbox: Sandbox) -> Named:
    sandbox.replace(sandbox.artifacts / BEFORE / "config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05')
    return Named("checkpoint", f"{BEFORE}/config.json", expected="the same bytes as at the start", found="other bytes")


@case()
def edited_tokenizer(sandbox: Sandbox) -> Named:
    path = sandbox.artifacts / BEFORE / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    return Named(
        "checkpoint", f"{BEFORE}/tokenizer.json", expected="the same bytes as at the start", found="other bytes"
    )


@case()
def weights_in_another_format(sandbox: Sandbox) -> Named:
    (sandbox.artifacts / BEFORE / "pytorch_model.bin").write_bytes(b"x")
    path = f"{BEFORE}/pytorch_model.bin"
    return Named("checkpoint", path, expected="no such file", found="weights that no update writes")


@case()
def edited_trainer_state(sandbox: Sandbox) -> Named:
    sandbox.replace(sandbox.artifacts / BEFORE / "trainer" / "state.json", '"updates_done": 4', '"updates_done": 5')
    return Named("checkpoint", f"{BEFORE}/trainer/state.json", column="updates_done", expected=4, found=5)


@case()
def truncated_weights(sandbox: Sandbox) -> Named:
    path = sandbox.artifacts / "checkpoints/step=0002/agent=ada/model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    size = path.stat().st_size
    return Named(
        "checkpoint",
        "checkpoints/step=0002/agent=ada/model.safetensors",
        expected=re.compile(f"^{size + 8} bytes"),
        found=f"{size} bytes",
    )


# --- settings, metrics, locks ----------------------------------------------------------------------------------------


@case()
def params_edited_after_the_run(sandbox: Sandbox) -> Named:
    sandbox.replace(sandbox.pipeline / "params.yaml", "alpha: 1.0", "alpha: 2.0")
    return Named("settings", "settings.json", column="algorithm.importance.alpha", expected=2.0, found=1.0)


@case()
def settings_edited_after_the_run(sandbox: Sandbox) -> Named:
    sandbox.replace(sandbox.artifacts / "settings.json", '"epsilon": 1e-06', '"epsilon": 1e-05')
    return Named("settings", "settings.json", column="algorithm.advantage.epsilon", expected=1e-6, found=1e-5)


@case()
def edited_metrics(sandbox: Sandbox) -> Named:
    path = sandbox.artifacts / "metrics/verify/step=0002/bo.json"
    metrics = json.loads(path.read_text())
    path.write_text(json.dumps({**metrics, "accuracy": metrics["accuracy"] + 1e-6}))
    accuracy = metrics["accuracy"]
    return Named("metrics", "metrics/verify/step=0002/bo.json", "", "accuracy", accuracy, accuracy + 1e-6)


@case()
def edited_lock(sandbox: Sandbox) -> Named:
    sandbox.replace(sandbox.lock(2), "rows_per_shard: 20", "rows_per_shard: 21")
    lock = "/pipelines/small/steps/0002/dvc.lock"
    return Named("lock", lock, "generate@ada", "params storage", '{"rows_per_shard": 20}', '{"rows_per_shard": 21}')


@case()
def edited_dvc_yaml(sandbox: Sandbox) -> Named:
    sandbox.replace(sandbox.pipeline / "steps/0001/dvc.yaml", "--step ${step}", "--step 0002")
    return Named("lock", "/pipelines/small/steps/0001/dvc.yaml", ANY, "", re.compile(r"\$\{step\}"), re.compile("0002"))


# --- the audit -------------------------------------------------------------------------------------------------------


def findings(case: Case) -> list[Finding]:
    """What the audit says; where texts are read or a step is repeated, it looks at that step alone."""
    step = case.texts if case.texts is not None else case.deep
    return audit(
        Pipeline.open(Path("pipelines/small")),
        texts="none" if case.texts is None else "all",
        deep=case.deep is not None,
        first=step,
        last=step,
    ).findings


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_corruption_is_found_and_named(sandbox: Sandbox, case: Case) -> None:
    wanted = case.tamper(sandbox)
    found = findings(case)
    for named in wanted if isinstance(wanted, list) else [wanted]:
        assert any(named.is_said_by(finding) for finding in found), f"{named}\nnot in\n" + "\n".join(map(str, found))
    assert any(finding.check == "lock" for finding in found)


@pytest.mark.parametrize(
    "options", [["--texts", "none"], ["--texts", "sample"], ["--texts", "all"], ["--texts", "none", "--deep"]]
)
def test_a_clean_run_has_no_finding_in_any_mode(sandbox: Sandbox, cli: Cli, options: list[str]) -> None:
    result = cli("audit", "pipelines/small", "--json", *options)
    said = json.loads(result.out)
    assert (result.code, said["findings"], said["clean"]) == (0, [], True)
    if "--deep" in options:
        # Per agent: two steps of generate and update, and two evaluations; on one machine all come out the same.
        assert said["coverage"]["deep"] == {"replayed": 12, "exact": 12}


def test_the_command_names_what_it_finds_and_fails(sandbox: Sandbox, cli: Cli) -> None:
    row = sandbox.edit(ADVANTAGES, "omega", in_last_digits, is_cross)
    result = cli("audit", "pipelines/small", "--json", "--texts", "none")
    [said] = [finding for finding in json.loads(result.out)["findings"] if finding["check"] == "advantages"]
    assert result.code == 1
    assert said["file"] == f"artifacts/small/{ADVANTAGES}/part-00000.parquet"
    assert (said["row"], said["column"]) == (row["rollout_id"], "omega")
    assert (said["expected"], said["found"]) == (pytest.approx(row["omega"], rel=1e-12), row["new"])


def test_every_table_and_enough_kinds_are_covered() -> None:
    assert len(CASES) >= 35
    assert len({case.name for case in CASES}) == len(CASES)
