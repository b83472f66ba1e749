"""The report: its numbers against arithmetic done by hand, hostile texts, partial runs, what must never be there."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import struct
import tomllib
from collections.abc import Callable, Mapping, Sequence
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ruamel.yaml import YAML
from safetensors.numpy import save_file

from hacpo.artifacts import parquet, storage, tables
from hacpo.artifacts.layout import Layout
from hacpo.errors import ArtifactError
from hacpo.evaluation.metrics import Estimate, over_problems, paired_change
from hacpo.pipeline.catalogue import GENERATE
from hacpo.pipeline.execution.command_line import new_app, run_app
from hacpo.settings import params as settings_of
from hacpo.settings.recipes import RECIPES
from hacpo.stages.report import report
from hacpo.tools.inspect.step_view import Response, Terms, Use, Worth
from hacpo.tools.report import browser, charts, checks, collect, facts, figures, held_out, reward_figures, scales

Reward = Callable[[int, str, int, int], float]
"""(step, agent, problem, sample) -> reward."""

HOSTILE = "</script><img src=x onerror=alert(1)><!--<script>&amp;\u2028 \u202e {{x}} $run ${style}"
PROBLEMS, GROUP = 2, 2


def params(
    agents: Sequence[str],
    *,
    steps: int = 2,
    recipe: str = "hacpo",
    benchmarks: bool = True,
    graded: bool = False,
) -> dict[str, Any]:
    """Settings of a small run; `graded`: with a reward function."""
    measured = {"greedy": {"data": "toy/test"}, "held": {"data": "toy/test", "samples": 2, "temperature": 1.0}}
    prompts = PROBLEMS * max(len(agents), 2)
    return {
        "seed": 1,
        "steps": steps,
        "agents": {name: {"model": f"models/{name}"} for name in agents},
        "algorithm": {"recipe": recipe, "clip": {"own_low": 0.03}},
        "data": {"train": "toy/train", "sets": {"toy/train": {"path": "a.parquet"}, "toy/test": {"path": "b.parquet"}}},
        "sampling": {"group_size": GROUP, "max_new_tokens": 26},
        "batch": {"prompts": prompts, "minibatch_prompts": prompts},
        "optimizer": {"learning_rate": 3.0e-4},
        "evaluation": {"every": 1, "benchmarks": measured if benchmarks else {}},
        "verification": {"reward": "rewards:score"} if graded else {},
    }


def default_reward(step: int, agent: str, problem: int, sample: int) -> float:
    """ada solves everything, everybody else only the second problem's first sample."""
    return float(agent == "ada" or (problem == 1 and sample == 0))


