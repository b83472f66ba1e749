"""Real tokenizers: chat templates, exact encoding and decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hacpo.errors import DataError, ModelError


class ChatTokenizer:
    """A model folder's tokenizer as the stages use it.

    Raises:
        ModelError: the folder has no tokenizer, no chat template or no EOS token.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.folder = folder
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:
            # transformers raises OSError, ValueError, KeyError and others, depending on which file is absent.
            reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
            raise ModelError(f"no usable tokenizer: {reason}", where=folder) from None
        if not self._tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template",
                where=folder,
                expected="chat_template.jinja beside it or in tokenizer_config.json",
                remedy="add one, or name an instruction-tuned model",
            )
        if self._tokenizer.eos_token_id is None:
            raise ModelError("the tokenizer has no EOS token", where=folder)
        self.eos_token_id: int = int(self._tokenizer.eos_token_id)
        unknown = self._tokenizer.unk_token_id
        self.unk_token_id: int | None = None if unknown is None else int(unknown)
        self.context_length = context_length(folder)
        padding = self._tokenizer.pad_token_id
        self.pad_token_id: int = self.eos_token_id if padding is None else int(padding)

    def render(self, problem_id: str, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a prompt, ready for the assistant's answer.

        Raises:
            DataError: the template refuses the messages.
        """
        try:
            token_ids = self._tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:
            # A template is a program of the model's authors; it may raise anything.
            raise DataError(
                f"the chat template cannot render this prompt: {str(error).splitlines()[0][:160]}",
                where=f"problem {problem_id!r} with {self.folder}",
            ) from None
        if not token_ids:
            raise DataError("the chat template renders nothing", where=f"problem {problem_id!r} with {self.folder}")
        return [int(token) for token in token_ids]

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text: nothing added, and text that spells a special token stays text."""
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def decode(self, token_ids: list[int]) -> str:
        """The exact text of token ids, special tokens left out."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def context_length(folder: Path) -> int | None:
    """Most tokens that a model folder's config allows in one sequence; None if it does not say."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    value = config.get("max_position_embeddings", config.get("text_config", {}).get("max_position_embeddings"))
    return None if value is None else int(value)
