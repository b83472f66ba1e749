"""The processes that stages run in: whoever starts them, and however they end."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import hacpo
from conftest import Cli, contents, environment
from hacpo.errors import SettingsError
from hacpo.pipeline.execution import workers as workers_module
from hacpo.pipeline.execution.session import ConsoleProgress
from hacpo.pipeline.execution.workers import Workers

RUN = "pipelines/small"


def in_every_process(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Have every Python that is started from here begin with this code."""
    (folder / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_plain_script_runs_a_pipeline_side_by_side(project: Path, finished: Path) -> None:
    """Without `if __name__ == "__main__"`, as anybody writes it at first: nothing of it runs twice."""
    Path("script.py").write_text(
        "import hacpo\n"
        "print('begins', flush=True)\n"
        f"tables = hacpo.run('{RUN}', jobs=2, until=1)\n"
        "print(tables['rollouts'].height, 'rollouts')\n"
    )
    done = subprocess.run([sys.executable, "script.py"], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("begins") == 1
    assert done.stdout.endswith("64 rollouts\n")  # 2 agents x 8 prompts x 4 responses
    made, whole = contents(project), contents(finished)
    rollouts = [name for name in made if name.startswith("rollouts/step=0001")]
    assert rollouts
    assert all(made[name] == whole[name] for name in rollouts)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"until": 3}, "until is out of range (expected a whole number from 0 to 2, found 3)"),
        ({"until": -1}, "until is out of range (expected a whole number from 0 to 2, found -1)"),
        ({"until": "1"}, "until is out of range (expected a whole number from 0 to 2, found '1')"),
        ({"jobs": 0}, "jobs is out of range (expected a whole number from 1, found 0)"),
        ({"jobs": 1.5}, "jobs is out of range (expected a whole number from 1, found 1.5)"),
        ({"jobs": True}, "jobs is out of range (expected a whole number from 1, found True)"),
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_is_done(project: Path, given: Any, says: str) -> None:
    with pytest.raises(SettingsError) as refused:
        hacpo.run(RUN, **given)
    assert str(refused.value) == f"{RUN}: {says}"
    assert not Path("artifacts").exists()


def test_the_command_refuses_a_step_beyond_the_last(project: Path, cli: Cli) -> None:
    refused = cli("run", RUN, "--until", 3)
    assert refused.code == 2
    assert "--until is beyond the last step (expected 0 to 2, found 3)" in refused.error
    assert not Path("artifacts").exists()


def test_what_nobody_foresaw_in_a_worker_is_named(
    project: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_every_process(
        tmp_path,
        monkeypatch,
        "from hacpo.pipeline.project import Pipeline\n"
        "def broken(*_, **__): return {}['of the worker']\n"
        "Pipeline.open = broken\n",
    )
    Path("artifacts").mkdir()
    failed = cli("run", RUN, "--jobs", 2)
    assert failed.code == 70
    assert "an unforeseen error, KeyError: 'of the worker'. What was going on is in " in failed.error
    (path,) = Path("artifacts/.crashes").iterdir()
    written = path.read_text()
    for frame in ("in run_pipeline", "in broken", "KeyError: 'of the worker'"):  # the driver's and the worker's
        assert frame in written


def test_a_worker_that_ends_before_its_command_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_every_process(tmp_path, monkeypatch, "import os\nos._exit(3)\n")
    started = workers_module._started

    def ended() -> tuple[subprocess.Popen[bytes], Connection]:
        process, connection = started()
        process.wait()  # so that nobody reads what is sent
        return process, connection

    monkeypatch.setattr(workers_module, "_started", ended)
    with Workers(2, ConsoleProgress()) as workers:
        done, failure = workers.run([(0, ["one"]), (1, ["two"]), (0, ["three"])])
    assert done == []
    assert "a worker process ended by itself, with exit code 3" in str(failure)