class Run:
    """A synthetic run below a project folder, written table by table."""

    def __init__(
        self,
        root: Path,
        settings: Mapping[str, Any],
        *,
        text: str = "1+1=2",
        reward: Reward = default_reward,
        finish_reason: str = "stop",
        held_out: Callable[[int, int], float] = lambda step, problem: float(problem < step),
    ) -> None:
        self.root, self.text, self.reward = root, text, reward
        self.finish_reason, self.held_out = finish_reason, held_out
        self.folder = root / "pipelines" / "toy"
        self.folder.mkdir(parents=True)
        with (self.folder / "params.yaml").open("w") as stream:
            YAML(typ="safe").dump(dict(settings), stream)
        self.settings = settings_of.load(self.folder / "params.yaml")
        self.agents = list(self.settings.agents)
        self.layout = Layout(root / "artifacts" / "toy")

    def write(self, path: Path, table: tables.Table, rows: list[dict[str, Any]], **place: Any) -> None:
        where = table.partition(place.pop("step", None), *place.values())
        parquet.write_table(path, table, parquet.to_arrow(table, rows), run="toy", partition=where)

    def metrics(self, stage: str, step: int, agent: str, **values: float) -> None:
        storage.write_json(self.layout.metrics(stage, step, agent), {"seconds": 2.0, **values})

    def prepare(self) -> Run:
        storage.write_json(self.layout.settings, settings_of.dump(self.settings))
        for name in self.settings.data.sets:
            rows = [
                {
                    "problem_id": f"p{i}",
                    "problem": f"1+{i}=? {self.text}",
                    "answer": "2",
                    "solution": None,
                    "subject": None,
                }
                | {"level": None, "source": "toy"}
                for i in range(4)
            ]
            self.write(self.layout.problems(name), tables.PROBLEMS, rows)
        rows = [
            {"step": step, "position": i, "problem_id": f"p{i}", "problem": f"1+{i}=? {self.text}", "answer": "2"}
            for step in range(1, self.settings.steps + 1)
            for i in range(PROBLEMS)
        ]
        self.write(self.layout.schedule, tables.SCHEDULE, rows)
        return self

    def responses(self, step: int, agent: str) -> list[dict[str, Any]]:
        return [
            {
                "rollout_id": f"{step:04d}/{agent}/p{problem}/{sample:03d}",
                "problem_id": f"p{problem}",
                "sample": sample,
                "source": agent,
                "reward": self.reward(step, agent, problem, sample),
            }
            for problem in range(PROBLEMS)
            for sample in range(GROUP)
        ]

    def step(self, step: int) -> Run:
        share = self.settings.algorithm.rollouts.share
        capability = []
        for agent in self.agents:
            own = self.responses(step, agent)
            mean = math.fsum(row["reward"] for row in own) / len(own)
            capability.append({"agent": agent, "accuracy": mean, "window": [mean], "capability": max(mean, 1e-8)})
            capability[-1] |= {"accuracy_all": mean, "window_all": [mean], "window_covariance": [[]]}
            rollouts = [
                row
                | {"step": step, "agent": agent, "prompt_token_ids": [1], "token_ids": [2, 3], "text": self.text}
                | {
                    "finish_reason": self.finish_reason,
                    "sampler_logprobs": [-0.1] * 2,
                    "logprobs": [-0.1] * 2,
                    "policy": "x",
                }
                for row in own
            ]
            self.write(self.layout.rollouts(step, agent), tables.ROLLOUTS, rollouts, step=step, agent=agent)
            verdicts = [
                row | {"verdict": "correct" if row["reward"] else "wrong", "extracted": self.text, "answer": "2"}
                for row in own
            ]
            self.write(self.layout.verdicts(step, agent), tables.VERDICTS, verdicts, step=step, agent=agent)
            pooled = [
                row | {"is_self": row["source"] == agent}
                for source in (self.agents if share else [agent])
                for row in self.responses(step, source)
            ]
            self.write_learner(step, agent, pooled)
            self.metrics(
                "generate",
                step,
                agent,
                rollouts=4,
                tokens=8,
                sampler_difference_mean=1e-7,
                sampler_difference_p99=5e-7,
                sampler_difference_max=1e-6,
                sampler_ess=0.999,
            )
            self.metrics("update", step, agent, grad_norm=0.5, loss=0.1, tokens=16, updates=2)
            shares = dict.fromkeys(("uniform", "baseline_above_one", "guarded", "punished_correct"), 0.0)
            self.metrics("advantage", step, "all", **{f"{a}.{k}": v for a in self.agents for k, v in shares.items()})
        self.write(self.layout.capability(step), tables.CAPABILITY, capability, step=step)
        return self

    def write_learner(self, step: int, agent: str, pooled: list[dict[str, Any]]) -> None:
        learner = {"step": step, "learner": agent}
        rows = [
            row
            | {
                "prompt_token_ids": [1],
                "token_ids": [2, 3],
                "source_logprob": -0.2,
                "source_tokens": 2,
                "learner_tokens": 3,
            }
            | {"text_bytes": 5, "status": "kept", "roundtrip": True, "as_sampled": row["is_self"]}
            for row in pooled
        ]
        self.write(self.layout.pool(step, agent), tables.POOL, rows, **learner)
        rows = [
            row
            | {"baseline": 0.5, "sigma": 0.5, "advantage": row["reward"] - 0.5, "omega": 1.0 if row["is_self"] else 2.0}
            | {"effective_advantage": (row["reward"] - 0.5) * (1.0 if row["is_self"] else 2.0)}
            | {"uniform": False, "guarded": False}
            for row in pooled
        ]
        self.write(self.layout.advantages(step, agent), tables.ADVANTAGES, rows, **learner)
        rows = [
            {"rollout_id": row["rollout_id"], "source": row["source"], "is_self": row["is_self"], "update": 0}
            | {
                "learner_logprob": -0.1,
                "source_logprob": -0.1,
                "objective": 0.1,
                "upper": 1.03 if row["is_self"] else 1.0,
                "sampler_weight": 1.0,
            }
            | {"lower": 0.97 if row["is_self"] else 0.8, "ratio": 1.0 if row["is_self"] else 0.7}
            | {"clipped": not row["is_self"], "is_weight": 1.0 if row["is_self"] else 0.8}
            for row in pooled
        ]
        self.write(self.layout.trace(step, agent), tables.TRACE, rows, step=step, agent=agent)

    def evaluate(self, step: int) -> Run:
        # Four problems, two samples each; by default one more problem is solved per step: 0/4, 1/4, 2/4...
        for agent in self.agents:
            rows = [
                {"benchmark": name, "problem_id": f"p{problem}", "sample": sample, "text": self.text, "token_count": 2}
                | {
                    "finish_reason": "stop",
                    "reward": self.held_out(step, problem),
                    "verdict": "correct",
                    "extracted": "2",
                }
                for name, benchmark in self.settings.evaluation.benchmarks.items()
                for problem in range(4)
                for sample in range(benchmark.samples)
            ]
            if rows:
                self.write(self.layout.evaluation(step, agent), tables.EVALUATIONS, rows, step=step, agent=agent)
            self.metrics("evaluate", step, agent, **{"held.tokens": 16})
        return self

    def complete(self) -> Run:
        self.prepare().evaluate(0)
        for step in range(1, self.settings.steps + 1):
            self.step(step).evaluate(step)
        return self

    def report(self, *options: str) -> Path:
        app = new_app()
        app.command()(report)
        assert run_app(app, [str(self.folder), *options]) == 0
        return self.layout.report

    def measurements(self) -> collect.Measurements:
        return collect.collect(self.layout, "toy", self.agents, self.settings.steps, self.settings.evaluation.series)


