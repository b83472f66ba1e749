"""Every kind of tokenizer encodes and decodes what stands in the middle of a sequence exactly, and knows its ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hacpo.errors import DataError, ModelError
from hacpo.tokens.chat_templates import PLAIN_TEMPLATE, settle_chat
from hacpo.tokens.stopping import eos_token_ids
from hacpo.tokens.tokenizers import ChatTokenizer, load_tokenizer
from tokenizer_kinds import KINDS, write_tokenizer

NAMES = [*KINDS, "python_bytes"]
ASK = [{"role": "user", "content": "7+3=?"}]
SPELLED = "</s> <eos> <|im_end|> <think> <start_of_turn> <end_of_turn> <unk> [SEP] <0x0A>"
"""Control tokens of all kinds, written as text."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Settled tokenizer folders of every kind."""
    root = tmp_path_factory.mktemp("kinds")
    for name in NAMES:
        (root / name).mkdir()
        tokenizer = write_tokenizer(root / name, name)
        ends = [tokenizer.convert_tokens_to_ids(end) for end in KINDS[name].ends] if name in KINDS else []
        if ends:
            (root / name / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        settle_chat(root / name, root / name)
    return {name: root / name for name in NAMES}


@pytest.fixture(scope="module")
def chats(folders: dict[str, Path]) -> dict[str, ChatTokenizer]:
    return {name: ChatTokenizer(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def untouched(folders: dict[str, Path]) -> dict[str, Any]:
    """The same tokenizers as transformers loads them."""
    return {name: load_tokenizer(folder) for name, folder in folders.items()}


# --- exact text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["7+3=10", " 7+3=10", "  8", "8 ", "\\boxed{8}\n"])
@pytest.mark.parametrize("name", ["byte_level", "byte_level_base", "llama2", "unigram_bytes", "characters"])
def test_a_response_continues_the_prompt_without_a_space_added_or_lost(
    name: str, text: str, chats: dict[str, ChatTokenizer], untouched: dict[str, Any]
) -> None:
    chat, raw = chats[name], untouched[name]
    prompt, response = chat.render("p", ASK), chat.encode(text)
    assert chat.decode(response) == text
    # Prompt and response in one sequence, as the model sees them, decoded by the tokenizer as it is.
    whole = raw.decode(prompt + response, skip_special_tokens=True)
    assert whole == raw.decode(prompt, skip_special_tokens=True) + text


@pytest.mark.parametrize("name", ["byte_level", "llama2", "unigram_bytes", "unigram", "characters", "python_bytes"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_sampled_tokens_decode_to_what_they_add_to_the_prompt(
    name: str, chats: dict[str, ChatTokenizer], untouched: dict[str, Any], data: st.DataObject
) -> None:
    chat, raw = chats[name], untouched[name]
    token_ids = data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=12))
    token_ids = [token_id for token_id in token_ids if token_id not in chat.stop_token_ids]
    # Special tokens out, so that those of the prompt do not decide what counts as the first token.
    prompt = chat.encode("7")
    whole = raw.decode([*prompt, *token_ids], skip_special_tokens=True)
    start = raw.decode(prompt, skip_special_tokens=True)
    assert whole == start + chat.decode(token_ids)


def test_a_leading_space_is_encoded_only_where_there_is_one(chats: dict[str, ChatTokenizer]) -> None:
    for name in ("llama2", "unigram_bytes", "unigram"):
        chat = chats[name]
        pieces = [chat._tokenizer.convert_ids_to_tokens(chat.encode(text))[0] for text in ("7", " 7")]
        assert [piece.startswith("▁") for piece in pieces] == [False, True]


@pytest.mark.parametrize("name", NAMES)
def test_text_that_spells_control_tokens_has_none(name: str, chats: dict[str, ChatTokenizer]) -> None:
    chat = chats[name]
    backend = chat._tokenizer
    control = {i for i, token in backend.added_tokens_decoder.items() if token.content.strip()} - {chat.unk_token_id}
    for text in (SPELLED, *SPELLED.split(), "\uffff<think>\uffff"):
        assert control.isdisjoint(chat.encode(f"8 {text} 9")), text
    if name in ("byte_level", "byte_level_base", "llama2", "characters", "python_bytes"):
        assert chat.decode(chat.encode(SPELLED)) == SPELLED


def test_added_tokens_that_are_ordinary_text_are_used_and_keep_their_ids(chats: dict[str, ChatTokenizer]) -> None:
    chat = chats["byte_level"]  # "    " was added after <think>, </think>, <tool_call>
    spaces = chat._tokenizer.convert_tokens_to_ids("    ")
    assert chat.encode("a    b") == [*chat.encode("a"), spaces, *chat.encode("b")]


def test_control_tokens_that_were_sampled_are_not_in_the_text_but_tags_are(chats: dict[str, ChatTokenizer]) -> None:
    chat = chats["byte_level"]
    start, think, end = (
        chat._tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<think>", "<|im_end|>")
    )
    assert chat.decode([think, *chat.encode("8"), start, *chat.encode("9"), end]) == "<think>89"


# --- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(KINDS))
def test_eos_is_what_the_template_ends_a_turn_with(name: str, chats: dict[str, ChatTokenizer]) -> None:
    chat = chats[name]
    assert chat._tokenizer.convert_ids_to_tokens(chat.eos_token_id) == KINDS[name].end


def test_sampling_stops_at_every_end_and_the_folder_says_so(
    folders: dict[str, Path], chats: dict[str, ChatTokenizer]
) -> None:
    names = {name: chat._tokenizer.convert_ids_to_tokens(list(chat.stop_token_ids)) for name, chat in chats.items()}
    assert names["byte_level"] == ["<|im_end|>", "<|endoftext|>"]
    assert names["unigram_bytes"] == ["<eos>", "<end_of_turn>"]
    # Nothing but its template says that this one's turns end in <end_of_turn>: the folder is made to.
    assert names["unigram"] == ["<eos>", "<end_of_turn>"]
    assert json.loads((folders["unigram"] / "generation_config.json").read_text()) == {"eos_token_id": [5, 1]}
    for name, folder in folders.items():
        assert eos_token_ids(folder) == list(chats[name].stop_token_ids)


def test_a_declared_end_that_the_sampled_response_ends_in_is_not_in_its_text(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    for file in folders["characters"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    bar = ChatTokenizer(tmp_path).encode("|")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, *bar]}))
    chat = ChatTokenizer(tmp_path)
    assert chat.eos_token_id == 1
    assert chat.decode(chat.encode("8|9|")) == "8|9"


def test_a_tokenizer_without_eos_takes_the_models(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "digits")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(PLAIN_TEMPLATE)
    with pytest.raises(ModelError, match="the tokenizer has no EOS token"):
        ChatTokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert ChatTokenizer(tmp_path).eos_token_id == 7


# --- templates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), [("byte_level", 0), ("byte_level_base", 0), ("llama2", 1), ("unigram", 1)])
def test_a_prompt_has_bos_once_if_the_template_writes_it_and_a_response_never(
    name: str, count: int, chats: dict[str, ChatTokenizer]
) -> None:
    chat = chats[name]
    bos = chat._tokenizer.bos_token_id
    assert chat.render("p", ASK).count(bos) == count
    assert bos not in chat.encode("7+3")


def test_the_plain_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "byte_level_base")
    with pytest.raises(ModelError, match="no chat template"):
        ChatTokenizer(tmp_path)
    assert settle_chat(tmp_path, tmp_path) == ["plain chat template added, it has none", "stops at the tokens 337"]
    raw = load_tokenizer(tmp_path)
    turns = [{"role": "system", "content": "Be brief."}, *ASK]
    assert raw.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "Be brief.\n\nUser: 7+3=?\n\nAssistant:\n"
    )
    told = [*turns, {"role": "assistant", "content": "10"}, {"role": "user", "content": "Sure?"}]
    assert raw.apply_chat_template(told, tokenize=False) == (
        "Be brief.\n\nUser: 7+3=?\n\nAssistant:\n10<|end_of_text|>\n\nUser: Sure?\n\n"
    )
    assert settle_chat(tmp_path, tmp_path) == []  # a second time there is nothing to do


