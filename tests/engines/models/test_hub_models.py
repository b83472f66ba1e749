"""Agents that start from a model on the hub: downloaded once, its commit written down, every refusal one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_stub import HubStub, running_hub

from conftest import PARAMS, Cli
from hacpo.settings.model_source import STARTED_FROM, hub_repository

COMMIT, LATER = "a" * 40, "b" * 40
START = Path("artifacts/small/checkpoints/step=0000/agent=ada")
MODEL = "Lab/Ada-1B"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, models: Path) -> Iterator[HubStub]:
    """A hub with the test model `ada`, more files beside it than a run needs, and an empty cache."""
    with running_hub() as stub:
        monkeypatch.setenv("HF_ENDPOINT", stub.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        stub.commits |= {f"{MODEL}@main": COMMIT, f"{MODEL}@{COMMIT}": COMMIT}
        files = {file.name: file.read_bytes() for file in (models / "ada").iterdir() if file.is_file()}
        files |= {
            "README.md": b"---\nlicense: apache-2.0\n---\n",
            "LICENSE": b"free",
            "USE_POLICY.md": b"kindly",
            "original/consolidated.00.pth": b"other",
            "consolidated.safetensors": b"other",
            "pytorch_model.bin": b"other",
            "original/params.json": b"{}",
        }
        stub.files |= {f"{MODEL}@{COMMIT}/{name}": content for name, content in files.items()}
        yield stub


def use(project: Path, model: str = MODEL, revision: str | None = None) -> None:
    """Let agent ada start from `model`."""
    agent = json.dumps({"model": model} | ({"revision": revision} if revision else {}))
    text = PARAMS.replace("ada: {model: models/ada}", f"ada: {agent}")
    (project / "pipelines/small/params.yaml").write_text(text)


def warmed(cli: Cli) -> str:
    for words in (["resolve"], ["warmup", "--agent", "ada"]):
        done = cli(words[0], "pipelines/small", *words[1:])
        assert done.code == 0, done.err
    return done.out + done.err


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_model_is_downloaded_and_its_commit_written_down(
    cli: Cli, project: Path, hub: HubStub, models: Path, revision: str | None
) -> None:
    use(project, revision=revision)
    assert f"{MODEL} on the hub, commit {COMMIT}" in warmed(cli)
    assert json.loads((START / STARTED_FROM).read_text()) == {"hub": MODEL, "commit": COMMIT}
    assert (START / "model.safetensors").read_bytes() == (models / "ada" / "model.safetensors").read_bytes()
    assert (START / "LICENSE").read_bytes() == b"free"
    assert (START / "USE_POLICY.md").read_bytes() == b"kindly"
    assert not [path for path in hub.asked if "/resolve/" in path and path.endswith((".pth", ".bin", "params.json"))]
    assert {path.name for path in START.iterdir()} >= {"config.json", "tokenizer.json", "README.md"}
    assert not (START / "consolidated.safetensors").exists()


def test_what_was_downloaded_is_not_asked_for_again(cli: Cli, project: Path, hub: HubStub) -> None:
    use(project, revision=COMMIT)
    warmed(cli)
    hub.asked.clear()
    (project / START / STARTED_FROM).unlink()
    warmed(cli)
    assert hub.asked == []
    assert (START / STARTED_FROM).is_file()


def test_the_cache_is_enough_without_a_network(
    cli: Cli, project: Path, hub: HubStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(project)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cli("resolve", "pipelines/small")
    refused = cli("warmup", "pipelines/small", "--agent", "ada")
    assert refused.code == 1
    assert f"agents.ada.model: the hub cannot be reached, and {MODEL} is not whole in its cache" in refused.error
    assert f"run `hf download {MODEL}`" in refused.error
    assert not START.exists()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    warmed(cli)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert COMMIT in warmed(cli)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("model", "revision", "says"),
    [
        ("Lab/Gone", None, "there is no folder Lab/Gone here, and the hub shows no such model to this account"),
        (MODEL, "v2", f"{MODEL} has no revision 'v2'"),
        ("models/none", None, "the model folder is missing"),
        ("./Lab/Ada-1B", None, "the model folder is missing"),
        ("Ada-1B", None, "the model folder is missing"),
    ],
)
def test_a_model_that_is_not_there_is_one_line(
    cli: Cli, project: Path, hub: HubStub, model: str, revision: str | None, says: str
) -> None:
    use(project, model, revision)
    cli("resolve", "pipelines/small")
    refused = cli("warmup", "pipelines/small", "--agent", "ada")
    assert refused.code != 0
    assert says in refused.error
    assert not START.exists()


def test_a_gated_model_says_how_to_get_in(cli: Cli, project: Path, hub: HubStub) -> None:
    hub.gated.add(MODEL)
    use(project)
    cli("resolve", "pipelines/small")
    refused = cli("warmup", "pipelines/small", "--agent", "ada")
    assert f"agents.ada.model: {MODEL} is gated: its owner wants its licence accepted" in refused.error
    assert f"Accept it on {hub.address}/{MODEL} and log in with `hf auth login`" in refused.error


def test_a_folder_wins_over_the_hub(cli: Cli, project: Path, hub: HubStub, models: Path) -> None:
    (project / "Lab").mkdir()
    use(project)
    assert hub_repository(MODEL, project) is None  # a folder of that owner's, in which the model is missing
    (project / MODEL).symlink_to(models / "ada")
    use(project, revision="v2")
    assert f"taken from {MODEL}, a folder, of which revision v2 cannot be told" in warmed(cli)
    assert hub.asked == []
    assert not (START / STARTED_FROM).exists()


def test_dvc_follows_folders_only(cli: Cli, project: Path) -> None:
    use(project)
    assert cli("plan", "pipelines/small").code == 0
    text = (project / "pipelines/small/steps/0000/dvc.yaml").read_text()
    assert MODEL not in text
    assert "      - models/bo\n" in text


def test_a_run_from_the_hub_trains_audits_and_exports(cli: Cli, project: Path, hub: HubStub) -> None:
    use(project)
    text = (project / "pipelines/small/params.yaml").read_text().replace("steps: 2", "steps: 1")
    (project / "pipelines/small/params.yaml").write_text(text)
    done = cli("run", "pipelines/small", "--jobs", 1)
    assert done.code == 0, done.err
    # Another commit on the branch changes nothing: what was downloaded is a file of the run.
    hub.commits[f"{MODEL}@main"] = LATER
    hub.asked.clear()
    assert cli("run", "pipelines/small", "--jobs", 1).code == 0
    assert hub.asked == []
    for step in ("step=0000", "step=0001"):
        stated = json.loads(Path(f"artifacts/small/checkpoints/{step}/agent=ada/{STARTED_FROM}").read_text())
        assert stated == {"hub": MODEL, "commit": COMMIT}
    audit = cli("audit", "pipelines/small")
    assert audit.code == 0, audit.out + audit.err
    assert f"{MODEL} on the hub, commit {COMMIT}" in Path("artifacts/small/report/index.html").read_text()
    exported = cli("export", "pipelines/small", "out", "--agent", "ada", "--step", 1)
    assert exported.code == 0, exported.err
    card = Path("out/README.md").read_text()
    assert f"base_model: {MODEL}" in card
    assert "license: apache-2.0" in card
    # A run that starts from a checkpoint of this one does not claim to start from the hub.
    assert Path("out", STARTED_FROM).is_file()
    use(project, "out")
    assert cli("warmup", "pipelines/small", "--agent", "ada", "--out", "again").code == 0
    assert not Path("again/checkpoints/step=0000/agent=ada", STARTED_FROM).exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"hub": MODEL, "commit": LATER}, LATER),
        ({"hub": "Lab/Other", "commit": COMMIT}, "Lab/Other"),
        ({"hub": MODEL}, "not readable"),
        (None, "no such file"),
    ],
)
def test_an_audit_sees_another_origin(
    cli: Cli, project: Path, hub: HubStub, content: dict[str, str] | None, says: str
) -> None:
    use(project, revision=COMMIT)
    warmed(cli)
    path = START / STARTED_FROM
    path.unlink()
    if content is not None:
        path.write_text(json.dumps(content))
    audit = cli("audit", "pipelines/small", "--json")
    findings = json.loads(audit.out)["findings"]
    assert [says in str(one["found"]) for one in findings if one["file"].endswith(STARTED_FROM)] == [True]