class Page(HTMLParser):
    """What a browser makes of the page: tags, scripts, and every address that it could fetch."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.ids: list[str] = []
        self.scripts: dict[str, str] = {}
        self.text = ""
        self._script: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.addresses += [values[name] for name in ("src", "href", "srcset", "action", "data") if name in values]
        self.handlers += [name for name in values if name.startswith("on")]
        self.ids += [values["id"]] if "id" in values else []
        if tag == "script":
            self._script = values.get("id", "code")
            self.scripts[self._script] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is None:
            self.text += data
        else:
            self.scripts[self._script] += data


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A complete run of two agents and two steps."""
    monkeypatch.chdir(tmp_path)
    return Run(tmp_path, params(["ada", "bo"])).complete()


def page_of(run: Run) -> Page:
    return Page((run.report() / "index.html").read_text(encoding="utf-8"))


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_the_standard_error_is_taken_over_problems() -> None:
    # Means 1, 0, 1, 0: mean 1/2, variance (4 * 1/4) / 3 = 1/3, error sqrt(1/3 / 4) = 0.288675.
    estimate = over_problems([1.0, 0.0, 1.0, 0.0])
    assert (estimate.mean, estimate.problems) == (0.5, 4)
    assert estimate.error == pytest.approx(math.sqrt(1 / 12), rel=1e-12)
    assert over_problems([0.25]).error is None
    assert over_problems([0.25]).interval == (0.25, 0.25)
    with pytest.raises(ValueError, match="at least one"):
        over_problems([])


def test_a_change_is_paired_by_problem() -> None:
    # Differences over the common problems a and b: +1 and +1, so the error is 0 although both ends vary; c and d do not
    # count.
    change = paired_change({"a": 0.0, "b": -1.0, "c": 9.0}, {"a": 1.0, "b": 0.0, "d": 9.0})
    assert change == Estimate(1.0, 0.0, 2)
    assert paired_change({"a": 0.0}, {"b": 1.0}) is None


def test_measurements_are_those_of_the_tables(toy: Run) -> None:
    found = toy.measurements()
    assert found.steps_trained == found.last_step == 2
    # After step 1 one of four problems is solved: mean 1/4, variance (3 * 1/16 + 9/16) / 3 = 1/4, error sqrt(1/16) =
    # 1/4.
    assert found.accuracy["bo", "held"][1] == Estimate(0.25, 0.25, 4)
    # From 0 to 2 of 4: differences 1, 1, 0, 0: mean 1/2, error sqrt(1/3 / 4).
    assert found.change["bo", "greedy"].error == pytest.approx(math.sqrt(1 / 12))
    assert found.reward == {"ada": {1: 1.0, 2: 1.0}, "bo": {1: 0.25, 2: 0.25}}
    assert found.verdicts["bo"] == {"correct": {1: 1, 2: 1}, "wrong": {1: 3, 2: 3}}
    assert found.omega == {("ada", "bo"): {1: 2.0, 2: 2.0}, ("bo", "ada"): {1: 2.0, 2: 2.0}}
    cross, own = found.ratios["ada", "cross"][1], found.ratios["ada", "own"][1]
    assert (cross.mean, cross.below, cross.above, cross.weight) == pytest.approx((0.7, 1.0, 0.0, 0.8))
    assert (own.mean, own.below, own.rows, own.lower, own.upper) == (1.0, 0.0, 4, (0.97, 0.97), 1.03)
    assert found.total(GENERATE, "tokens", "ada") == 16


def test_metrics_and_curves(toy: Run) -> None:
    folder = toy.report()
    assert (folder / "curves.csv").read_text() == (
        "step,ada.greedy,bo.greedy,ada.held,bo.held\n"
        "0,0.0000,0.0000,0.0000,0.0000\n"
        "1,0.2500,0.2500,0.2500,0.2500\n"
        "2,0.5000,0.5000,0.5000,0.5000\n"
    )
    metrics = json.loads((folder / "metrics.json").read_text())
    assert (
        metrics["held"] == metrics["greedy"] == {**{"ada": 0.5, "bo": 0.5, "(mean)": 0.5, "(gain)": 0.5, "(best)": 0.5}}
    )
    # Two steps of two agents, 4 rollouts of 2 tokens each. 3 evaluations, 2 generates, 2 updates of 2 agents and 2
    # advantages, 2 seconds each.
    seconds = 2.0 * (6 + 4 + 4 + 2)
    assert {key: metrics[key] for key in ("steps", "rollouts", "tokens", "seconds")} == {
        "steps": 2,
        "rollouts": 16,
        "tokens": 32,
        "seconds": seconds,
    }
    assert not (toy.layout.root / "metrics" / "report").exists()


