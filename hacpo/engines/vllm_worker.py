"""What vLLM's own worker processes run for us: taking over a checkpoint's weights, all of them.

Named to vLLM as `worker_extension_cls`; the methods become the worker's and are called by `collective_rpc`.
"""

from __future__ import annotations

from typing import Any


class CheckpointReload:
    """Mixed into vLLM's worker."""

    model_runner: Any

    def hacpo_load(self, folder: str) -> None:
        """Take over the weights of a model folder, in place."""
        self.model_runner.reload_weights(weights_path=folder)
        head = getattr(self.model_runner.get_model(), "lm_head", None)
        method: Any = getattr(head, "quant_method", None)
        if hasattr(method, "process_weights_after_loading"):
            # On CPU the head keeps a packed copy of its weights, which a reload alone leaves as it was when it is tied
            # to the embeddings: log-probabilities were off by several nats, silently.
            method.process_weights_after_loading(head)
