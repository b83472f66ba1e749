"""Two at work on one run, and what is recorded when: `hacpo run` and `dvc repro` side by side lose nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from conftest import PARAMS, Cli, environment, make_project

RUN = [sys.executable, "-m", "hacpo.cli", "run", "pipelines/small", "--jobs", "2"]
REPRO = [sys.executable, "-m", "dvc", "repro", "pipelines/small/dvc.yaml"]
ENDLESS = (
    "{tiny: {architecture: llama, layers: 1, hidden: 48, heads: 2, vocabulary: numbers_words, "
    "warmup: {steps: 1000000, batch_size: 8, learning_rate: 1.0e-3}}}"
)
"""An agent whose start is not made before the test ends."""


@pytest.fixture
def uneven(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in which ada is ready at once, and bo never, in its root."""
    root = make_project(tmp_path / "uneven", models, PARAMS.replace("{model: models/bo}", ENDLESS))
    monkeypatch.chdir(root)
    return root


@contextmanager
def started(command: list[str], **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A command in the background; it and whatever it started is killed in the end."""
    process = subprocess.Popen(
        command,
        env={**environment(), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        print(process.communicate()[0])


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> bool:
    """Whether something came about while a process works; gives up after a while."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.05)
    return False


def identities(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file: the same only if nobody touched it."""
    return {
        str(path): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".") and ".locks" not in path.parts
    }


def recorded(name: str) -> bool:
    lock = Path("pipelines/small/steps/0000/dvc.lock")
    return lock.is_file() and name in lock.read_text()


def test_a_stage_is_recorded_when_it_is_done_not_when_its_slowest_neighbour_is(uneven: Path, cli: Cli) -> None:
    start = Path("artifacts/small/checkpoints/step=0000/agent=ada")
    with started(RUN) as process:
        assert wait_for(start.is_dir, process)
        assert wait_for(lambda: recorded("warmup-ada:"), process), "the work of ada waits for bo"
        before = identities(start)
        process.kill()
        process.wait()
    params = Path("pipelines/small/params.yaml")
    params.write_text(params.read_text().replace("steps: 1000000", "steps: 1"))
    assert cli("run", "pipelines/small", "--jobs", "1", "--until", "0").code == 0
    assert identities(start) == before


def test_dvc_repro_beside_a_run_refuses_and_removes_nothing(uneven: Path) -> None:
    start = Path("artifacts/small/checkpoints/step=0000/agent=ada")
    with started(RUN) as process:
        assert wait_for(start.is_dir, process)
        assert wait_for(lambda: recorded("warmup-ada:"), process)  # which may put other links in place
        before = identities(start)
        repro = subprocess.run(REPRO, env=environment(), capture_output=True, text=True, check=False)
        assert repro.returncode != 0
        assert f"it is being blocked by:\n  (PID {process.pid})" in repro.stderr
        assert process.poll() is None
        assert identities(start) == before
        looked = subprocess.run(
            [*REPRO[:-2], "status", REPRO[-1]], env=environment(), capture_output=True, text=True, check=False
        )
        assert looked.returncode == 0, looked.stderr  # looking at a run under way is no harm


def test_a_run_beside_dvc_repro_refuses_in_one_line_and_takes_over_when_it_is_gone(uneven: Path, cli: Cli) -> None:
    assert cli("plan", "pipelines/small").code == 0
    with started(REPRO) as process:
        beside = "artifacts/small/checkpoints/step=0000/.agent=bo.tmp-*"
        assert wait_for(lambda: bool(list(uneven.glob(beside))), process)
        before = identities(uneven / "artifacts")
        refused = cli("run", "pipelines/small")
        assert refused.code == 7
        assert f"`dvc repro pipelines/small/dvc.yaml` (process {process.pid}) works on this pipeline" in refused.error
        assert identities(uneven / "artifacts") == before
        process.kill()
        process.wait()
        params = Path("pipelines/small/params.yaml")
        params.write_text(params.read_text().replace("steps: 1000000", "steps: 1"))
        ada = identities(uneven / "artifacts/small/checkpoints/step=0000/agent=ada")
        assert cli("run", "pipelines/small", "--jobs", "1", "--until", "0").code == 0
        assert identities(uneven / "artifacts/small/checkpoints/step=0000/agent=ada") == ada


def test_a_stage_whose_dvc_was_killed_before_it_began_does_nothing(project: Path, cli: Cli) -> None:
    """The kernel's signal on a parent's death comes too late: DVC is gone before the stage can ask for it."""
    assert cli("plan", "pipelines/small").code == 0
    Path("bin").mkdir()
    hacpo = Path("bin/hacpo")
    hacpo.write_text(
        f"#!{sys.executable}\n"
        "import json, os, signal, sys, time\n"
        "entry = next(iter(json.load(open('.dvc/tmp/rwlock'))['write'].values()))\n"
        "os.kill(entry['pid'], signal.SIGKILL)\n"
        "while os.getppid() == entry['pid']: time.sleep(0.01)\n"
        f"code = os.spawnv(os.P_WAIT, {sys.executable!r}, [{sys.executable!r}, '-m', 'hacpo.cli', *sys.argv[1:]])\n"
        "open('ended', 'w').write(str(code))\n"
    )
    hacpo.chmod(0o755)
    variables = environment()
    variables |= {"PATH": f"{hacpo.parent.resolve()}{os.pathsep}{variables['PATH']}", "SHELL": "/bin/sh"}
    single = ["repro", "--single-item", "pipelines/small/dvc.yaml:resolve"]
    killed = subprocess.run([*REPRO[:3], *single], env=variables, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while not Path("ended").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert Path("ended").read_text() == "1"
    assert not Path("artifacts/small/settings.json").exists()


def test_a_stage_ends_with_its_dvc_also_where_a_shell_is_between_them(uneven: Path, cli: Cli) -> None:
    for command in ("plan", "resolve"):
        assert cli(command, "pipelines/small").code == 0
    shell = Path("shell")
    shell.write_text('#!/bin/sh\n/bin/sh "$@"\nexit $?\n')  # one that does not become the command
    shell.chmod(0o755)
    single = ["repro", "--single-item", "pipelines/small/steps/0000/dvc.yaml:warmup-bo"]
    beside = Path("artifacts/small/checkpoints/step=0000")
    with started([*REPRO[:3], *single], SHELL=str(shell.resolve())) as process:
        assert wait_for(lambda: bool(list(beside.glob(".agent=bo.tmp-*"))), process)
        stage = int(next(beside.glob(".agent=bo.tmp-*")).name.rpartition("-")[2])
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while psutil.pid_exists(stage) and psutil.Process(stage).status() != "zombie" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not psutil.pid_exists(stage) or psutil.Process(stage).status() == "zombie"