def test_a_wrong_run_or_a_damaged_table_is_one_line(toy: Run, capsys: pytest.CaptureFixture[str]) -> None:
    path = toy.layout.trace(1, "bo")
    path.write_bytes(path.read_bytes()[:100])
    app = new_app()
    app.command()(report)
    assert run_app(app, [str(toy.folder)]) == 4
    line = capsys.readouterr().err
    assert "trace.parquet" in line
    assert "Traceback" not in line


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_page_stands_alone(toy: Run) -> None:
    html = (toy.report() / "index.html").read_text(encoding="utf-8")
    page = Page(html)
    assert all(address.startswith("#") for address in page.addresses)
    assert {address[1:] for address in page.addresses} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert page.handlers == []
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    assert not re.search(r"url\(|@import|https?://", html.replace("http-equiv", ""))
    digest = base64.b64encode(hashlib.sha256(page.scripts["code"].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html
    assert "$" not in page.text


def test_the_same_files_give_the_same_bytes(toy: Run, tmp_path: Path) -> None:
    first = {path.name: path.read_bytes() for path in toy.report().iterdir()}
    toy.report("--out", str(tmp_path / "again"))
    second = {path.name: path.read_bytes() for path in (tmp_path / "again" / "report").iterdir()}
    assert first.keys() == {"index.html", "metrics.json", "curves.csv"}
    assert first == second
    assert str(tmp_path).encode() not in b"".join(first.values())


def test_hostile_text_stays_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = page_of(Run(tmp_path, params(["ada", "bo"]), text=HOSTILE).complete())
    assert "img" not in page.tags
    assert page.handlers == []
    assert sorted(page.scripts) == ["code", "reader-index", "reader-step-1", "reader-step-2"]
    problem = json.loads(page.scripts["reader-step-1"])[0]
    response = dict(zip(browser.RESPONSE_FIELDS, problem["agents"][0][0], strict=True))
    assert response["text"] == response["extracted"] == HOSTILE
    assert problem["problem"] == f"1+0=? {HOSTILE}"
    assert HOSTILE in page.text  # the example of the problem sets, escaped, its writing direction kept to itself
    assert page.tags.count("bdi") >= 4
    for name, script in page.scripts.items():
        assert name == "code" or not set("<>&\u2028") & set(script)


def test_the_script_shows_texts_only_as_text() -> None:
    script = files("hacpo.tools.report").joinpath("report.js").read_text()
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|setTimeout", script
    )
    assert "</script" not in script


@pytest.mark.parametrize("agents", [["solo"], ["ada", "bo", "cy"], ["ada", "bo", "cy", "di", "ed"]])
def test_any_number_of_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agents: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    page = page_of(Run(tmp_path, params(agents)).complete())
    assert all(agent in page.text for agent in agents)
    assert ("nobody learns from the answers of others" in page.text) == (len(agents) == 1)


@pytest.mark.parametrize("recipe", ["gspo", "grpo", "gspo_x2"])
def test_recipes_without_sharing_have_no_cross_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path, params(["ada", "bo"], recipe=recipe)).complete()
    page = page_of(run)
    assert "nobody learns from the answers of others" in page.text
    assert "omega for" not in page.text
    learners = json.loads(page.scripts["reader-step-1"])[0]["agents"][1][0][-1]
    assert learners[0] is None
    assert learners[1] is not None


def test_benchmarks_of_the_same_problems_have_no_average(toy: Run) -> None:
    page = page_of(toy).text
    assert "Held-out accuracy, greedy, after step 2" in page
    assert "average of" not in page
    assert "best is the evaluation" not in page


def test_a_run_without_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path, params(["ada"], benchmarks=False)).complete()
    page = page_of(run).text
    assert "No evaluation has finished" in page
    assert "Is the latest model the best one?" not in page  # there will never be an answer
    assert (run.layout.report / "curves.csv").read_text() == "step\n"


def test_a_run_that_has_only_just_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path, params(["ada", "bo"]))
    run.prepare()
    page = page_of(run).text
    assert "in progress: 0 of 2 steps" in page
    assert "nothing sampled yet" in page
    run.evaluate(0)
    assert "before training" in page_of(run).text


def test_an_unfinished_step_shows_what_there_is(toy: Run) -> None:
    for path in (
        toy.layout.trace(2, "bo").parent,
        toy.layout.advantages(2, "ada").parent,
        toy.layout.evaluation(2, "bo"),
    ):
        storage.remove(path)
    storage.remove(toy.layout.rollouts(2, "bo"))
    page = page_of(toy)
    assert "in progress: 1 of 2 steps" in page.text
    second = json.loads(page.scripts["reader-step-2"])[0]
    assert [len(group) for group in second["agents"]] == [2, 0]
    assert (toy.layout.report / "curves.csv").read_text().splitlines()[-1] == "2,0.5000,,0.5000,"


def test_rewards_need_not_be_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(
        tmp_path, params(["ada"], graded=True), reward=lambda step, agent, problem, sample: -2.5 + step
    ).complete()
    assert "−1.5" in page_of(run).text


# --- graded rewards --------------------------------------------------------------------------------------------------


def graded_reward(step: int, agent: str, problem: int, sample: int) -> float:
    """Step 1: ada 0.5 and 0.25, bo 0 and 0.25; step 2: both a half more, up to 1."""
    return (0.5 if agent == "ada" else 0.0) * (sample == 0) + 0.25 * (sample == 1) + 0.5 * (step == 2)


