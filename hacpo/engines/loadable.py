"""Whether a model folder is whole: transformers finds every weight in it, and the tokenizer renders a prompt."""

from __future__ import annotations

from pathlib import Path

from hacpo.engines.tokenizers import ChatTokenizer
from hacpo.errors import ModelError


def check_loadable(folder: Path, called: Path) -> None:
    """Load model (on the CPU, in the dtype of its weights) and tokenizer, as a user of the folder would.

    Args:
        called: what messages name instead of `folder`.

    Raises:
        ModelError: transformers cannot load it, or would make up weights that are missing.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        _, loading = AutoModelForCausalLM.from_pretrained(
            str(folder), local_files_only=True, dtype="auto", output_loading_info=True
        )
    except Exception as error:
        # transformers raises OSError, ValueError, KeyError and others for folders it cannot use.
        reason = (str(error).splitlines() or ["?"])[0][:160]
        raise ModelError(f"transformers cannot load it: {reason}", where=called) from None
    for what in ("missing_keys", "mismatched_keys"):
        if loading.get(what):
            names = sorted(map(str, loading[what]))
            raise ModelError(f"its weights do not fit its config: {what.replace('_', ' ')} {names[0]}", where=called)
    ChatTokenizer(folder, called).render("export", [{"role": "user", "content": "1+1"}])
