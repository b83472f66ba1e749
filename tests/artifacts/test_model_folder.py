"""Model folders that strangers made: code in them is never run, and links in them give nothing away."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, Cli, environment
from hacpo.artifacts.model_folder import is_model_file

START = Path("artifacts/small/checkpoints/step=0000/agent=ada")

CODE = """
from pathlib import Path
from transformers import PretrainedConfig, LlamaForCausalLM, LlamaConfig

Path(r"{ran}").write_text("code of the model folder ran")


class Config(LlamaConfig):
    model_type = "stranger"


class Model(LlamaForCausalLM):
    config_class = Config
"""


@pytest.fixture
def folder(cli: Cli, project: Path, models: Path) -> Path:
    """The project's `models/ada` as a folder of its own, which a test may change."""
    assert cli("resolve", "pipelines/small").code == 0
    (project / "models").unlink()
    shutil.copytree(models, project / "models")
    return project / "models/ada"


@pytest.mark.parametrize("command", ["warmup", "plan --check"])
def test_code_of_a_model_folder_never_runs_whatever_is_answered(
    project: Path, folder: Path, tmp_path: Path, command: str
) -> None:
    """transformers asks on standard input whether to run it, unless it is told not to ask."""
    ran = tmp_path / "ran"
    (folder / "modeling.py").write_text(CODE.format(ran=ran))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "stranger",
        "auto_map": {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = command.split()
    options = ["--agent", "ada"] if command == "warmup" else words[1:]
    done = subprocess.run(
        [sys.executable, "-m", "hacpo.cli", words[0], *options, "pipelines/small"],
        input="y\ny\ny\n",
        capture_output=True,
        text=True,
        cwd=project,
        env=environment(),
        check=False,
    )
    assert not ran.exists()
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert not (project / START).exists()


def test_every_call_that_builds_from_a_folder_forbids_its_code() -> None:
    calls = [
        (path.name, call)
        for path in (ROOT / "hacpo").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if call.func.attr in ("from_pretrained", "from_config") and "Auto" in ast.unparse(call.func.value)
    ]
    assert len(calls) >= 4
    for name, call in calls:
        said = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert said.get("trust_remote_code") == "False", f"{name}: {ast.unparse(call)}"


def test_a_link_out_of_the_folder_is_refused(cli: Cli, project: Path, folder: Path, tmp_path: Path) -> None:
    private = tmp_path / "id_rsa"
    private.write_text("a private key")
    private.chmod(0o600)
    (folder / "LICENSE").symlink_to(private)
    result = cli("warmup", "pipelines/small", "--agent", "ada")
    assert result.code == 6
    assert "LICENSE" in result.error
    assert "a link to" in result.error
    assert not START.exists()
    (folder / "LICENSE").unlink()
    (folder / "LICENSE").write_text("free")
    (folder / "NOTICE").symlink_to("LICENSE")  # within the folder
    assert cli("warmup", "pipelines/small", "--agent", "ada").code == 0
    assert (START / "NOTICE").read_text() == "free"


@pytest.mark.parametrize("linked", ["additional_chat_templates", "additional_chat_templates/tool.jinja"])
def test_a_template_elsewhere_is_refused(cli: Cli, project: Path, folder: Path, tmp_path: Path, linked: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "tool.jinja").write_text("private")
    (folder / linked).parent.mkdir(exist_ok=True)
    (folder / linked).symlink_to(outside if linked.endswith("templates") else outside / "tool.jinja")
    result = cli("warmup", "pipelines/small", "--agent", "ada")
    assert result.code == 6
    assert "additional_chat_templates" in result.error
    assert "is no file of this model folder (found a link to" in result.error


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"num_hidden_layers": 3_000_000}, "num_hidden_layers is out of bounds (expected at most 1000, found 3000000)"),
        ({"head_dim": 2**33}, "head_dim is out of bounds"),
        ({"text_config": {"vocab_size": 2**40}}, "vocab_size is out of bounds"),
        ({"num_labels": 3_000_000_000}, "num_labels is out of bounds"),
        ({"attn_implementation": "owner/kernel"}, "attn_implementation names code that is not in transformers"),
        ({"_attn_implementation": {"": "owner/kernel:f"}}, "names code that is not in transformers"),
    ],
)
def test_a_config_that_asks_for_too_much_or_for_code_is_refused(
    cli: Cli, project: Path, folder: Path, config: dict[str, Any], says: str
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    result = cli("warmup", "pipelines/small", "--agent", "ada")
    assert result.code == 6
    assert says in result.error
    assert not START.exists()


@pytest.mark.parametrize(
    "kind", ["AutoTokenizer", "AutoProcessor", "AutoConfig", "AutoModelForCausalLM", "RagTokenizer"]
)
def test_a_tokenizer_class_that_is_none_does_not_run_code(
    cli: Cli, project: Path, folder: Path, tmp_path: Path, kind: str
) -> None:
    """transformers takes the name of any class of its own, and some of them ask whether to run the folder's code."""
    ran = tmp_path / "ran"
    (folder / "modeling.py").write_text(CODE.format(ran=ran))
    config = json.loads((folder / "config.json").read_text())
    code = {
        "AutoConfig": "modeling.Config",
        "AutoModelForCausalLM": "modeling.Model",
        "AutoProcessor": "modeling.Config",
    }
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "stranger", "auto_map": code}))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": kind}))
    done = subprocess.run(
        [sys.executable, "-m", "hacpo.cli", "warmup", "--agent", "ada", "pipelines/small"],
        input="y\ny\ny\n",
        capture_output=True,
        text=True,
        cwd=project,
        env=environment(),
        check=False,
    )
    assert not ran.exists()
    assert done.returncode == 6
    assert f"tokenizer_class names no tokenizer of transformers (found '{kind}')" in done.stderr