@pytest.fixture
def graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A complete run whose rewards and held-out results are grades."""
    monkeypatch.chdir(tmp_path)
    settings = params(["ada", "bo"], graded=True)
    return Run(tmp_path, settings, reward=graded_reward, held_out=lambda step, problem: 0.1 + 0.2 * step).complete()


def test_a_graded_run_never_speaks_of_accuracy_or_correct_answers(graded: Run) -> None:
    page = page_of(graded)
    shown = page.text.partition("Skip to the results")[2]
    before, _, after = shown.partition("All settings (")  # whose meanings speak of both kinds of reward
    text = before + after.partition("What training was for.")[2]
    others = text.replace("It corrects for", "").replace("loss.sampler_correction", "").replace("no correction for", "")
    assert re.findall(r".{0,30}(?:accura|correct|success|solved).{0,30}", others, re.IGNORECASE) == []
    assert "Mean reward on problems never trained on" in text
    assert "Held-out mean reward, held, after step 2" not in text  # the leading benchmark is the first
    assert "Held-out mean reward, greedy, after step 2, against step 0" in text
    assert "held, mean reward (sampled at temperature 1)" in text
    assert "capability and mean reward of each step" in text
    # 0.1 + 0.2 * 2 = 0.5: a number and no percentage, on the card and in the table.
    assert "0.5000from 0.1000, +0.4000" in text
    assert "50.0\u00a0%from" not in text
    html = (graded.layout.report / "index.html").read_text()
    assert "Held-out mean reward, plus or minus one standard error" in html
    words = json.loads(page.scripts["reader-index"])["filters"]
    assert not re.search(r"correct|success|solved", json.dumps([label for _, label in words]))


def test_a_graded_answer_is_coloured_by_its_reward(graded: Run) -> None:
    page = page_of(graded)
    index = json.loads(page.scripts["reader-index"])
    assert (index["graded"], index["rewards"]) == (True, [0.0, 1.0])
    # Rewards 0, 0.25, 0.5, 0.75, 1: five bins. Step 1, ada: 0.5 and 0.25 for each of two problems.
    grades = graded.measurements().grades
    assert grades.names == ("0", "0.25", "0.5", "0.75", "1")
    assert grades.counts["ada"] == [{}, {1: 2}, {1: 2}, {2: 2}, {2: 2}]
    assert grades.counts["bo"] == [{1: 2}, {1: 2}, {2: 2}, {2: 2}, {}]
    html = (graded.layout.report / "index.html").read_text()
    verdicts = html[html.index('id="verdicts"') : html.index('id="pool"')]
    assert "Rewards of the answers" in verdicts
    assert [f'class="bar c-grade-{place}"' in verdicts for place in range(5)] == [True] * 5
    assert "c-verdict-wrong" not in verdicts
    assert not json.loads(page_of_math(graded.root).scripts["reader-index"])["graded"]


def page_of_math(root: Path) -> Page:
    (root / "math").mkdir()
    return page_of(Run(root / "math", params(["ada", "bo"])).complete())


def test_many_grades_fall_into_equal_parts_of_their_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def reward(step: int, agent: str, problem: int, sample: int) -> float:
        return -1.0 + (4 * (step - 1) + 2 * problem + sample) * 0.5  # -1, -0.5, ..., 2.5

    grades = Run(tmp_path, params(["ada"], graded=True), reward=reward).complete().measurements().grades
    # Eight rewards from -1 to 2.5: five parts of 0.7, of which the last holds its upper end.
    assert (grades.low, grades.high) == (-1.0, 2.5)
    assert grades.names[0] == "−1 to −0.3"
    # -1, -0.5 | 0 | 0.5, 1 | 1.5 | 2, 2.5: edges -0.3, 0.4, 1.1, 1.8.
    assert grades.counts["ada"] == [{1: 2}, {1: 1}, {1: 1, 2: 1}, {2: 1}, {2: 2}]


# --- what is cut off, and what has fallen ----------------------------------------------------------------------------


def test_cut_off_answers_are_counted_by_their_finish_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the reward function calls them correct and wrong, never `truncated`
    run = Run(tmp_path, params(["ada", "bo"], graded=True), finish_reason="length").complete()
    check = next(one for one in checks.checks(run.measurements(), run.settings) if "length limit" in one.question)
    assert (check.answer, check.fine) == ("answers cut off: 100.0\u00a0%", False)
    page = page_of(run)
    problems = json.loads(page.scripts["reader-index"])["steps"][0]["problems"]
    assert all("trouble" in problem["flags"] for problem in problems)
    assert "cut off by the length limit" in page.text


def fallen(step: int, problem: int) -> float:
    """Held-out results of four problems: 0 of 4, 4 of 4, 1 of 4."""
    return float(problem < (0, 4, 1)[step])


def test_a_result_that_has_fallen_is_no_gain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path, params(["ada", "bo"]), held_out=fallen).complete()
    found = run.measurements()
    # Best minus last: 0, 1, 1, 1: mean 3/4, error sqrt((3 * 1/16 + 9/16) / 3 / 4) = 1/4; 3/4 > 2 * 1/4.
    assert found.fall["ada", "greedy"] == Estimate(0.75, 0.25, 4)
    card = held_out.headline(found, run.settings)
    assert "from 0\u00a0%, best 100.0\u00a0% at step 1, " in card
    assert '<p class="big">25.0\u00a0%</p>' in card
    assert '<strong class="fell">−75.0 points</strong>' in card
    assert "+25.0" not in card
    check = next(one for one in checks.checks(found, run.settings) if one.figure == "held_out")
    assert not check.fine
    assert "has fallen since its best: ada, greedy, from 100.0\u00a0% at step 1 to 25.0\u00a0% at step 2" in str(
        check.answer
    )
    metrics = json.loads((run.report() / "metrics.json").read_text())
    assert metrics["greedy"] == {"ada": 0.25, "bo": 0.25, "(mean)": 0.25, "(gain)": 0.25, "(best)": 1.0}


def test_a_fall_that_chance_explains_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path, params(["ada"]), held_out=lambda step, problem: float(problem < (0, 3, 2)[step])).complete()
    found = run.measurements()
    # Best minus last: 0, 0, 1, 0: mean 1/4, error sqrt((3 * 1/16 + 9/16) / 3 / 4) = 1/4; 1/4 < 2 * 1/4.
    assert found.fall["ada", "greedy"] == Estimate(0.25, 0.25, 4)
    check = checks.checks(found, run.settings)[0]
    assert (check.fine, check.answer) == (True, "no held-out result is further below its best than chance explains")
    card = held_out.headline(found, run.settings)
    assert "+50.0 points" in card
    assert "best 75.0\u00a0% at step 1" in card


def test_a_fall_of_which_nobody_knows_the_error_is_not_called_one() -> None:
    # One problem, right, right, wrong: best minus last is 1, and one value has no standard error.
    found = collect.Measurements(("ada",))
    found.accuracy["ada", "one"] = {step: Estimate(mean, None, 1) for step, mean in enumerate([1.0, 1.0, 0.0])}
    found.fall["ada", "one"] = Estimate(1.0, None, 1)
    assert not found.has_fallen("ada", "one")
    found.fall["ada", "one"] = Estimate(1.0, 0.49, 2)
    assert found.has_fallen("ada", "one")


def test_the_page_names_one_best_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1, 3 and 3 of 4 right: the latest is as good as the step before, and is called the best everywhere."""
    monkeypatch.chdir(tmp_path)
    settings = params(["ada"])
    settings["evaluation"]["average"] = ["greedy", "held"]
    run = Run(tmp_path, settings, held_out=lambda step, problem: float(problem < (1, 3, 3)[step])).complete()
    found = run.measurements()
    assert "; its best" in held_out.headline(found, run.settings)
    assert "best, latest <span class='error'>step 2</span>" in held_out.standings(found, run.settings)
    assert found.best("ada", "average") == 2


