"""examples/: what is shown there works, on a run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from conftest import ROOT, Cli, environment
from examples import read_tables
from examples.reward import score


@pytest.mark.parametrize(
    ("response", "finish_reason", "reward", "verdict"),
    [
        ("2+7=9 9-2=7 \\boxed{7}", "stop", 1.0, "correct"),
        ("2+2=11 12-6=8 \\boxed{7}", "stop", 0.5, "correct"),
        ("\\boxed{7}", "stop", 0.5, "correct"),
        ("7/0=7 \\boxed{7}", "stop", 0.5, "correct"),
        (f"1+{'9' * 5000}=7 \\boxed{{7}}", "stop", 0.5, "correct"),
        ("\\boxed{7} \\boxed{8}", "stop", 0.0, "wrong"),
        ("7", "stop", 0.0, "no_answer"),
        ("\\boxed{7}", "length", 0.0, "truncated"),
    ],
)
def test_the_reward_looks_at_the_working_too(response: str, finish_reason: str, reward: float, verdict: str) -> None:
    assert score({"answer": "7"}, response, finish_reason) == (reward, verdict)


def test_the_reward_judges_a_run(cli: Cli, finished_copy: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", finished_copy / "examples")
    reward = "verification.reward=examples.reward:score"
    result = cli("verify", "pipelines/small", "--step", 1, "--agent", "ada", "--out", tmp_path / "try", "--set", reward)
    assert result.code == 0, result.err
    graded = pl.read_parquet(tmp_path / "try/verdicts/**/*.parquet")
    rollouts = pl.read_parquet("artifacts/small/rollouts/step=0001/agent=ada/*.parquet")
    judged = (
        graded.join(rollouts, on="rollout_id").select("answer", "text", "finish_reason", "reward", "verdict").rows()
    )
    assert len(judged) == 32  # 8 prompts x 4 responses
    for answer, text, finish_reason, given, verdict in judged:
        assert (given, verdict) == score({"answer": answer}, text, finish_reason)


def test_the_tables_are_read_as_shown(finished: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/read_tables.py"), "artifacts/small"]
    shown = subprocess.run(command, cwd=finished, env=environment(), capture_output=True, text=True, check=True).stdout
    for view in (read_tables.rewards, read_tables.teaching, read_tables.lengths, read_tables.strongest):
        assert (view.__doc__ or "").splitlines()[0] in shown


def test_the_lines_of_the_readme_print_advantages(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    monkeypatch.chdir(finished)
    for block in lines:
        exec(block.replace("artifacts/quickstart", "artifacts/small").replace("step=7", "step=2"), {})
    assert "effective_advantage" in capsys.readouterr().out


def test_what_the_tables_say_is_what_the_files_hold(finished: Path) -> None:
    import hacpo

    run = hacpo.read_run(finished / "artifacts/small")
    rewards = read_tables.rewards(run)
    assert rewards["responses"].to_list() == [32] * 4  # 2 steps, 2 agents; 8 prompts x 4 responses
    first = pl.read_parquet(finished / "artifacts/small/verdicts/step=0001/agent=ada/*.parquet")
    assert rewards["reward"][0] == first["reward"].mean()
    teaching = read_tables.teaching(run)
    assert teaching["responses"].sum() == run["trace"].height
    lengths = read_tables.lengths(run)
    assert (lengths["source_tokens"] > 0).all()
    assert (read_tables.strongest(run)["source"] != read_tables.strongest(run)["agent"]).all()
