"""What `hacpo advantage` and `hacpo report` say about baselines, on verdict files, against arithmetic done by hand.

Five problems, four answers of each agent to each. Right answers by problem:

    ada   3 4 1 4 0     accuracy 12/20
    bo    2 0 2 0 0     accuracy  4/20, so omega^(ada,bo) = 3 and omega^(bo,ada) = 1/3

The last problem has no signal. mu^(ada) = (S_ada + 3 S_bo) / 8: 9/8, 4/8, 7/8, 4/8: above 1 in one of four live groups.
mu^(bo) = (S_ada / 3 + S_bo) / 8: 3/8, 1/6, 7/24, 1/6: never.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from conftest import PARAMS, Cli, make_project
from hacpo.artifacts import parquet, tables
from hacpo.artifacts.layout import Layout

Rewards = Mapping[str, Sequence[Sequence[float]]]
"""agent -> problem -> its samples' rewards."""

RIGHT = {"ada": (3, 4, 1, 4, 0), "bo": (2, 0, 2, 0, 0)}
THREE = RIGHT | {"cy": (3, 0, 1, 0, 0)}


def answers(right: Mapping[str, Sequence[int]]) -> Rewards:
    return {agent: [[1.0] * many + [0.0] * (4 - many) for many in row] for agent, row in right.items()}


class Project:
    """A run without models: prompts, and verdicts as given."""

    def __init__(self, root: Path, cli: Cli, rewards: Rewards, algorithm: str) -> None:
        problems = len(next(iter(rewards.values())))
        agents = "\n".join(f"  {agent}: {{model: models/none}}" for agent in rewards)
        params = PARAMS.replace("  ada: {model: models/ada}\n  bo: {model: models/bo}", agents)
        params = params.replace(
            "batch: {prompts: 8, minibatch_prompts: 4}", f"batch: {{prompts: {problems}, minibatch_prompts: 5}}"
        )
        params = re.sub(r"  recipe: hacpo\n", f"{algorithm}\n", params)
        make_project(root, root, params)
        self.cli, self.agents, self.layout = cli, list(rewards), Layout(root / "artifacts" / "small")
        for command in ("resolve", "prepare"):
            assert cli(command, "pipelines/small").code == 0
        for step in (1, 2):
            ids = parquet.read_table(self.layout.prompts(step), tables.SCHEDULE)["problem_id"].to_pylist()
            for agent, by_problem in rewards.items():
                rows = [
                    {"rollout_id": f"{step:04d}/{agent}/{name}/{sample:03d}", "problem_id": name, "sample": sample}
                    | {"reward": reward, "verdict": "correct" if reward else "wrong", "extracted": None, "answer": "1"}
                    for name, group in zip(ids, by_problem, strict=True)
                    for sample, reward in enumerate(group)
                ]
                content = parquet.to_arrow(tables.VERDICTS, rows)
                place = tables.VERDICTS.partition(step, agent)
                parquet.write_table(
                    self.layout.verdicts(step, agent), tables.VERDICTS, content, run="small", partition=place
                )

    def shares(self, step: int = 1) -> dict[str, dict[str, float]]:
        """agent -> its metrics of the advantage stage."""
        assert self.cli("advantage", "pipelines/small", "--step", step).code == 0
        found = json.loads(self.layout.metrics("advantage", step, "all").read_text())
        return {
            agent: {key.removeprefix(f"{agent}."): value for key, value in found.items() if key.startswith(f"{agent}.")}
            for agent in self.agents
        }

    def table(self) -> list[list[str]]:
        """Rows of the report's table of shares, learner first."""
        result = self.cli("report", "pipelines/small")
        assert result.code == 0, result.err
        html = (self.layout.report / "index.html").read_text()
        (body,) = re.findall(r"<caption>Baselines in the latest step</caption>(.*?)</table>", html)
        rows = re.findall(r"<tr>(.*?)</tr>", body)
        return [[re.sub(r"<.*?>", "", cell) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)] for row in rows]


