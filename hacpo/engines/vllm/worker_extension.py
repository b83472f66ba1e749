"""What vLLM's own worker processes run for us: taking over all of a checkpoint's weights, and saying whose they are.

Named to vLLM as `worker_extension_cls`; the methods become the worker's and are called by `collective_rpc`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any


class CheckpointReload:
    """Mixed into vLLM's worker."""

    model_runner: Any
    vllm_config: Any
    hacpo_ticket: str = ""
    """Whose weights these are: what the last `hacpo_load` was given."""

    def hacpo_watch(self, owner: int) -> None:
        """End this worker, and the engine's process that it belongs to, when process `owner` is gone: vLLM's own
        processes would outlive a driver that was killed, and keep the GPU's memory."""
        if os.getpid() == owner:
            return
        core = os.getppid()

        def watch() -> None:
            while _alive(owner):
                time.sleep(1)
            if core != owner and os.getppid() == core:
                os.kill(core, signal.SIGKILL)
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()

    def hacpo_load(self, folder: str, ticket: str = "") -> None:
        """Take over the weights of a model folder, in place."""
        self.hacpo_ticket = ticket
        self.model_runner.reload_weights(weights_path=folder)
        head = getattr(self.model_runner.get_model(), "lm_head", None)
        method: Any = getattr(head, "quant_method", None)
        if hasattr(method, "process_weights_after_loading"):
            # On CPU the head keeps a packed copy of its weights, which a reload alone leaves as it was when it is tied
            # to the embeddings: log-probabilities were off by several nats, silently.
            method.process_weights_after_loading(head)

    def hacpo_facts(self, folder: str) -> dict[str, Any]:
        """How this worker samples, whose weights it holds, and whether it finds weights in `folder`."""
        model = self.vllm_config.model_config
        return {
            "ticket": self.hacpo_ticket,
            "dtype": str(model.dtype).removeprefix("torch."),
            "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            "longest": int(model.max_model_len),
            "finds": any(Path(folder).glob("*.safetensors")),
        }


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
