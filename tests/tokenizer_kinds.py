"""Small tokenizers of every kind that real models come with, and folders of tiny models that use them.

They are trained on a few lines of text, so that their vocabularies have a few hundred entries; what matters is how each
normalises, cuts, falls back and decodes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "7+3=10 10-2=8 \\boxed{8}",
    "The answer is \\boxed{\\frac{1}{2}}.",
    "There are 12 apples and 3 pears, 15 in all: \\boxed{15}",
    "x = -5, so 2x + 1 = -9.\nHence x^2 = 25.",
    "Solve 4x = 12 for x. We divide by 4 and get x = 3.",
] * 4
"""What the tokenizers are trained on."""

BYTES = [f"<0x{number:02X}>" for number in range(256)]

CHATML = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['role'] == 'assistant' -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
    "{{- message['content'] + '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
INST = (
    "{{- bos_token -}}{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}{{- ' ' + message['content'] + ' ' + eos_token -}}"
    "{%- else -%}{{- '[INST] ' + message['content'] + ' [/INST]' -}}{%- endif -%}{%- endfor -%}"
)
TURNS = (
    "{{- bos_token -}}{%- for message in messages -%}"
    "{{- '<start_of_turn>' + message['role'] + '\\n' + message['content'] | trim + '<end_of_turn>\\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"
)
MARKED = (
    "{%- for message in messages -%}{{- message['content'] + ' ' + eos_token -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- cls_token -}}{%- endif -%}"
)


@dataclass(frozen=True)
class Kind:
    """A kind of tokenizer.

    Attributes:
        build: makes the backend.
        named: special tokens by role (`eos_token`, ...).
        special: further special tokens.
        added: added tokens that are not special.
        template: chat template; None: a base model without one.
        ends: names of the tokens that the generation config lists; empty: no generation config says any.
        end: name of the token that ends an assistant's turn.
        exact: text with no unknown character comes back as it was.
    """

    build: Callable[[], Tokenizer]
    named: dict[str, str]
    end: str
    template: str | None
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    exact: bool = True
    extra: dict[str, Any] = field(default_factory=dict)


def _byte_level() -> Tokenizer:
    """Qwen's and Llama 3's way: every byte has a token, NFC."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet))
    return tokenizer


def _llama2() -> Tokenizer:
    """Llama 2's way: BPE on text with `▁` for a space and one in front, bytes for unknown characters, BOS in encode."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces = ["<unk>", "<s>", "</s>", *BYTES]
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=420, special_tokens=pieces))
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in BYTES]
    # As the converter of Llama 2's own vocabulary does: pieces that ordinary pieces merge into by chance.
    vocabulary = spec["model"]["vocab"]
    for piece in ("</", "s>", "<0x", "0A>", "0x", "0A"):
        vocabulary.setdefault(piece, len(vocabulary))
    for character in "</s>0xA":
        vocabulary.setdefault(character, len(vocabulary))
    spec["model"]["merges"] += [
        ["<", "/"], ["s", ">"], ["</", "s>"], ["0", "x"], ["0", "A"], ["<", "0x"], ["0A", ">"], ["<0x", "0A>"],
    ]  # fmt: skip
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return tokenizer


def _unigram(*, byte_fallback: bool) -> Tokenizer:
    """SentencePiece's Unigram: a space in front of every text, control tokens are pieces of the vocabulary."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=control, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    spec = json.loads(tokenizer.to_str())
    model = spec["model"]
    model["unk_id"] = next(number for number, (piece, _) in enumerate(model["vocab"]) if piece == "<unk>")
    if byte_fallback:
        model["byte_fallback"] = True
        model["vocab"] += [[piece, 0.0] for piece in BYTES]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    if byte_fallback:
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer


def _characters(alphabet: str) -> Tokenizer:
    """One token a character, unknown ones become `<unk>`."""
    vocabulary = {piece: number for number, piece in enumerate(["<pad>", "<eos>", "<unk>", *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _wordpiece() -> Tokenizer:
    """BERT's way: lower case, no accents, no account of white space."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    control = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=control))
    pieces = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=pieces)
    return tokenizer


_PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"
_SMALL = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
_GEMMA = {**_SMALL, "bos_token": "<bos>"}

KINDS: dict[str, Kind] = {
    "byte_level": Kind(
        _byte_level,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        "<|im_end|>",
        CHATML,
        special=("<|im_start|>",),
        added=("<think>", "</think>", "<tool_call>", "    "),
        ends=("<|im_end|>", "<|endoftext|>"),
    ),
    "byte_level_base": Kind(
        _byte_level,
        {"eos_token": "<|end_of_text|>", "bos_token": "<|begin_of_text|>"},
        "<|end_of_text|>",
        None,
        special=("<|eot_id|>",),
    ),
    "llama2": Kind(
        _llama2, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, "</s>", INST, ends=("</s>",)
    ),
    "unigram_bytes": Kind(
        lambda: _unigram(byte_fallback=True),
        _GEMMA,
        "<end_of_turn>",
        TURNS,
        special=("<start_of_turn>", "<end_of_turn>"),
        ends=("<eos>", "<end_of_turn>"),
    ),
    "unigram": Kind(
        lambda: _unigram(byte_fallback=False),
        _GEMMA,
        "<end_of_turn>",
        TURNS,
        special=("<start_of_turn>", "<end_of_turn>"),
        exact=False,
    ),
    "characters": Kind(lambda: _characters(_PRINTABLE), _SMALL, "<eos>", None),
    "digits": Kind(lambda: _characters("0123456789+-= {}\\boxed"), _SMALL, "<eos>", None),
    "wordpiece": Kind(
        _wordpiece,
        {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "eos_token": "[SEP]"},
        "[SEP]",
        MARKED,
        exact=False,
    ),
}
"""Name -> kind; `python_bytes` beside them has no backend of the `tokenizers` library."""


def write_tokenizer(folder: Path, name: str) -> Any:
    """Write a kind's tokenizer into a folder; returns the transformers tokenizer."""
    from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

    if name == "python_bytes":
        tokenizer: Any = ByT5Tokenizer(extra_ids=0)
    else:
        kind = KINDS[name]
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=kind.build(),
            **kind.named,
            additional_special_tokens=list(kind.special),
            chat_template=kind.template,
            clean_up_tokenization_spaces=False,
        )
        tokenizer.add_tokens(list(kind.added))
    tokenizer.save_pretrained(str(folder))
    return tokenizer


def write_model(folder: Path, name: str, seed: int = 0, head_dim: int = 16) -> Path:
    """Write a model folder: a kind's tokenizer and a random Llama of two heads; returns the folder."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(folder, name)
    kind = KINDS.get(name)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=2 * head_dim,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=head_dim,
        intermediate_size=64,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(str(folder))
    ends = [tokenizer.convert_tokens_to_ids(end) for end in kind.ends] if kind else []
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    if ends:
        path.write_text(json.dumps({"eos_token_id": ends}))
    return folder
