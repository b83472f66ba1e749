"""Settings and overrides that could only fail later, or would silently do nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import PARAMS, Cli
from hacpo.engines.vllm.servers import keeps_secrets, server_url
from hacpo.errors import ModelError, SettingsError
from hacpo.settings.model_source import hub_repository


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("launcher: {processes: 2, command: 'srun --gpus={gpus} torchrun'}", "only {processes} and {nodes}"),
        ("launcher: {processes: 2, command: 'srun {}'}", "only {processes} and {nodes}"),
        ('launcher: {processes: 2, command: "srun \'torchrun"}', "command: No closing quotation"),
        ("launcher: {processes: 2, command: ''}", "command is empty"),
        ("launcher: {command: torchrun}", "command starts several processes"),
        ("launcher: {processes: 3, replicas: 2}", "replicas must divide the 3 processes"),
        ("launcher: {processes: 2, nodes: 2}", "several nodes need `command`"),
    ],
)
def test_launchers_that_cannot_start(project: Path, cli: Cli, lines: str, message: str) -> None:
    (project / "pipelines/small/params.yaml").write_text(f"{PARAMS}\n{lines}\n")
    refused = cli("plan", "pipelines/small")
    assert refused.code == 2
    assert message in refused.error


def test_a_schedule_needs_a_shape(project: Path, cli: Cli) -> None:
    text = PARAMS.replace("micro_batch_size: 32", "schedule_updates: 10")
    (project / "pipelines/small/params.yaml").write_text(text)
    assert "schedule_updates belongs to schedule linear or cosine" in cli("plan", "pipelines/small").error


def test_an_override_that_changes_nothing_here_is_refused(finished_copy: Path, cli: Cli, tmp_path: Path) -> None:
    out = ["--step", 1, "--agent", "ada", "--out", tmp_path / "out"]
    for stage, change in (("update", "agents.bo.sampling.temperature=0.5"), ("update", "agents.ada.model=models/bo")):
        refused = cli(stage, "pipelines/small", *out, "--set", change)
        assert refused.code == 2
        assert "update of ada reads nothing that this changes" in refused.error
    path = finished_copy / "pipelines/small/params.yaml"
    path.write_text(path.read_text().replace("{model: models/ada}", "{model: models/ada, sampling: {top_p: 0.9}}"))
    refused = cli("generate", "pipelines/small", *out, "--set", "sampling.top_p=0.5")
    assert "generate of ada reads nothing that this changes" in refused.error


@pytest.mark.parametrize("url", ["http://[::1", "http://host:port", "http://:8000", "ftp://host", "host:8000", "5"])
def test_what_is_no_url(tmp_path: Path, url: str) -> None:
    (tmp_path / "servers.yaml").write_text(f"ada: '{url}'\nbo: http://127.0.0.1:8000/\n")
    with pytest.raises(SettingsError, match="is no URL of a server"):
        server_url(tmp_path, "ada")
    assert server_url(tmp_path, "bo") == "http://127.0.0.1:8000"


def test_no_password_stands_in_a_url(tmp_path: Path) -> None:
    (tmp_path / "servers.yaml").write_text("ada: https://me:hunter2@example.com:8000\n")
    with pytest.raises(SettingsError, match="may hold no user and no password") as refused:
        server_url(tmp_path, "ada")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("url", ["http://10.0.0.7:8000", "http://127.evil.example:8000", "http://localhost.example"])
def test_a_key_goes_over_no_plain_connection(url: str) -> None:
    from hacpo.engines.vllm.server import VllmServer
    from hacpo.settings.engine import EngineSettings

    with pytest.raises(ModelError, match="plain http") as refused:
        VllmServer(url, "ada", Path("models/ada"), EngineSettings(), eos_token_ids=[1], decode=str, key="hunter2")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["https://example.com", "http://127.0.0.1:8000", "http://localhost:8000", "http://[::1]:1"]
)
def test_where_a_key_may_go(url: str) -> None:
    assert keeps_secrets(url)


def test_servers_that_are_a_folder(tmp_path: Path) -> None:
    (tmp_path / "servers.yaml").mkdir()
    with pytest.raises(SettingsError, match="cannot be read: Is a directory"):
        server_url(tmp_path, "ada")


def test_names_that_the_hub_never_has(tmp_path: Path) -> None:
    assert hub_repository("Qwen/Qwen3-0.6B", tmp_path) == "Qwen/Qwen3-0.6B"
    assert hub_repository("Qwen/Qwen3--0.6B", tmp_path) is None
    assert hub_repository("Qwen/Qwen3..6B", tmp_path) is None
