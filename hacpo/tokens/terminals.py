"""What ends a response, and which token of one model stands for which of another (docs/tokenizers.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_DOCUMENT_ENDS = {"endoftext", "eos", "s", "endofsentence", "endofdocument", "eod"}
"""Letters of the tokens with which models are taught in pretraining that a document is over: `<|endoftext|>` (Qwen,
GPT-NeoX, Phi), `<|end_of_text|>` (Llama 3, Granite), `<eos>` (Gemma), `</s>` (Llama 2, Mistral), `<|end▁of▁sentence|>`
(DeepSeek)."""


@dataclass(frozen=True)
class Terminals:
    """The tokens that end a model's responses.

    Attributes:
        turn_end: ends an assistant's turn in its chat template, and a response where nothing else is known.
        document_end: ends a text in pretraining; None if it has no such token besides `turn_end`.
        contents: every token that it stops at, these two included -> what it is called.
    """

    turn_end: int
    document_end: int | None
    contents: Mapping[int, str]

    @classmethod
    def of(cls, turn_end: int, contents: Mapping[int, str], eos_token_id: int | None) -> Terminals:
        """From what a model folder declares.

        The document's end is the tokenizer's `eos_token` where that does not end a turn, else the first other token
        that has the name of one.

        Args:
            turn_end: see the attribute.
            contents: every token that the model stops at -> what it is called.
            eos_token_id: the tokenizer's `eos_token`, if it has one.
        """
        if eos_token_id is not None and eos_token_id != turn_end:
            return cls(turn_end, eos_token_id, contents)
        named = (
            token_id
            for token_id in sorted(contents)
            if token_id != turn_end and re.sub("[^a-z]", "", contents[token_id].lower()) in _DOCUMENT_ENDS
        )
        return cls(turn_end, next(named, None), contents)


def terminal_map(source: Terminals, learner: Terminals) -> dict[int, int]:
    """Every token that a source's response can end with -> the learner's token that stands for it.

    In this order: the end of a turn becomes the learner's end of a turn; a token of the same name that the learner
    stops at too is that one; the end of a document becomes the learner's, if it has one; anything else (the end of a
    message to a tool) becomes the end of a turn.
    """
    named = {content: token_id for token_id, content in learner.contents.items()}
    result = {}
    for token_id, content in source.contents.items():
        if token_id == source.turn_end:
            result[token_id] = learner.turn_end
        elif content in named:
            result[token_id] = named[content]
        elif token_id == source.document_end and learner.document_end is not None:
            result[token_id] = learner.document_end
        else:
            result[token_id] = learner.turn_end
    return result
