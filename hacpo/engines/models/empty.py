"""Models without weights, and their weights from the one process that has read them.

Of several processes only the first reads a model's files. All build the model empty, its parameters on the meta device
(accelerate's `init_empty_weights`), shard it, and then get their parts parameter by parameter; the first process lets
go of each parameter when it has been handed out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hacpo.engines.models.adapter import Adapter, adapter_of, put_adapter
from hacpo.engines.training.policy import check_head, like
from hacpo.engines.training.world import World
from hacpo.errors import ModelError


@dataclass(frozen=True)
class _Plan:
    """A model without its parameters.

    Attributes:
        parameters: name -> shape and dtype; tied ones once.
        buffers: name -> values.
        plain_head: see `head.output_head`.
    """

    config: Any
    attention: str
    adapter: Adapter | None
    parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    buffers: Mapping[str, torch.Tensor]
    plain_head: bool | None


def empty_copy(whole: Any | None, world: World) -> Any:
    """The first process's model on every process, with its adapter and its buffers but without its weights.

    Args:
        whole: the first process's; None on the others.

    Raises:
        ModelError: transformers builds another model than it reads.
    """
    plan = world.share(None if whole is None else _plan(whole))
    model = _empty(plan)
    built = dict(model.named_parameters())
    if odd := sorted(built.keys() ^ plan.parameters.keys()):
        raise _differs(model, odd[0])
    for name, (shape, dtype) in plan.parameters.items():
        if tuple(built[name].shape) != shape:
            raise _differs(model, name)
        built[name].data = built[name].data.to(dtype)
    for name, value in plan.buffers.items():
        _set_buffer(model, name, value)
    if plan.plain_head is not None:
        model._hacpo_plain_head = plan.plain_head
    if whole is not None and hasattr(whole, "_weight_conversions"):  # transformers' own names in memory -> in files
        model._weight_conversions = whole._weight_conversions
    return model.eval()


def _plan(whole: Any) -> _Plan:
    check_head(whole)
    return _Plan(
        config=whole.config,
        attention=whole.config._attn_implementation,
        adapter=adapter_of(whole),
        parameters={name: (tuple(one.shape), one.dtype) for name, one in whole.named_parameters()},
        buffers={name: one.cpu() for name, one in whole.named_buffers()},
        plain_head=getattr(whole, "_hacpo_plain_head", None),
    )


def _empty(plan: _Plan) -> Any:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, GenerationConfig

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            plan.config, dtype=torch.float32, attn_implementation=plan.attention, trust_remote_code=False
        )
        if plan.adapter is not None:
            put_adapter(model, plan.adapter)
    model.tie_weights()  # what is assigned under init_empty_weights is a parameter of its own
    model.generation_config = GenerationConfig()
    return model


def _differs(model: Any, name: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} is built with other weights than it is read with: {name}",
        remedy="set launcher.processes to 1",
    )


@torch.no_grad()
def fill(model: Any, whole: Any | None, device: torch.device) -> None:
    """Give an empty model, sharded or not, its weights; all processes must call this.

    Args:
        model: by `empty_copy`.
        whole: what it is a copy of, on the first process, where it is emptied; None on the others.
        device: where the model will be.
    """
    buffers = dict(model.named_buffers())
    tied = len(dict(model.named_parameters()))
    model.to_empty(device=device)
    if len(dict(model.named_parameters())) != tied:  # FSDP's parameters stay tied, others do not
        model.tie_weights()
    for name, value in buffers.items():
        _set_buffer(model, name, value.to(device))
    for name, parameter in model.named_parameters():
        value = None
        if whole is not None:
            read = whole.get_parameter(name)
            value, read.data = read.data, torch.empty(0)
        parameter.copy_(like(value, parameter))


def _set_buffer(model: Any, name: str, value: torch.Tensor) -> None:
    module, _, leaf = name.rpartition(".")
    owner = model.get_submodule(module)
    if leaf not in owner._buffers:
        raise _differs(model, name)
    owner._buffers[leaf] = value
