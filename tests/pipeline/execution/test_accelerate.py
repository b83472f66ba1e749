"""Several processes through accelerate: how they are started, what a user's config may say, and who reads weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from conftest import ROOT, Cli
from hacpo.pipeline.execution.accelerating import accelerate_command
from hacpo.pipeline.project import Pipeline
from tests.updates_of_processes import HALVES, UPDATE, assert_same, ranks, wait_for

CONFIG = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 2,
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False},
}
"""As `accelerate config` writes one."""


def configured(root: Path, config: dict[str, Any], **launcher: Any) -> Path:
    """A user's config file in the project, and the run's params.yaml naming it."""
    (root / "accelerate.yaml").write_text(json.dumps(config))
    params = root / "pipelines/small/params.yaml"
    settings = {"processes": 2, "accelerate_config": "accelerate.yaml", **launcher}
    params.write_text(params.read_text() + f"launcher: {json.dumps(settings)}\n")
    return params


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
def test_accelerate_launch_starts_the_processes_as_the_users_config_says(
    finished_copy: Path, cli: Cli, tmp_path: Path
) -> None:
    """One process, then two whose layers stay gathered: the same bytes."""
    assert cli(*UPDATE, "--out", tmp_path / "one", "--set", HALVES).code == 0
    configured(finished_copy, CONFIG)
    mark = f"{tmp_path}/two"
    words = [*(str(word) for word in UPDATE[1:]), "--out", mark, "--set", HALVES]
    with subprocess.Popen([sys.executable, "-m", "hacpo.stages.update", *words], stderr=subprocess.PIPE) as process:
        wait_for(lambda: len(ranks(mark)) == 2)
        told = [(Path("/proc") / str(rank) / "environ").read_bytes().split(b"\0") for rank in ranks(mark)]
        starters = {_parent(rank) for rank in ranks(mark)}
        _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    for environment in told:
        assert b"WORLD_SIZE=2" in environment
        assert b"ACCELERATE_USE_FSDP=true" in environment
        assert b"FSDP_RESHARD_AFTER_FORWARD=false" in environment
    assert [b"accelerate.commands.launch" in command for command in starters] == [True]
    assert_same(tmp_path / "one", tmp_path / "two")


def _parent(process: int) -> bytes:
    """The command line of a process's parent."""
    status = (Path("/proc") / str(process) / "stat").read_text()
    parent = status.rpartition(")")[2].split()[1]
    return (Path("/proc") / parent / "cmdline").read_bytes()


