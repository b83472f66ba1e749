"""Real tokenizers: chat templates, the tokens that end a response, exact encoding and decoding (docs/tokenizers.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from hacpo.artifacts.model_config import check_config
from hacpo.artifacts.model_folder import read_mapping, why_unloadable
from hacpo.errors import DataError, ModelError, TemplateError
from hacpo.tokens.context_length import context_length
from hacpo.tokens.plain_text import decode_exactly, is_control, text_encoder
from hacpo.tokens.renderer import RefusedError, renderer_of
from hacpo.tokens.stopping import eos_token_ids
from hacpo.tokens.terminals import Terminals
from hacpo.tokens.tokenizer_file import FileTokenizer, tokenizer_of_file

_ANSWER = "ANSWER"

_THINKING = ("enable_thinking", "thinking")
"""What chat templates call it: the first in Qwen3, SmolLM3, GLM and most others, the second in DeepSeek and Granite."""


def never_ask() -> None:
    """Have transformers refuse a folder's code wherever nobody told it `trust_remote_code`.

    hacpo always does, but transformers hands that on to some of the classes that it makes itself and not to others, and
    those ask on the terminal. A waiting time of zero, which its own tests set, makes the question a refusal.
    """
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0


def load_tokenizer(folder: Path, called: Path | None = None) -> Any:
    """The transformers tokenizer of a model folder, whether it has a chat template or not.

    Args:
        folder: where its files are.
        called: what messages name instead; None: the folder.

    Raises:
        ModelError: the folder has no tokenizer that can be loaded, or `check_config` refuses it.
    """
    from transformers import AutoTokenizer

    check_config(folder, called)
    never_ask()
    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # transformers raises OSError, ValueError, KeyError and others, depending on which file is absent. A panic in
        # the `tokenizers` library arrives as a BaseException of its own.
        raise ModelError(f"no usable tokenizer: {why_unloadable(error)}", where=called or folder) from None
    longest = loaded.model_max_length
    if not isinstance(longest, int | float):  # which transformers compares with lengths, once it encodes
        raise ModelError(
            "no usable tokenizer: model_max_length is no number", where=called or folder, found=type(longest).__name__
        )
    return loaded


class ChatTokenizer:
    """A model folder's tokenizer as the stages use it.

    Args:
        folder: where its files are.
        called: what messages name instead; None: the folder.

    Attributes:
        eos_token_id: the token with which the chat template ends an assistant's turn, or the tokenizer's EOS where the
            template ends it with none.
        stop_token_ids: what ends a response that the model samples: `eos_token_id`, the tokenizer's EOS and those that
            the model's generation config and config name.
        terminals: the same tokens, and which of them stands for what in another vocabulary.
        unk_token_id: what stands for text that the vocabulary lacks, if there is such a token.
        pad_token_id: filler; the EOS where the tokenizer names none.
        context_length: most tokens of a sequence; None if the model does not say.
        vocabulary_size: tokens, added ones included.

    Raises:
        ModelError: the folder has no tokenizer, no chat template or no EOS token.
    """

    def __init__(self, folder: Path, called: Path | None = None) -> None:
        self.folder = called or folder
        check_config(folder, called)
        self._tokenizer: Any = tokenizer_of_file(folder) or load_tokenizer(folder, called)
        if not self._tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template",
                where=self.folder,
                expected="chat_template.jinja beside it or in tokenizer_config.json",
                remedy="repeat warmup, which adds one",
            )
        try:
            self._renderer = renderer_of(self._tokenizer.get_chat_template())
        except ValueError:
            raise ModelError("the tokenizer has several chat templates and no default", where=self.folder) from None
        own = self._tokenizer.eos_token_id
        declared = eos_token_ids(folder, *([] if own is None else [int(own)]))
        added = self._tokenizer.added_tokens_decoder.items()
        self._control = {
            int(token_id): token.content
            for token_id, token in added
            if is_control(token.content, special=token.special or token_id in declared)
        }
        candidates = [own, *declared]
        end = self._turn_end({*declared})
        if end is None:
            end = self._turn_end({int(token_id) for token_id, token in added if token.special})
        first = end if end is not None else next((token for token in candidates if token is not None), None)
        if first is None:
            raise ModelError("the tokenizer has no EOS token", where=self.folder)
        self.eos_token_id: int = int(first)
        self.stop_token_ids: tuple[int, ...] = tuple(sorted({self.eos_token_id, *declared}))
        names = {token_id: str(self._tokenizer.convert_ids_to_tokens(token_id)) for token_id in self.stop_token_ids}
        self.terminals = Terminals.of(self.eos_token_id, names, own)
        special = {int(token_id) for token_id, token in added if token.special}
        self._without_text = frozenset({*special, *map(int, self._tokenizer.all_special_ids)})
        unknown = self._tokenizer.unk_token_id
        self.unk_token_id: int | None = None if unknown is None else int(unknown)
        self.context_length = context_length(read_mapping(folder / "config.json"))
        self.vocabulary_size: int = len(self._tokenizer)
        padding = self._tokenizer.pad_token_id
        self.pad_token_id: int = self.eos_token_id if padding is None else int(padding)
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            decode_exactly(backend)

    def render(self, problem_id: str, messages: list[dict[str, str]], thinking: bool | None = None) -> list[int]:
        """Token ids of a prompt, ready for the assistant's answer.

        Args:
            thinking: told to the template under the names that templates have for it; None: nothing is told.

        Raises:
            TemplateError: the template refuses the messages.
            DataError: it makes nothing of them.
            ModelError: the tokenizer cannot encode what it makes of them.
        """
        told = {} if thinking is None else dict.fromkeys(_THINKING, thinking)
        try:
            text = self._rendered(messages, add_generation_prompt=True, **told)
        except RefusedError as refusal:
            raise TemplateError(
                "the chat template cannot render this prompt",
                where=f"problem {problem_id!r} with {self.folder}",
                reason=str(refusal),
            ) from None
        with self._encoding():
            token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if not token_ids:
            raise DataError("the chat template renders nothing", where=f"problem {problem_id!r} with {self.folder}")
        return [int(token) for token in token_ids]

    def _rendered(self, messages: list[dict[str, str]], *, add_generation_prompt: bool, **told: Any) -> str:
        """The text of a conversation.

        Raises:
            RefusedError: the template refuses it, or goes beyond its bounds.
        """
        given = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        return self._renderer.render({**self._tokenizer.special_tokens_map, **given, "messages": messages, **told})

    def encode(self, text: str) -> list[int]:
        """Token ids of text that continues a prompt: nothing added, and text that spells a control token stays text.

        Empty where the only way to encode it is a control token.
        """
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The same of each of many texts."""
        return [token_ids if self._never_in_text.isdisjoint(token_ids) else [] for token_ids in self._encoded(texts)]

    def decode(self, token_ids: list[int]) -> str:
        """The exact text of token ids that continue a prompt, without special tokens and without the EOS at the end."""
        body = self._without_end(token_ids)
        return str(self._tokenizer.decode(body, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def decode_all(self, token_ids: Sequence[list[int]]) -> list[str]:
        """The same of each of many responses."""
        if not isinstance(self._tokenizer, FileTokenizer):
            return [self.decode(ids) for ids in token_ids]
        return self._tokenizer.decode_all([self._without_end(ids) for ids in token_ids])

    def _without_end(self, token_ids: list[int]) -> list[int]:
        return token_ids[:-1] if token_ids and token_ids[-1] in self.stop_token_ids else token_ids

    def holds_control(self, token_ids: Sequence[int]) -> bool:
        """Whether one of these tokens is in no text: a special token, or an id that the vocabulary does not have (a
        model that has more rows than tokens may sample it)."""
        return not self._without_text.isdisjoint(token_ids) or max(token_ids, default=0) > self._last_id

    def _encoded(self, texts: Sequence[str]) -> Iterator[list[int]]:
        if self._encoder is not None:
            with self._encoding():
                encodings = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
            for encoding in encodings:
                yield encoding.ids
            return
        for text in texts:
            with self._encoding():
                token_ids = list(
                    self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
                )
            yield token_ids

    @contextmanager
    def _encoding(self) -> Iterator[None]:
        """Refuse a tokenizer whose own files keep it from encoding, such as one that names no token for the unknown."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # as in `load_tokenizer`
            raise ModelError(f"the tokenizer encodes no text: {why_unloadable(error)}", where=self.folder) from None

    @cached_property
    def _never_in_text(self) -> frozenset[int]:
        """Control tokens, but for the one that stands for what the vocabulary lacks."""
        return frozenset(self._control.keys() - {self.unk_token_id})

    @cached_property
    def _last_id(self) -> int:
        return max(map(int, self._tokenizer.get_vocab().values()))

    @cached_property
    def _encoder(self) -> Any:
        """The tokenizer for text alone; None for one written in Python, which is taken as it is."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        try:
            return text_encoder(backend, self._control.values())
        except Exception:
            # Parts of it are Python objects, which have no specification to change.
            return None

    def _turn_end(self, candidates: set[int]) -> int | None:
        """The one of these tokens that the chat template puts after an assistant's answer; None if it puts none."""
        turns = [{"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": _ANSWER}]
        try:
            rendered = self._rendered(turns, add_generation_prompt=False)
        except RefusedError as refusal:
            if refusal.beyond_bounds:
                raise ModelError(f"the chat template cannot be used: {refusal}", where=self.folder) from None
            return None  # some templates take no answers at all
        before, _, after = rendered.rpartition(_ANSWER)
        contents = {token_id: self._tokenizer.convert_ids_to_tokens(token_id) for token_id in candidates}
        following = [
            token_id for token_id, name in contents.items() if before and name and after.lstrip().startswith(name)
        ]
        return max(following, key=lambda token_id: len(contents[token_id]), default=None)
