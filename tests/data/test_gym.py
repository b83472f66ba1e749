"""Problems of reasoning-gym's tasks: which ones a set holds, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Cli

pytest.importorskip("reasoning_gym")

from hacpo.artifacts.problem_rows import Problem
from hacpo.artifacts.tables import PROBLEMS
from hacpo.data import gym, problems
from hacpo.data.gym_solutions import solution
from hacpo.errors import HacpoError
from hacpo.settings.gym_tasks import SCORED_WITH
from hacpo.settings.root import SPLITS, DataSet


def made(mixture: dict[str, Any], split: str = "train", count: int = 60, seed: int = 0) -> list[Problem]:
    source = DataSet.model_validate(
        {"task": "reasoning_gym", "mixture": mixture, "split": split, "problems": count, "seed": seed}
    )
    return problems.load("gym/x", source, Path())


def test_each_task_has_its_share() -> None:
    # 61 problems at weights 2 : 1 : 1 are 30.5, 15.25, 15.25; the one left over goes to the largest remainder.
    rows = made({"chain_sum": {"weight": 2}, "gcd": {}, "lcm": {"weight": 1}}, count=61)
    assert [sum(row.subject == task for row in rows) for task in ("chain_sum", "gcd", "lcm")] == [31, 15, 15]
    assert len({row.problem for row in rows}) == len({row.problem_id for row in rows}) == 61
    assert len({row.subject for row in rows[:10]}) > 1  # shuffled


def test_splits_share_no_text_whatever_the_seed_and_the_options() -> None:
    few = {"chain_sum": {"max_terms": 2, "max_digits": 1}}  # 200 questions in all
    texts = {
        split: {row.problem for seed in (1, 2) for row in made(few, split, 25, seed)}
        | {row.problem for row in made({"chain_sum": {"max_digits": 1}}, split, 100)}
        for split in SPLITS
    }
    assert not (texts["train"] & texts["heldout"])
    assert not (texts["train"] & texts["final"])
    assert not texts["heldout"] & texts["final"]
    alike = ("the gcd of 12, 30", "the gcd of 30, 12"), ("3*x - 4 = 5", "3*y - 4 = 5"), ("3 + 2 - 9", "2 + 3 - 9")
    assert all(gym.split_of(one) == gym.split_of(other) for one, other in alike)
    assert len({gym.split_of(f"the gcd of 12, {number}") for number in range(30)}) == 3
    parts = [gym.split_of(f"question {number}") for number in range(2000)]
    # 2000 questions at 1/5: 400 with a standard deviation of 18.
    assert all(abs(parts.count(split) - 400) < 90 for split in ("heldout", "final"))


def test_the_same_settings_give_the_same_problems_in_any_process() -> None:
    mixture = {task: {} for task in SCORED_WITH}
    program = (
        "import json, random, sys; from pathlib import Path; from hacpo.data import problems; "
        "from hacpo.settings.root import DataSet; random.seed(int(sys.argv[2])); "
        "source = DataSet.model_validate_json(sys.argv[1]); "
        "print(json.dumps([vars(row) for row in problems.load('gym/x', source, Path())]))"
    )
    settings = {"task": "reasoning_gym", "mixture": mixture, "split": "train", "problems": 4 * len(mixture), "seed": 3}
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program, json.dumps(settings), number],
            env={**os.environ, "PYTHONHASHSEED": number},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for number in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert [Problem(**row) for row in json.loads(outputs[0])] == made(mixture, count=4 * len(mixture), seed=3)
    assert made(mixture, count=4 * len(mixture), seed=4) != made(mixture, count=4 * len(mixture), seed=3)


@pytest.mark.parametrize(
    ("task", "metadata", "answer", "text"),
    [
        ("chain_sum", {"expression": "7 + 3 - 2"}, "8", "7+3=10 10-2=8 \\boxed{8}"),
        ("chain_sum", {"expression": "3 - 8 + 1"}, "-4", "3-8=-5 -5+1=-4 \\boxed{-4}"),
        ("basic_arithmetic", {"expression": "7 - 3 * 2"}, "1", "3*2=6 7-6=1 \\boxed{1}"),
        ("basic_arithmetic", {"expression": "3 + 2 * 3"}, "15", "\\boxed{15}"),  # the task's own way, from the left
        ("basic_arithmetic", {"expression": "( 3 + 2 )"}, "5", "\\boxed{5}"),
        ("simple_equations", {"equation": "4*x + 3 = 27"}, "6", "27-3=24 24/4=6 \\boxed{6}"),
        ("simple_equations", {"equation": "12 - 3*z = -6"}, "6", "12+6=18 18/3=6 \\boxed{6}"),
        ("simple_equations", {"equation": "5*q - 7 = -2"}, "1", "-2+7=5 5/5=1 \\boxed{1}"),
        ("simple_equations", {"equation": "4 + w = 9"}, "5", "9-4=5 \\boxed{5}"),
        ("gcd", {"numbers": [12, 30]}, "6", "30%12=6 12%6=0 \\boxed{6}"),
        ("gcd", {"numbers": [12, 30, 8]}, "2", "\\boxed{2}"),
        ("lcm", {"numbers": [12, 8]}, "24", "12*8=96 96/4=24 \\boxed{24}"),
        ("products", {"expression": "6 * 43"}, "258", "40*6=240 3*6=18 240+18=258 \\boxed{258}"),
        ("ab", {}, "A# B#", "\\boxed{A# B#}"),
    ],
)
def test_solutions_are_worked_where_a_rule_fits(task: str, metadata: dict[str, Any], answer: str, text: str) -> None:
    assert solution(task, {"metadata": metadata, "answer": answer}) == text


def test_a_scorer_s_part_of_the_entry_comes_with_the_problem() -> None:
    row = made({"word_sorting": {"max_words": 4}}, count=1)[0]
    scorer = json.loads(row.scorer or "")
    assert scorer == {
        "task": "word_sorting",
        "options": {"max_words": 4},
        "metadata": {"sorted_words": row.answer.split(", ")},
    }


@pytest.mark.parametrize(
    ("mixture", "says"),
    [
        ({"chain_sum": {"terms": 3}}, "mixture.chain_sum.terms: reasoning_gym's task has no such option (expected all"),
        (
            {"chain_sum": {"min_terms": 9}},
            "mixture.chain_sum: the task does not work with these options: max_terms must be >= min_terms",
        ),
        ({"gcd": {"min_value": "x"}}, "mixture.gcd: the task does not work with these options: '>=' not supported"),
        (
            {"chain_sum": {"max_terms": 2, "max_digits": 1}},
            "there are not enough different train problems of reasoning_gym's task 'chain_sum' (expected 500",
        ),
    ],
)
def test_options_that_do_not_fit_are_one_line(mixture: dict[str, Any], says: str) -> None:
    with pytest.raises(HacpoError) as refused:
        made(mixture, count=500)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mixture": {"n_queens": {}}}, "mixture.n_queens: no such task of reasoning_gym is allowed"),
        ({"mixture": {"chain_sum": {"seed": 1}}}, "seed is no option here"),
        ({"mixture": {"chain_sum": {"weight": 0}}}, "greater than 0"),
        ({"mixture": {"chain_sum": {"max_terms": {"a": 1}}}}, "valid"),
        ({"mixture": {}}, "`mixture` belongs to `task: reasoning_gym`, which needs one"),
        ({"task": "arithmetic"}, "`mixture` belongs to `task: reasoning_gym`"),
        ({"task": "arithmetic", "mixture": {}, "split": "final"}, "`split: final` belongs to `task: reasoning_gym`"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, Any], says: str) -> None:
    settings = {"task": "reasoning_gym", "mixture": {"gcd": {}}, "split": "train", "problems": 3}
    with pytest.raises(ValueError, match="validation error") as refused:
        DataSet.model_validate(settings | changes)
    assert says in str(refused.value)


# --- hacpo import ----------------------------------------------------------------------------------------------------

MIXTURE = "{chain_sum: {max_terms: 3, max_digits: 1}, word_sorting: {}}"


def test_import_writes_a_table_that_a_run_can_use(project: Path, cli: Cli) -> None:
    done = cli("import", "reasoning_gym", "--mixture", MIXTURE, "--problems", 30, "--seed", 5)
    assert done.code == 0, done.err
    assert "verification: {reward: reasoning_gym}" in done.out
    assert "reasoning_gym: {data: reasoning_gym/heldout}" in done.out
    assert "final}" not in done.out
    assert done.out.count("each can be verified") == 3
    read = problems.load("x/train", DataSet(path="data/reasoning_gym/train.parquet"), project)
    assert read == made({"chain_sum": {"max_terms": 3, "max_digits": 1}, "word_sorting": {}}, count=30, seed=5)
    assert cli("import", "reasoning_gym", "--mixture", MIXTURE, "--problems", 30).code == 2  # is there and differs


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "reasoning_gym needs --mixture"),
        (["--mixture", "["], "--mixture is not valid YAML"),
        (["--mixture", "{countdown: {}}"], "mixture.countdown: no such task of reasoning_gym is allowed"),
        (["--mixture", "{gcd: {}}", "--split", "test"], "split: input should be 'train', 'heldout' or 'final'"),
        (["--mixture", "{gcd: {}}", "--revision", "main"], "--map and --revision do not belong"),
    ],
)
def test_import_refuses_in_one_line(project: Path, cli: Cli, options: list[str], says: str) -> None:
    refused = cli("import", "reasoning_gym", *options)
    assert refused.code == 2
    assert says in refused.error
    assert not Path("data/reasoning_gym").exists()


def test_a_mixture_is_for_reasoning_gym_alone(project: Path, cli: Cli) -> None:
    assert "--mixture belongs to `hacpo import reasoning_gym`" in cli("import", "gsm8k", "--mixture", "{}").error


def test_the_table_s_column_may_be_missing_from_runs_made_before() -> None:
    assert PROBLEMS.added == ("scorer",)
