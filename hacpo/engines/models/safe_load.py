"""Loading a stranger's model folder: its code is never run, and every parameter is accounted for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hacpo.artifacts.model_config import check_config
from hacpo.artifacts.model_folder import indexed_weights, model_files, why_unloadable
from hacpo.artifacts.text_files import check_regular
from hacpo.errors import ArtifactError, ModelError
from hacpo.tokens.tokenizers import ChatTokenizer, never_ask

_HARMLESS = re.compile(r"rotary_emb\.inv_freq$|attn\.(?:masked_)?bias$|attention\.(?:masked_)?bias$|^(?:model\.)?mtp\.")
"""Tensors that folders hold and models do not: buffers that older releases of transformers saved and the present ones
compute (rotary frequencies; the causal mask of GPT-2 and GPT-NeoX), and the heads for multi-token prediction, which
generate nothing here."""


def load_whole(folder: Path, called: Path | None = None, **options: Any) -> Any:
    """The causal language model of a folder, if its weights are exactly those of its config.

    Tied weights count as there when one of them is. `_HARMLESS` tensors may be left over.

    Args:
        folder: a model folder without adapter.
        called: what messages name instead; None: the folder.
        options: of `from_pretrained`; `device_map="meta"` reads the headers of the weights files alone.

    Raises:
        ModelError: transformers does not know the architecture, or a parameter is missing, left over, or of another
            shape than the config says, or the weights' index names a file elsewhere.
        ArtifactError: a weights file is damaged.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # one for each file, through our own: here, and where models are saved
    loud = logging.get_verbosity()
    logging.set_verbosity_error()  # it reports what is missing in a table, and goes on
    where = called or folder
    indexed_weights(folder)
    check_config(folder, called)
    never_ask()
    try:
        for file in sorted(folder.glob("*.safetensors")):
            check_regular(file)
        model, report = AutoModelForCausalLM.from_pretrained(
            str(folder),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report
            **options,
        )
    except SafetensorError as error:
        raise ArtifactError(f"damaged weights: {error}", where=where) from None
    except Exception as error:
        # transformers raises OSError, ValueError, KeyError and others for folders it cannot use.
        raise ModelError(f"cannot be loaded: {why_unloadable(error)}", where=where) from None
    finally:
        logging.set_verbosity(loud)
    check_report(report, where)
    return model


def check_report(report: dict[str, Any], where: Path) -> None:
    """Refuse a model of which a parameter has not come from the folder, or a tensor of the folder has gone nowhere."""
    missing = sorted(map(str, report["missing_keys"]))
    other = sorted((str(name), tuple(present), tuple(wanted)) for name, present, wanted in report["mismatched_keys"])
    left = sorted(name for name in map(str, report["unexpected_keys"]) if not _HARMLESS.search(name))
    remedy = "complete the folder, or correct its config.json"
    if missing:
        what = f"its weights lack the parameter {_first(missing)}, which would be random numbers"
        raise ModelError(what, where=where, remedy=remedy)
    if other:
        name, present, wanted = other[0]
        raise ModelError(
            f"the parameter {name} has another shape than config.json says",
            where=where,
            expected=wanted,
            found=present,
            remedy=remedy,
        )
    if left:
        what = f"its weights hold {_first(left)}, which the architecture in config.json has no place for"
        raise ModelError(what, where=where, remedy=remedy)


def _first(names: list[str]) -> str:
    return f"{names[0]}, one of {len(names)}" if len(names) > 1 else names[0]


def check_loadable(folder: Path, called: Path) -> None:
    """Whether a model folder is whole: its files are its own, its weights fit its config, its tokenizer renders a
    prompt. No weights are read.

    Args:
        called: what messages name instead of `folder`.

    Raises:
        ModelError, ArtifactError: it is not.
    """
    model_files(folder)
    load_whole(folder, called, dtype="auto", device_map="meta")
    ChatTokenizer(folder, called).render("export", [{"role": "user", "content": "1+1"}])