def test_steps_that_taught_nothing_are_counted(toy: Run) -> None:
    for step, live in ((1, 0.0), (2, 2.0)):
        toy.metrics("advantage", step, "all", **{"ada.live_groups": live, "bo.live_groups": 2.0})
    found = {check.question: check for check in checks.checks(toy.measurements(), toy.settings)}
    check = found["Does every step have something to teach?"]
    assert (check.answer, check.fine) == ("steps in which all rewards were equal, worst learner: 1 of 2", False)


# --- axes and colours ------------------------------------------------------------------------------------------------


def axis(html: str, figure: str) -> list[str]:
    """The labels of a figure's vertical axes."""
    part = html[html.index(f'id="{figure}"') :]
    return re.findall(r'<span class="y"[^>]*>([^<]*)</span>', part[: part.index("</figure>")])


def test_no_accuracy_axis_leaves_0_to_100_percent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nothing = Run(tmp_path, params(["ada"]), reward=lambda *_: 0.0, held_out=lambda *_: 0.0).complete()
    html = (nothing.report() / "index.html").read_text()
    assert set(axis(html, "held_out")) == set(axis(html, "reward")) == {"0%", "50%", "100%"}
    # One of four right: .25 with an error of .25; the band ends at 0, and so does the axis.
    assert scales.share_scale([-0.05, 0.02, 0.07]).low == 0.0
    assert scales.share_scale([0.97, 1.0, 1.04]).high == 1.0
    assert (scales.share_scale([0.0]).low, scales.share_scale([0.0]).high) == (0.0, 1.0)
    assert scales.share_scale([1.0]).high == 1.0
    assert (scales.linear_scale([0.0, 0.0]).low, scales.linear_scale([0.0, 0.0]).high) == (0.0, 1.0)


def luminance(color: str) -> float:
    """Relative luminance of `#rrggbb` (WCAG 2.2)."""
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_everything_drawn_stands_out_from_its_ground() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)  # (1 + .05) / (0 + .05)
    css = files("hacpo.tools.report").joinpath("report.css").read_text()
    pair = r"light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)"
    named = {name: colors for name, *colors in re.findall(rf"--([\w-]+): {pair}", css)}
    drawn = {name: colors for name, *colors in re.findall(rf"\.c-([\w-]+) \{{ --c: {pair}", css)}
    drawn |= {name: colors for name, colors in named.items() if name.startswith("agent-")}
    assert {"below", "above", "grade-0", "grade-4", "stage-generate", "agent-7"} <= drawn.keys()
    assert {f"verdict-{name}" for name in reward_figures.VERDICTS} - {"verdict-correct"} <= drawn.keys()
    low = {
        (name, theme, ground): round(contrast(colors[theme], named[ground][theme]), 2)
        for name, colors in drawn.items()
        for theme in (0, 1)
        for ground in ("card", "paper")
        if contrast(colors[theme], named[ground][theme]) < 3
    }
    assert low == {}


def test_the_state_of_a_check_has_room_for_its_words() -> None:
    css = files("hacpo.tools.report").joinpath("report.css").read_text()
    (columns,) = re.findall(r"^\.check \{[^}]*grid-template-columns: ([^;]*);", css, re.MULTILINE)
    assert "max-content" in columns.rpartition(" minmax(0, 1fr)")[0]  # as wide as `no data yet` in any font


