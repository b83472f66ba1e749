"""Tokenizers and language models made from scratch, as folders that any Hugging Face tool can load."""

from __future__ import annotations

import re

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from hacpo.data.tiny_vocabularies import CONTROL_TOKENS, EOS, PAD, PIECES, ROLES, UNK
from hacpo.settings.agents import TinySettings

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<' + message['role'] + '>' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- '" + EOS + "' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"
)


def build_tokenizer(settings: TinySettings) -> PreTrainedTokenizerFast:
    """A tokenizer with chat template, `<pad>`, `<eos>` and `<unk>`; text without `<unk>` decodes to itself.

    Control tokens in a text are control tokens, as everywhere, unless it is encoded with `split_special_tokens=True`.
    """
    pieces = PIECES[settings.vocabulary]
    vocabulary = {piece: token_id for token_id, piece in enumerate((*CONTROL_TOKENS, *pieces))}
    # The longest piece wins; a character that is in no piece stands alone and becomes <unk>.
    longest_first = sorted((piece for piece in pieces if len(piece) > 1), key=lambda piece: (-len(piece), piece))
    pattern = "|".join([*map(re.escape, longest_first), r"[\s\S]"])
    backend = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = Split(Regex(pattern), behavior="isolated")
    backend.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=[f"<{role}>" for role in ROLES],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=settings.context,
    )


def build_model(settings: TinySettings, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """A float32 model, its weights drawn from the seed alone; torch's global random generator is left as found."""
    config = _config(settings, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def _config(settings: TinySettings, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "intermediate_size": settings.intermediate or 4 * settings.hidden,
        "max_position_embeddings": settings.context,
        "tie_word_embeddings": True,
        "initializer_range": settings.initializer_range,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if settings.architecture == "gpt_neox":
        rotary = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
        return GPTNeoXConfig(**shape, rope_parameters=rotary)
    grouped = {"num_key_value_heads": settings.heads, "head_dim": settings.hidden // settings.heads}
    if settings.architecture == "llama":
        return LlamaConfig(**shape, **grouped)
    return Qwen3Config(**shape, **grouped)
