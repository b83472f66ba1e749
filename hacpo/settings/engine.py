"""What samples and scores, and how many processes train."""

from __future__ import annotations

import shlex
from typing import Literal

from pydantic import model_validator

from hacpo.settings.base import Section, knob

Dtype = Literal["float32", "bfloat16"]


class VllmSettings(Section):
    """How vLLM runs."""

    tensor_parallel: int = knob(1, doc="Processes that share each layer.", unit="processes", ge=1)
    memory_fraction: float = knob(
        0.45, doc="Share of a GPU's memory for weights and cache; the rest is for training.", gt=0, le=1
    )
    cpu_cache_gib: int = knob(1, doc="On CPU: memory for the cache.", unit="GiB", ge=1)
    max_model_len: int | None = knob(
        None, doc="Longest prompt plus response; null: the model's context length.", unit="tokens", ge=1
    )
    enforce_eager: bool = knob(False, doc="Neither compile nor capture graphs: a faster start, slower sampling.")
    data_parallel: int = knob(
        1, doc="With `vllm_server`: copies of the model behind one server (`hacpo serve`).", unit="copies", ge=1
    )
    sleep: bool = knob(
        True,
        doc="With `vllm` on a GPU: give weights and cache back to the GPU after each stage's sampling, for what runs "
        "next; the weights are loaded and checked again at the next use.",
    )


class EngineSettings(Section):
    """What samples and scores."""

    name: Literal["auto", "transformers", "vllm", "vllm_server"] = knob(
        "auto",
        doc="Sampling engine. `vllm`: in the stage's own process; `vllm_server`: the servers named in `servers.yaml` "
        "beside params.yaml (docs/engines.md); `auto`: vllm on a GPU where it is installed, else transformers.",
    )
    device: Literal["auto", "cpu", "cuda"] = knob("auto", doc="`auto`: cuda where there is one.")
    dtype: Dtype = knob("float32", doc="Of weights and activations; log-probabilities are float32.")
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = knob(
        "auto",
        doc="Attention of the training stack. `auto`: what transformers chooses, PyTorch's SDPA where the model has "
        "it; `flash_attention_2` needs its package, a GPU and bfloat16.",
    )
    batch_size: int = knob(256, doc="Most responses sampled or rescored together.", unit="responses", ge=1)
    batch_tokens: int | None = knob(
        None,
        doc="Most tokens rescored together, prompts and padding included; responses of similar length share a pass. "
        "null: on a CPU 2048, on a GPU only `batch_size` counts.",
        unit="tokens",
        ge=1,
    )
    save_every: int = knob(
        1024,
        doc="Responses sampled between two saves: after a kill only what was not saved is sampled again.",
        unit="responses",
        ge=1,
    )
    vllm: VllmSettings = VllmSettings()
    threads: int | None = knob(
        None, doc="CPU threads per process; null: all cores. Results are the same bytes only for the same number.", ge=1
    )

    @model_validator(mode="after")
    def _copies_have_a_server(self) -> EngineSettings:
        if self.vllm.data_parallel > 1 and self.name != "vllm_server":
            raise ValueError(
                f"vllm.data_parallel: {self.vllm.data_parallel} copies of a model need a server; set name to "
                "vllm_server and start `hacpo serve`"
            )
        return self


VLLM_ENGINES = ("vllm", "vllm_server")
"""The engines that are vLLM, in a stage's own process or behind a server."""


def sampling_engine(engine: EngineSettings, *, on_gpu: bool, vllm: Literal["cpu", "gpu"] | None) -> str:
    """What samples on a machine: as the settings say; under `auto` vLLM where there are a GPU and its build for
    GPUs, else transformers.

    Args:
        on_gpu: whether the machine has one.
        vllm: the build that is installed; None: neither.
    """
    if engine.name != "auto":
        return engine.name
    return "vllm" if on_gpu and engine.device != "cpu" and vllm == "gpu" else "transformers"


class LauncherSettings(Section):
    """Processes that compute one agent's update together."""

    processes: int = knob(1, doc="Processes on each machine: one per GPU.", unit="processes", ge=1)
    nodes: int = knob(1, doc="Machines.", unit="machines", ge=1)
    replicas: int = knob(
        1,
        doc="Copies of the model: each is sharded over its part of the processes. 1: one copy over all (FSDP); as many "
        "as there are processes: nothing is sharded (DDP).",
        unit="copies",
        ge=1,
    )
    command: str | None = knob(
        None,
        doc="What starts the processes, followed by `-m hacpo.stages.update ...`; `{processes}` and `{nodes}` are "
        "filled in. null: `accelerate launch` on this machine.",
    )
    accelerate_config: str | None = knob(
        None,
        doc="File made by `accelerate config` that `accelerate launch` shall follow, relative to the project's root; "
        "`default`: the one in the user's own cache. What it says must fit the other settings (docs/update.md). "
        "null: none, not even that one.",
    )

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.processes * self.nodes

    @property
    def started_by(self) -> list[str] | None:
        """`command` in words, filled in.

        Raises:
            ValueError: it cannot be.
        """
        if self.command is None:
            return None
        try:
            return shlex.split(self.command.format(processes=self.processes, nodes=self.nodes))
        except (KeyError, IndexError):
            raise ValueError("command: only {processes} and {nodes} are filled in; write other braces twice") from None
        except ValueError as error:
            raise ValueError(f"command: {error}") from None

    @model_validator(mode="after")
    def _fits(self) -> LauncherSettings:
        if self.command is not None and self.world_size == 1:
            raise ValueError("command starts several processes; set processes or nodes")
        if self.started_by == []:
            raise ValueError("command is empty")
        if self.accelerate_config is not None and (self.command is not None or self.world_size == 1):
            raise ValueError(
                "accelerate_config is for `accelerate launch`, which starts several processes: "
                + ("name the file in `command`" if self.command is not None else "set processes")
            )
        if self.world_size % self.replicas:
            raise ValueError(f"replicas must divide the {self.world_size} processes, found {self.replicas}")
        if self.nodes > 1 and self.command is None:
            raise ValueError(
                "several nodes need `command`, such as srun --nodes={nodes} --ntasks-per-node=1 torchrun "
                "--nnodes={nodes} --nproc-per-node={processes} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500"
            )
        return self
