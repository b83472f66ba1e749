"""`hacpo update` over several processes, in parts, and in bfloat16: the same numbers, the same bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import Cli
from tests.updates_of_processes import HALVES, TWO, UPDATE, assert_same, metrics_of, ranks, trace_of, wait_for


@pytest.fixture
def one(finished_copy: Path, cli: Cli, tmp_path: Path) -> Path:
    assert cli(*UPDATE, "--out", tmp_path / "one", "--set", HALVES).code == 0
    return tmp_path / "one"


def test_two_processes_equal_one_with_two_accumulation_steps(one: Path, cli: Cli, tmp_path: Path) -> None:
    """The optimizer's state too: either can go on where the other has stopped."""
    out = tmp_path / "two"
    result = cli(*UPDATE, "--out", out, *TWO, "--set", HALVES, "--set", "optimizer.gradient_checkpointing=true")
    assert result.code == 0, result.err
    assert "2 processes" in result.out
    assert_same(one, out)


def test_more_processes_than_micro_batches_and_other_recipes(finished_copy: Path, cli: Cli, tmp_path: Path) -> None:
    """Three micro-batches over two processes: one process has nothing to do in the second round."""
    changes = [
        *("--set", "optimizer.micro_batch_size=6"),
        *("--set", "algorithm.importance.reference=self"),
        *("--set", "algorithm.loss={kl_coef: 0.05, kl_responses: own}"),
    ]
    assert cli(*UPDATE, "--out", tmp_path / "one", *changes).code == 0
    result = cli(*UPDATE, "--out", tmp_path / "two", *changes, *TWO)
    assert result.code == 0, result.err
    assert metrics_of(tmp_path / "two")["micro_batches"] == 12
    one, two = (trace_of(tmp_path / name) for name in ("one", "two"))
    assert one["rollout_id"].equals(two["rollout_id"])
    for name in ("learner_logprob", "source_logprob", "ratio", "objective"):
        # Three gradients added in another order: float32 rounding, grown by AdamW over four updates.
        assert (one[name] - two[name]).abs().max() < 1e-4, name
    first = one["update"] == 0
    assert one.filter(first).equals(two.filter(first))


def test_bfloat16_trains_float32_masters(finished_copy: Path, cli: Cli, tmp_path: Path) -> None:
    """A step of 1e-6 is lost in bfloat16 weights of 0.1; masters keep it, and two processes keep the same, each with a
    copy of its own."""
    tiny_steps = ["--set", "engine.dtype=bfloat16", "--set", "optimizer.learning_rate=1e-6", "--set", HALVES]
    start = finished_copy / "artifacts/small/checkpoints/step=0001/agent=ada"
    before, file = load_file(start / "model.safetensors"), start / "trainer/optimizer.safetensors"
    masters = {f"master.{name}": tensor for name, tensor in before.items()}
    save_file(load_file(file) | masters, file)  # of a float32 run, which has none
    assert cli(*UPDATE, "--out", tmp_path / "one", *tiny_steps).code == 0
    copies = ["--set", "launcher={processes: 2, replicas: 2}"]
    assert cli(*UPDATE, "--out", tmp_path / "two", *tiny_steps, *copies).code == 0
    assert_same(tmp_path / "one", tmp_path / "two")
    folder = tmp_path / "one/checkpoints/step=0002/agent=ada"
    after = load_file(folder / "model.safetensors")
    state = load_file(folder / "trainer/optimizer.safetensors")
    for name, tensor in after.items():
        assert tensor.dtype == torch.bfloat16
        master = state[f"master.{name}"]
        assert master.dtype == torch.float32
        assert torch.equal(master.to(torch.bfloat16), tensor)
        moved = (master - before[name]).abs().max()
        assert 1e-6 < moved < 1e-5, name  # four updates of about 1e-6 each


def test_the_number_of_processes_must_be_what_the_settings_say(
    finished_copy: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    refused = cli(*UPDATE, "--out", tmp_path / "out")
    assert refused.code == 2
    assert "wrong number of processes (expected 1 (processes x nodes), found 3)" in refused.error
    assert not (tmp_path / "out").exists()


def test_an_error_of_a_process_is_one_line(finished_copy: Path, cli: Cli, tmp_path: Path) -> None:
    state = finished_copy / "artifacts/small/checkpoints/step=0001/agent=ada/trainer/optimizer.safetensors"
    state.write_bytes(state.read_bytes()[:-100])
    result = cli(*UPDATE, "--out", tmp_path / "out", *TWO)
    assert result.code == 4, "as with one process"
    assert "the optimizer state cannot be used" in result.error
    assert not (tmp_path / "out/checkpoints").exists()

    params = finished_copy / "pipelines/small/params.yaml"
    params.write_text(params.read_text() + "launcher: {processes: 2, command: 'no-such-launcher {processes}'}\n")
    result = cli(*UPDATE, "--out", tmp_path / "out")
    assert result.code == 2
    assert "'no-such-launcher' cannot be started" in result.error


def test_several_nodes_need_a_command(finished_copy: Path, cli: Cli, tmp_path: Path) -> None:
    result = cli(*UPDATE, "--out", tmp_path / "out", "--set", "launcher={nodes: 2, processes: 8}")
    assert result.code == 2
    assert "several nodes need `command`" in result.error


@pytest.mark.skipif(sys.platform != "linux", reason="processes die with their parent on Linux only")
def test_a_killed_update_leaves_no_process(finished_copy: Path, tmp_path: Path) -> None:
    params = finished_copy / "pipelines/small/params.yaml"
    params.write_text(params.read_text() + "launcher: {processes: 2}\n")
    mark = f"{tmp_path}/out"
    command = [sys.executable, "-m", "hacpo.stages.update", *(str(word) for word in UPDATE[1:]), "--out", mark]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: len(ranks(mark)) == 2)
        process.kill()
    wait_for(lambda: not ranks(mark))
