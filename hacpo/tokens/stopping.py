"""How a response ends: by a token of its own (EOS), by a stop string, or by the length limit.

A stop string ends a response with the token that completes it. That token may say more (`.\\n` completes `.`), and
stays whole, so a response's text is always what its tokens decode to. There is no EOS then, for whoever learns from it.

    finish_reason   stop_string   the last token
    stop            null          EOS
    stop            a text        completes that text
    length          null          is where the limit was
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hacpo.artifacts.model_folder import read_mapping
from hacpo.errors import ModelError

UNFINISHED = "\ufffd"
"""What a decoder gives for bytes that are no character, or none yet."""

_MOST = 1 << 31
"""Token ids are int32."""

_PATIENCE = 16
"""Tokens without a whole character after which they are taken for what they are: a character has four bytes at most."""


def first_stop(text: str, stop: Sequence[str]) -> str | None:
    """The stop string that is complete first in a text; of two that end together, the first in the list."""
    ends = [(text.find(one) + len(one), number) for number, one in enumerate(stop) if one in text]
    return stop[min(ends)[1]] if ends else None


def stop_string(
    text: str, token_ids: Sequence[int], finish_reason: str, *, stop: Sequence[str], eos_token_ids: Sequence[int]
) -> str | None:
    """What a rollout's column `stop_string` holds; None if EOS or the length limit ended the response."""
    if finish_reason != "stop" or (token_ids and token_ids[-1] in eos_token_ids):
        return None
    return first_stop(text, stop)


def eos_token_ids(folder: Path, *others: int) -> list[int]:
    """Tokens that a model folder's generation config and config name as EOS, and `others`.

    Raises:
        ModelError: one of them names something that is no token id.
    """
    token_ids = set(others)
    for name in ("generation_config.json", "config.json"):
        value = read_mapping(folder / name).get("eos_token_id")
        declared = value if isinstance(value, list) else [] if value is None else [value]
        wrong = [token_id for token_id in declared if type(token_id) is not int or not 0 <= token_id < _MOST]
        if wrong:
            raise ModelError("eos_token_id is no token id", where=folder / name, found=repr(wrong[0])[:40])
        token_ids |= set(declared)
    return sorted(token_ids)


def completed_at(token_ids: Sequence[int], stop: Sequence[str], decode: Callable[[list[int]], str]) -> int | None:
    """How many of a response's tokens it takes to complete a stop string; None if none is complete."""
    grown = StopStrings(stop, decode)
    return next((count for count, token_id in enumerate(token_ids, start=1) if grown.completed_by(token_id)), None)


def ended_by_eos(finish_reason: str, stop_string: str | None) -> bool:
    """Whether a rollout's last token is an EOS."""
    return finish_reason == "stop" and stop_string is None


class StopStrings:
    """Watches one response grow, token by token, for the first stop string in its text.

    Text is taken from whole characters only, as vLLM does: a token that ends within one counts with the token that
    completes it. Only the last tokens are decoded, so a token costs the same however long the response is.

    Args:
        stop: the stop strings.
        decode: text of token ids that continue a prompt.
    """

    def __init__(self, stop: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self._stop = stop
        self._decode = decode
        self._longest = max(map(len, stop), default=0)
        self._tail = ""
        self._token_ids: list[int] = []  # a few that are in the text already, then those that are not yet
        self._settled = 0

    def completed_by(self, token_id: int) -> bool:
        """Add a token; whether a stop string is complete with it."""
        self._token_ids.append(token_id)
        before = self._decode(self._token_ids[: self._settled])
        text = self._decode(self._token_ids)
        if text == before:  # a control token: it is in no text
            self._token_ids.pop()
            return False
        if text.endswith(UNFINISHED) and len(self._token_ids) - self._settled < _PATIENCE:
            return False
        self._token_ids = self._token_ids[self._settled :]
        self._settled = len(self._token_ids)
        self._tail += text[len(before) :]
        completed = first_stop(self._tail, self._stop) is not None
        self._tail = self._tail[-self._longest :]
        return completed
