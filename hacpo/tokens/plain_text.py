"""A tokenizer for text in the middle of a sequence: nothing added, nothing stripped, no control token recognised.

Tokenizers are made for whole documents. Put to a response, which continues a prompt, many are not exact:
SentencePiece-like ones put a space in front when they encode and take one away when they decode, some strip white
space at both ends, and text that spells a control token (`<|im_end|>`, `<think>`) becomes it. Each of these is one
component of the specification in tokenizer.json, so it is changed there; the pieces of ordinary text, how
they are cut and their ids stay as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from tokenizers import Tokenizer

Spec = dict[str, Any]

_TAG = re.compile(r"<[^\s<>][^<>]*>|\[[^\s\[\]][^\[\]]*\]")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_PLACEHOLDER = "\uffff{}\uffff"
"""Name of a piece that text cannot reach: U+FFFF is no character. A text that spells it all the same is refused."""


def is_control(content: str, *, special: bool) -> bool:
    """Whether only a template or a model may put an added token into a sequence, never a text that spells it.

    So it is for special tokens, and for what looks like a tag though it is not declared special: Qwen3's `<think>`.
    Other added tokens (runs of spaces, words that a user added) are ordinary text.
    """
    return special or _TAG.fullmatch(content) is not None


def text_encoder(backend: Tokenizer, control: Collection[str]) -> Tokenizer:
    """A copy of a tokenizer that encodes text exactly.

    Args:
        backend: any tokenizer of the `tokenizers` library.
        control: contents of its control tokens.

    Raises:
        Exception: it has parts written in Python and cannot be copied.
    """
    spec: Spec = json.loads(backend.to_str())
    banned = set(control)
    spec["added_tokens"] = _hidden(spec["added_tokens"], banned, _pieces(spec["model"]))
    spec["truncation"] = spec["padding"] = spec["post_processor"] = None
    spec["normalizer"] = _changed(spec["normalizer"], "normalizers", _as_found_normalizer)
    spec["pre_tokenizer"] = _changed(spec["pre_tokenizer"], "pretokenizers", _without_prefix_space)
    _hide(spec["model"], banned)
    return Tokenizer.from_str(json.dumps(spec))


def decode_exactly(backend: Tokenizer) -> None:
    """Make a tokenizer decode what stands in the middle of a text: a leading space is kept."""
    if backend.decoder is None:
        return
    spec: Spec = json.loads(backend.decoder.__getstate__())
    exact = _changed(spec, "decoders", _exact_decoder)
    if exact != spec:
        carrier = {
            "version": "1.0",
            "model": {"type": "WordLevel", "vocab": {"": 0}, "unk_token": ""},
            "decoder": exact,
        }
        backend.decoder = Tokenizer.from_str(json.dumps(carrier)).decoder


def _changed(spec: Spec | None, members: str, change: Any) -> Spec | None:
    """A component with `change` applied to it, or to each member if it is a sequence; None drops it."""
    if spec is None:
        return None
    if spec["type"] != "Sequence":
        return change(spec)  # type: ignore[no-any-return]
    kept = [_changed(member, members, change) for member in spec[members]]
    return {**spec, members: [member for member in kept if member is not None]}


def _as_found_normalizer(spec: Spec) -> Spec | None:
    return None if spec["type"] in ("Prepend", "Strip") else spec


def _without_prefix_space(spec: Spec) -> Spec:
    if spec["type"] == "Metaspace":
        return {**spec, "prepend_scheme": "never"}
    return {**spec, "add_prefix_space": False} if spec["type"] == "ByteLevel" else spec


def _exact_decoder(spec: Spec) -> Spec | None:
    if spec["type"] == "Metaspace":
        return {**spec, "prepend_scheme": "never"}
    return None if spec["type"] == "Strip" and not spec["content"].strip() else spec


def _pieces(model: Spec) -> set[str]:
    return {entry if isinstance(entry, str) else entry[0] for entry in model["vocab"]}


def _hidden(added: list[Spec], banned: set[str], pieces: set[str]) -> list[Spec]:
    """Added tokens without the banned ones. Those that are no pieces of the vocabulary are numbered in order when the
    tokenizer is made, so they cannot go, or the others would get their ids; they get a name that no text has."""
    return [
        {**token, "content": _PLACEHOLDER.format(token["content"])} if token["content"] in banned else token
        for token in added
        if not (token["content"] in banned and token["content"] in pieces)
    ]


def _hide(model: Spec, banned: set[str]) -> None:
    """Take from a model's vocabulary what no text may become, leaving all ids where they are.

    Control tokens are often pieces of the vocabulary too, and a Unigram model or a merge would find them in a text. So
    would it find the pieces that stand for bytes: the six characters `<0x0A>` are not a line break.
    """
    vocabulary = model["vocab"]
    if model["type"] == "Unigram":
        # Below any six pieces together, which is what spelling out the name of a byte takes at most.
        least = 8 * min((score for _, score in vocabulary), default=0.0) - 8
        model["vocab"] = [
            [_PLACEHOLDER.format(piece), score]
            if piece in banned
            else [piece, least if model.get("byte_fallback") and _BYTE.fullmatch(piece) else score]
            for piece, score in vocabulary
        ]
        return
    banned -= {model.get("unk_token")}
    model["vocab"] = {
        _PLACEHOLDER.format(piece) if piece in banned else piece: token_id for piece, token_id in vocabulary.items()
    }
    if "merges" in model:
        bytes_too = bool(model.get("byte_fallback"))
        pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [
            [left, right]
            for left, right in pairs
            if not banned & {left, right, left + right} and not (bytes_too and _BYTE.fullmatch(left + right))
        ]
