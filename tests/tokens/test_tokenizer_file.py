"""A tokenizer of tokenizer.json alone is the one that transformers makes of the folder, or it is not taken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from conftest import SHARED
from hacpo.artifacts.model_folder import read_mapping
from hacpo.tokens import tokenizers as chat_tokenizers
from hacpo.tokens.tokenizer_file import (
    AS_IT_IS,
    AS_IT_IS_FOR,
    NAMED,
    OTHER_CLASS_FOR,
    FileTokenizer,
    tokenizer_of_file,
)
from hacpo.tokens.tokenizers import ChatTokenizer, load_tokenizer
from tokenizer_kinds import CHATML, KINDS, TEXTS, write_tokenizer

SAMPLES = [
    *TEXTS[:5],
    "",
    " 8",
    "8 ",
    "\n\n 7+3=\t10  ,  \\boxed{10} .",
    "é e\u0301 日本 \U0001f600 x² ﬁ A\u0300bc ▁x",
    "</s> <s> <eos> <pad> <|im_end|> <think>x</think> <start_of_turn> <unk> [SEP] <0x0A>    <image>",
    "don't We're 12345 1,000.50\r\n",
]
ENDS = {"qwen3": [151645, 151643], "llama3": [128001, 128008, 128009]}

Change = Callable[[Path], None]


def settled(folder: Path, model_type: str = "llama") -> Path:
    """The folder with a config.json, and a chat template if it has none."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "transformers_version": "5.0.0"}))
    if not (folder / "chat_template.jinja").exists():
        (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def rewritten(file: str, **values: Any) -> Change:
    """Other values in one of a folder's JSON files; None takes a key out."""

    def change(folder: Path) -> None:
        content = {**read_mapping(folder / file), **values}
        (folder / file).write_text(json.dumps({key: value for key, value in content.items() if value != "out"}))

    return change


def qwen(folder: Path) -> Path:
    """A folder of Qwen's class, with a vocabulary of its own."""
    from transformers import Qwen2Tokenizer

    backend = Tokenizer(BPE())
    backend.normalizer = normalizers.NFC()
    pattern = next(
        part["pattern"]["Regex"]
        for part in json.loads(Qwen2Tokenizer().backend_tokenizer.to_str())["pre_tokenizer"]["pretokenizers"]
        if part["type"] == "Split"
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet))
    spec = json.loads(backend.to_str())
    tokenizer = Qwen2Tokenizer(
        vocab=spec["model"]["vocab"],
        merges=[tuple(pair) for pair in spec["model"]["merges"]],
        eos_token="<|im_end|>",
        unk_token=None,
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save_pretrained(str(folder))
    # What is saved leaves out a role that nothing has; folders of the hub say so.
    rewritten("tokenizer_config.json", bos_token=None, unk_token=None)(folder)
    return settled(folder, "qwen3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of every kind that is made here."""
    root = tmp_path_factory.mktemp("kinds")
    for name in (*KINDS, "python_bytes"):
        (root / name).mkdir()
        write_tokenizer(root / name, name)
        settled(root / name)
    return {**{name: root / name for name in (*KINDS, "python_bytes")}, "qwen": qwen(root / "qwen")}


def agree(ours: FileTokenizer, theirs: Any) -> None:
    """Both answer the same to everything that is asked of a tokenizer."""
    added = [
        {token_id: token.__getstate__() for token_id, token in one.added_tokens_decoder.items()}
        for one in (ours, theirs)
    ]
    assert added[0] == added[1]
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert set(ours.all_special_ids) == set(theirs.all_special_ids)
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    for role in ("eos", "unk", "pad"):
        assert getattr(ours, f"{role}_token_id") == getattr(theirs, f"{role}_token_id")
    assert ours.chat_template == theirs.get_chat_template()
    for text in SAMPLES:
        for split in (None, True, False):
            options = {} if split is None else {"split_special_tokens": split}
            ids = ours(text, add_special_tokens=False, **options)["input_ids"]
            assert ids == theirs(text, add_special_tokens=False, **options)["input_ids"], (text, split)
            decoded = [
                one.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) for one in (ours, theirs)
            ]
            assert decoded[0] == decoded[1]
    assert [ours.convert_ids_to_tokens(n) for n in range(len(ours) + 2)] == [
        theirs.convert_ids_to_tokens(n) for n in range(len(ours) + 2)
    ]


def chats_agree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ChatTokenizer` is the same by either way."""
    ours = ChatTokenizer(folder)
    with monkeypatch.context() as patch:
        patch.setattr(chat_tokenizers, "tokenizer_of_file", lambda _: None)
        theirs = ChatTokenizer(folder)
    assert isinstance(ours._tokenizer, FileTokenizer)
    assert not isinstance(theirs._tokenizer, FileTokenizer)
    for name in ("eos_token_id", "stop_token_ids", "terminals", "unk_token_id", "pad_token_id", "vocabulary_size"):
        assert getattr(ours, name) == getattr(theirs, name), name
    asked = [{"role": "user", "content": "1+1=? <|im_end|>"}]
    assert ours.render("p", asked) == theirs.render("p", asked)
    for text in SAMPLES:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.holds_control([*ids, 0]) == theirs.holds_control([*ids, 0])


@pytest.mark.parametrize("name", [*KINDS, "qwen"])
def test_every_kind_is_what_transformers_makes_of_it(
    name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = tokenizer_of_file(folders[name])
    assert ours is not None
    agree(ours, load_tokenizer(folders[name]))
    chats_agree(folders[name], monkeypatch)


def test_the_pipelines_own_are_taken(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ada", "bo"):
        chats_agree(models / name, monkeypatch)


def test_a_tokenizer_without_the_file_is_transformers(folders: dict[str, Path]) -> None:
    assert tokenizer_of_file(folders["python_bytes"]) is None
    assert ChatTokenizer(folders["python_bytes"]).encode("8") == [ord("8") + 3]


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "tokenizers").is_dir(), reason="needs the real tokenizers of ../shared")
@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_real_ones_are_taken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (SHARED / "tokenizers" / name).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS[name]}))
    if name == "llama3":
        roles = {"eos_token": "<|eot_id|>", "bos_token": "<|begin_of_text|>"}
        rewritten("tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **roles)(tmp_path)
    settled(tmp_path, {"qwen3": "qwen3", "llama3": "llama"}[name])
    ours = tokenizer_of_file(tmp_path)
    assert ours is not None
    agree(ours, load_tokenizer(tmp_path))
    chats_agree(tmp_path, monkeypatch)


# --- folders that ask for more ----------------------------------------------------------------------------------------

_CONFIG = "tokenizer_config.json"
_TOKEN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}


def component(**values: Any) -> Change:
    return rewritten("tokenizer.json", **values)


def model_part(**values: Any) -> Change:
    def change(folder: Path) -> None:
        model = read_mapping(folder / "tokenizer.json")["model"]
        component(model={**model, **values})(folder)

    return change


def file(name: str, text: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return change


PLAIN: dict[str, tuple[str, Change]] = {
    "older keys": (
        "byte_level",
        rewritten(
            _CONFIG, tokenizer_class="PreTrainedTokenizerFast", extra_special_tokens={}, add_prefix_space=True,
            additional_special_tokens=["<|im_start|>"], clean_up_tokenization_spaces=True, legacy=False,
        ),
    ),
    "special text stays text": ("byte_level", rewritten(_CONFIG, split_special_tokens=True)),
    "a role as a whole token": (
        "byte_level",
        rewritten(_CONFIG, eos_token={"__type": "AddedToken", "content": "<|im_end|>", **_TOKEN}),
    ),
    "truncation": (
        "byte_level",
        component(truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}),
    ),
    "a prefix space": ("byte_level", component(pre_tokenizer={
        "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True})),
    "a model type that takes the file": ("llama2", lambda folder: (
        rewritten(_CONFIG, tokenizer_class="LlamaTokenizerFast")(folder), settled(folder, "mistral"))[0]),
    "a template in the config": ("byte_level", lambda folder: (
        (folder / "chat_template.jinja").unlink(), rewritten(_CONFIG, chat_template=CHATML)(folder))[0]),
    "lines of Windows": ("byte_level", lambda folder: (folder / "chat_template.jinja").write_bytes(
        CHATML.replace("}}", "}}\r\n").encode()) and None),
}  # fmt: skip
"""Still taken."""

OTHERS: dict[str, tuple[str, Change]] = {
    "another class": ("llama2", rewritten(_CONFIG, tokenizer_class="LlamaTokenizerFast")),
    "no class": ("byte_level", rewritten(_CONFIG, tokenizer_class="out")),
    "a class of the model's": ("byte_level", lambda folder: settled(folder, "qwen3_5") and None),
    "qwen's type, another file": ("byte_level", lambda folder: settled(folder, "qwen2") and None),
    "qwen, another pattern": ("qwen", component(pre_tokenizer={
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True})),
    "qwen, another form": ("qwen", component(normalizer={"type": "NFKC"})),
    "qwen, a prefix space": ("qwen", rewritten(_CONFIG, add_prefix_space=True)),
    "qwen, merges ignored": ("qwen", model_part(ignore_merges=True)),
    "qwen, an open role": ("qwen", rewritten(_CONFIG, pad_token="out")),
    "a role that is no token": ("byte_level", rewritten(_CONFIG, mask_token="<mask>")),
    "an ordinary token with a role": ("byte_level", rewritten(_CONFIG, sep_token="<think>")),
    "a token that is not there": ("byte_level", rewritten(_CONFIG, extra_special_tokens=["<new>"])),
    "tokens by name": ("byte_level", rewritten(_CONFIG, extra_special_tokens={"image_token": "<|im_start|>"})),
    "an unusual role": ("byte_level", rewritten(_CONFIG, image_token="<|im_start|>")),
    "a described token": ("byte_level", rewritten(_CONFIG, added_tokens_decoder={
        "360": {"content": "<|im_end|>", **_TOKEN, "lstrip": True}})),
    "a described token elsewhere": ("byte_level", rewritten(_CONFIG, added_tokens_decoder={
        "999": {"content": "<later>", **_TOKEN}})),
    "an older list": ("byte_level", file("added_tokens.json", '{"<old>": 370}')),
    "an older map": ("byte_level", file("special_tokens_map.json", '{"eos_token": "<think>"}')),
    "padding": ("byte_level", component(padding={
        "strategy": {"Fixed": 4}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<think>"})),
    "a corrected pattern": ("byte_level", rewritten(_CONFIG, fix_mistral_regex=True)),
    "another file": ("byte_level", rewritten(_CONFIG, fast_tokenizer_files=["tokenizer.4.0.0.json"])),
    "more templates": ("byte_level", file("additional_chat_templates/tool.jinja", "{{ messages }}")),
    "a list of templates": ("byte_level", lambda folder: (
        (folder / "chat_template.jinja").unlink(),
        rewritten(_CONFIG, chat_template=[{"name": "default", "template": CHATML}])(folder))[0]),
    "code": ("byte_level", rewritten(_CONFIG, auto_map={"AutoTokenizer": [None, "code.Mine"]})),
    "a length in words": ("byte_level", rewritten(_CONFIG, model_max_length="long")),
    "no side": ("byte_level", rewritten(_CONFIG, padding_side="up")),
    "a damaged file": ("byte_level", lambda folder: file(
        "tokenizer.json", (folder / "tokenizer.json").read_text()[:-40])(folder)),
    "a damaged config": ("byte_level", file("config.json", "[1]")),
    "no config": ("byte_level", lambda folder: (folder / "config.json").unlink()),
}  # fmt: skip
"""Left to transformers."""


@pytest.mark.parametrize("what", [*PLAIN, *OTHERS])
def test_what_is_taken_is_what_transformers_makes(what: str, folders: dict[str, Path], tmp_path: Path) -> None:
    name, change = {**PLAIN, **OTHERS}[what]
    folder = tmp_path / "model"
    shutil.copytree(folders[name], folder)
    change(folder)
    ours = tokenizer_of_file(folder)
    assert (ours is not None) == (what in PLAIN)
    if ours is not None:
        agree(ours, load_tokenizer(folder))


def test_the_classes_are_those_of_transformers() -> None:
    """What an installed version does otherwise, `tokenizer_of_file` must learn."""
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto import tokenization_auto as auto

    ours = {*AS_IT_IS, "PythonBackend", "MistralCommonBackend", None}
    of_type = auto.TOKENIZER_MAPPING_NAMES
    fixed = {name for name in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS if of_type.get(name) not in ours}
    assert fixed <= {*OTHER_CLASS_FOR, "qwen2"}
    assert of_type["qwen2"] == "Qwen2Tokenizer"
    assert all(of_type[name] in ours - {None} for name in AS_IT_IS_FOR)
    assert all(auto.tokenizer_class_from_name(name).__name__ == "TokenizersBackend" for name in AS_IT_IS)
    assert set(PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES) == set(NAMED)
