"""The warm start on reasoning-gym's tasks: what is learned from, and in which tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from hacpo.data import gym, problems
from hacpo.data.tiny_vocabularies import BOX
from hacpo.engines.models.tiny import build_model, build_tokenizer
from hacpo.engines.training.warm_start import Corpus, backward
from hacpo.errors import SettingsError
from hacpo.settings.agents import TinySettings
from hacpo.settings.root import DataSet

MIXTURE = {
    "chain_sum": {"min_terms": 3, "max_terms": 3, "max_digits": 1},
    "simple_equations": {"max_terms": 2, "max_value": 12},
    "gcd": {"max_value": 20},
    "lcm": {"max_value": 20},
    "products": {"max_digits": 2},
}


def tiny(vocabulary: str, **warmup: Any) -> TinySettings:
    given = {"steps": 1, "problems": 100, "mixture": MIXTURE, "drills": 0.3, **warmup}
    shape = {"architecture": "llama", "layers": 1, "hidden": 16, "heads": 2, "vocabulary": vocabulary}
    return TinySettings.model_validate({**shape, "warmup": given})


@pytest.mark.parametrize(
    ("vocabulary", "pieces"),
    [
        ("gym_characters", ["Solve for ", "x", ":", " ", "1", "2", "*", "x", " ", "=", " ", "3", "6"]),
        ("gym_numbers", ["Solve for ", "x", ":", " ", "12", "*", "x", " ", "=", " ", "36"]),
        (
            "gym_words",
            ["Solve", " ", "for", " ", "x", ":", " ", "1", "2", "*", "x", " ", "=", " ", "3", "6"],
        ),
    ],
)
def test_every_question_and_solution_has_tokens(vocabulary: str, pieces: list[str]) -> None:
    tokenizer = build_tokenizer(tiny(vocabulary))
    assert tokenizer.tokenize("Solve for x: 12*x = 36") == pieces
    settings = {"task": "reasoning_gym", "mixture": MIXTURE, "split": "train", "problems": 100}
    for row in problems.load("gym/train", DataSet.model_validate(settings), Path()):
        for text in (row.problem, row.solution or ""):
            token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.unk_token_id not in token_ids
            assert tokenizer.decode(token_ids) == text
        assert len(tokenizer(row.problem)["input_ids"]) < 60


def test_texts_are_worked_or_guessed_solutions_of_the_training_side() -> None:
    settings = tiny("gym_characters", drills=0.0, guessing={"gcd": 0.9})
    tokenizer = build_tokenizer(settings)
    corpus = Corpus("ada", settings, tokenizer, seed=1)
    guesses = dict.fromkeys(MIXTURE, 0)
    drawn = dict.fromkeys(MIXTURE, 0)
    asked = {row.problem: row for row in gym.problems(settings.warmup.mixture, "train", 100, 0)}
    for _ in range(400):
        text = tokenizer.decode(corpus.draw().token_ids)
        prompt, response = text.removeprefix("<user>").split("<assistant>")
        row = asked[prompt]
        assert gym.split_of(prompt) == "train"
        assert response.endswith("}<eos>")
        drawn[row.subject or ""] += 1
        guesses[row.subject or ""] += response.startswith("\\boxed") and not (row.solution or "").startswith("\\boxed")
    # A fifth each; of gcd's texts 0.4 are guesses (`_MOST_GUESSES`), of the others none.
    assert all(40 < count < 130 for count in drawn.values())
    assert guesses["gcd"] > 10
    assert sum(guesses.values()) == guesses["gcd"]


def test_a_solution_without_steps_is_no_choice_among_all_but_the_box() -> None:
    # Most products of two numbers of two digits have no steps: with the box masked their loss would be infinite.
    mixture = {"products": {"min_digits": 2, "max_digits": 2}}
    settings = tiny("gym_characters", drills=0.0, mixture=mixture, guessing={"products": 0.9})
    tokenizer = build_tokenizer(settings)
    corpus = Corpus("ada", settings, tokenizer, seed=1)
    texts = [corpus.draw() for _ in range(16)]
    box = tokenizer.convert_tokens_to_ids(BOX)
    assert all(text.given_no_box is None or text.targets[text.given_no_box] != box for text in texts)
    assert math.isfinite(backward(build_model(settings, tokenizer, seed=1), texts, box))


def test_families_to_guess_in_are_the_mixture_s() -> None:
    settings = tiny("gym_words", guessing={"chains": 0.9})
    with pytest.raises(SettingsError, match="unknown task family 'chains' .expected chain_sum or simple_equations"):
        Corpus("ada", settings, build_tokenizer(settings), seed=1)
