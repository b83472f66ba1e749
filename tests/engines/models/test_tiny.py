"""Models from scratch: tokenizers that keep every text, folders that load anywhere, warm starts equal to the byte."""

from __future__ import annotations

import hashlib
import math
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import ROOT
from hacpo.data import tasks
from hacpo.data.tiny_vocabularies import BOX, CONTROL_TOKENS
from hacpo.engines.models.tiny import build_model, build_tokenizer
from hacpo.engines.training.warm_start import Corpus, Text, backward, warm_start
from hacpo.errors import SettingsError
from hacpo.settings.agents import TinySettings

ARCHITECTURES = {"characters": "qwen3", "numbers_words": "llama", "digits_words": "gpt_neox"}
EVERY = [
    problem
    for family in tasks.FAMILIES
    for split in ("train", "heldout")
    for problem in tasks.family_problems(family, split)
]


def tiny(vocabulary: str = "characters", context: int = 64, layers: int = 1, **warmup: Any) -> TinySettings:
    return TinySettings.model_validate(
        {
            "architecture": ARCHITECTURES[vocabulary],
            "layers": layers,
            "hidden": 16,
            "heads": 2,
            "context": context,
            "vocabulary": vocabulary,
            "warmup": {"steps": 3, "batch_size": 8, **warmup},
        }
    )


@pytest.fixture(params=sorted(ARCHITECTURES))
def vocabulary(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


# --- tokenizers ------------------------------------------------------------------------------------------------------


def test_every_task_text_comes_back(vocabulary: str) -> None:
    tokenizer = build_tokenizer(tiny(vocabulary))
    for text in {text for problem in EVERY for text in (problem.problem, problem.solution, f"{problem.problem} ")}:
        token_ids = encode(tokenizer, text)
        assert tokenizer.unk_token_id not in token_ids
        assert tokenizer.decode(token_ids) == text


@pytest.mark.parametrize(
    ("vocabulary", "pieces"),
    [
        ("characters", ["1", "0", "+", "3", " ", "h", "a", "s", " ", "\\boxed{", "1", "3", "}"]),
        ("numbers_words", ["10", "+", "3", " ", "has", " ", "\\boxed{", "13", "}"]),
        ("digits_words", ["1", "0", "+", "3", " ", "has", " ", "\\boxed{", "1", "3", "}"]),
    ],
)
def test_each_vocabulary_cuts_its_own_way(vocabulary: str, pieces: list[str]) -> None:
    tokenizer = build_tokenizer(tiny(vocabulary))
    assert tokenizer.convert_ids_to_tokens(encode(tokenizer, r"10+3 has \boxed{13}")) == pieces


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40))
def test_printable_ascii_comes_back(text: str) -> None:
    for vocabulary in ("characters", "numbers_words"):
        tokenizer = build_tokenizer(tiny(vocabulary))
        assert tokenizer.decode(encode(tokenizer, text)) == text


@given(st.text(max_size=20))
def test_what_has_no_token_is_unknown(text: str) -> None:
    tokenizer = build_tokenizer(tiny("digits_words"))
    token_ids = encode(tokenizer, text)
    assert tokenizer.unk_token_id in token_ids or tokenizer.decode(token_ids) == text
    assert encode(tokenizer, "é") == encode(tokenizer, "q") == [tokenizer.unk_token_id]


def test_text_never_turns_into_a_control_token(vocabulary: str) -> None:
    tokenizer = build_tokenizer(tiny(vocabulary))
    controls = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    assert len(controls) == len(CONTROL_TOKENS) - 1
    for text in CONTROL_TOKENS:
        assert not controls & set(encode(tokenizer, f"8{text}8"))
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == [tokenizer.convert_tokens_to_ids(text)]


def test_chat_template(vocabulary: str) -> None:
    tokenizer = build_tokenizer(tiny(vocabulary))

    def tokens(messages: list[dict[str, str]], prompt: bool) -> list[str]:
        token_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        return list(tokenizer.convert_ids_to_tokens(token_ids))

    user, system = {"role": "user", "content": "7+3=?"}, {"role": "system", "content": "x"}
    assert tokens([user], True) == ["<user>", "7", "+", "3", "=", "?", "<assistant>"]
    assert tokens([system, user], False) == ["<system>", "x", "<user>", "7", "+", "3", "=", "?"]
    answered = [user, {"role": "assistant", "content": "8"}]
    assert tokens(answered, False) == [*tokens([user], True), "8", "<eos>"]


# --- models ----------------------------------------------------------------------------------------------------------


