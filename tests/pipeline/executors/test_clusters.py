"""`hacpo run` on a real Ray cluster of two nodes, and through submitit: the bytes of one machine."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from conftest import Cli, contents, environment
from hacpo.artifacts.layout import Layout
from tests.small_project import PARAMS, changed

RUN = "pipelines/small"


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of two nodes with a core each."""
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs hacpo[ray]")
    two = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "env_vars": {"HACPO_NODE": "a"}})
    two.add_node(num_cpus=1, env_vars={"HACPO_NODE": "b"})
    yield two.address
    two.shutdown()


def started(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hacpo.cli", "run", RUN, *options]
    return subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def far_workers() -> list[psutil.Process]:
    """The processes of hacpo's that processes of Ray's have started."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            if "hacpo.pipeline.execution.worker_process" in (process.info["cmdline"] or []) and parent is not None:
                found += [process] if "".join(parent.cmdline()).startswith("ray::") else []
    return found


def under_way() -> list[Path]:
    """Orders whose process has begun and not ended."""
    found = []
    for report in Path("artifacts/small/.locks/orders").glob("*.json"):
        with contextlib.suppress(OSError):
            found += [] if "summary" in report.read_text() else [report]
    return found


@pytest.mark.slow
def test_a_run_on_two_nodes_has_the_bytes_of_one_machine_and_a_lost_worker_is_repeated(
    project: Path, finished: Path, cluster: str, cli: Cli
) -> None:
    Path(f"{RUN}/params.yaml").write_text(changed(PARAMS, f"{{executor: {{address: '{cluster}'}}}}"))
    running = started("--executor", "ray")
    table = Layout(Path("artifacts/small")).rollouts(1, "ada")
    deadline = time.monotonic() + 300
    while not table.exists() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    while running.poll() is None and time.monotonic() < deadline and not (under_way() and far_workers()):
        time.sleep(0.01)
    for process in far_workers():  # those that are at an order, and those that keep a model for the next
        process.kill()
    _, err = running.communicate(timeout=300)
    assert running.returncode == 0, err
    assert contents(project) == contents(finished)
    assert "worker process was killed" in err
    assert "it is repeated" in err
    metrics = json.loads(Layout(Path("artifacts/small")).metrics("generate", 1, "ada").read_text())
    assert metrics["slices_seconds"] > 0
    assert not Path("artifacts/small/.slices").exists()
    assert not Path("artifacts/small/.locks/orders").exists()
    assert "no finding" in cli("audit", RUN).out


@pytest.mark.slow
def test_a_run_by_jobs_has_the_bytes_of_one_machine(
    project: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit", reason="needs hacpo[slurm]")
    monkeypatch.setenv("HACPO_SUBMITIT_CLUSTER", "local")
    running = started("--executor", "slurm", "--until", "1")
    _, err = running.communicate(timeout=500)
    assert running.returncode == 0, err
    made = contents(project)
    whole = contents(finished)
    assert {name for name in made if "rollouts/step=0001" in name}
    assert all(whole[name] == content for name, content in made.items())


def test_without_a_cluster_one_line_says_so(project: Path, cli: Cli) -> None:
    pytest.importorskip("ray", reason="needs hacpo[ray]")
    Path(f"{RUN}/params.yaml").write_text(changed(PARAMS, "{executor: {address: '127.0.0.1:1'}}"))
    refused = cli("run", RUN, "--executor", "ray")
    assert refused.code == 2
    assert "executor.address: 127.0.0.1:1: no Ray cluster answers" in refused.error
    assert "--executor is none that there is" in cli("run", RUN, "--executor", "kubernetes").error


def test_settings_of_an_executor_are_not_of_the_run(project: Path, cli: Cli) -> None:
    assert cli("resolve", RUN).code == 0
    before = Path("artifacts/small/settings.json").read_bytes()
    Path(f"{RUN}/params.yaml").write_text(changed(PARAMS, "{executor: {kind: ray, slices: 4}}"))
    assert cli("resolve", RUN).code == 0
    assert Path("artifacts/small/settings.json").read_bytes() == before
    Path(f"{RUN}/params.yaml").write_text(changed(PARAMS, "{executor: {kind: ray, stages: {generat: {gpus: 1}}}}"))
    assert "executor.stages.generat: no such stage (expected one of resolve, prepare" in cli("run", RUN).error
