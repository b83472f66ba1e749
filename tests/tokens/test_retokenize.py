"""Text from one agent in another's tokens: exact where it can be, refused with a reason where it cannot."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from conftest import SHARED
from hacpo.errors import DataError, ModelError
from hacpo.tokens.chat_templates import settle_chat
from hacpo.tokens.retokenize import retokenize, retokenize_all
from hacpo.tokens.same_tokenizer import same_tokenizer
from hacpo.tokens.terminals import terminal_map
from hacpo.tokens.tokenizers import ChatTokenizer, load_tokenizer

SOLUTION = "7+3=10 10-2=8 \\boxed{8}"


@pytest.fixture
def ada(models: Path) -> ChatTokenizer:
    return ChatTokenizer(models / "ada")


@pytest.fixture
def bo(models: Path) -> ChatTokenizer:
    return ChatTokenizer(models / "bo")


def test_a_stopped_response_ends_in_the_learners_eos_and_a_cut_one_in_none(ada: ChatTokenizer) -> None:
    plain = ada.encode(SOLUTION)
    stopped = retokenize(SOLUTION, terminal=ada.eos_token_id, tokenizer=ada, room=99)
    cut = retokenize(SOLUTION, terminal=None, tokenizer=ada, room=99)
    assert (stopped.token_ids, stopped.status, stopped.roundtrip) == ([*plain, ada.eos_token_id], "kept", True)
    assert cut.token_ids == plain


def test_two_vocabularies_cut_one_text_differently_and_lose_nothing(ada: ChatTokenizer, bo: ChatTokenizer) -> None:
    one, other = (retokenize(SOLUTION, terminal=t.eos_token_id, tokenizer=t, room=99).token_ids for t in (ada, bo))
    assert len(one) > len(other)
    assert ada.decode(one) == bo.decode(other) == SOLUTION


def test_room_counts_the_eos(ada: ChatTokenizer) -> None:
    length = len(ada.encode(SOLUTION))
    assert retokenize(SOLUTION, terminal=None, tokenizer=ada, room=length).status == "kept"
    assert retokenize(SOLUTION, terminal=ada.eos_token_id, tokenizer=ada, room=length).status == "too_long"
    assert retokenize(SOLUTION, terminal=ada.eos_token_id, tokenizer=ada, room=length + 1).status == "kept"


def test_empty_and_foreign_texts_are_refused_with_the_reason(ada: ChatTokenizer) -> None:
    assert retokenize("", terminal=ada.eos_token_id, tokenizer=ada, room=99).status == "empty"
    foreign = retokenize("7+3=10 \u65e5\u672c", terminal=ada.eos_token_id, tokenizer=ada, room=99)
    assert (foreign.status, foreign.token_ids, foreign.roundtrip) == ("not_representable", [], False)


def test_text_that_spells_a_control_token_stays_text(ada: ChatTokenizer, bo: ChatTokenizer) -> None:
    for tokenizer in (ada, bo):
        spelled = tokenizer._tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id)
        result = retokenize(f"8 {spelled} 9", terminal=None, tokenizer=tokenizer, room=99)
        assert tokenizer.eos_token_id not in result.token_ids
        if result.status == "kept":
            assert tokenizer.decode(result.token_ids) == f"8 {spelled} 9"


class OneByOne:
    """A tokenizer that knows no batches."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode_all(self, token_ids: Sequence[list[int]]) -> list[str]:
        return [self.decode(ids) for ids in token_ids]


class Failing(OneByOne):
    """A tokenizer that raises, as third-party code may."""

    unk_token_id = None

    def encode(self, text: str) -> list[int]:
        raise ValueError(text)

    def decode(self, token_ids: list[int]) -> str:
        return ""


class Spaced(OneByOne):
    """A SentencePiece-like tokenizer whose decode puts a space in front."""

    unk_token_id: int | None = None

    def decode(self, token_ids: list[int]) -> str:
        return " " + "".join(map(chr, token_ids))


def test_a_tokenizer_that_fails_costs_one_response() -> None:
    assert retokenize("x", terminal=0, tokenizer=Failing(), room=9).status == "error"


def test_a_text_that_fails_costs_the_others_nothing() -> None:
    class Choosy(Spaced):
        def encode(self, text: str) -> list[int]:
            if text == "bad":
                raise ValueError(text)
            return super().encode(text)

    results = retokenize_all(
        ["ab", "bad", "", "abc", "d"], terminals=[0, 0, 0, 0, None], tokenizer=Choosy(), rooms=[9, 9, 9, 3, 9]
    )
    assert [result.status for result in results] == ["kept", "error", "empty", "too_long", "kept"]
    assert [result.token_ids for result in results] == [[97, 98, 0], [], [], [97, 98, 99, 0], [100]]


def test_a_difference_in_white_space_is_kept_and_marked() -> None:
    result = retokenize("ab", terminal=0, tokenizer=Spaced(), room=9)
    assert (result.status, result.roundtrip, result.token_ids) == ("kept", False, [97, 98, 0])


def test_a_panic_in_a_tokenizer_library_costs_one_response_and_ctrl_c_does_not() -> None:
    class PanicException(BaseException):
        """What pyo3 raises when Rust code panics."""

    class Panicking(Failing):
        def __init__(self, raised: type[BaseException]) -> None:
            self.raised = raised

        def encode(self, text: str) -> list[int]:
            raise self.raised

    assert retokenize("x", terminal=0, tokenizer=Panicking(PanicException), room=9).status == "error"
    with pytest.raises(KeyboardInterrupt):
        retokenize("x", terminal=0, tokenizer=Panicking(KeyboardInterrupt), room=9)