@pytest.mark.parametrize(
    ("change", "launcher", "message"),
    [
        ({"num_processes": 8}, {}, "num_processes contradicts launcher (2 processes x 1 nodes) (expected 2, found 8)"),
        ({"num_machines": 2}, {}, "num_machines contradicts launcher.nodes (expected 1, found 2)"),
        ({"mixed_precision": "bf16"}, {}, "mixed_precision contradicts engine.dtype float32 (expected no, found bf16)"),
        ({"mixed_precision": "fp16"}, {}, "(expected no, found fp16)"),
        ({"fsdp_config": {}}, {}, "fsdp_version contradicts how updates are computed (FSDP2) (expected 2, found 1)"),
        ({"fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}}, {}, "fsdp_offload_params contradicts"),
        (
            {"fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}},
            {},
            "contradicts optimizer.gradient_checkpointing (expected False, found True)",
        ),
        ({"distributed_type": "DEEPSPEED"}, {}, "expected MULTI_CPU or FSDP or MULTI_GPU, found DEEPSPEED"),
        ({"distributed_type": "NO"}, {}, "distributed_type contradicts engine.device cpu on 2 processes"),
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, {}, "without torch.compile"),
        ({"dynamo_config": {"backend": "INDUCTOR"}}, {}, "without torch.compile"),
        ({"fsdp_config": {"version": 2, "offload_params": True}}, {}, "fsdp_offload_params contradicts"),
        ({"parallelism_config": {"parallelism_config_dp_replicate_size": 2}}, {}, "launcher.replicas 1 (expected 1"),
        ({"parallelism_config": {"parallelism_config_tp_size": 2}}, {}, "tp_size contradicts"),
        ({"processes": 2}, {}, "accelerate cannot read it"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, {}, "accelerate cannot read it"),
        ({}, {"accelerate_config": "elsewhere.yaml"}, "there is no such file"),
        ({}, {"command": "torchrun"}, "name the file in `command`"),
        ({}, {"processes": 1}, "set processes"),
    ],
)
def test_a_config_that_contradicts_the_settings_is_refused(
    finished_copy: Path, cli: Cli, tmp_path: Path, change: dict[str, Any], launcher: dict[str, Any], message: str
) -> None:
    configured(finished_copy, {**CONFIG, **change}, **launcher)
    refused = cli(*UPDATE, "--out", tmp_path / "out")
    assert refused.code == 2
    assert message in refused.error
    assert not (tmp_path / "out").exists()
    checked = cli("plan", "--check", "pipelines/small")
    assert checked.code == 1
    assert message in checked.out.replace("\n", " ")


def test_the_users_own_default_config_counts_only_if_it_is_asked_for(
    finished_copy: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache/accelerate").mkdir(parents=True)
    (tmp_path / "cache/accelerate/default_config.yaml").write_text(json.dumps({**CONFIG, "num_processes": 5}))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    command = [sys.executable, "-m", "hacpo.stages.update", *map(str, UPDATE[1:]), "--out", str(tmp_path / "out")]
    configured(finished_copy, CONFIG, accelerate_config="default")
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "num_processes contradicts launcher (2 processes x 1 nodes) (expected 2, found 5)" in refused.stderr

    params = finished_copy / "pipelines/small/params.yaml"
    params.write_text(params.read_text().replace('"accelerate_config": "default"', '"accelerate_config": null'))
    assert places(finished_copy) == ["02", "12"]


def test_multi_cpu_is_more_than_one_process(finished_copy: Path) -> None:
    """`accelerate launch` alone starts one process under such a config, and says nothing."""
    configured(finished_copy, {**CONFIG, "distributed_type": "MULTI_CPU", "use_cpu": True})
    assert places(finished_copy) == ["02", "12"]


def places(root: Path) -> list[str]:
    """Rank and number of processes, as every process is told that the run's command starts."""
    command = accelerate_command(Pipeline.open(Path("pipelines/small")).settings, root)
    (root / "place.py").write_text("import os; print(os.environ['RANK'] + os.environ['WORLD_SIZE'] + '\\n')")
    return sorted(subprocess.run([*command, "place.py"], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "fsdp_version"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "mixed_precision"),
    ],
)
def test_an_accelerate_launch_by_hand_must_fit_too(
    finished_copy: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, str], message: str
) -> None:
    params = finished_copy / "pipelines/small/params.yaml"
    params.write_text(params.read_text() + "launcher: {processes: 2}\n")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", **told}.items():
        monkeypatch.setenv(name, value)
    refused = cli(*UPDATE, "--out", tmp_path / "out")
    assert refused.code == 2
    assert f"hacpo: error: {message}: accelerate was told another" in refused.error


def test_a_launcher_that_starts_one_process_is_found_out(finished_copy: Path, cli: Cli, tmp_path: Path) -> None:
    """`accelerate launch --cpu --num_processes 2` starts one and says nothing."""
    params = finished_copy / "pipelines/small/params.yaml"
    command = f"{sys.executable} -m accelerate.commands.launch --cpu --num_processes {{processes}} --num_machines 1"
    params.write_text(params.read_text() + f"launcher: {{processes: 2, command: {command!r}}}\n")
    result = cli(*UPDATE, "--out", tmp_path / "out")
    assert result.code == 2
    assert "wrong number of processes (expected 2 (processes x nodes), found 1)" in result.error


ELSEWHERE = """
import os, runpy, sys
if os.environ["RANK"] != "0":
    os.chdir(sys.argv[1])
sys.argv = sys.argv[2:]
sys.path.insert(0, {root!r})
runpy.run_module(sys.argv.pop(0 if sys.argv[0] != "-m" else 1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        (2, ["algorithm.loss={kl_coef: 0.05, kl_responses: own}"]),
        (1, ["agents.ada.adapter={rank: 4, alpha: 8}", "engine.dtype=bfloat16"]),
    ],
    ids=["with an initial model", "an adapter in bfloat16"],
)
def test_only_the_first_process_reads_weights(
    finished_copy: Path, cli: Cli, tmp_path: Path, step: int, changes: list[str]
) -> None:
    """The second process runs in a copy of the project without a single weights file, and the bytes are the same."""
    update = ["update", "pipelines/small", "--step", step, "--agent", "ada"]
    sets = [word for change in (*changes, HALVES) for word in ("--set", change)]
    assert cli(*update, "--out", tmp_path / "one", *sets).code == 0
    script = tmp_path / "elsewhere.py"
    script.write_text(ELSEWHERE.format(root=str(ROOT)))
    command = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 {script} {tmp_path}/bare"
    params = finished_copy / "pipelines/small/params.yaml"
    params.write_text(params.read_text() + f"launcher: {{processes: 2, command: {command!r}}}\n")
    shutil.copytree(finished_copy, tmp_path / "bare", symlinks=True)
    (tmp_path / "bare/models").unlink()
    removed = [path for path in (tmp_path / "bare").rglob("*.safetensors") if path.unlink() is None]
    assert {path.name for path in removed} == {"model.safetensors", "optimizer.safetensors"}
    result = cli(*update, "--out", tmp_path / "two", *sets)
    assert result.code == 0, result.err
    files = {str(path.relative_to(tmp_path / "one")) for path in (tmp_path / "one/checkpoints").rglob("*.*")}
    assert {Path(name).name for name in files} >= {"optimizer.safetensors", "state.json"}
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    trace = f"updates/step=000{step}/agent=ada/trace.parquet"
    assert pl.read_parquet(tmp_path / "one" / trace).equals(pl.read_parquet(tmp_path / "two" / trace))
