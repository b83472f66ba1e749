"""The supervised warm-up of models that exist: what it learns, what it writes, and what it is part of."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import PARAMS, Cli
from hacpo.data import tasks
from hacpo.engines.training.model_warmup import Solutions, warm_up
from hacpo.settings.agents import ModelWarmupSettings
from hacpo.tokens.tokenizers import ChatTokenizer

RUN = "pipelines/small"
START = Path("artifacts/small/checkpoints/step=0000/agent=ada")


@pytest.fixture
def folder(models: Path, tmp_path: Path) -> Path:
    """A copy of the test model `ada`, its weights a hard link to somebody's file."""
    shutil.copytree(models / "ada", tmp_path / "ada")
    weights = tmp_path / "ada" / "model.safetensors"
    weights.rename(tmp_path / "theirs.safetensors")
    os.link(tmp_path / "theirs.safetensors", weights)
    return tmp_path / "ada"


def warmup(**settings: Any) -> ModelWarmupSettings:
    return ModelWarmupSettings(**{"steps": 3, "batch_size": 10, "learning_rate": 1e-3, **settings})


def weights_hash(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def write(project: Path, agent: dict[str, Any], **top: Any) -> None:
    """Settings in which agent ada starts from its model with more beside it."""
    text = PARAMS.replace("ada: {model: models/ada}", f"ada: {json.dumps({'model': 'models/ada', **agent})}")
    (project / RUN / "params.yaml").write_text(text + "".join(f"{key}: {value}\n" for key, value in top.items()))


def warmed(cli: Cli) -> str:
    for words in (["resolve", RUN], ["warmup", RUN, "--agent", "ada"]):
        done = cli(*words)
        assert done.code == 0, done.err
    return done.out + done.err


# --- what it learns --------------------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_over_the_tokens_of_the_solutions(folder: Path) -> None:
    settings = warmup(steps=1, batch_size=3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    drawn: list[Any] = []
    draw = Solutions.draw

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Solutions, "draw", lambda self: drawn.append(draw(self)) or drawn[-1])
        metrics = warm_up("ada", settings, 1, folder)
    total = tokens = 0.0
    for prompt, response in drawn:
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        for at, token in enumerate(response, len(prompt)):
            total -= logprobs[at - 1, token].item()
            tokens += 1
    assert len(drawn) == 3
    assert metrics["loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert metrics["tokens"] == sum(len(prompt) + len(response) for prompt, response in drawn)


def test_it_learns_solutions_of_the_families_that_are_named_alone(folder: Path) -> None:
    tokenizer = ChatTokenizer(folder)
    texts = Solutions("ada", warmup(families=("chains",)), tokenizer, 1)
    known = {problem.problem: problem.solution for problem in tasks.family_problems("chains", "train")}
    for _ in range(20):
        prompt, response = texts.draw()
        asked = re.search(r"[-+0-9]+=\?", tokenizer.decode(prompt))
        assert asked is not None
        assert tokenizer.decode(response) == known[asked[0]]
        assert response[-1] == tokenizer.eos_token_id
    losses: list[float] = []
    warm_up("ada", warmup(steps=30), 1, folder, on_progress=lambda _, __, loss: losses.append(loss))
    assert sum(losses[-10:]) < sum(losses[:10])


# --- what it writes --------------------------------------------------------------------------------------------------


def test_the_same_settings_give_the_same_bytes_and_others_others(folder: Path, tmp_path: Path) -> None:
    before, theirs = weights_hash(folder), hashlib.sha256((tmp_path / "theirs.safetensors").read_bytes()).hexdigest()
    cases = {"one": ("ada", 1), "again": ("ada", 1), "seed": ("ada", 2), "name": ("bo", 1)}
    found = {}
    for case, (name, seed) in cases.items():
        shutil.copytree(folder, tmp_path / case, copy_function=os.link)
        state = torch.get_rng_state()
        warm_up(name, warmup(), seed, tmp_path / case)
        assert torch.equal(torch.get_rng_state(), state)
        found[case] = weights_hash(tmp_path / case)
        assert {file.name for file in (tmp_path / case).iterdir()} == {file.name for file in folder.iterdir()}
        for file in folder.iterdir():
            if file.suffix != ".safetensors":
                assert file.read_bytes() == (tmp_path / case / file.name).read_bytes()
    assert found["one"] == found["again"]
    assert len({before, *found.values()}) == 4
    # Its folder's weights were links: what they led to is as it was.
    assert before == weights_hash(folder) == theirs


def test_weights_keep_their_dtype(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16)
    model.save_pretrained(folder)
    warm_up("ada", warmup(steps=1), 1, folder)
    held = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert {parameter.dtype for parameter in held.parameters()} == {torch.bfloat16}
    changed = (held.lm_head.weight != model.lm_head.weight).float().mean().item()
    assert changed > 0.1
    assert math.isfinite(held(torch.tensor([[3, 4, 5]])).logits.sum().item())


# --- in a run --------------------------------------------------------------------------------------------------------


def test_a_run_with_it_is_recorded_and_one_without_is_as_it_was(cli: Cli, project: Path) -> None:
    cli("plan", RUN)
    plain = (project / RUN / "steps/0000/dvc.yaml").read_text()
    assert "agents.ada.warmup" not in plain
    block = {"steps": 2, "batch_size": 4, "learning_rate": 1e-3, "families": ["chains", "words"]}
    write(project, {"warmup": block, "adapter": {"rank": 4, "alpha": 8}})
    done = cli("run", RUN, "--jobs", "1")
    assert done.code == 0, done.err
    stamped = (project / RUN / "steps/0000/dvc.yaml").read_text()
    assert stamped.count("agents.ada.warmup") == 1
    assert "agents.bo.warmup" not in stamped
    metrics = json.loads(Path("artifacts/small/metrics/warmup/step=0000/ada.json").read_text())
    assert (metrics["steps"], metrics["texts"]) == (2, 8)
    assert metrics["loss"] > 0
    assert (START / "model.safetensors").is_file()  # whole, also of an agent with an adapter
    assert weights_hash(START) != weights_hash(project / "models/ada")
    report = Path("artifacts/small/report/index.html").read_text()
    assert "model folder models/ada, then 2 supervised warm-up steps (chains, words)" in report
    audit = cli("audit", RUN)
    assert audit.code == 0, audit.out
    settings = json.loads(Path("artifacts/small/settings.json").read_text())
    assert settings["agents"]["ada"]["warmup"]["steps"] == 2
    assert "warmup" not in settings["agents"]["bo"]


def test_the_starts_seed_draws_its_texts(cli: Cli, project: Path) -> None:
    block = {"steps": 1, "batch_size": 4, "learning_rate": 1e-3}
    found = []
    for seed, start_seed in ((1, 1), (1, 5), (2, 5)):
        write(project, {"warmup": block}, start_seed=start_seed)
        path = project / RUN / "params.yaml"
        path.write_text(path.read_text().replace("seed: 1\nsteps", f"seed: {seed}\nsteps"))
        assert "warmed up for 1 steps" in warmed(cli)
        found.append(weights_hash(START))
    assert found[0] != found[1] == found[2]


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ({"warmup": {"steps": 1, "families": ["sums"]}}, "agents.ada.warmup.families: unknown task family 'sums'"),
        ({"warmup": {"steps": 1, "families": ["words"], "mixture": {"gcd": {}}}}, "`mixture` of reasoning-gym's tasks"),
        ({"warmup": {"steps": 1, "prompt": {"user": "{problem}" * 40}}}, "agents.ada.warmup: the model's context is"),
        ({"warmup": {"steps": 1, "prompt": {"thinking": True}}}, "agents.ada.warmup.prompt.thinking"),
    ],
)
def test_what_does_not_fit_is_one_line_before_anything_is_trained(
    cli: Cli, project: Path, agent: dict[str, Any], says: str
) -> None:
    write(project, agent)
    checked = cli("plan", "--check", RUN)
    assert checked.code == 1
    assert says in checked.out + checked.err
    done = cli("run", RUN, "--jobs", "1")
    assert done.code != 0
    assert says in done.error
    assert not START.exists()