def test_an_unknown_token_is_refused_even_if_it_decodes_to_the_text() -> None:
    class Unknown(Spaced):
        unk_token_id = 98

        def decode(self, token_ids: list[int]) -> str:
            return "ab"

    assert retokenize("ab", terminal=0, tokenizer=Unknown(), room=9).status == "not_representable"


def test_marks_in_another_order_are_the_same_text() -> None:
    class Reordering(Spaced):
        def decode(self, token_ids: list[int]) -> str:
            return "a\u0323\u0301 \u00bd" if len(token_ids) == 4 else "a\u0301"

    # Acute (class 230) and dot below (220) are sorted in every normal form; 1/2 only has a compatibility form.
    assert retokenize("a\u0301\u0323\u00bd", terminal=None, tokenizer=Reordering(), room=9).status == "kept"
    assert retokenize("a\u0323", terminal=None, tokenizer=Reordering(), room=9).status == "not_representable"


def test_a_run_of_combining_marks_takes_no_quadratic_time() -> None:
    text = "a" + "\u0301\u0323" * 200_000
    start = time.process_time()
    assert retokenize(text, terminal=None, tokenizer=Spaced(), room=1 << 30).status == "kept"
    assert time.process_time() - start < 10  # a second or less; unicodedata.normalize takes minutes


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


# --- real tokenizers, real texts -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    """Qwen3 with its own template, Llama 3 without one; with the ends that the instruction-tuned models declare."""
    if not (SHARED / "tokenizers").is_dir():
        pytest.skip("needs ../shared/tokenizers (two real tokenizers)")
    ends = {"qwen3": [151645, 151643], "llama3": [128001, 128008, 128009]}
    found = {}
    for name, eos in ends.items():
        folder = tmp_path_factory.mktemp(name)
        for file in (SHARED / "tokenizers" / name).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        if name == "llama3":
            config = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|eot_id|>",
                "bos_token": "<|begin_of_text|>",
            }
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        settle_chat(folder, folder)
        found[name] = ChatTokenizer(folder)
    return found


@pytest.mark.slow
def test_real_models_end_their_turns_as_they_do(real: dict[str, ChatTokenizer]) -> None:
    qwen, llama = real["qwen3"], real["llama3"]
    # <|im_end|>, and <|endoftext|>; <|eot_id|>, and <|end_of_text|>, <|eom_id|>
    assert (qwen.eos_token_id, qwen.stop_token_ids) == (151645, (151643, 151645))
    assert (llama.eos_token_id, llama.stop_token_ids) == (128009, (128001, 128008, 128009))


@pytest.mark.slow
def test_real_ends_stand_for_each_other(real: dict[str, ChatTokenizer]) -> None:
    qwen, llama = real["qwen3"].terminals, real["llama3"].terminals
    # <|im_end|> is <|eot_id|>, <|endoftext|> is <|end_of_text|>; <|eom_id|> ends a turn.
    assert terminal_map(qwen, llama) == {151645: 128009, 151643: 128001}
    assert terminal_map(llama, qwen) == {128009: 151645, 128001: 151643, 128008: 151645}


@pytest.mark.slow
def test_a_real_tokenizer_that_was_saved_again_is_the_same(real: dict[str, ChatTokenizer], tmp_path: Path) -> None:
    """Twice as long a tokenizer.json, merges as pairs."""
    original = SHARED / "tokenizers" / "qwen3"
    load_tokenizer(original).save_pretrained(str(tmp_path))
    assert (tmp_path / "tokenizer.json").stat().st_size > 2 * (original / "tokenizer.json").stat().st_size
    assert same_tokenizer(original, tmp_path)
    assert not same_tokenizer(original, SHARED / "tokenizers" / "llama3")


@pytest.mark.slow
def test_real_control_tokens_in_a_text_stay_text(real: dict[str, ChatTokenizer]) -> None:
    names = {name: [t.content for t in chat._tokenizer.added_tokens_decoder.values()] for name, chat in real.items()}
    assert {"<think>", "</tool_call>", "<|im_end|>"} <= set(names["qwen3"])
    for text in [f"8 {spelled}9" for spelled in names["qwen3"] + names["llama3"][:16]]:
        for chat in real.values():
            result = retokenize(text, terminal=chat.eos_token_id, tokenizer=chat, room=99)
            assert (result.status, result.roundtrip) == ("kept", True)
            assert set(result.token_ids) & set(chat._tokenizer.added_tokens_decoder) == {chat.eos_token_id}
            assert chat.decode(result.token_ids) == text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["math/train", "math/test", "gsm8k/train", "gsm8k/test"])
def test_real_solutions_survive_real_tokenizers(name: str, real: dict[str, ChatTokenizer]) -> None:
    """A sample; docs/tokenizers.md has the figures for all of them."""
    import pyarrow.parquet as pq

    path = SHARED / "data" / f"{name}.parquet"
    if not path.is_file():
        pytest.skip(f"needs ../shared/data/{name}.parquet (real solutions)")
    texts = [text for text in pq.read_table(path)["solution"].to_pylist() if text]
    for text in texts[:: max(1, len(texts) // 200)]:
        for source, learner in (("qwen3", "llama3"), ("llama3", "qwen3")):
            sampled = [*real[source].encode(text), real[source].eos_token_id]
            chat = real[learner]
            result = retokenize(real[source].decode(sampled), terminal=chat.eos_token_id, tokenizer=chat, room=1 << 30)
            assert (result.status, result.roundtrip) == ("kept", True)
            assert result.token_ids[-1] == real[learner].eos_token_id
            assert real[learner].decode(result.token_ids) == text
            # What is ordinary text is encoded as everywhere.
            plain = real[learner]._tokenizer(text, add_special_tokens=False)["input_ids"]
            assert result.token_ids[:-1] == plain