def test_transformers_never_asks_whether_to_run_code(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where it makes a class itself and does not say that no code may run."""
    from transformers import AutoConfig

    from hacpo.tokens.tokenizers import never_ask

    ran = tmp_path / "ran"
    (folder / "modeling.py").write_text(CODE.format(ran=ran))
    config = {"model_type": "stranger", "auto_map": {"AutoConfig": "modeling.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    never_ask()
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoConfig.from_pretrained(str(folder))
    assert not ran.exists()


@pytest.mark.parametrize("both", [True, False])
def test_weights_under_another_name_are_refused(cli: Cli, project: Path, folder: Path, both: bool) -> None:
    """A checkpoint gets the folder's config and weights under the usual name: it could be loaded by nobody. With both
    files there, transformers would read the other one."""
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    if not both:
        (folder / "model.safetensors").unlink()
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"transformers_weights": "other.safetensors"}))
    for words in (["warmup", "--agent", "ada"], ["plan", "--check"], ["run"]):
        result = cli(words[0], *words[1:], "pipelines/small")
        assert "transformers_weights has another file read than the usual one" in result.out + result.err
        assert result.code not in (0, 70)
    assert not START.exists()


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("config.json", {"configuration_files": ["config.4.0.0.json"]}, "configuration_files has another file read"),
        ("config.json", {"quantization_config": {"quant_method": "fp8"}}, "says that the weights are quantised"),
        ("config.json", {"text_config": {"quantization_config": {}, "compression_config": {"a": 1}}}, "quantised"),
        ("config.json", {"vision_config": {"use_pretrained_backbone": True}}, "has weights fetched from the hub"),
        (
            "tokenizer_config.json",
            {"fast_tokenizer_files": ["/x/tokenizer.4.json"]},
            "fast_tokenizer_files names a file elsewhere",
        ),
        ("tokenizer_config.json", {"init_inputs": ["/etc/hostname"]}, "init_inputs may have another file read"),
        ("tokenizer_config.json", {"vocab": "/etc/hostname"}, "vocab has another file read"),
    ],
)
def test_what_is_read_is_what_is_checked(
    cli: Cli, project: Path, folder: Path, name: str, change: dict[str, Any], says: str
) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    result = cli("warmup", "pipelines/small", "--agent", "ada")
    assert result.code == 6
    assert says in result.error
    assert not START.exists()


def test_links_in_a_circle_are_refused(cli: Cli, project: Path, folder: Path) -> None:
    (folder / "LICENSE").symlink_to("LICENSE")
    result = cli("warmup", "pipelines/small", "--agent", "ada")
    assert result.code == 6
    assert "LICENSE: is no file of this model folder (found a link to LICENSE)" in result.error


@pytest.mark.parametrize("absolute", [True, False])
def test_weights_elsewhere_are_not_taken_for_the_models(cli: Cli, project: Path, folder: Path, absolute: bool) -> None:
    """transformers follows an index out of its folder: somebody's own weights would be trained, and exported."""
    from safetensors.torch import load_file

    private = project / "private/model.safetensors"
    private.parent.mkdir()
    shutil.move(folder / "model.safetensors", private)
    shutil.copy(private, folder / "other.safetensors")  # or it has no weights
    named = str(private) if absolute else "../../private/model.safetensors"
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(private), named)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for words in (["warmup", "--agent", "ada"], ["plan", "--check"]):
        result = cli(words[0], *words[1:], "pipelines/small")
        assert "model.safetensors.index.json: names no weights file of this folder" in result.out + result.err
        assert result.code != 0
    assert not START.exists()


