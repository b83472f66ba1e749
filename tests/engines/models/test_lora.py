"""A run in which one agent trains a LoRA adapter and the other all of its weights."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import PARAMS, Cli, contents, make_finished, make_project, train
from hacpo.artifacts.weights import policy_hash
from hacpo.engines.interface import SamplingParameters
from hacpo.engines.models.checkpoint import load_model
from hacpo.engines.vllm.warm_engine import Resident
from hacpo.settings.engine import EngineSettings
from tests.tampering import Sandbox

RUN = "pipelines/small"
WITH_ADAPTER = PARAMS.replace("{model: models/ada}", "{model: models/ada, adapter: {rank: 4, alpha: 8}}")
FLOAT32 = EngineSettings(device="cpu", threads=1)
LAST = Path("artifacts/small/checkpoints/step=0002/agent=ada")
START = Path("artifacts/small/checkpoints/step=0000/agent=ada")


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """The root of a project whose run is complete."""
    return make_finished(tmp_path_factory.mktemp("lora"), models, WITH_ADAPTER)


@pytest.fixture
def here(finished_run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the root of the finished project, which nothing here changes."""
    monkeypatch.chdir(finished_run)
    return finished_run


@pytest.fixture(scope="module")
def damaged(finished_run: Path) -> Path:
    """What `sandbox` is a copy of."""
    return finished_run


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(3, 23)[None]).logits
    return result


def test_checkpoints_hold_the_adapter_and_its_optimizer_alone(here: Path) -> None:
    start = {file.name for file in START.iterdir()}
    assert not any(name.startswith("adapter_") for name in start)
    of_adapter = {"adapter_base.json", "adapter_config.json", "adapter_model.safetensors"}
    assert {file.name for file in LAST.iterdir()} == start - {"config.json", "model.safetensors"} | of_adapter | {
        "trainer"
    }
    weights, state = load_file(LAST / "adapter_model.safetensors"), load_file(LAST / "trainer/optimizer.safetensors")
    assert len(state) == 2 * len(weights)
    assert all(".lora_" in name for name in state)
    assert any(".lora_B." in name and bool(value.any()) for name, value in weights.items())
    # The other agent trains everything.
    assert (LAST.parent / "agent=bo/model.safetensors").is_file()


def test_the_policy_is_what_a_shell_says_and_stands_in_the_rollouts(here: Path) -> None:
    import polars as pl

    before = Path("artifacts/small/checkpoints/step=0001/agent=ada")
    joined = b"".join(file.read_bytes() for file in sorted(before.glob("adapter_*")))
    assert policy_hash(before) == hashlib.sha256(joined).hexdigest()
    recorded = pl.read_parquet("artifacts/small/rollouts/step=0002/agent=ada/*.parquet")["policy"].unique().to_list()
    assert recorded == [policy_hash(before)]


def test_other_tools_load_a_checkpoint_from_the_projects_root(here: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wanted = logits(load_model(LAST, FLOAT32))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(str(LAST))), wanted)
    base = AutoModelForCausalLM.from_pretrained(str(START))
    assert torch.equal(logits(PeftModel.from_pretrained(base, str(LAST))), wanted)
    prompts = [
        AutoTokenizer.from_pretrained(str(folder)).apply_chat_template([{"role": "user", "content": "1+1"}])
        for folder in (START, LAST)
    ]
    assert prompts[0] == prompts[1]


def test_the_audit_is_clean_and_repeats_every_bit(here: Path, cli: Cli) -> None:
    done = cli("audit", RUN, "--deep")
    assert done.code == 0, done.out
    assert "repeated: 12 stages, 12 of them bit for bit" in done.out