def test_a_template_that_asks_for_the_date_is_told_the_same_on_every_day(tmp_path: Path) -> None:
    """As Llama 3.2's does: else a run's prompts would change at midnight, and no audit could render them again."""
    template = tmp_path / "dated.jinja"
    asked = "{%- if strftime_now is defined %}{%- set date = strftime_now('%d %b %Y') %}{%- endif %}"
    template.write_text(asked + "{{- date }}\n{{- messages[0]['content'] }}\n{{- '=' }}")
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model", "byte_level")
    settle_chat(tmp_path / "model", tmp_path / "model", template)
    chat = ChatTokenizer(tmp_path / "model")
    assert chat.decode(chat.render("p", ASK)) == "26 Jul 20247+3=?="


def test_the_plain_template_begins_with_bos_where_the_tokenizer_puts_one(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, "llama2")
    (tmp_path / "chat_template.jinja").unlink()
    settle_chat(tmp_path, tmp_path)
    prompt = ChatTokenizer(tmp_path).render("p", ASK)
    assert prompt[0] == tokenizer.bos_token_id
    assert prompt.count(tokenizer.bos_token_id) == 1


def test_linked_files_are_replaced_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "copy").mkdir()
    write_tokenizer(tmp_path / "source", "unigram")
    (tmp_path / "source" / "generation_config.json").write_text('{"eos_token_id": 1}')
    before = {file.name: file.read_bytes() for file in (tmp_path / "source").iterdir()}
    for file in (tmp_path / "source").iterdir():
        (tmp_path / "copy" / file.name).hardlink_to(file)
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}\n")
    notes = settle_chat(tmp_path / "copy", tmp_path / "source", tmp_path / "mine.jinja")
    assert notes == ["chat template as given"]
    assert (tmp_path / "copy" / "chat_template.jinja").read_text() == "{{ messages[0].content }}\n"
    assert {file.name: file.read_bytes() for file in (tmp_path / "source").iterdir()} == before


def test_errors_name_the_users_file_and_not_the_copy(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    write_tokenizer(tmp_path / "copy", "llama2")
    for content, says in (("{% if", "unexpected"), ("{{ raise_exception('no') }}", "prompt: no")):
        (tmp_path / "bad.jinja").write_text(content)
        with pytest.raises(DataError, match=says) as caught:
            settle_chat(tmp_path / "copy", tmp_path / "source", tmp_path / "bad.jinja")
        assert "bad.jinja" in str(caught.value)
        assert "copy" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"max_position_embeddings": 64},
        {"n_positions": 64, "n_ctx": 64},  # GPT-2, GPT-J
        {"max_seq_len": 64},  # MPT, DBRX
        {"text_config": {"max_position_embeddings": 64}},
    ],
)
def test_the_context_length_is_found_under_every_name(
    config: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(folders["byte_level"], tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert ChatTokenizer(tmp_path / "model").context_length == 64