# --- the browser of answers ------------------------------------------------------------------------------------------


def test_flags(toy: Run) -> None:
    page = page_of(toy)
    index = json.loads(page.scripts["reader-index"])
    first, second = index["steps"][0]["problems"]
    # ada 2/2 against bo 0/2, then 2/2 against 1/2; every cross answer is clipped.
    assert first["rates"] == [1.0, 0.0]
    assert first["flags"] == ["disagree", "partner_only", "silenced"]
    assert second["rates"] == [1.0, 0.5]
    assert second["flags"] == ["disagree", "silenced"]


def problem_of(*groups: Sequence[Response]) -> browser.Problem:
    names = ("ada", "bo")[: len(groups)]
    return browser.Problem("p", "1+1", "2", dict(zip(names, map(list, groups), strict=True)))


def answered(reward: float, verdict: str, worths: Mapping[str, float], *, clipped: bool = False) -> Response:
    """A response by its reward and each learner's effective advantage; the learner `ada` is its author."""
    terms = (Terms(0, -1.0, -1.0, 1.0, 0.8, 1.2, clipped, 1.0, 0.0),)
    uses = tuple(
        Use(name, name == "ada", "kept", True, 1, Worth(0.0, 1.0, worth, 1.0, worth, False, False), terms)
        for name, worth in worths.items()
    )
    return Response("r", "ada", 0, "text", "stop", 4, verdict, reward, None, uses)


def test_other_flags() -> None:
    def answers(*results: tuple[float, str]) -> list[Response]:
        return [answered(reward, verdict, {"ada": -0.1}, clipped=True) for reward, verdict in results]

    troubled = problem_of(answers((0.0, "wrong")), answers((0.0, "timeout")))
    assert browser.flags(troubled) == ["unsolved", "no_signal", "trouble"]
    assert browser.flags(problem_of(answers((1.0, "correct"), (0.0, "wrong")))) == ["punished"]


def test_a_punished_answer_is_one_that_no_other_beats() -> None:
    def flags(*rewards: float, worth: Sequence[float], shared: bool = True) -> list[str]:
        responses = [answered(r, "correct", {"ada": w}) for r, w in zip(rewards, worth, strict=True)]
        if not shared:  # the best answer belongs to an agent that this learner does not learn from
            responses[0] = answered(rewards[0], "correct", {"bo": 1.0})
        return browser.flags(problem_of(responses))

    assert "punished" in flags(0.4, 0.2, worth=(-0.1, -0.5))
    assert "punished" not in flags(0.9, 0.8, worth=(0.1, -0.5))
    assert "punished" in flags(0.9, 0.8, 0.7, worth=(0.1, -0.5, -0.6), shared=False)
    # Equal up to rounding: no signal, so nothing is punished.
    assert flags(0.7, 0.7000001, worth=(-0.1, -0.1)) == ["no_signal"]


def test_the_byte_budget_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path, params(["ada", "bo"]), text="é" * 5000).complete()
    schedule = parquet.read_table(run.layout.schedule, tables.SCHEDULE)

    def embedded(**changes: Any) -> browser.Embedded:
        settings = run.settings.report.model_copy(update=changes)
        return browser.embed(run.layout, "toy", run.agents, schedule, settings)

    whole = embedded()
    assert [len(entry["problems"]) for entry in whole.index] == [2, 2]
    assert not whole.shortened
    # 4000 characters of two bytes, 2 agents x 2 samples: 32 kB and more a problem; 80 kB for two steps fit one problem
    # each.
    some = embedded(browser_mebibytes=80e3 / 2**20)
    assert [len(entry["problems"]) for entry in some.index] == [1, 1]
    least = embedded(browser_mebibytes=20e3 / 2**20)
    assert least.shortened
    assert sum(len(payload.encode()) for payload in least.payloads.values()) < 20e3
    response = dict(zip(browser.RESPONSE_FIELDS, json.loads(least.payloads[1])[0]["agents"][0][0], strict=True))
    assert len(response["text"]) + response["cut"] == 5000
    assert list(embedded(browser_steps=1).payloads) == [2]
    assert embedded(browser_steps=0).payloads == embedded(problems_per_step=0).payloads == {}


def test_steps_are_spread_evenly() -> None:
    assert browser.spaced(range(1, 11), 4) == [1, 4, 7, 10]
    assert browser.spaced([3, 5], 4) == [3, 5]
    assert charts.thinned(range(1000), 3) == [0, 500, 999]


# --- facts, words and scales -----------------------------------------------------------------------------------------


def test_settings_say_how_they_differ(toy: Run) -> None:
    rows = {row.key: row for row in facts.setting_rows(toy.settings)}
    assert rows["algorithm.clip.own_low"].standing == "changed"
    assert rows["algorithm.clip.own_low"].reference == "0.0003"
    assert rows["algorithm.clip.own_high"].standing == "recipe"
    assert rows["optimizer.learning_rate"].standing == "given"
    assert rows["optimizer.beta1"].standing == "default"
    assert (rows["agents.ada.model"].value, rows["agents.ada.model"].standing) == ("models/ada", "given")


