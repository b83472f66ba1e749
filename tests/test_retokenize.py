"""Text from one agent in another's tokens: exact where it can be, refused with a reason where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import SHARED
from hacpo.engines.tokenizers import ChatTokenizer
from hacpo.errors import DataError, ModelError
from hacpo.retokenize import retokenize

SOLUTION = "7+3=10 10-2=8 \\boxed{8}"


@pytest.fixture
def ada(models: Path) -> ChatTokenizer:
    return ChatTokenizer(models / "ada")


@pytest.fixture
def bo(models: Path) -> ChatTokenizer:
    return ChatTokenizer(models / "bo")


def test_a_stopped_response_ends_in_the_learners_eos_and_a_cut_one_in_none(ada: ChatTokenizer) -> None:
    plain = ada.encode(SOLUTION)
    stopped = retokenize(SOLUTION, stopped=True, tokenizer=ada, room=99)
    cut = retokenize(SOLUTION, stopped=False, tokenizer=ada, room=99)
    assert (stopped.token_ids, stopped.status, stopped.roundtrip) == ([*plain, ada.eos_token_id], "kept", True)
    assert cut.token_ids == plain


def test_two_vocabularies_cut_one_text_differently_and_lose_nothing(ada: ChatTokenizer, bo: ChatTokenizer) -> None:
    one, other = (retokenize(SOLUTION, stopped=True, tokenizer=t, room=99).token_ids for t in (ada, bo))
    assert len(one) > len(other)
    assert ada.decode(one) == bo.decode(other) == SOLUTION


def test_room_counts_the_eos(ada: ChatTokenizer) -> None:
    length = len(ada.encode(SOLUTION))
    assert retokenize(SOLUTION, stopped=False, tokenizer=ada, room=length).status == "kept"
    assert retokenize(SOLUTION, stopped=True, tokenizer=ada, room=length).status == "too_long"
    assert retokenize(SOLUTION, stopped=True, tokenizer=ada, room=length + 1).status == "kept"


def test_empty_and_foreign_texts_are_refused_with_the_reason(ada: ChatTokenizer) -> None:
    assert retokenize("", stopped=True, tokenizer=ada, room=99).status == "empty"
    foreign = retokenize("7+3=10 \u65e5\u672c", stopped=True, tokenizer=ada, room=99)
    assert (foreign.status, foreign.token_ids, foreign.roundtrip) == ("not_representable", [], False)


def test_text_that_spells_a_control_token_stays_text(ada: ChatTokenizer, bo: ChatTokenizer) -> None:
    for tokenizer in (ada, bo):
        spelled = tokenizer._tokenizer.eos_token
        result = retokenize(f"8 {spelled} 9", stopped=False, tokenizer=tokenizer, room=99)
        assert tokenizer.eos_token_id not in result.token_ids
        if result.status == "kept":
            assert tokenizer.decode(result.token_ids) == f"8 {spelled} 9"


class Failing:
    """A tokenizer that raises, as third-party code may."""

    eos_token_id = 0
    unk_token_id = None

    def encode(self, text: str) -> list[int]:
        raise ValueError(text)

    def decode(self, token_ids: list[int]) -> str:
        return ""


class Spaced:
    """A SentencePiece-like tokenizer whose decode puts a space in front."""

    eos_token_id = 0
    unk_token_id = None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return " " + "".join(map(chr, token_ids))


def test_a_tokenizer_that_fails_costs_one_response() -> None:
    assert retokenize("x", stopped=True, tokenizer=Failing(), room=9).status == "error"


def test_a_difference_in_white_space_is_kept_and_marked() -> None:
    result = retokenize("ab", stopped=True, tokenizer=Spaced(), room=9)
    assert (result.status, result.roundtrip, result.token_ids) == ("kept", False, [97, 98, 0])


def test_folders_without_tokenizer_or_template_are_refused(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no usable tokenizer"):
        ChatTokenizer(tmp_path)
    for file in (models / "ada").iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match="has no chat template"):
        ChatTokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no user message') }}")
    with pytest.raises(DataError, match="problem 'p1' .*cannot render this prompt: no user message"):
        ChatTokenizer(tmp_path).render("p1", [{"role": "user", "content": "1+1"}])


@pytest.mark.skipif(not (SHARED / "tokenizers").is_dir(), reason="needs ../shared/tokenizers (two real tokenizers)")
@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="needs ../shared/data (real solutions)")
def test_real_solutions_survive_real_tokenizers() -> None:
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer

    class Raw:
        """A tokenizer.json as it is."""

        unk_token_id = None

        def __init__(self, folder: str, eos: str) -> None:
            self.tokenizer = Tokenizer.from_file(str(SHARED / "tokenizers" / folder / "tokenizer.json"))
            self.tokenizer.encode_special_tokens = True
            self.eos_token_id = self.tokenizer.token_to_id(eos)

        def encode(self, text: str) -> list[int]:
            return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

        def decode(self, token_ids: list[int]) -> str:
            return str(self.tokenizer.decode(token_ids))

    texts = pq.read_table(SHARED / "data" / "math" / "train.parquet")["solution"].to_pylist()[:300]
    qwen, llama = Raw("qwen3", "<|im_end|>"), Raw("llama3", "<|eot_id|>")
    for text in [*texts, "a <|im_end|> b <|eot_id|> c"]:
        results = [retokenize(text, stopped=True, tokenizer=tokenizer, room=1 << 30) for tokenizer in (qwen, llama)]
        assert [r.status for r in results] == ["kept", "kept"]
        for result, tokenizer in zip(results, (qwen, llama), strict=True):
            assert result.token_ids.count(tokenizer.eos_token_id) == 1
            assert result.roundtrip or "".join(tokenizer.decode(result.token_ids).split()) == "".join(text.split())