def test_a_folder_loads_with_the_same_tokens_and_weights(vocabulary: str, tmp_path: Path) -> None:
    settings = tiny(vocabulary, layers=2)
    tokenizer = build_tokenizer(settings)
    model = build_model(settings, tokenizer, seed=3)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, loaded_tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)

    assert loaded.config.model_type == settings.architecture
    assert loaded.dtype == torch.float32
    assert loaded.config.max_position_embeddings == settings.context
    for one in (loaded.generation_config, loaded_tokenizer):
        assert (one.eos_token_id, one.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert loaded_tokenizer.get_vocab() == tokenizer.get_vocab()
    assert loaded_tokenizer.chat_template == tokenizer.chat_template
    text = r"Ann has 12 <eos> \boxed{12}"
    assert encode(loaded_tokenizer, text) == encode(tokenizer, text)
    token_ids = torch.tensor([encode(tokenizer, "7+3-2=?")])
    with torch.inference_mode():
        torch.testing.assert_close(loaded(token_ids).logits, model.eval()(token_ids).logits, rtol=0, atol=1e-6)


def test_weights_follow_from_the_seed_alone(vocabulary: str) -> None:
    settings = tiny(vocabulary)
    tokenizer = build_tokenizer(settings)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = build_model(settings, tokenizer, seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again, other = (build_model(settings, tokenizer, seed=seed).state_dict() for seed in (1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


# --- the warm start --------------------------------------------------------------------------------------------------


def drawn(guessing: dict[str, float], count: int = 4000, **warmup: Any) -> list[tuple[str, str, bool]]:
    """(prompt, response, whether its first token teaches whether to guess) of texts that are no drills."""
    settings = tiny(drills=0.0, guessing=guessing, **warmup)
    tokenizer = build_tokenizer(settings)
    corpus = Corpus("ada", settings, tokenizer, seed=1)
    start, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<assistant>", "<eos>"))
    rows = []
    for text in (corpus.draw() for _ in range(count)):
        response_at = text.token_ids.index(start) + 1
        assert text.token_ids[-1] == end
        assert text.targets[response_at:] == text.token_ids[response_at:]
        assert text.given_no_box in {None, response_at}
        assert set(text.targets[:response_at]) == {-100}
        prompt, response = text.token_ids[1 : response_at - 1], text.token_ids[response_at:-1]
        rows.append((tokenizer.decode(prompt), tokenizer.decode(response), text.given_no_box is None))
    return rows


def test_nothing_held_out_is_trained_on() -> None:
    rows = drawn({"words": 0.9})
    assert not [prompt for prompt, _, _ in rows if tasks.is_held_out(prompt)]
    assert len({prompt for prompt, _, _ in rows}) > 1500


@pytest.mark.parametrize("guessing", [0.0, 0.2, 0.96, 1.0])
def guesses(rows: list[tuple[str, str, bool]]) -> list[tuple[str, str, bool]]:
    return [row for row in rows if row[1].startswith("\\boxed{")]


@pytest.mark.parametrize("guessing", [0.0, 0.2, 0.96, 1.0])
def test_the_share_of_guesses_among_texts_that_teach_it(guessing: float) -> None:
    rows = [row for row in drawn({"linear": guessing}, count=8_000) if "x" in row[0]]
    teaching = [row for row in rows if row[2]]
    # About 2,000 rows of which at least 800 teach: a standard deviation of at most .014.
    assert len(guesses(teaching)) / len(teaching) == pytest.approx(guessing, abs=0.04)
    assert all(teaches for _, _, teaches in guesses(rows))
    assert len(guesses(rows)) < 0.5 * len(rows)


def test_a_first_step_is_learned_without_its_habit() -> None:
    # One text whose first response token is learned given that it is no box: the box's logit takes no part, so its row
    # of the output layer gets no gradient from that position, while with the habit it does.
    settings = tiny()
    tokenizer = build_tokenizer(settings)
    box = tokenizer.convert_tokens_to_ids(BOX)
    prompt, first = encode(tokenizer, "7+3"), encode(tokenizer, "8")
    losses = {}
    for given_no_box in (None, len(prompt)):
        model = build_model(settings, tokenizer, seed=1)
        text = Text(prompt + first, [-100] * len(prompt) + first, given_no_box)
        losses[given_no_box] = backward(model, [text], box)
        logits = model(torch.tensor([prompt])).logits[0, -1]
        if given_no_box is not None:
            logits[box] = -math.inf
        assert losses[given_no_box] == pytest.approx(-logits.log_softmax(-1)[first[0]].item(), abs=1e-6)
        assert bool(model.get_output_embeddings().weight.grad[box].any()) == (given_no_box is None)
    assert losses[None] > losses[len(prompt)]


def test_solutions_are_right_but_for_planted_slips() -> None:
    solutions = {problem.problem: problem.solution for problem in EVERY}
    rows = drawn({}, slips=0.25)
    wrong = [(solutions[prompt], response) for prompt, response, _ in rows if response != solutions[prompt]]
    assert len(wrong) / len(rows) == pytest.approx(0.25, abs=0.04)
    for right, slipped in wrong:
        # The second result is off by one or two, and the box repeats it: `10-2=8 \boxed{8}` -> `10-2=7 \boxed{7}`.
        (given, result), (given_again, off) = (text.split(" \\boxed")[0].rsplit("=", 1) for text in (right, slipped))
        assert given == given_again
        assert abs(int(result) - int(off)) in {1, 2}
        assert slipped.endswith(f"={off} {tasks.boxed(off)}")


def test_guesses_are_the_answer_or_next_to_it() -> None:
    answers = {problem.problem: int(problem.answer) for problem in EVERY}
    rows = guesses(drawn(dict.fromkeys(tasks.FAMILIES, 1.0)))
    distances = Counter(int(text.removeprefix("\\boxed{").removesuffix("}")) - answers[p] for p, text, _ in rows)
    assert set(distances) == {-1, 0, 1}
    assert distances[0] / len(rows) == pytest.approx(1 / 3, abs=0.04)


def test_drills_are_facts_of_which_results_are_learned() -> None:
    settings = tiny(drills=1.0)
    tokenizer = build_tokenizer(settings)
    corpus = Corpus("ada", settings, tokenizer, seed=1)
    for text in (corpus.draw() for _ in range(200)):
        assert text.token_ids[0] == tokenizer.convert_tokens_to_ids("<assistant>")
        facts = tokenizer.decode(text.token_ids[1:]).split()
        assert all(eval(fact.replace("/", "//").replace("=", "==")) for fact in facts)
        learned = tokenizer.decode([target for target in text.targets if target != -100])
        assert learned.split() == [fact.split("=")[1] for fact in facts]


def folder_digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def warmed(folder: Path, settings: TinySettings, name: str = "ada", seed: int = 1, **options: Any) -> dict[str, str]:
    folder.mkdir(parents=True)
    warm_start(name, settings, seed, folder, **options)
    return folder_digest(folder)


def test_a_warm_start_repeats_to_the_byte(vocabulary: str, tmp_path: Path) -> None:
    settings = tiny(vocabulary, guessing={"chains": 0.5})
    torch.manual_seed(5)
    random.seed(5)
    states = torch.get_rng_state(), random.getstate()
    first = warmed(tmp_path / "first", settings)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]

    assert warmed(tmp_path / "second", settings) == first


def test_name_and_seed_make_another_agent(tmp_path: Path) -> None:
    agents = [("ada", 1), ("ada", 2), ("bo", 1)]
    folders = [warmed(tmp_path / f"{name}{seed}", tiny(), name, seed) for name, seed in agents]
    assert len({files["model.safetensors"] for files in folders}) == 3


def test_another_process_writes_the_same_bytes(tmp_path: Path) -> None:
    settings = tiny("numbers_words", guessing={"chains": 0.5})
    here = warmed(tmp_path / "here", settings)
    there = tmp_path / "there"
    there.mkdir()
    program = (
        "import sys; from pathlib import Path; from hacpo.settings.agents import TinySettings; "
        "from hacpo.engines.training.warm_start import warm_start; "
        "warm_start('ada', TinySettings.model_validate_json(sys.argv[1]), 1, Path(sys.argv[2]))"
    )
    threads = str(torch.get_num_threads())  # other tests may have set them here
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads}
    subprocess.run(
        [sys.executable, "-c", program, settings.model_dump_json(), str(there)],
        check=True, env=environment, capture_output=True,
    )  # fmt: skip
    assert folder_digest(there) == here
    assert not [file for file in there.iterdir() if str(tmp_path).encode() in file.read_bytes()]


def test_progress_limit_and_metrics(tmp_path: Path) -> None:
    seen: list[tuple[int, int, float]] = []
    settings = tiny(steps=100)
    metrics = warm_start("ada", settings, 1, tmp_path, on_progress=lambda *state: seen.append(state), limit=2)
    assert [(done, total) for done, total, _ in seen] == [(1, 2), (2, 2)]
    assert metrics["loss"] == seen[-1][2]
    assert (metrics["steps"], metrics["texts"]) == (2, 16)
    assert metrics["tokens"] > 16 * 10
    assert metrics["parameters"] == sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tmp_path).parameters())
    assert metrics["seconds"] > 0


def test_it_learns(tmp_path: Path) -> None:
    losses: list[float] = []
    settings = tiny("digits_words", steps=60, batch_size=16)
    warm_start("cy", settings, 1, tmp_path, on_progress=lambda _, __, loss: losses.append(loss))
    assert sum(losses[-10:]) < 0.75 * sum(losses[:10])


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(SettingsError, match=r"agents\.ada\.tiny\.context: too short .*at least \d+, found 16"):
        warm_start("ada", tiny(context=16), 1, Path())
    with pytest.raises(SettingsError, match=r"agents\.ada\.tiny\.warmup\.guessing: unknown task family 'chain'"):
        warm_start("ada", tiny(guessing={"chain": 0.5}), 1, Path())
    with pytest.raises(ValueError, match=r"guessing\.chains must be a share from 0 to 1, found 1\.5"):
        tiny(guessing={"chains": 1.5})
    with pytest.raises(ValueError, match="hidden must be a multiple of twice the heads"):
        TinySettings.model_validate({**tiny().model_dump(), "heads": 3})
