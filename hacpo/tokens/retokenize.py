"""One response in another learner's vocabulary.

Between different tokenizers responses travel as text: decoded by the source, encoded by the learner, ended by the
learner's token for the one that the source ended with. Text that spells a control token stays text. Responses in the
learner's own vocabulary are never re-encoded (a sampled tokenisation need not be the canonical one, and its
log-probabilities belong to the tokens that were sampled). Called by `hacpo.algorithm.pooling`; whose responses need it
is decided in stages/pool.py.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, Protocol

Status = Literal["kept", "too_long", "empty", "not_representable", "error"]


class TextTokenizer(Protocol):
    """What retokenising needs of a tokenizer.

    Attributes:
        unk_token_id: what stands for text that the vocabulary lacks; None if nothing does.
    """

    unk_token_id: int | None

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts that continue a prompt: nothing added, no control token recognised in them."""

    def decode_all(self, token_ids: Sequence[list[int]]) -> list[str]:
        """The texts of token ids, exactly."""


@dataclass(frozen=True)
class Retokenized:
    """A response in the learner's tokens.

    Attributes:
        token_ids: what the learner is trained on, with its terminal token where the source's is scored; empty unless
            `kept` or `too_long`.
        status: `kept`, or why the learner cannot use it.
        roundtrip: the learner's decode gives back the same text.
    """

    token_ids: list[int]
    status: Status
    roundtrip: bool


def retokenize(text: str, *, terminal: int | None, tokenizer: TextTokenizer, room: int) -> Retokenized:
    """Encode a source's response for a learner.

    Args:
        text: the source's response, without special tokens.
        terminal: the learner's token for the one that ended it; None if none did, or if it is not scored.
        tokenizer: the learner's.
        room: most tokens the response may take, the terminal token included.

    Returns:
        `not_representable` if the vocabulary lacks something in the text (an unknown token, or a decode that differs in
        more than white space and Unicode normal form, case and accents included); `empty` if there is no text;
        `too_long` if it does not fit; `error` if the tokenizer itself fails on the text; else `kept`.
    """
    return retokenize_all([text], terminals=[terminal], tokenizer=tokenizer, rooms=[room])[0]


def retokenize_all(
    texts: Sequence[str], *, terminals: Sequence[int | None], tokenizer: TextTokenizer, rooms: Sequence[int]
) -> list[Retokenized]:
    """The same of many responses, which a tokenizer encodes and decodes sooner together; each is what it is alone."""
    ways = iter(_there_and_back([text for text in texts if text], tokenizer))
    return [
        _result(text, next(ways), terminal, tokenizer.unk_token_id, room) if text else Retokenized([], "empty", True)
        for text, terminal, room in zip(texts, terminals, rooms, strict=True)
    ]


def _there_and_back(texts: Sequence[str], tokenizer: TextTokenizer) -> list[tuple[list[int], str] | None]:
    """Token ids of each text, and what they decode to; None where the tokenizer fails."""
    try:
        token_ids = tokenizer.encode_all(texts)
        return list(zip(token_ids, tokenizer.decode_all(token_ids), strict=True))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        # Tokenizers are third-party code and the text is a model's: whatever it raises costs this one response. A panic
        # in the `tokenizers` library arrives as a BaseException of its own.
        return [None] if len(texts) == 1 else [way for text in texts for way in _there_and_back([text], tokenizer)]


def _result(
    text: str, way: tuple[list[int], str] | None, terminal: int | None, unknown: int | None, room: int
) -> Retokenized:
    if way is None:
        return Retokenized([], "error", False)
    token_ids, decoded = way
    roundtrip = decoded == text
    lacks = not token_ids or (unknown is not None and unknown in token_ids)
    if lacks or (not roundtrip and _skeleton(decoded) != _skeleton(text)):
        return Retokenized([], "not_representable", roundtrip)
    if terminal is not None:
        token_ids = [*token_ids, terminal]
    return Retokenized(token_ids, "kept" if len(token_ids) <= room else "too_long", roundtrip)


def _skeleton(text: str) -> str:
    """Text without the differences that a tokenizer's normaliser may make: white space and Unicode form (NFKD).

    `unicodedata.normalize` orders a run of combining marks in quadratic time, and a text of one such run would take
    minutes. Letters are decomposed one by one, which is the same, and each run is sorted.
    """
    letters = (part for letter in text for part in unicodedata.normalize("NFKD", letter) if not part.isspace())
    runs = groupby(letters, key=lambda part: unicodedata.combining(part) == 0)
    return "".join(
        part for starters, run in runs for part in (run if starters else sorted(run, key=unicodedata.combining))
    )
