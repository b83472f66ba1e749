"""Rewards by reasoning-gym's scorers: every allowed task, hostile answers, partial scores, and runs."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hostile import FAMILIES
from small_project import PARAMS, changed

from conftest import Cli

pytest.importorskip("reasoning_gym")

from hacpo.artifacts.problem_rows import Problem
from hacpo.data import problems
from hacpo.errors import DataError, SettingsError
from hacpo.settings.gym_tasks import SCORED_WITH
from hacpo.settings.root import DataSet
from hacpo.settings.verification import VerificationSettings
from hacpo.verifying import gym_scores
from hacpo.verifying.verifier import Request, Verdict, Verifier

RUN = "pipelines/small"
ODD = ["zzz", "-987654321.5", "?", "1e999999999", "NaN", "Infinity", "1/0", "0x10", "[]", "{}", "٣"]
"""Answers of no problem made here; some stand for numbers that are far larger than their text."""


def made(mixture: dict[str, Any], count: int) -> list[Problem]:
    settings = {"task": "reasoning_gym", "mixture": mixture, "split": "train", "problems": count, "seed": 11}
    return problems.load("gym/train", DataSet.model_validate(settings), Path())


def boxed(answer: str) -> str:
    return f"so \\boxed{{{answer}}}"


@pytest.fixture(scope="module")
def every() -> list[Problem]:
    """Four problems of each task."""
    return made({task: {} for task in SCORED_WITH}, 4 * len(SCORED_WITH))


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(VerificationSettings(reward="reasoning_gym", partial_scores=True, timeout_seconds=2.0)) as opened:
        yield opened


def judged(verifier: Verifier, asked: list[tuple[Problem, str]]) -> list[Verdict]:
    return verifier.verify(
        [Request(str(number), text, "stop", row.answer, row) for number, (row, text) in enumerate(asked)]
    )


def test_every_task_s_own_answer_earns_all_and_another_less(every: list[Problem], verifier: Verifier) -> None:
    assert {row.subject for row in every} == set(SCORED_WITH)
    own = judged(verifier, [(row, boxed(row.answer)) for row in every])
    assert [(row.subject, one.reward, one.verdict) for row, one in zip(every, own, strict=True)] == [
        (row.subject, 1.0, "correct") for row in every
    ]
    asked = [(row, boxed(f"{row.answer[:-1]}~")) for row in every] + [(row, boxed(odd)) for row in every for odd in ODD]
    others = judged(verifier, asked)
    assert {one.verdict for one in others} == {"wrong"}
    assert all(0 <= one.reward < 1 for one in others)


def test_more_than_the_answer_is_another_answer(every: list[Problem], verifier: Verifier) -> None:
    """Some scorers count places of a list that agree, and some leave all commas out of a number."""

    def longer(answer: str) -> list[str]:
        parts = [",".join(answer), "_".join(answer)] if len(answer) > 1 else []
        return [
            f"{answer}, else",
            f"{answer},{answer}",
            f"{answer} {answer}",
            f"{answer},,,",
            f"else, {answer}",
            *parts,
        ]

    asked = [(row, boxed(text)) for row in every for text in longer(row.answer)]
    correct = [
        (row.subject, row.answer, text)
        for (row, text), one in zip(asked, judged(verifier, asked), strict=True)
        if one.verdict == "correct"
    ]
    assert correct == []
    number = replace(made({"products": {}}, 1)[0], answer="5844", scorer=made({"products": {}}, 1)[0].scorer)
    verdicts = judged(verifier, [(number, boxed(text)) for text in ("5,844", "5844", "58,44", "5_844", "5,8,4,4")])
    assert [one.verdict for one in verdicts] == ["correct", "correct", "wrong", "wrong", "wrong"]


def test_hostile_answers_are_bounded(every: list[Problem], verifier: Verifier) -> None:
    first = {row.subject: row for row in every}
    hostile = [make(0)[:900] for make in FAMILIES.values()] + ["9" * 990, "1," * 490, "[" * 900, "\\n" * 490, "é" * 990]
    verdicts = judged(verifier, [(row, boxed(text)) for row in first.values() for text in hostile])
    # `no_answer`: a text whose braces do not match.
    assert {one.verdict for one in verdicts} <= {"wrong", "no_answer"}


def test_no_scorer_evaluates_anything() -> None:
    from reasoning_gym.factory import DATASETS

    for task in SCORED_WITH:
        source = inspect.getsource(DATASETS[task][0].score_answer)
        assert not re.search(r"\b(eval|exec|literal_eval|parse_expr|sympify|Fraction|loads)\b", source), task
    assert importlib.metadata.version("reasoning-gym") == gym_scores.VERSION


def test_a_partial_score_is_wrong_and_earns_nothing_unless_it_shall() -> None:
    # "7 is it": the gold answer is 1 of 7 characters, for which the base class gives 1/7.
    row = made({"gcd": {}}, 1)[0]
    text = boxed(row.answer + " is it")
    share = len(row.answer) / (len(row.answer) + 6)
    for partial, reward in ((False, 0.0), (True, share)):
        settings = VerificationSettings(reward="reasoning_gym", partial_scores=partial)
        assert settings.is_binary is not partial
        with Verifier(settings) as opened:
            (one,) = judged(opened, [(row, text)])
        assert (one.verdict, one.extracted) == ("wrong", row.answer + " is it")
        assert one.reward == pytest.approx(reward, rel=1e-7)


def test_only_the_last_box_is_an_answer_and_a_cut_response_has_none(verifier: Verifier) -> None:
    row = made({"gcd": {}}, 1)[0]
    texts = [f"{row.answer}", f"\\boxed{{{row.answer}}} or \\boxed{{x}}", "\\boxed{}", boxed("x" * 1001)]
    verdicts = judged(verifier, [(row, text) for text in texts])
    assert [one.verdict for one in verdicts] == ["no_answer", "wrong", "no_answer", "error"]
    assert verdicts[3].message == "an answer of more than 1000 characters"
    (cut,) = verifier.verify([Request("a", boxed(row.answer), "length", row.answer, row)])
    assert (cut.verdict, cut.reward) == ("truncated", 0.0)


@pytest.mark.parametrize(
    ("scorer", "says"),
    [
        ('{"task": "n_queens", "options": {}, "metadata": {}}', "'n_queens' is no task of reasoning_gym that is allow"),
        ('{"task": ["gcd"], "options": {}, "metadata": {}}', "is no task of reasoning_gym that is allowed"),
        ("{", "the problem's scorer is not readable"),
        ("[" * 100_000, "the problem's scorer is not readable"),
        ('{"task": "gcd", "options": {"a": 1}, "metadata": {}}', "reasoning_gym's scorer of gcd raised TypeError"),
        ('{"task": "word_sorting", "options": {}, "metadata": {}}', "scorer of word_sorting raised KeyError"),
        ('{"task": "spell_backward", "options": {}, "metadata": {}}', "is no task of reasoning_gym that is allowed"),
    ],
)
def test_a_stranger_s_problem_file_calls_no_other_scorer(verifier: Verifier, scorer: str, says: str) -> None:
    row = replace(made({"gcd": {}}, 1)[0], scorer=scorer)
    (one,) = judged(verifier, [(row, boxed("1 2"))])
    assert one.reward < 1
    if says:
        assert one.verdict == "error"
        assert says in (one.message or "")


def test_problems_without_a_scorer_are_refused(verifier: Verifier) -> None:
    row = replace(made({"gcd": {}}, 1)[0], scorer=None)
    with pytest.raises(DataError, match="scores its own problems alone, and this one has no scorer"):
        judged(verifier, [(row, boxed("1"))])


def test_without_the_package_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(SettingsError, match=r"reasoning-gym is not installed; run `pip install 'hacpo\[gym\]'`"):
        made({"gcd": {}}, 1)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.24")
    with pytest.raises(gym_scores.NotInstalledError, match=r"0.1.24 is installed, and the scorers of 0.1.25 were read"):
        gym_scores.load()


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match="partial_scores is for reward `reasoning_gym`"):
        VerificationSettings(partial_scores=True)
    assert VerificationSettings(reward="reasoning_gym").error_limit == 1.0


# --- runs ------------------------------------------------------------------------------------------------------------

GYM = """
steps: 1
data:
  train: gym/train
  sets:
    arithmetic/train: null
    arithmetic/heldout: null
    gym/train: {task: reasoning_gym, mixture: {number_sequence: {max_terms: 4}, basic_arithmetic: {max_terms: 3,
      max_digits: 1}}, split: train, problems: 24}
    gym/heldout: {task: reasoning_gym, mixture: {number_sequence: {max_terms: 4}}, split: heldout, problems: 6}
