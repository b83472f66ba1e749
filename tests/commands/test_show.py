"""`hacpo show`: every response of a problem with what became of it, whatever models wrote, however far the run is."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from rich.console import Console

from conftest import PARAMS, Cli, environment, train
from hacpo.artifacts import tables
from hacpo.pipeline.project import Pipeline
from hacpo.tools.inspect.plain import harmless
from hacpo.tools.inspect.side_by_side import list_problems, read_side_by_side
from hacpo.tools.inspect.side_by_side_view import print_problems, print_side_by_side
from hacpo.tools.inspect.step_reader import StepReader, learners_of

RUN = Path("pipelines/small")
AGENTS = ("ada", "bo")


@pytest.fixture
def there(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the finished project, to be read only."""
    monkeypatch.chdir(finished)
    return finished


def table(name: str, step: int, **partition: str) -> list[dict[str, Any]]:
    folder = Path("artifacts/small") / name / f"step={step:04d}"
    for key, value in partition.items():
        folder /= f"{key}={value}"
    return pl.read_parquet(folder / "*.parquet", hive_partitioning=False).to_dicts()


def problem_ids(step: int) -> list[str]:
    return [row["problem_id"] for row in table("prompts", step)]


def tree(cli: Cli, *options: object) -> Any:
    result = cli("show", RUN, *options, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def edit(path: Path, kind: tables.Table, change: dict[str, Any], **where: object) -> None:
    """Change columns of the rows that match, in every shard of a table, and keep its metadata."""
    import pyarrow.parquet as pq

    for shard in sorted(path.glob("*.parquet")) if path.is_dir() else [path]:
        content = pq.read_table(shard)
        rows = content.to_pylist()
        for row in rows:
            if all(row[key] == value for key, value in where.items()):
                row.update(change)
        pq.write_table(type(content).from_pylist(rows, schema=content.schema), shard)


def test_the_numbers_are_those_of_the_files(cli: Cli, there: Path) -> None:
    problem = problem_ids(2)[0]
    shown = tree(cli, "--step", 2, "--problem", problem)
    rollouts = [row for agent in AGENTS for row in table("rollouts", 2, agent=agent) if row["problem_id"] == problem]
    verdicts = {row["rollout_id"]: row for agent in AGENTS for row in table("verdicts", 2, agent=agent)}
    assert [response["rollout_id"] for response in shown["responses"]] == [row["rollout_id"] for row in rollouts]
    assert (shown["problem"], shown["answer"]) == next(
        (row["problem"], row["answer"]) for row in table("prompts", 2) if row["problem_id"] == problem
    )
    updates = 0
    for response, row in zip(shown["responses"], rollouts, strict=True):
        verdict = verdicts[row["rollout_id"]]
        assert (response["text"], response["finish_reason"]) == (row["text"], row["finish_reason"])
        assert response["tokens"] == len(row["token_ids"])
        assert [response[key] for key in ("verdict", "reward", "extracted")] == [
            verdict[key] for key in ("verdict", "reward", "extracted")
        ]
        assert [use["learner"] for use in response["uses"]] == list(AGENTS)
        for use in response["uses"]:
            name = use["learner"]
            (worth,) = [r for r in table("advantages", 2, learner=name) if r["rollout_id"] == row["rollout_id"]]
            assert use["worth"] == {key: worth[key] for key in use["worth"]}
            assert set(use["worth"]) > {"baseline", "sigma", "advantage", "omega", "effective_advantage"}
            (pooled,) = [r for r in table("pool", 2, learner=name) if r["rollout_id"] == row["rollout_id"]]
            assert use["status"] == pooled["status"]
            traced = [r for r in table("updates", 2, agent=name) if r["rollout_id"] == row["rollout_id"]]
            assert use["updates"] == [
                {key: r[key] for key in terms} for r, terms in zip(traced, use["updates"], strict=True)
            ]
            updates += len(traced)
    assert updates == 2 * len(rollouts)


def test_one_learner_alone(cli: Cli, there: Path) -> None:
    problem = problem_ids(1)[0]
    shown = tree(cli, "--step", 1, "--problem", problem, "--learner", "bo")
    assert {use["learner"] for response in shown["responses"] for use in response["uses"]} == {"bo"}
    assert {response["agent"] for response in shown["responses"]} == set(AGENTS)


def test_a_pipe_gets_every_text_whole_and_no_escape(cli: Cli, there: Path) -> None:
    problem = problem_ids(1)[0]
    result = cli("show", RUN, "--step", 1, "--problem", problem)
    assert result.code == 0
    assert "\x1b" not in result.out
    assert "│" not in result.out
    for agent in AGENTS:
        for row in table("rollouts", 1, agent=agent):
            if row["problem_id"] == problem:
                assert f"{agent} sample {row['sample']}: " in result.out
                for line in row["text"].splitlines():
                    assert line.strip() in result.out
    assert (
        len(re.findall(r"^  → \w+  advantage .*  effective .*  update \d  ratio .*  objective .*$", result.out, re.M))
        == 16
    )


def test_what_models_write_cannot_steer_a_terminal(cli: Cli, finished_copy: Path) -> None:
    problem = problem_ids(1)[0]
    hostile = "a\x1b[31mred\x1b]0;title\x07 [bold]loud[/bold] [/] \u202eback \x9b2J \r over :smile:\nsecond\tline\x00"
    folder = Path("artifacts/small/rollouts/step=0001/agent=ada")
    steers = "\x1b]0;title\x07\x1b[2Jstop\nforged"
    edit(folder, tables.ROLLOUTS, {"text": hostile, "finish_reason": steers}, problem_id=problem, sample=0)
    edit(Path("artifacts/small/pool/step=0001/learner=bo"), tables.POOL, {"status": steers}, problem_id=problem)
    edit(
        Path("artifacts/small/verdicts/step=0001/agent=ada"),
        tables.VERDICTS,
        {"extracted": "[red]\x1b[2J", "verdict": steers},
        problem_id=problem,
    )
    out = cli("show", RUN, "--step", 1, "--problem", problem).out
    assert r"a\x1b[31mred\x1b]0;title\x07 [bold]loud[/bold] [/] \u202eback \x9b2J \r over :smile:" in out
    assert "\n  second    line\\x00\n" in out
    assert r"extracted [red]\x1b[2J" in out
    assert out.count(r"\x1b]0;title\x07\x1b[2Jstop\nforged") >= 3
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out)
    raw = cli("show", RUN, "--step", 1, "--problem", problem, "--json").out
    assert raw.isascii()
    assert json.loads(raw)["responses"][0]["text"] == hostile


