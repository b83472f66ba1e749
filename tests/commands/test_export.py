"""`hacpo export`: a model folder that any tool loads, and a card that says only what the files say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from hub_stub import HubStub, running_hub

from conftest import Cli
from hacpo.artifacts.weights import policy_hash

RUN = "pipelines/small"


@pytest.fixture
def here(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the root of the finished project, which nothing here changes."""
    monkeypatch.chdir(finished)
    return finished


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    """A hub to upload to, and a token for it."""
    with running_hub() as stub:
        monkeypatch.setenv("HF_ENDPOINT", stub.address)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield stub


def test_the_folder_is_the_checkpoint_without_its_trainer(cli: Cli, here: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = tmp_path / "model"
    done = cli("export", RUN, target, "--agent", "ada", "--step", 2)
    assert done.code == 0, done.err
    checkpoint = here / "artifacts/small/checkpoints/step=0002/agent=ada"
    names = {file.name for file in target.iterdir()}
    assert names == {file.name for file in checkpoint.iterdir() if file.is_file()} | {"README.md"}
    assert "trainer" not in names
    assert (checkpoint / "trainer").is_dir()
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert policy_hash(target) == policy_hash(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(str(target))
    tokenizer = AutoTokenizer.from_pretrained(str(target))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}], add_generation_prompt=True)
    assert model.config.vocab_size == len(tokenizer)
    assert prompt
    # Editing the export must not reach the checkpoint.
    assert all(file.stat().st_nlink == 1 for file in target.iterdir())