verification: {reward: reasoning_gym, partial_scores: PARTIAL}
evaluation:
  every: 1
  benchmarks:
    heldout: {data: gym/heldout, samples: 2, temperature: 1.0}
"""


@pytest.mark.run
@pytest.mark.parametrize("partial", [False, True])
def test_a_run_is_rewarded_by_scorers_and_audited(project: Path, cli: Cli, partial: bool) -> None:
    Path(RUN, "params.yaml").write_text(changed(PARAMS, GYM.replace("PARTIAL", str(partial).lower())))
    assert cli("plan", RUN, "--check").code == 0
    run = cli("run", RUN)
    assert run.code == 0, run.err
    table = pl.read_parquet("artifacts/small/verdicts/**/*.parquet", hive_partitioning=False)
    assert set(table["verdict"]) <= {"correct", "wrong", "no_answer", "truncated"}
    assert (table["verdict"] != "truncated").any()
    audit = cli("audit", RUN, "--texts", "all")
    assert audit.code == 0, audit.out + audit.err
    assert ("mean reward" if partial else "correct responses") in cli("show", RUN, "--step", 1).out
    # A verdict that the scorer does not give, with the reward that goes with it, is found by asking the scorer again.
    file = next(Path("artifacts/small/verdicts").rglob("*.parquet"))
    verdicts = pq.read_table(file)
    row = verdicts["verdict"].to_pylist().index("wrong")
    columns = {name: verdicts[name].to_pylist() for name in ("verdict", "reward")}
    columns["verdict"][row], columns["reward"][row] = "correct", 1.0
    for name, values in columns.items():
        at = verdicts.schema.get_field_index(name)
        verdicts = verdicts.set_column(at, verdicts.schema.field(at), pa.array(values, verdicts.schema.field(at).type))
    pq.write_table(verdicts, file, compression="zstd")
    found = cli("audit", RUN, "--texts", "all")
    assert found.code != 0
    assert "verdict" in found.out


def test_a_set_of_reasoning_gym_s_needs_its_reward(project: Path, cli: Cli) -> None:
    params = changed(PARAMS, GYM.replace("PARTIAL", "false"))
    Path(RUN, "params.yaml").write_text(changed(params, "verification: {reward: math}"))
    refused = cli("resolve", RUN)
    assert refused.code == 2
    assert "reasoning_gym's problems have its scorers; set verification.reward: reasoning_gym" in refused.error
    Path(RUN, "params.yaml").write_text(changed(PARAMS, "verification: {reward: reasoning_gym}"))
    assert "scores its own problems alone, and these are of task arithmetic" in cli("resolve", RUN).error