def test_only_what_steers_is_spelled_out() -> None:
    assert harmless("é 漢字 ≤ 𝟙 ∑").plain == "é 漢字 ≤ 𝟙 ∑"
    assert harmless("a\u200bb\u2028c\U000e0041\ufeff\ue000").plain == r"a\u200bb\u2028c\U000e0041\ufeff\ue000"


@pytest.mark.parametrize("width", [80, 100, 120, 160, 200])
def test_a_terminal_of_any_width(there: Path, width: int) -> None:
    problem = problem_ids(1)[0]
    opened = Pipeline.open(RUN)
    learners = learners_of(opened, None)
    reader = StepReader(opened, 1)
    shown = read_side_by_side(reader, problem, learners)
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, markup=False)
    print_side_by_side(console, shown)
    print_problems(console, "small, step 1", list_problems(reader, learners), list(AGENTS), learners)
    assert isinstance(console.file, io.StringIO)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue()).splitlines()
    assert max(map(len, lines)) <= width
    page = " ".join("\n".join(lines).split())
    for response in shown.responses:
        for word in response.text.split():
            assert word in page
        assert f"#{response.sample} {response.verdict}" in page
    # Both agents stand beside each other: one line begins the first response of each.
    assert sum(line.count("#0 ") == 2 for line in lines) == 1
    for name in problem_ids(1):
        assert name in page
    assert page.count("objective") == 16


def test_a_response_that_was_not_used_says_why(cli: Cli, finished_copy: Path) -> None:
    problem = problem_ids(1)[0]
    pool = Path("artifacts/small/pool/step=0001/learner=bo")
    edit(pool, tables.POOL, {"status": "too_long"}, problem_id=problem, source="ada", sample=1)
    out = cli("show", RUN, "--step", 1, "--problem", problem, "--learner", "bo").out
    assert out.count("→ bo  not used: too_long") == 1


def test_the_list_to_choose_from(cli: Cli, there: Path) -> None:
    listed = tree(cli, "--step", 1)["problems"]
    assert [line["problem_id"] for line in listed] == problem_ids(1)
    rewards: dict[tuple[str, str], list[float]] = {}
    for agent in AGENTS:
        for row in table("verdicts", 1, agent=agent):
            rewards.setdefault((row["problem_id"], agent), []).append(row["reward"])
    live = 0
    for line in listed:
        groups = {agent: rewards[line["problem_id"], agent] for agent in AGENTS}
        assert line["correct"] == {agent: [int(sum(group)), 4] for agent, group in groups.items()}
        mixed = len({reward for group in groups.values() for reward in group}) > 1
        assert line["live"] == dict.fromkeys(AGENTS, mixed)
        live += mixed
    assert live > 0
    text = cli("show", RUN, "--step", 1).out
    for line in listed:
        (row,) = [row for row in text.splitlines() if line["problem_id"] in row]
        assert all(f"{right}/{all_of}" in row for right, all_of in line["correct"].values())
        assert ("live" if line["live"]["ada"] else "uniform") in row