def test_the_card_states_what_the_files_say(cli: Cli, here: Path, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    target = tmp_path / "model"
    assert cli("export", RUN, target, "--agent", "ada", "--step", 2).code == 0
    card = ModelCard.load(target / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["hacpo", "reinforcement-learning"],
    }
    text = card.text
    assert "Trained for 2 of 2 planned steps together with `bo`" in text
    assert "| `ada` (this one) | model folder models/ada | Qwen3ForCausalLM |" in text
    assert "| `bo` | model folder models/bo | LlamaForCausalLM |" in text
    assert "| `algorithm.clip.own_low` | `0.03` | `0.0003` |" in text
    assert "algorithm.importance.alpha" not in text  # as the recipe has it
    assert "`arithmetic/train` (made by hacpo: arithmetic, train side, 64 problems)" in text
    assert "8 prompts, 4 responses per prompt and agent, 4 updates" in text  # 8 / 4 = 2 updates, times 2 agents
    assert "The licence of the model that training started from is not known" in text
    for step in (0, 2):
        table = pl.read_parquet(here / f"artifacts/small/evaluations/step={step:04d}/agent=ada/*.parquet")
        assert len(table) == 16 * 2
        assert f"| {table['reward'].mean():.3f} ± " in text
    assert policy_hash(here / "artifacts/small/checkpoints/step=0002/agent=ada") in text
    assert policy_hash(here / "artifacts/small/checkpoints/step=0000/agent=ada") in text
    assert hashlib.sha256((here / "artifacts/small/settings.json").read_bytes()).hexdigest() in text
    assert str(here) not in text


def test_best_is_the_best_evaluated_step(cli: Cli, finished_copy: Path, tmp_path: Path) -> None:
    set_rewards(finished_copy, {0: 1.0, 2: 0.0})
    done = cli("export", RUN, tmp_path / "best", "--agent", "ada", "--step", "best", "--by", "heldout")
    assert done.code == 0, done.err
    assert done.out.startswith("ada at step 0 (the best of 2 by heldout): model folder")
    text = (tmp_path / "best/README.md").read_text()
    assert "best of 2 evaluated ones by `heldout`" in text
    assert "before training" in text
    set_rewards(finished_copy, {0: 0.5, 2: 0.75})
    assert "ada at step 2" in cli("export", RUN, tmp_path / "b", "--agent", "ada", "--step", "best").out


def set_rewards(root: Path, rewards: dict[int, float]) -> None:
    """Rewrite ada's evaluations so that every response has the step's reward."""
    from hacpo.artifacts import parquet, tables

    for step, reward in rewards.items():
        path = root / f"artifacts/small/evaluations/step={step:04d}/agent=ada"
        rows = [{**row, "reward": reward} for row in parquet.read_table(path, tables.EVALUATIONS).to_pylist()]
        partition = f"step={step:04d}/agent=ada"
        parquet.write_table(
            path, tables.EVALUATIONS, parquet.to_arrow(tables.EVALUATIONS, rows), run="small", partition=partition
        )


def test_an_export_is_not_overwritten_unawares(cli: Cli, here: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    assert cli("export", RUN, target, "--agent", "ada", "--step", 0).code == 0
    before = policy_hash(target)
    refused = cli("export", RUN, target, "--agent", "ada", "--step", 2)
    assert refused.code == 2
    assert "is there already. Add --force" in refused.error
    assert policy_hash(target) == before
    assert cli("export", RUN, target, "--agent", "ada", "--step", 2, "--force").code == 0
    assert policy_hash(target) != before
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_force_replaces_nothing_but_a_model_folder(cli: Cli, here: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "deep").mkdir(parents=True)
    (work / "config.json").write_text("{}")
    refused = cli("export", RUN, work, "--agent", "ada", "--step", 2, "--force")
    assert "is no exported model folder and is not replaced" in refused.error
    assert (work / "deep").is_dir()
    (work / "deep").rmdir()
    (work / "model.safetensors").touch()
    (work / "thesis.tex").write_text("years of work")
    refused = cli("export", RUN, work, "--agent", "ada", "--step", 2, "--force")
    assert "is no exported model folder and is not replaced (found thesis.tex)" in refused.error
    assert (work / "thesis.tex").is_file()
    (work / "thesis.tex").rename(tmp_path / "thesis.tex")
    (work / "model.safetensors").unlink()
    refused = cli("export", RUN, work, "--agent", "ada", "--step", 2, "--force")
    assert "is no exported model folder and is not replaced" in refused.error
    assert (work / "config.json").read_text() == "{}"
    for inside in (here / "artifacts/small/export", here / "artifacts"):
        refused = cli("export", RUN, inside, "--agent", "ada", "--step", 2, "--force")
        assert "must lie outside the run's artifacts" in refused.error


@pytest.mark.parametrize("length", [250, 300])
def test_a_name_that_the_disk_does_not_take_is_one_line(cli: Cli, here: Path, tmp_path: Path, length: int) -> None:
    """A name has 255 bytes at most, and what is written first has a longer one."""
    refused = cli("export", RUN, tmp_path / ("x" * length), "--agent", "ada", "--step", 2)
    assert refused.code == 8
    assert "file name too long" in refused.error
    assert "hoose a shorter name, then repeat the command" in refused.error
    assert not any(tmp_path.iterdir())


def test_a_file_in_the_place_of_a_folder_is_one_line(cli: Cli, here: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    refused = cli("export", RUN, tmp_path / "file/model", "--agent", "ada", "--step", 2)
    assert refused.code == 8
    assert (
        f"{tmp_path}/file/model: cannot be written: file exists ({tmp_path}/file). Nothing was changed" in refused.error
    )
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "inside", [".dvc/cache/model", ".git/model", "pipelines/small/steps/0001", "pipelines/small/.keys/m"]
)
def test_a_model_is_not_put_among_what_programs_keep(cli: Cli, here: Path, inside: str) -> None:
    for target in (here / inside, here / "pipelines/.." / inside):
        refused = cli("export", RUN, target, "--agent", "ada", "--step", 2, "--force")
        assert refused.code == 2
        assert "must lie outside " in refused.error
    assert not (here / inside / "config.json").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--agent", "eve", "--step", "2"], "no agent 'eve' in this run (expected one of ada, bo)"),
        (["--agent", "ada", "--step", "3"], "--step is no step of this run (expected 0 to 2, or best, found 3)"),
        (["--agent", "ada", "--step", "last"], "expected 0 to 2, or best, found last"),
        (["--agent", "ada", "--step", "best", "--by", "math"], "no benchmark 'math' (expected one of heldout)"),
        (["--agent", "ada", "--step", "2", "--by", "heldout"], "--by belongs to --step best"),
        (["--agent", "ada", "--step", "2", "--private"], "--private belongs to --push"),
    ],
)
def test_what_cannot_be_exported_is_named(cli: Cli, here: Path, tmp_path: Path, options: list[str], says: str) -> None:
    refused = cli("export", RUN, tmp_path / "model", *options)
    assert refused.code == 2
    assert says in refused.error
    assert not any(tmp_path.iterdir())


def test_a_damaged_checkpoint_leaves_nothing(cli: Cli, finished_copy: Path, tmp_path: Path) -> None:
    checkpoint = finished_copy / "artifacts/small/checkpoints/step=0002/agent=ada"
    from safetensors.torch import load_file, save_file

    weights = load_file(checkpoint / "model.safetensors")
    name = next(name for name in weights if "mlp" in name)
    save_file({key: value for key, value in weights.items() if key != name}, checkpoint / "model.safetensors")
    refused = cli("export", RUN, tmp_path / "out/model", "--agent", "ada", "--step", 2)
    assert refused.code == 6
    assert f"its weights lack the parameter {name}" in refused.error
    assert not any((tmp_path / "out").iterdir())
    # A checkpoint that is gone is named with the command that brings it: the newest is in DVC's cache.
    checkpoint.rename(tmp_path / "gone")
    refused = cli("export", RUN, tmp_path / "model", "--agent", "ada", "--step", 2)
    assert "run `dvc checkout pipelines/small/steps/0002/dvc.yaml`" in refused.error.replace("Run", "run")


