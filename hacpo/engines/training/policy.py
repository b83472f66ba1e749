"""A model as its log-probabilities, on one process or sharded over several.

Sharding is PyTorch's FSDP2 (`fully_shard`): every decoder layer is gathered for its own computation only. The same code
makes plain data parallelism (as many copies as processes), a mixture, and, on one process, float32 master weights under
a bfloat16 model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from hacpo.engines.models.adapter import adapter_of
from hacpo.engines.training.head import output_head
from hacpo.engines.training.logprobs import TokenBatch, token_logprobs
from hacpo.engines.training.world import World
from hacpo.errors import ModelError


class Policy(torch.nn.Module):
    """A causal language model whose forward pass gives log-probabilities of given tokens.

    FSDP gathers weights when its root module is called: whatever is computed must happen inside this call.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: TokenBatch, temperature: float) -> torch.Tensor:
        """See `logprobs.token_logprobs`."""
        return token_logprobs(self.model, batch, temperature)

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Name in the model -> parameter, of those that are trained."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}


def shard(policy: Policy, world: World, device: torch.device, dtype: torch.dtype) -> None:
    """Shard a policy in place; its parameters, float32, stay what the optimizer updates.

    Args:
        policy: on any device, the same weights on every process; or empty on every process, to be filled.
        device: where it will be computed.
        dtype: of weights and activations in forward and backward passes; gradients add up in float32.
    """
    check_head(policy.model)
    for parameter in policy.model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)  # a frozen weight needs no master
    mesh = init_device_mesh(
        device.type, (world.replicas, world.size // world.replicas), mesh_dim_names=("replicate", "shard")
    )
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=torch.float32, cast_forward_inputs=False
        ),
    }
    layers = decoder_layers(policy.model)
    for layer in layers:
        # What a layer hands on must keep the model's own dtype.
        mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(layer, **{**options, "mp_policy": mixed, "reshard_after_forward": world.reshard})
    fully_shard(policy, **options)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # Terms are already divided by counts over all processes, so gradients are added, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def check_head(model: Any) -> None:
    """Look, while a model's weights are whole, whether its head has the form that `output_head` knows."""
    attention = model.config._attn_implementation
    if attention == "flash_attention_2":  # which computes nothing in float32
        model.set_attn_implementation("sdpa")
    output_head(model)
    if attention == "flash_attention_2":
        model.set_attn_implementation(attention)


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The repeated layers of a model.

    Raises:
        ModelError: the model does not say which they are.
    """
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if names & {kind.__name__ for kind in type(module).__mro__}]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} does not say which its layers are, so it can neither be sharded nor checkpointed",
            remedy="set launcher.processes to 1, engine.dtype to float32 and optimizer.gradient_checkpointing to false",
        )
    return layers


def recompute_activations(model: Any) -> None:
    """Keep every layer's input only, and compute the layer again in the backward pass.

    Inside the layer's call, so that FSDP has gathered its weights both times, and without training mode: dropout stays
    off.
    """
    for layer in decoder_layers(model):
        layer.forward = functools.partial(
            checkpoint, type(layer).forward.__get__(layer), use_reentrant=False, preserve_rng_state=False
        )


def keep_activations(model: Any) -> None:
    """Undo `recompute_activations`."""
    for layer in decoder_layers(model):
        layer.__dict__.pop("forward", None)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor put together again, on the CPU; all processes must call this."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def like(tensor: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    """A whole tensor of the first process, placed and sharded as `parameter` is; all processes must call this.

    Args:
        tensor: None on the other processes; of a sharded parameter they get their part and no more.
    """
    if tensor is None:
        tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device=_device_of(parameter))
    tensor = tensor.to(device=_device_of(parameter), dtype=parameter.dtype)
    if not isinstance(parameter, DTensor):
        tensor = tensor.clone()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(tensor, src=0)
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)


def _device_of(parameter: torch.Tensor) -> torch.device:
    """Where a parameter is or, while it is empty, will be."""
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def weights(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and whole tensor of everything in a model's state (of one with an adapter: of the adapter, its base is on
    disk), parameters in `dtype`; all processes must iterate.

    Of tied parameters only the first has its name, as in a model folder.
    """
    first = dict(model.named_parameters())
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - first.keys()
    left_out = {name for name in first if adapter_of(model) is not None and not first[name].requires_grad}
    for name, tensor in model.state_dict().items():
        if name not in tied | left_out:
            yield name, whole(tensor).to(dtype) if name in first else whole(tensor)