def test_a_tiny_agent_has_its_own(cli: Cli, project: Path) -> None:
    path = project / RUN / "params.yaml"
    tiny = {"architecture": "qwen3", "layers": 1, "hidden": 16, "heads": 2, "vocabulary": "characters"}
    agent = {"tiny": {**tiny, "warmup": {"steps": 1}}, "warmup": {"steps": 1}}
    path.write_text(PARAMS.replace("ada: {model: models/ada}", f"ada: {json.dumps(agent)}"))
    refused = cli("resolve", RUN)
    assert refused.code != 0
    assert "`warmup` belongs to `model`; a `tiny` model has its own, `tiny.warmup`" in refused.error


def test_what_dvc_tracks_where_it_is_set_is_part_of_what_is_stamped(cli: Cli, project: Path) -> None:
    """Else `dvc repro` would take settings that it has seen before from its cache, and keep the start of others."""
    found = []
    for agent, top in (({}, {}), ({"warmup": {"steps": 1}}, {}), ({}, {"start_seed": 7})):
        write(project, agent, **top)
        if found:
            refused = cli("resolve", RUN, "--stamped", found[0])
            assert refused.code != 0
            assert "is stamped from other settings than params.yaml has" in refused.error
        cli("plan", RUN)
        found += re.findall(r"--stamped (\w+)", (project / RUN / "dvc.yaml").read_text())
    assert len({*found}) == 3