def test_licence_and_data_sets_come_from_the_files(cli: Cli, finished_copy: Path, tmp_path: Path) -> None:
    from huggingface_hub import metadata_load

    from hacpo.artifacts import parquet, tables

    checkpoint = finished_copy / "artifacts/small/checkpoints/step=0002/agent=ada"
    (checkpoint / "README.md").write_text("---\nlicense: apache-2.0\n---\nSomebody else's card.\n")
    (checkpoint / "LICENSE").write_text("words")
    path = finished_copy / "artifacts/small/data/arithmetic/train.parquet"
    source = "hf://datasets/openai/gsm8k@0123abc/main/train.parquet#1"
    rows = [{**row, "source": source} for row in parquet.read_table(path, tables.PROBLEMS).to_pylist()]
    parquet.write_table(path, tables.PROBLEMS, parquet.to_arrow(tables.PROBLEMS, rows), run="small")
    done = cli("export", RUN, tmp_path / "model", "--agent", "ada", "--step", 2)
    assert done.code == 0, done.err
    stated = metadata_load(tmp_path / "model/README.md")
    assert stated["license"] == "apache-2.0"
    assert stated["datasets"] == ["openai/gsm8k"]
    assert "Somebody else" not in (tmp_path / "model/README.md").read_text()
    assert (tmp_path / "model/LICENSE").read_text() == "words"


@pytest.mark.parametrize(
    "front",
    [
        "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
        + "license: *a8\n",
        f"license: {'x' * 201}\n",
        'license: "mit\\ntags: [hacked]"\n',
        "license: " + "[" * 5000 + "\n",
    ],
    ids=["aliases", "length", "lines", "depth"],
)
def test_a_licence_that_is_none_is_not_taken_over(cli: Cli, finished_copy: Path, tmp_path: Path, front: str) -> None:
    checkpoint = finished_copy / "artifacts/small/checkpoints/step=0002/agent=ada"
    (checkpoint / "README.md").write_text(f"---\n{front}---\n")
    done = cli("export", RUN, tmp_path / "model", "--agent", "ada", "--step", 2)
    assert done.code == 0, done.err
    card = (tmp_path / "model/README.md").read_text()
    assert "license:" not in card
    assert "The licence of the model that training started from is not known" in card


def test_what_lies_beside_an_export_stays(cli: Cli, here: Path, tmp_path: Path) -> None:
    kept = [tmp_path / ".mine.tmp-999999", tmp_path / ".*.tmp-notes"]
    for folder in kept:
        folder.mkdir()
    assert cli("export", RUN, tmp_path / "*", "--agent", "ada", "--step", 2).code == 0
    assert all(folder.is_dir() for folder in kept)


def test_a_step_of_other_settings_than_the_card_would_state_is_refused(
    cli: Cli, finished_copy: Path, tmp_path: Path
) -> None:
    path = finished_copy / "artifacts/small/settings.json"
    settings = json.loads(path.read_text())
    settings["optimizer"]["learning_rate"] = 1e-5
    path.write_text(json.dumps(settings))
    refused = cli("export", RUN, tmp_path / "model", "--agent", "ada", "--step", 2)
    assert refused.code == 4
    assert "pipelines/small: steps 1-2 made with other settings" in refused.error
    assert "(step 1: trace of ada with optimizer.learning_rate 0.0003, not 1e-05)" in refused.error
    assert not (tmp_path / "model").exists()
    assert cli("export", RUN, tmp_path / "start", "--agent", "ada", "--step", 0).code == 0


def test_push_uploads_every_file(cli: Cli, here: Path, tmp_path: Path, hub: HubStub) -> None:
    target = tmp_path / "model"
    done = cli("export", RUN, target, "--agent", "ada", "--step", 2, "--push", "lab/ada", "--private")
    assert done.code == 0, done.err
    assert f"uploaded: {hub.address}/lab/ada/commit/{'c' * 40}" in done.out
    assert [(one["organization"], one["name"]) for one in hub.created] == [("lab", "ada")]
    assert hub.created[0].get("private") is True or hub.created[0].get("visibility") == "private"
    assert hub.uploaded == {file.name: file.read_bytes() for file in target.iterdir()}
    assert hub.tokens == {"Bearer hf_secret"}


def test_a_push_that_fails_is_one_line(
    cli: Cli, here: Path, tmp_path: Path, hub: HubStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.refuse = 403
    refused = cli("export", RUN, tmp_path / "a", "--agent", "ada", "--step", 2, "--push", "lab/ada")
    assert refused.code == 1
    assert "lab/ada: the hub cannot be used: " in refused.error
    assert "403" in refused.error
    assert "hf_secret" not in refused.err
    assert (tmp_path / "a/model.safetensors").is_file()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    refused = cli("export", RUN, tmp_path / "b", "--agent", "ada", "--step", 2, "--push", "lab/ada")
    assert "the hub cannot be used: " in refused.error
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    refused = cli("export", RUN, tmp_path / "c", "--agent", "ada", "--step", 2, "--push", "lab/ada")
    assert "no token for the hub. Set HF_TOKEN, or run `hf auth login`" in refused.error