def test_stage_by_stage_gives_the_same_bytes(
    finished_run: Path, tmp_path: Path, models: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command loads base and adapter anew; `hacpo run` kept the model that it had trained."""
    monkeypatch.chdir(make_project(tmp_path / "project", models, WITH_ADAPTER))
    train(cli, "small", ["ada", "bo"], steps=2)
    cold, warm = contents(Path.cwd()), contents(finished_run)
    assert cold == {name: warm[name] for name in cold}
    assert sum("adapter_model" in name for name in cold) == 2


class Killed(BaseException):
    """Stands for a kill: nothing catches it on its way out."""


def test_a_killed_update_resumes_with_the_same_bytes(
    sandbox: Sandbox, finished_run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object, **__: object) -> None:
        raise Killed

    for table in ("checkpoints", "updates"):
        shutil.rmtree(f"artifacts/small/{table}/step=0002/agent=ada")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("hacpo.engines.training.trainer.Trainer.save", die)
        cli("update", RUN, "--step", 2, "--agent", "ada")
    assert not LAST.exists()
    assert cli("run", RUN, "--jobs", 1).code == 0
    assert contents(sandbox.root) == contents(finished_run)


def test_another_adapter_keeps_the_first_rollouts(sandbox: Sandbox, cli: Cli) -> None:
    """B is zero at first, so the first policy is the base whatever the adapter."""
    rollouts = Path("artifacts/small/rollouts/step=0001/agent=ada/part-00000.parquet")
    params, before = Path(RUN, "params.yaml"), (policy_hash(START), policy_hash(LAST), rollouts.stat().st_mtime_ns)
    params.write_text(params.read_text().replace("alpha: 8", "alpha: 16"))
    assert cli("run", RUN, "--jobs", 1, "--yes").code == 0
    assert policy_hash(START) == before[0]
    assert policy_hash(LAST) != before[1]
    assert rollouts.stat().st_mtime_ns == before[2]
    assert json.loads((LAST / "adapter_config.json").read_text())["lora_alpha"] == 16


def change(path: Path, **keys: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys, indent=2, sort_keys=True) + "\n")


def scale_base(path: Path) -> None:
    tensors = {name: value * 1.01 for name, value in load_file(path).items()}
    path.unlink()  # a link to the model that the agent started from
    save_file(tensors, path, metadata={"format": "pt"})


def test_the_audit_finds_what_was_changed(sandbox: Sandbox, cli: Cli) -> None:
    first = LAST.parents[1] / "step=0001/agent=ada"
    change(LAST / "adapter_config.json", lora_alpha=80)
    change(first / "adapter_config.json", use_rslora=True)
    change(first / "adapter_base.json", folder="../agent=bo")
    shutil.copy(LAST / "adapter_config.json", START)
    shutil.copy(START / "config.json", LAST)
    done = cli("audit", RUN, "--texts", "none", "--json")
    assert done.code != 0
    found = {(finding["file"], finding["column"]) for finding in json.loads(done.out)["findings"]}
    wanted = {
        (LAST / "adapter_config.json", "lora_alpha"),
        (LAST / "config.json", ""),  # transformers would take the folder for a whole model
        (first / "adapter_config.json", "use_rslora"),
        (first / "adapter_base.json", "folder"),
        (START / "adapter_config.json", ""),
    }
    assert {(str(file), column) for file, column in wanted} <= found


def test_a_changed_base_is_found_and_refused(sandbox: Sandbox, cli: Cli) -> None:
    scale_base(START / "model.safetensors")
    done = cli("audit", RUN, "--texts", "none")
    assert done.code != 0
    assert "adapter_base.json" in done.out
    refused = cli("generate", RUN, "--step", 2, "--agent", "ada", "--out", sandbox.root / "out")
    assert refused.code == 4
    assert "its weights are not those that this adapter belongs to" in refused.error


def test_a_base_with_another_config_is_refused(sandbox: Sandbox, cli: Cli) -> None:
    config = json.loads((START / "config.json").read_text())
    (START / "config.json").unlink()  # a link to the model that the agent started from
    (START / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 500}))
    refused = cli("generate", RUN, "--step", 2, "--agent", "ada", "--out", sandbox.root / "out")
    assert refused.code == 4
    assert "step=0000/agent=ada: its config, generation config, tokenizer or chat template is not the one" in (
        refused.error
    )


# --- settings and set-up ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adapter", "code", "says"),
    [
        ("{targets: [query]}", 2, "agents.ada.adapter.targets: 'query' is no layer of this model (expected some of"),
        ("{rank: 48}", 2, "agents.ada.adapter.rank: an adapter as large as its layer saves nothing"),
        ("{targets: some}", 2, "agents.ada.adapter: targets: give `all-linear`, or a list of names"),
        ("{dropout: 0.1}", 2, "unknown key 'agents.ada.adapter.dropout'"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(project: Path, cli: Cli, adapter: str, code: int, says: str) -> None:
    Path(RUN, "params.yaml").write_text(WITH_ADAPTER.replace("{rank: 4, alpha: 8}", adapter))
    cli("resolve", RUN)
    refused = cli("warmup", RUN, "--agent", "ada")
    assert refused.code == code
    assert says in refused.error
    assert not START.exists()


def test_without_peft_the_first_command_says_so(project: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(RUN, "params.yaml").write_text(WITH_ADAPTER)
    assert cli("resolve", RUN).code == 0
    monkeypatch.setattr("hacpo.engines.models.adapter.importlib.util.find_spec", lambda name: None)
    refused = cli("warmup", RUN, "--agent", "ada")
    assert refused.code == 6
    assert refused.error.endswith("which is not installed. Run `pip install 'hacpo[lora]'`")
    assert cli("warmup", RUN, "--agent", "bo").code == 0


def test_settings_that_disagree_with_the_checkpoint_are_refused(here: Path, cli: Cli, tmp_path: Path) -> None:
    command = ["update", RUN, "--step", 2, "--agent", "ada", "--out", tmp_path, "--set"]
    refused = cli(*command, "agents.ada.adapter=null")
    assert refused.code == 2
    assert "step 1 has another adapter (expected rank 4, alpha 8, found none)" in refused.error
    assert cli(*command, "algorithm.loss.kl_coef=0.1").code == 0  # the base is the initial policy


# --- whole models on demand ------------------------------------------------------------------------------------------


def test_vllm_gets_a_whole_model_that_is_gone_afterwards(here: Path, tmp_path: Path) -> None:
    """A stand-in for the engine: it computes log-probabilities with whatever folder it is given."""
    from hacpo.engines.cache import ModelCache
    from hacpo.engines.from_checkpoint import open_model
    from hacpo.engines.transformers import TransformersEngine

    loaded: list[dict[str, int]] = []

    class Engine:
        remedy, longest = "", 64

        def __init__(self, folder: Path, _: object) -> None:
            self.load(folder)

        def load(self, folder: Path) -> None:
            loaded.append({file.name: file.stat().st_size for file in folder.iterdir()})
            model = load_model(folder, FLOAT32)
            self.scorer = TransformersEngine(model, eos_token_ids=[0], pad_token_id=0, batch_size=8)

        def probe(self, token_ids: Any) -> list[Any]:
            return [self.scorer.score([(token_ids[:1], token_ids[1:])], temperature=1.0)[0]]

        def sample(self, requests: Any, parameters: SamplingParameters, on_progress: Any = None) -> list[Any]:
            return []

        def sleep(self) -> bool:
            return False

        def close(self) -> None:
            return

    cache, resident = ModelCache(), Resident(FLOAT32, Engine)
    for step in (0, 1, 2):
        folder = LAST.parents[1] / f"step={step:04d}/agent=ada"
        tokenizer, model, policy = open_model(cache, "ada", folder, FLOAT32, "hacpo run")
        scorer = TransformersEngine(model, eos_token_ids=[0], pad_token_id=0, batch_size=8)
        resident.at(folder, policy, tokenizer, scorer, tmp_path / ".merged/agent=ada")
        assert resident.metrics["vllm_probe_difference"] < 1e-5
    assert [whole["model.safetensors"] for whole in loaded] == [START.joinpath("model.safetensors").stat().st_size] * 3
    assert not (tmp_path / ".merged").exists()


def test_an_export_is_one_whole_model(here: Path, cli: Cli, tmp_path: Path) -> None:
    done = cli("export", RUN, tmp_path / "ada", "--agent", "ada", "--step", 2)
    assert done.code == 0, done.err
    assert {file.name for file in (tmp_path / "ada").iterdir()} == {file.name for file in START.iterdir()} | {
        "README.md"
    }
    found, wanted = logits(load_model(tmp_path / "ada", FLOAT32)), logits(load_model(LAST, FLOAT32))
    assert (found - wanted).abs().max() < 2e-6 * wanted.abs().max()  # measured: 5e-7
    card = (tmp_path / "ada/README.md").read_text()
    assert "LoRA adapter of rank 4, alpha 8, 4,416 parameters, on `down_proj`" in card
    assert "merged into the weights of its base" in card
    assert policy_hash(LAST) in card


def test_an_adapter_is_exported_alone_with_the_name_of_its_base(here: Path, cli: Cli, tmp_path: Path) -> None:
    command = ["export", RUN, tmp_path / "ada", "--agent", "ada", "--step", 2, "--adapter"]
    assert cli(*command).code == 0
    weights = "adapter_model.safetensors"
    assert (tmp_path / "ada" / weights).read_bytes() == (LAST / weights).read_bytes()
    names = {file.name for file in (tmp_path / "ada").iterdir()}
    assert "README.md" in names
    assert not names & {"config.json", "adapter_base.json", "trainer"}
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(str(tmp_path / "ada"))  # the base is found from the project's root
    assert torch.equal(logits(loaded), logits(load_model(LAST, FLOAT32)))

    assert cli(*command, "--force", "--base", "owner/base").code == 0
    config = json.loads((tmp_path / "ada/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "owner/base"
    card = (tmp_path / "ada/README.md").read_text()
    assert "base_model: owner/base\nlibrary_name: peft" in card
    assert "This is a LoRA adapter without its base, `owner/base`" in card


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--agent", "bo", "--step", "2", "--adapter"], "--adapter: this checkpoint holds none"),
        (["--agent", "ada", "--step", "0", "--adapter"], "--adapter: this checkpoint holds none"),
        (["--agent", "ada", "--step", "2", "--base", "a/b"], "--base belongs to --adapter"),
        (["--agent", "ada", "--step", "2", "--adapter", "--push", "a/b"], "Name it with --base OWNER/NAME"),
    ],
)
def test_what_cannot_be_exported_is_named(here: Path, cli: Cli, tmp_path: Path, options: list[str], says: str) -> None:
    refused = cli("export", RUN, tmp_path / "model", *options)
    assert refused.code == 2
    assert says in refused.error
    assert not any(tmp_path.iterdir())