NOWHERE = {"type": "Precompiled", "precompiled_charsmap": ""}
"""A normaliser over which the `tokenizers` library panics."""


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("generation_config.json", {"eos_token_id": "abc"}, "eos_token_id is no token id (found 'abc')"),
        ("generation_config.json", {"eos_token_id": [1 << 40]}, "eos_token_id is no token id"),
        ("generation_config.json", {"eos_token_id": -1}, "eos_token_id is no token id"),
        ("generation_config.json", None, "generation_config.json: is no JSON mapping"),
        ("tokenizer.json", {"normalizer": NOWHERE}, "no usable tokenizer: Precompiled"),
        ("tokenizer_config.json", {"model_max_length": {}}, "no usable tokenizer: model_max_length is no number"),
    ],
)
def test_a_damaged_file_is_one_line(
    cli: Cli, project: Path, folder: Path, name: str, change: dict[str, object] | None, says: str
) -> None:
    file = folder / name
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.unlink(missing_ok=True)
    file.write_text("[1" if change is None else json.dumps({**content, **change}))
    for words in (["warmup", "--agent", "ada"], ["plan", "--check"]):
        result = cli(words[0], *words[1:], "pipelines/small")
        assert says in result.out + result.err
        assert "Traceback" not in result.err
        assert result.code not in (0, 70)
    assert not START.exists()


def test_the_check_refuses_a_folder_with_an_adapter_as_the_start_does(cli: Cli, project: Path, folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "/"}))
    for words in (["warmup", "--agent", "ada"], ["plan", "--check"]):
        result = cli(words[0], *words[1:], "pipelines/small")
        assert "holds an adapter, not a model alone" in result.out + result.err


def test_only_a_models_files_are_taken(cli: Cli, project: Path, folder: Path, tmp_path: Path) -> None:
    for name in ("modeling.py", "vocab.py", "chat_template.py", "pytorch_model.bin", ".env", "notes.pdf", "id_rsa"):
        (folder / name).write_text("secret")
    outside = tmp_path / "notes"
    outside.write_text("secret")
    (folder / "todo.md").symlink_to(outside)  # not a model's file, so it is not looked at
    (folder / "LICENSE").write_text("free")
    assert cli("warmup", "pipelines/small", "--agent", "ada").code == 0
    names = {path.name for path in START.iterdir()}
    assert {"LICENSE", "config.json", "model.safetensors", "tokenizer.json"} <= names
    assert all(is_model_file(name) for name in names)
    assert "secret" not in {path.read_text(errors="replace") for path in START.iterdir()}


def test_permissions_are_kept(cli: Cli, project: Path, folder: Path) -> None:
    """What only its owner may read is not readable to all in a checkpoint or an export of it."""
    for file in folder.iterdir():
        file.chmod(0o600)
    for words in (["warmup", "--agent", "ada"], ["warmup", "--agent", "bo"]):
        assert cli(words[0], "pipelines/small", *words[1:]).code == 0
    assert cli("export", "pipelines/small", "out", "--agent", "ada", "--step", "0").code == 0
    ours = {"README.md", "generation_config.json", "chat_template.jinja"}
    for made in (START, Path("out")):
        modes = {path.name: path.stat().st_mode & 0o077 for path in made.iterdir() if path.name not in ours}
        assert set(modes.values()) == {0}, modes


def test_a_snapshot_of_the_hubs_cache_is_a_model_folder(cli: Cli, project: Path, folder: Path) -> None:
    """Its files are links to `../../blobs`, outside the folder and still the model's own."""
    cached = project / "hub/models--someone--ada"
    (cached / "blobs").mkdir(parents=True)
    snapshot = cached / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = cached / "blobs" / f"{number:040d}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    shutil.rmtree(folder)
    folder.symlink_to(snapshot)
    assert cli("warmup", "pipelines/small", "--agent", "ada").code == 0
    assert not any(path.is_symlink() for path in START.iterdir())


def damage(folder: Path, change: str) -> str:
    """Take a tensor out of a folder's weights, add one, or cut one; returns its name."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    if change == "missing":
        del weights[name]
    elif change == "of another shape":
        weights[name] = weights[name][:-1].clone()
    else:
        name = "model.layers.1.mlp.up_proj.weight"  # the config says that there is one layer
        weights[name] = weights["model.layers.0.mlp.up_proj.weight"].clone()
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return name


@pytest.mark.parametrize("change", ["missing", "of another shape", "left over"])
def test_every_parameter_is_accounted_for_at_the_start(cli: Cli, folder: Path, change: str) -> None:
    """Transformers fills what is missing with random numbers and goes on."""
    name = damage(folder, change)
    result = cli("warmup", "pipelines/small", "--agent", "ada")
    assert result.code == 6
    assert name in result.error
    assert "LOAD REPORT" not in result.err
    assert not START.exists()


@pytest.mark.parametrize("command", ["generate", "evaluate", "export"])
def test_every_parameter_is_accounted_for_at_every_load(cli: Cli, finished_copy: Path, command: str) -> None:
    name = damage(START, "missing")
    options = {"export": ["out", "--step", 0], "generate": ["--step", 1], "evaluate": ["--step", 0]}[command]
    result = cli(command, "pipelines/small", *options, "--agent", "ada")
    assert result.code != 0
    assert name in result.error


def test_buffers_of_older_releases_may_be_left_over(cli: Cli, folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(12)
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert cli("warmup", "pipelines/small", "--agent", "ada").code == 0