def test_an_agent_is_described_by_its_checkpoint(toy: Run) -> None:
    folder = toy.layout.checkpoint(0, "bo")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 17}))
    weights = {"a": np.zeros((3, 5), np.float32), "b": np.zeros(7, np.float16)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ada, bo = facts.agent_facts(toy.layout, toy.settings)
    assert (bo.architecture, bo.parameters, bo.vocabulary) == ("LlamaForCausalLM", 3 * 5 + 7, 17)
    assert (ada.origin, ada.parameters) == ("model folder models/ada", None)


def cut(content: bytes) -> bytes:
    return content[:-1]


def lengthened(content: bytes) -> bytes:
    return content + b"x"


def garbage(content: bytes) -> bytes:
    return b"no header at all" * 9


def endless(content: bytes) -> bytes:
    return struct.pack("<Q", 1 << 62) + content[8:]


@pytest.mark.parametrize("damaged", [cut, lengthened, garbage, endless])
def test_damaged_weights_are_one_line(damaged: Callable[[bytes], bytes], toy: Run) -> None:
    folder = toy.layout.checkpoint(0, "bo")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    path = folder / "model.safetensors"
    save_file({"a": np.zeros((3, 5), np.float32)}, path)
    path.write_bytes(damaged(path.read_bytes()))
    with pytest.raises(ArtifactError, match=r"model\.safetensors: damaged weights: its header cannot be read"):
        facts.agent_facts(toy.layout, toy.settings)


def test_checks_name_what_is_out_of_line(toy: Run) -> None:
    found = {check.figure: check for check in checks.checks(toy.measurements(), toy.settings)}
    assert found["sampler"].fine
    assert not found["cross_ratio"].fine  # every cross answer of the toy run is clipped
    assert found["cross_ratio"].answer == "answers of others silenced, worst learner: 100.0\u00a0%"
    assert found.keys() <= figures.FIGURES.keys()


def test_steps_without_signal_say_nothing_about_punished_answers(toy: Run) -> None:
    # Step 1 has no live group, in step 2 half of ada's correct answers are punished: 1/2, not (0 + 1/2) / 2.
    for step, live, punished in ((1, 0.0, 0.0), (2, 2.0, 0.5)):
        shares = {"uniform": 1 - live / 2, "groups": 2.0, "live_groups": live, "punished_correct": punished}
        toy.metrics("advantage", step, "all", **{f"ada.{key}": value for key, value in shares.items()})
    answers = {check.question: check.answer for check in checks.checks(toy.measurements(), toy.settings)}
    assert answers["Are correct answers spared?"] == "correct answers pushed down, worst learner: 50.0\u00a0%"
    # No signal: (1 + 0) / 2 over both steps.
    assert "worst learner: 50.0\u00a0%" in str(answers["Is there something to learn from most problems?"])


def test_every_figure_and_recipe_has_its_words() -> None:
    words = tomllib.loads(files("hacpo.tools.report").joinpath("captions.toml").read_text())
    assert words["figures"].keys() == figures.FIGURES.keys()
    assert words["recipes"].keys() == RECIPES.keys()
    for caption in words["figures"].values():
        graded = caption.pop("graded", {})
        assert caption.keys() == {"title", "what", "read", "healthy", "absent"}
        assert graded.keys() <= caption.keys()
        assert all([*caption.values(), *graded.values()])


def test_numbers_are_written_for_readers() -> None:
    assert [scales.number(value) for value in (0.0, 1.0, 0.82251, 12345.6, 1.07e-7, -0.5)] == [
        "0",
        "1.000",
        "0.8225",
        "12,346",
        "1.07×10⁻⁷",
        "−0.5000",
    ]
    assert [scales.number(value) for value in (float("inf"), float("-inf"), float("nan"))] == ["inf", "−inf", "nan"]
    assert scales.seconds(float("inf")) == "inf\u00a0s"
    assert scales.percent(0.82250001) == scales.percent(0.8225) == "82.3\u00a0%"
    assert scales.points(-0.0125) == "−1.3"
    assert [scales.short_count(value) for value in (950, 1.5e4, 2.34e6)] == ["950", "15\u00a0k", "2.34\u00a0M"]
    assert [scales.seconds(value).replace("\u00a0", " ") for value in (0.5, 65, 7320)] == [
        "0.5 s",
        "1 min 05 s",
        "2 h 02 min",
    ]


def test_scales_hold_their_values() -> None:
    scale = scales.linear_scale([0.61, 0.92])
    assert scale.low <= 0.61 < 0.92 <= scale.high
    assert all(scale.low <= tick <= scale.high for tick in scale.ticks)
    assert scales.linear_scale([3.0, 3.0]).low < 3.0 < scales.linear_scale([3.0, 3.0]).high
    assert scales.linear_scale([], low=0.0, high=1.0).ticks == pytest.approx((0.0, 0.5, 1.0))
    log = scales.log_scale([0.5, 2.0])
    assert log.place(1.0) == pytest.approx((log.place(0.5) + log.place(2.0)) / 2)
    assert scales.log_scale([2e-8, 1e-7], decades=True).ticks == pytest.approx((1e-8, 1e-7))
    assert scales.step_ticks(1, 30) == [10, 20, 30]


def test_labels_keep_apart() -> None:
    placed = scales.spread([10.0, 12.0, 100.0], 15, 0, 100)
    assert placed == [10.0, 25.0, 100.0]
    assert scales.spread([99.0, 100.0], 15, 0, 100) == [85.0, 100.0]
