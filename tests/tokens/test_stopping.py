"""Where a stop string ends a response: the same token for every kind of tokenizer, and as vLLM's own stream has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from hacpo.tokens.chat_templates import settle_chat
from hacpo.tokens.stopping import StopStrings, completed_at, ended_by_eos, first_stop, stop_string
from hacpo.tokens.tokenizers import ChatTokenizer, load_tokenizer
from tokenizer_kinds import KINDS, write_tokenizer

NAMES = ["byte_level", "llama2", "unigram_bytes", "unigram", "characters", "wordpiece"]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ChatTokenizer, Any]]:
    """Tokenizers of every kind, as the stages use them and as transformers (and vLLM) loads them."""
    root, found = tmp_path_factory.mktemp("kinds"), {}
    for name in NAMES:
        folder: Path = root / name
        folder.mkdir()
        tokenizer = write_tokenizer(folder, name)
        ends = [tokenizer.convert_tokens_to_ids(end) for end in KINDS[name].ends]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends} if ends else {}))
        settle_chat(folder, folder)
        found[name] = (ChatTokenizer(folder), load_tokenizer(folder))
    return found


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert first_stop("a, b. c", [".", ","]) == ","
    assert first_stop("a. b", ["b", " b", ". b"]) == "b"  # all end together: the first in the list
    assert first_stop("a. b", ["x"]) is None
    assert first_stop("a", []) is None


@pytest.mark.parametrize(
    ("finish_reason", "last", "expected"),
    [("stop", 9, None), ("stop", 4, "."), ("length", 4, None), ("length", 9, None)],
)
def test_what_a_rollout_says_of_its_end(finish_reason: str, last: int, expected: str | None) -> None:
    said = stop_string("8.", [3, last], finish_reason, stop=["."], eos_token_ids=[9])
    assert said == expected
    assert ended_by_eos(finish_reason, said) == (finish_reason == "stop" and last == 9)


def test_a_stop_string_may_begin_in_one_token_and_end_inside_another() -> None:
    pieces = {1: "x = 5", 2: ".", 3: "\n\nNext", 4: "\n"}

    def decode(token_ids: list[int]) -> str:
        return "".join(pieces[token_id] for token_id in token_ids)

    assert completed_at([1, 2, 3, 1], [".\n"], decode) == 3
    assert completed_at([1, 2, 4, 4], [".\n\n"], decode) == 4
    assert completed_at([1, 2, 1], ["5."], decode) == 2
    assert completed_at([1, 2, 1], ["\n"], decode) is None


def test_half_characters_and_control_tokens_wait_for_what_follows() -> None:
    """`é` as two byte tokens, with a control token between text: decoded as byte-level tokenizers do."""
    pieces = {1: b"caf", 2: b"\xc3", 3: b"\xa9", 4: b"", 5: b"!"}

    def decode(token_ids: list[int]) -> str:
        return b"".join(pieces[token_id] for token_id in token_ids).decode(errors="replace")

    assert completed_at([1, 2, 3, 5], ["é"], decode) == 3
    assert completed_at([1, 2, 3, 4, 4, 5], ["é!"], decode) == 6
    assert completed_at([1, 2, 1], ["caf"], decode) == 1
    # Bytes that never become a character hold nothing back for long.
    assert completed_at([2] * 40 + [5], ["!"], decode) == 41


def test_a_long_response_costs_as_much_per_token_as_a_short_one() -> None:
    seen: list[int] = []

    def decode(token_ids: list[int]) -> str:
        seen.append(len(token_ids))
        return "ab" * len(token_ids)

    grown = StopStrings(["never"], decode)
    assert not any(grown.completed_by(1) for _ in range(2000))
    assert max(seen) <= 3


@pytest.mark.parametrize("name", NAMES[:-1])  # WordPiece is none that vLLM samples with
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_a_response_ends_where_vllm_ends_it(
    name: str, chats: dict[str, tuple[ChatTokenizer, Any]], data: st.DataObject
) -> None:
    """Against the decoder stream of the `tokenizers` library, primed with a prompt, which is what vLLM watches."""
    chat, raw = chats[name]
    # Any tokens but halves of characters that never become whole: the stream gives up on some of those.
    ordinary = [token_id for token_id in range(len(raw)) if "\ufffd" not in chat.decode([token_id])]
    whole = [[token_id] for token_id in ordinary if token_id not in chat.stop_token_ids]
    whole += [chat.encode(text) for text in ("é", "日本", "😀", " ∫ x")] * 20
    pieces = data.draw(st.lists(st.sampled_from(whole), min_size=1, max_size=12))
    token_ids = [token_id for piece in pieces for token_id in piece]
    text = chat.decode(token_ids)
    start = data.draw(st.integers(0, max(len(text) - 1, 0)))
    stop = [text[start : start + data.draw(st.integers(1, 5))], "\\boxed"]
    stop = [one for one in stop if one and "\ufffd" not in one]
    stream = DecodeStream(ids=chat.encode("7"), skip_special_tokens=True)
    grown, expected = "", None
    for count, token_id in enumerate(token_ids, start=1):
        grown += stream.step(raw.backend_tokenizer, token_id) or ""
        if expected is None and first_stop(grown, stop) is not None:
            expected = count
    assert completed_at(token_ids, stop, chat.decode) == expected
    if expected is not None:
        assert first_stop(chat.decode(token_ids[:expected]), stop) is not None


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_response_ends_where_its_whole_text_first_has_a_stop_string(
    name: str, chats: dict[str, tuple[ChatTokenizer, Any]], data: st.DataObject
) -> None:
    """Decoding a few tokens at a time is decoding all of them, also where a token's text depends on those before it."""
    chat, raw = chats[name]
    whole = [number for number in range(len(raw)) if "\ufffd" not in chat.decode([number])]
    token_ids = data.draw(st.lists(st.sampled_from(whole), min_size=1, max_size=12))
    text = chat.decode(token_ids)
    start = data.draw(st.integers(0, max(len(text) - 1, 0)))
    stop = [text[start : start + data.draw(st.integers(1, 5))] or "no text"]
    counts = range(1, len(token_ids) + 1)
    expected = next((count for count in counts if first_stop(chat.decode(token_ids[:count]), stop) is not None), None)
    assert completed_at(token_ids, stop, chat.decode) == expected
