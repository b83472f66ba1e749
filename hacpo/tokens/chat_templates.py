"""What makes a model folder answer chat prompts and stop: its chat template and the tokens that end a response.

Both are settled once, in the first checkpoint's folder, so that every step, an audit and whoever deploys the trained
model read the same files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hacpo.artifacts.model_folder import read_mapping
from hacpo.errors import ModelError
from hacpo.tokens.stopping import eos_token_ids
from hacpo.tokens.tokenizers import ChatTokenizer, load_tokenizer

TEMPLATE_FILE = "chat_template.jinja"

PLAIN_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{- message['content'] + '\\n\\n' -}}
{%- elif message['role'] == 'assistant' -%}{{- 'Assistant:\\n' + message['content'] -}}{{- eos_token -}}{{- '\\n\\n' -}}
{%- else -%}{{- 'User: ' + message['content'] + '\\n\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:\\n' -}}{%- endif -%}
"""
"""For base models, which come without one. The prompt ends in a line break: real tokenizers do not merge that with the
word that follows, so prompt and response encoded apart are what they would be together."""


def settle_chat(folder: Path, source: Path, template: Path | None = None) -> list[str]:
    """Give a model folder the chat template and the stop tokens it will be trained and deployed with.

    Args:
        folder: a copy of a model folder; its files may be links and are replaced, never written through.
        source: the model folder, for messages.
        template: a Jinja file to use instead of the folder's own template; None: the folder's own, or `PLAIN_TEMPLATE`
            (after the BOS token if the tokenizer puts one before every text).

    Returns:
        What was changed, in words for the user.

    Raises:
        ModelError: there is no usable tokenizer, or the template file cannot be read.
        DataError: the template cannot render a prompt.
    """
    notes = []
    if template is not None:
        _replace(folder / TEMPLATE_FILE, _read(template))
        notes.append("chat template as given")
    else:
        tokenizer = load_tokenizer(folder, source)
        if not tokenizer.chat_template:
            bos = "{{- bos_token -}}\n" if _begins_with_bos(tokenizer) else ""
            _replace(folder / TEMPLATE_FILE, bos + PLAIN_TEMPLATE)
            notes.append("plain chat template added, it has none")
    chat = ChatTokenizer(folder, template or source)
    chat.render("1+1", [{"role": "user", "content": "1+1=?"}])
    if _declare_stop_tokens(folder, chat):
        notes.append("stops at the tokens " + " ".join(map(str, chat.stop_token_ids)))
    return notes


def _read(template: Path) -> str:
    try:
        return template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ModelError(f"the chat template cannot be read: {reason}", where=template) from None


def _begins_with_bos(tokenizer: Any) -> bool:
    token_ids = tokenizer("x")["input_ids"]
    return tokenizer.bos_token_id is not None and list(token_ids[:1]) == [tokenizer.bos_token_id]


def _declare_stop_tokens(folder: Path, chat: ChatTokenizer) -> bool:
    """Write into generation_config.json what ends a response, unless the folder says so already; whether it did."""
    if set(eos_token_ids(folder)) == set(chat.stop_token_ids):
        return False
    path = folder / "generation_config.json"
    config = read_mapping(path)
    others = [token_id for token_id in chat.stop_token_ids if token_id != chat.eos_token_id]
    config["eos_token_id"] = [chat.eos_token_id, *others] if others else chat.eos_token_id
    _replace(path, json.dumps(config, indent=2, sort_keys=True) + "\n")
    return True


def _replace(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8")
