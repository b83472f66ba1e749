"""A tokenizer from its tokenizer.json alone, where that is what transformers would make of the folder.

transformers' `AutoTokenizer` imports torch, which takes seconds, to choose a class; the class loads tokenizer.json, or
builds the same anew from its vocabulary, and adds the tokens that the folder's other files name. `tokenizer_of_file`
takes a folder for which both come to nothing, by rules that hold whatever its vocabulary: the class is one that takes
the file as it is or builds just that, every token that a file names is in tokenizer.json as it is named, and no key
asks for anything else. For any other folder it returns None, and transformers decides, and says what is wrong.

Source of the rules: transformers 5.19, `AutoTokenizer.from_pretrained`, `TokenizersBackend`, `Qwen2Tokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from hacpo.artifacts.model_folder import CHAT_TEMPLATES, read_mapping
from hacpo.artifacts.text_files import check_regular

Json = dict[str, Any]

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The roles of tokens that every tokenizer has in transformers; they are variables of a chat template."""

AS_IT_IS = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Names under which transformers takes tokenizer.json as it is."""

AS_IT_IS_FOR = ("deepseek_v3", "glm4", "granite", "mistral", "olmo2", "phi3")
"""Model types for which it does so whatever class the folder names."""

OTHER_CLASS_FOR = ("hyperclovax_vision_v2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp")
"""Model types for which it takes a class of its own whatever the folder names."""

_QWEN = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_QWEN_TYPE = "qwen2"
"""The model type for which transformers takes this class whatever the folder names."""
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_PARTS: Json = {
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": _QWEN_PATTERN}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    },
}
"""What this class builds around a vocabulary and its merges."""

_SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
"""A special token as that class adds it."""

_OF_NO_ACCOUNT = frozenset(
    {
        "add_bos_token",
        "add_eos_token",
        "backend",
        "clean_up_tokenization_spaces",
        "errors",
        "is_local",
        "legacy",
        "local_files_only",
        "model_input_names",
        "name_or_path",
        "processor_class",
        "sp_model_kwargs",
        "spaces_between_special_tokens",
        "use_default_system_prompt",
    }
)
"""Keys of tokenizer_config.json that change nothing of how text without special tokens around it is encoded, of how
tokens are decoded with `clean_up_tokenization_spaces=False`, and of prompts."""

_ACCOUNTED = frozenset(
    {
        *NAMED,
        "add_prefix_space",
        "added_tokens_decoder",
        "additional_special_tokens",
        "chat_template",
        "extra_special_tokens",
        "model_max_length",
        "padding_side",
        "split_special_tokens",
        "tokenizer_class",
        "truncation_side",
    }
)


@dataclass(frozen=True)
class FileTokenizer:
    """What `ChatTokenizer` asks of a transformers tokenizer, with its names and answers.

    Attributes:
        backend_tokenizer: of the `tokenizers` library.
        chat_template: Jinja; None if the folder has none.
        special_tokens_map: role -> content of the token that has it.
        extra_special_tokens: contents of special tokens without a role.
        split_special_tokens: whether text that spells a special token stays text.
    """

    backend_tokenizer: Tokenizer
    chat_template: str | None
    special_tokens_map: dict[str, str]
    extra_special_tokens: Sequence[str]
    split_special_tokens: bool

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __call__(
        self, text: str, *, add_special_tokens: bool, split_special_tokens: bool | None = None
    ) -> dict[str, list[int]]:
        """Token ids of a text, under `input_ids`."""
        split = self.split_special_tokens if split_special_tokens is None else split_special_tokens
        self.backend_tokenizer.encode_special_tokens = split
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of token ids, with its spaces as they are: `clean_up_tokenization_spaces` is no other."""
        assert not clean_up_tokenization_spaces
        return str(self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def decode_all(self, token_ids: Sequence[list[int]]) -> list[str]:
        """The texts of many responses, without special tokens."""
        return list(self.backend_tokenizer.decode_batch(list(token_ids), skip_special_tokens=True))

    def get_chat_template(self) -> str:
        """The chat template of a folder that has one."""
        assert self.chat_template is not None
        return self.chat_template

    def get_vocab(self) -> dict[str, int]:
        """Every token's id, added ones included."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """What a token is called."""
        return self.backend_tokenizer.id_to_token(token_id)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Added tokens by id."""
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the tokens with a role, and of the others that are named special."""
        contents = dict.fromkeys([*self.special_tokens_map.values(), *self.extra_special_tokens])
        return [self._id(content) for content in contents]

    @property
    def eos_token_id(self) -> int | None:
        """Of the tokenizer's EOS, if it has one."""
        return self._with_role("eos_token")

    @property
    def unk_token_id(self) -> int | None:
        """Of what stands for text that the vocabulary lacks, if there is such a token."""
        return self._with_role("unk_token")

    @property
    def pad_token_id(self) -> int | None:
        """Of filler, if there is such a token."""
        return self._with_role("pad_token")

    def _with_role(self, role: str) -> int | None:
        content = self.special_tokens_map.get(role)
        return None if content is None else self._id(content)

    def _id(self, content: str) -> int:
        token_id = self.backend_tokenizer.token_to_id(content)
        assert token_id is not None  # `_Source.is_plain`: every token that is named is there
        return int(token_id)


def tokenizer_of_file(folder: Path) -> FileTokenizer | None:
    """The tokenizer of a model folder that `check_config` has let pass; None where transformers must be asked.

    Token ids, decoded texts, special tokens and the chat template are those of `AutoTokenizer`'s result.
    """
    try:
        source = _Source(folder)
        return source.tokenizer if source.is_plain else None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        # Whatever a damaged file leads to, a panic in the `tokenizers` library included: transformers is asked about
        # the same file, and what it raises is told.
        return None


class _Source:
    """The files that a tokenizer is made of.

    Raises:
        Exception: one of them is not there, or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = read_mapping(folder / "tokenizer_config.json")
        self._model = read_mapping(folder / "config.json")

    @property
    def is_plain(self) -> bool:
        """Whether transformers would make the same of them as `tokenizer` is."""
        return (
            self._keys_are_known()
            and self._says_all()
            and self._class_takes_the_file()
            and self.tokenizer.backend_tokenizer.padding is None
            and self._adds_nothing()
            and (not self._may_be_built_anew() or self._is_what_qwen_builds())
        )

    @cached_property
    def tokenizer(self) -> FileTokenizer:
        """Of tokenizer.json."""
        file, config = self._folder / "tokenizer.json", self._config
        check_regular(file)
        backend = Tokenizer.from_file(str(file))
        backend.no_truncation()
        template = self._folder / "chat_template.jinja"
        return FileTokenizer(
            backend,
            template.read_text(encoding="utf-8") if template.is_file() else config.get("chat_template"),
            {role: _content(config[role]) for role in NAMED if config.get(role) is not None},
            config.get("extra_special_tokens") or config.get("additional_special_tokens") or [],
            config.get("split_special_tokens", False),
        )

    def _keys_are_known(self) -> bool:
        config = self._config
        lists = [config.get(name) or [] for name in ("extra_special_tokens", "additional_special_tokens")]
        return (
            config.keys() <= _OF_NO_ACCOUNT | _ACCOUNTED
            and all(isinstance(token, str) for tokens in lists for token in tokens)
            and not any(isinstance(tokens, dict) for tokens in lists)
            and isinstance(config.get("chat_template"), str | None)
            and isinstance(config.get("split_special_tokens", False), bool)
            and isinstance(config.get("model_max_length"), int | float | None)
            and all(config.get(side, "left") in ("left", "right") for side in ("padding_side", "truncation_side"))
        )

    def _says_all(self) -> bool:
        """Whether no other file has a say: more chat templates, Mistral's own format, lists of tokens that older
        versions wrote, which count where tokenizer_config.json has none."""
        legacy = () if "added_tokens_decoder" in self._config else ("special_tokens_map.json", "added_tokens.json")
        return not any((self._folder / name).exists() for name in (CHAT_TEMPLATES, "tekken.json", *legacy))

    def _class_takes_the_file(self) -> bool:
        """Whether the class is one that takes tokenizer.json as it is, or Qwen's."""
        named, model_type = self._config.get("tokenizer_class"), self._model.get("model_type")
        return (
            isinstance(named, str)
            and isinstance(model_type, str)
            and model_type not in OTHER_CLASS_FOR
            and not {"auto_map", "model_name"} & self._model.keys()
            and (named in (*AS_IT_IS, *_QWEN) or model_type in AS_IT_IS_FOR)
        )

    def _may_be_built_anew(self) -> bool:
        return self._config["tokenizer_class"] in _QWEN or self._model["model_type"] == _QWEN_TYPE

    def _adds_nothing(self) -> bool:
        """Whether the tokens that tokenizer_config.json names are in tokenizer.json already: those with a role as
        special tokens, those that it describes as it describes them."""
        by_id = self.tokenizer.added_tokens_decoder
        added = {token.content: token for token in by_id.values()}
        described = self._config.get("added_tokens_decoder", {})
        return (
            all(added[content].special for content in self.tokenizer.special_tokens_map.values())
            and all(content in added for content in self.tokenizer.extra_special_tokens)
            and all(
                by_id[int(token_id)].__getstate__() == AddedToken(**token).__getstate__()
                for token_id, token in described.items()
            )
        )

    def _is_what_qwen_builds(self) -> bool:
        """Whether the class that builds a byte-level BPE of a vocabulary and adds the other tokens to it, one after the
        other, gets to what tokenizer.json says."""
        config, tokenizer = self._config, self.tokenizer
        spec: Json = json.loads(tokenizer.backend_tokenizer.to_str())
        model, added = spec["model"], spec["added_tokens"]
        ids = [token["id"] for token in added]
        described = {int(token_id) for token_id in config.get("added_tokens_decoder", ids)}
        named = {*tokenizer.special_tokens_map.values(), *tokenizer.extra_special_tokens}
        return (
            # Roles that the file leaves open would be filled.
            {"unk_token", "bos_token", "eos_token", "pad_token"} <= config.keys()
            and not config.get("add_prefix_space")
            and {name: spec[name] for name in _QWEN_PARTS} == _QWEN_PARTS
            and spec["decoder"]["type"] == "ByteLevel"
            and model.pop("type") == "BPE"
            and not any(value for key, value in model.items() if key not in ("vocab", "merges"))
            and sorted(model["vocab"].values()) == list(range(len(model["vocab"])))
            and ids == list(range(len(model["vocab"]), len(model["vocab"]) + len(ids)))
            and described == set(ids)
            and all(_SPECIAL.items() <= token.items() for token in added if token["content"] in named)
        )


def _content(token: str | Mapping[str, Any]) -> str:
    """What a token with a role is called, which is written as text or as a whole token."""
    if isinstance(token, str):
        return token
    if token["__type"] != "AddedToken":
        raise TypeError(token)
    return str(token["content"])