@pytest.fixture
def make(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")

    def project(rewards: Rewards, algorithm: str = "  recipe: hacpo") -> Project:
        return Project(tmp_path / "project", cli, rewards, algorithm)

    return project


def assert_shares(found: Mapping[str, float], **expected: float) -> None:
    assert {key: found[key] for key in expected} == pytest.approx(expected, abs=1e-12)


def test_groups_are_counted_and_a_guarded_baseline_counts_as_above_one(make: Any) -> None:
    found = make(answers(RIGHT)).shares()
    groups = {"groups": 5, "live_groups": 4, "uniform": 1 / 5}
    spared = {"punished_correct": 0, "punished_correct_own": 0, "punished_correct_cross": 0}
    assert_shares(found["ada"], **groups, baseline_above_one=1 / 4, guarded=1 / 4, **spared)
    # bo learns from ada's guarded rows too, but its own baseline was never guarded.
    assert_shares(found["bo"], **groups, baseline_above_one=0, guarded=0, **spared)


def test_without_the_guard_correct_answers_are_punished(make: Any) -> None:
    found = make(answers(RIGHT), "  recipe: hacpo\n  advantage: {baseline_guard: false}").shares()
    # The first problem's three right answers of ada, of 12 right ones of hers and 4 of bo's, are below mu^(ada) = 9/8,
    # for both learners: a cross answer is measured against its source's baseline.
    above = {"baseline_above_one": 1 / 4, "guarded": 0}
    assert_shares(found["ada"], **above, punished_correct=3 / 16, punished_correct_own=3 / 12, punished_correct_cross=0)
    above = {"baseline_above_one": 0, "guarded": 0}
    assert_shares(found["bo"], **above, punished_correct=3 / 16, punished_correct_own=0, punished_correct_cross=3 / 12)


def test_with_the_learners_baseline_cross_answers_are_punished_too(make: Any) -> None:
    advantage = "{baseline_guard: false, cross_baseline: learner}"
    found = make(answers(RIGHT), f"  recipe: hacpo\n  advantage: {advantage}").shares()
    # ada measures everything against 9/8: bo's two right answers to the first problem, of 4, fall below it as well.
    punished = {"punished_correct": 5 / 16, "punished_correct_own": 3 / 12, "punished_correct_cross": 2 / 4}
    assert_shares(found["ada"], **punished)
    assert_shares(found["bo"], punished_correct=0, punished_correct_own=0, punished_correct_cross=0)


def test_three_agents(make: Any) -> None:
    project = make(answers(THREE), "  recipe: hacpo\n  advantage: {baseline_guard: false}")
    found = project.shares()
    # cy is as able as bo. mu^(ada) = (S_ada + 3 (S_bo + S_cy)) / 12: 18/12, 4/12, 10/12, 4/12; others below 1.
    # ada: 3 of 12 own ones, none of the others' 4 + 4. bo: none of its 4, and 3 of 12 + 4 cross ones; cy alike.
    assert_shares(found["ada"], baseline_above_one=1 / 4, punished_correct=3 / 20, punished_correct_own=3 / 12)
    assert_shares(found["ada"], punished_correct_cross=0, omega_cross=1 / 3)
    for name in ("bo", "cy"):
        assert_shares(found[name], baseline_above_one=0, punished_correct=3 / 20, punished_correct_own=0)
        # On ada's rows 3, on the third agent's 1.
        assert_shares(found[name], punished_correct_cross=3 / 16, omega_cross=2)
    header, *rows = project.table()
    assert header[-3:] == ["punished correct", "punished correct, own", "punished correct, of others"]
    assert [row[0] for row in rows] == ["ada", "bo", "cy"]
    assert [cell.replace("\u00a0", " ") for cell in rows[0][1:]] == [
        *("1", "4 of 5", "20.0 %", "25.0 %", "0 %"),
        *("15.0 %", "25.0 %", "0 %"),
    ]


@pytest.mark.parametrize("agents", [RIGHT, THREE])
def test_without_sharing_a_group_is_an_agents_own(make: Any, agents: Mapping[str, Sequence[int]]) -> None:
    project = make(answers(agents), "  recipe: gspo")
    found = project.shares()
    # Every agent has some, but not all, right in two of five problems.
    for name in agents:
        assert_shares(found[name], groups=5, live_groups=2, uniform=3 / 5, baseline_above_one=0, guarded=0)
        assert_shares(found[name], punished_correct=0, punished_correct_own=0)
        assert not {"punished_correct_cross", "omega_cross"} & found[name].keys()
    assert [row[-1] for row in project.table()[1:]] == [""] * len(agents)


def test_the_report_charts_every_share_and_lists_the_latest(make: Any) -> None:
    project = make(answers(RIGHT))
    project.shares(1)
    project.shares(2)
    assert [row[:4] for row in project.table()[1:]] == [
        ["ada", "2", "4 of 5", "20.0\u00a0%"],
        ["bo", "2", "4 of 5", "20.0\u00a0%"],
    ]
    html = (project.layout.report / "index.html").read_text()
    (figure,) = re.findall(r'<figure class="figure" id="groups">(.*?)</figure>', html, re.DOTALL)
    charts = re.findall(r"<caption>share of (.*?), by step</caption>(.*?)</table>", figure)
    assert [title for title, _ in charts] == [
        *("problems: no signal", "problems: baseline above one", "problems: guarded", "best answers: punished correct"),
        *("best answers: punished correct, own", "best answers: punished correct, of others"),
    ]
    # Guarded: 1/4 of ada's live groups, none of bo's, in both steps.
    assert re.findall(r"<td>(.*?)</td>", charts[2][1]) == ["25.0\u00a0%", "0\u00a0%"] * 2


def test_graded_rewards_are_judged_by_the_best_of_the_problem(make: Any) -> None:
    # Accuracies 5.6/8 and 1.2/8: omega^(ada,bo) = 14/3. First problem: mu^(ada) = (1.6 + 14/3 * 1.2) / 8 = 0.9 is above
    # every reward there, yet below 1. mu^(bo) = (1.6 * 3/14 + 1.2) / 8 is not. Second problem: mu^(ada) = 4/8.
    rewards = {"ada": [[0.4] * 4, [1.0] * 4], "bo": [[0.4, 0.4, 0.4, 0.0], [0.0] * 4]}
    found = make(rewards).shares()
    assert_shares(found["ada"], baseline_above_one=0, guarded=0, punished_correct_own=4 / 8, punished_correct_cross=0)
    assert_shares(found["ada"], punished_correct=4 / (8 + 3))
    assert_shares(found["bo"], punished_correct_own=0, punished_correct_cross=4 / 8)


def test_a_step_without_signal_has_shares_of_zero(make: Any) -> None:
    # omega^(ada,bo) = 1, and every answer is right or every one wrong.
    found = make(answers({"ada": (4, 0), "bo": (4, 0)})).shares()
    shares = dict.fromkeys(
        ("baseline_above_one", "guarded", "punished_correct", "punished_correct_own", "advantage_max"), 0
    )
    for name in ("ada", "bo"):
        assert_shares(found[name], live_groups=0, uniform=1, punished_correct_cross=0, **shares)


def test_a_guard_that_acts_where_nothing_is_learned_is_not_counted(make: Any) -> None:
    # ada 8/12, bo 5/12: omega^(ada,bo) = 1.6. First problem, all right: mu^(ada) = (4 + 1.6 * 4) / 8 = 1.3, guarded but
    # without signal. Then (4 + 1.6) / 8 = 0.7.
    project = make(answers({"ada": (4, 4, 0), "bo": (4, 1, 0)}))
    assert_shares(project.shares()["ada"], live_groups=1, baseline_above_one=0, guarded=0)
    rows = parquet.read_table(project.layout.advantages(1, "ada"), tables.ADVANTAGES).to_pylist()
    assert any(row["guarded"] and row["uniform"] for row in rows)
