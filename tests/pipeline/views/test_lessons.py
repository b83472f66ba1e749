"""What a run says of steps that teach nothing, and of the evaluation that a number comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import PARAMS, Cli, train
from hacpo.artifacts import storage
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.views import lessons

RUN = "pipelines/small"
CUT = PARAMS.replace("max_new_tokens: 26", "max_new_tokens: 1").replace("steps: 2", "steps: 3")
ONCE = "teaches ada and bo nothing: all responses to a problem have the same reward"


def rewrite(project: Path, params: str) -> None:
    (project / RUN / "params.yaml").write_text(params)


def test_a_run_says_once_that_a_step_teaches_nothing(project: Path, cli: Cli) -> None:
    rewrite(project, CUT)
    done = cli("run", RUN, "--jobs", "1")
    assert done.code == 0, done.err
    said = [line for line in done.err.splitlines() if ONCE in line]
    assert said == [
        f"step 1 {ONCE} (accuracy 0.000). 100 % of them were cut off: look at sampling.max_new_tokens, 1 here. "
        "Its problems: `hacpo show pipelines/small --step 1`. Said again only after a step that teaches something."
    ]
    summary = "3 of 3 steps taught ada and bo nothing, all rewards of a problem being equal: 1-3"
    assert [line for line in done.out.splitlines() if summary in line]
    assert summary in cli("status", RUN).out


def test_a_number_says_of_which_evaluation_it_is(project: Path, cli: Cli) -> None:
    rewrite(project, PARAMS.replace("steps: 2", "steps: 3"))
    done = cli("run", RUN, "--jobs", "1")
    first, second, third = (line for line in done.err.splitlines() if line.startswith("step "))
    assert first.count("(step 0)") == 2  # ada's and bo's: one evaluation so far
    assert "->" not in first
    assert second.count("(step 2)") == 2
    assert second.count(" -> ") == 2
    assert third.count("(step 3)") == 2  # evaluated after the last
    assert "ada: mean reward 0." in first


def test_the_stage_says_it_too_and_not_again(project: Path, cli: Cli) -> None:
    rewrite(project, CUT)
    train(cli, "small", ["ada", "bo"], steps=2)
    # Repeated: the line depends on the files, not on what was said before.
    first, second = (cli("advantage", RUN, "--step", step).out.splitlines() for step in (1, 2))
    assert len([line for line in first if line.startswith(f"step 1 {ONCE}")]) == 1
    assert len(second) == 1
    elsewhere = cli("advantage", RUN, "--step", 1, "--out", "elsewhere").out
    assert ONCE not in elsewhere


def test_a_reward_function_is_named(project: Path, cli: Cli) -> None:
    rewrite(project, PARAMS + "verification: {reward: 'rewards:score'}\n")
    (project / "rewards.py").write_text("def score(problem, response, finish_reason):\n    return 0.25\n")
    train(cli, "small", ["ada", "bo"])
    said = cli("advantage", RUN, "--step", 1).out
    assert "the same reward (mean reward 0.250). Look at what the reward function rewards:score makes of them" in said
    assert "mean reward 0.250" in cli("verify", RUN, "--step", 1, "--agent", "ada").out


# --- when it is said, by numbers made up -----------------------------------------------------------------------------


class Numbers:
    """Metrics files of a run that was never made."""

    def __init__(self, project: Path, steps: int) -> None:
        rewrite(project, PARAMS.replace("steps: 2", f"steps: {steps}"))
        self.pipeline = Pipeline.open(Path(RUN))

    def step(self, step: int, *, live: dict[str, float], mean: dict[str, float], **verdicts: float) -> None:
        layout = self.pipeline.layout
        groups = {f"{agent}.live_groups": count for agent, count in live.items()}
        storage.write_json(layout.metrics("advantage", step, "all"), groups)
        for agent, reward in mean.items():
            counts = {f"verdict.{name}": count for name, count in verdicts.items()} or {"verdict.wrong": 32}
            counts |= {"verdict.correct": 1} if reward else {}
            storage.write_json(layout.metrics("verify", step, agent), {"accuracy": reward, **counts})

    def said(self, steps: int) -> dict[int, list[str]]:
        return {step: lines for step in range(1, steps + 1) if (lines := lessons.remarks(self.pipeline, step))}


@pytest.fixture
def numbers(project: Path) -> Numbers:
    return Numbers(project, 8)


def test_it_is_said_again_after_a_relapse(numbers: Numbers) -> None:
    for step, live in enumerate([0, 0, 3, 0, 0, 2], start=1):
        numbers.step(step, live={"ada": live, "bo": 3}, mean={"ada": 0.5, "bo": 0.5})
    said = numbers.said(6)
    assert said.keys() == {1, 4}
    assert all(lines[0].startswith(f"step {step} teaches ada nothing") for step, lines in said.items())
    (line,) = lessons.summary(numbers.pipeline)
    assert line.startswith("4 of 6 steps taught ada nothing, all rewards of a problem being equal: 1-2, 4-5 (")


def test_an_agent_that_earns_nothing_beside_one_that_does(numbers: Numbers) -> None:
    # bo earns nothing in steps 2 to 6, but learns from ada's answers: said in the third such step, 4, and once.
    for step in range(1, 8):
        bo = 0.25 if step in (1, 7) else 0.0
        numbers.step(step, live={"ada": 3, "bo": 3}, mean={"ada": 0.5, "bo": bo})
    said = numbers.said(7)
    assert said.keys() == {4}
    assert said[4][0].startswith("bo has earned no reward in steps 2-4: it learns from the others' responses alone.")
    assert "None is correct: look at prompt and verification" in said[4][0]
    assert lessons.summary(numbers.pipeline) == []


@pytest.mark.parametrize(
    ("verdicts", "mean", "words"),
    [
        ({"correct": 32}, 1.0, "All are correct: nothing is left to learn"),
        ({"no_answer": 20, "wrong": 12}, 0.0, "40 of 64 have no answer in a box: look at prompt"),
        ({"wrong": 32}, 0.0, "None is correct"),
        ({"error": 30, "wrong": 2}, 0.0, "60 of 64 could not be judged"),
    ],
)
def test_the_likeliest_cause_is_named(numbers: Numbers, verdicts: dict[str, int], mean: float, words: str) -> None:
    numbers.step(1, live={"ada": 0, "bo": 0}, mean={})
    for agent in ("ada", "bo"):
        counts = {f"verdict.{name}": count for name, count in verdicts.items()}
        storage.write_json(numbers.pipeline.layout.metrics("verify", 1, agent), {"accuracy": mean, **counts})
    (line,) = lessons.remarks(numbers.pipeline, 1)
    assert words in line


def test_files_that_are_not_there_or_damaged_say_nothing(numbers: Numbers) -> None:
    assert lessons.remarks(numbers.pipeline, 1) == lessons.summary(numbers.pipeline) == []
    path = numbers.pipeline.layout.metrics("advantage", 1, "all")
    path.parent.mkdir(parents=True)
    path.write_text("[1, 2")
    assert lessons.remarks(numbers.pipeline, 1) == []