def test_graded_responses_are_shown_by_their_rewards(cli: Cli, project: Path) -> None:
    params = f"{PARAMS}verification: {{reward: 'rewards:score'}}\n"
    (project / RUN / "params.yaml").write_text(params)
    (project / "rewards.py").write_text("def score(problem, response, finish_reason):\n    return len(response) / 64\n")
    train(cli, "small", AGENTS)
    rewards: dict[tuple[str, str], list[float]] = {}
    for agent in AGENTS:
        for row in table("verdicts", 1, agent=agent):
            rewards.setdefault((row["problem_id"], agent), []).append(row["reward"])
    text = cli("show", RUN, "--step", 1).out
    assert text.startswith("small, step 1: mean reward of each agent")
    for line in tree(cli, "--step", 1)["problems"]:
        means = {agent: sum(group) / 4 for agent in AGENTS if (group := rewards[line["problem_id"], agent])}
        assert line["mean_reward"] == pytest.approx(means)
        assert line["correct"] == {}
        (row,) = [row for row in text.splitlines() if line["problem_id"] in row]
        assert all(f"{mean:.3f}" in row for mean in means.values())
    problem = problem_ids(1)[0]
    said = cli("show", RUN, "--step", 1, "--problem", problem).out
    assert "correct" not in said  # every reward is above 0, and the best is not twice the worst
    assert f"reward {rewards[problem, 'ada'][0]:g}" in said
    shown = read_side_by_side(StepReader(Pipeline.open(RUN), 1), problem, list(AGENTS))
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    print_side_by_side(console, shown)
    mean = sum(rewards[problem, "ada"]) / 4
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"mean reward {mean:.3f}" in drawn
    assert "correct" not in drawn
    # The lowest reward of the problem is red, the highest green.
    every = [reward for agent in AGENTS for reward in rewards[problem, agent]]
    assert f"\x1b[1;31mreward {min(every):g}\x1b[0m" in drawn
    assert f"\x1b[1;32mreward {max(every):g}\x1b[0m" in drawn
    asked = cli("what-if", RUN, "--step", 1, "--set", "algorithm.capability.metric=positive_rate").out
    assert re.search(r"capability of ada  mean reward 0\.\d+ → 1", asked)
    assert "punished best" in asked
    assert "correct" not in asked


def test_unknown_names_are_one_line(cli: Cli, there: Path) -> None:
    first, second = problem_ids(1)[0], problem_ids(2)[0]
    wrong = cli("show", RUN, "--step", 1, "--problem", first[:-1] + "zz")
    assert wrong.code == 2
    assert f"no problem '{first[:-1]}zz' in step 1. Near: " in wrong.error
    assert first in wrong.error
    assert first in cli("show", RUN, "--step", 1, "--problem", first[-5:]).error
    if second not in problem_ids(1):
        assert "It is in step 2" in cli("show", RUN, "--step", 1, "--problem", second).error
    assert "expected 1 to 2, found 3" in cli("show", RUN, "--step", 3).error
    assert "one of ada, bo" in cli("show", RUN, "--step", 1, "--learner", "cy").error


def test_a_run_at_work_shows_what_there_is(cli: Cli, finished_copy: Path) -> None:
    base = Path("artifacts/small")
    problem = problem_ids(2)[0]
    shutil.rmtree(base / "updates/step=0002/agent=bo")
    shutil.rmtree(base / "advantages/step=0002")
    shutil.rmtree(base / "capability/step=0002")
    shutil.rmtree(base / "verdicts/step=0002/agent=bo")
    result = cli("show", RUN, "--step", 2, "--problem", problem)
    assert result.code == 0, result.err
    for line in (
        "not there yet: verdicts of bo (`hacpo verify pipelines/small --step 2 --agent bo`)",
        "not there yet: advantages of ada (`hacpo advantage pipelines/small --step 2`)",
        "not there yet: trace of bo (`hacpo update pipelines/small --step 2 --agent bo`)",
        "not there yet: capability (`hacpo advantage pipelines/small --step 2`)",
    ):
        assert line in result.out
    assert "bo sample 0: not verified" in result.out
    listed = cli("show", RUN, "--step", 2)
    assert listed.code == 0
    assert "not there yet: verdicts of bo" in listed.out
    for name in ("verdicts", "rollouts", "pool"):
        shutil.rmtree(base / name / "step=0002")
    assert "not there yet: rollouts of ada" in cli("show", RUN, "--step", 2, "--problem", problem).out
    shutil.rmtree(base / "prompts/step=0002")
    assert "`hacpo run pipelines/small` makes it" in cli("show", RUN, "--step", 2).error


@pytest.mark.slow
def test_neither_command_loads_torch(there: Path) -> None:
    code = (
        "import sys\nfrom hacpo.pipeline.execution.command_line import run_app\nfrom hacpo.cli import app\n"
        "codes = [run_app(app, [name, 'pipelines/small', '--step', '1']) for name in ('show', 'what-if')]\n"
        "sys.exit(any(codes) or 'torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment() | {"COLUMNS": "100"},
        cwd=os.getcwd(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
