"""What one process holds in each phase of a step: which settings make which parts of its memory."""

from __future__ import annotations

from hacpo.settings.root import Settings
from hacpo.tools.estimate.lengths import Lengths
from hacpo.tools.estimate.memory import (
    BYTES,
    GIB,
    Batch,
    Part,
    padded,
    rescoring_parts,
    training_parts,
    transformers_parts,
    vllm_parts,
)
from hacpo.tools.estimate.shapes import ModelShape
from hacpo.tools.estimate.throughput import Hardware


def phases(
    settings: Settings,
    hardware: Hardware,
    engine: str,
    shape: ModelShape,
    trained: int,
    adapted: bool,
    own: Lengths,
    training: dict[str, Lengths],
) -> tuple[Batch, dict[str, list[Part]]]:
    """The largest micro-batch of training, and the parts of every phase.

    Args:
        engine: what samples.
        trained: parameters that are trained: the model's or, where it is `adapted`, its adapter's.
        own: lengths of the agent's rollouts.
        training: of every agent's, by name.
    """
    optimizer, launcher, dtype = settings.optimizer, settings.launcher, settings.engine.dtype
    share = settings.algorithm.rollouts.share
    responses = max(lengths.most_response for lengths in (training.values() if share else [own]))
    limit = settings.pool.max_tokens or shape.context
    longest = max(own.most, min(own.most_prompt + responses, limit or own.most_prompt + responses))
    sources = len(training) if share else 1
    seen = -(-settings.batch.prompts // settings.updates_per_pass) * settings.responses_per_prompt * sources
    batch = padded(min(optimizer.micro_batch_size, seen), longest, optimizer.micro_batch_tokens)
    rollouts = settings.batch.prompts * settings.responses_per_prompt
    together = min(settings.engine.batch_size, rollouts)
    vllm_share = 0.0
    if engine == "transformers":
        sampling = transformers_parts(shape, padded(together, own.most, None), dtype)
    else:
        fixed = settings.engine.vllm.cpu_cache_gib * GIB
        memory_gib = hardware.memory_gib
        vllm_share = (
            fixed + BYTES[dtype] * shape.parameters
            if memory_gib is None
            else memory_gib * GIB * settings.engine.vllm.memory_fraction
        )
        sampling = vllm_parts(shape, dtype, share=vllm_share, tensor_parallel=settings.engine.vllm.tensor_parallel)
    rescoring = rescoring_parts(shape, padded(together, own.most, settings.engine.batch_tokens), dtype)
    update = training_parts(
        shape,
        batch,
        dtype=dtype,
        shards=launcher.world_size // launcher.replicas,
        wrapped=settings.fsdp,
        trained=trained,
        frozen=shape.parameters if adapted else 0,
        checkpointing=optimizer.gradient_checkpointing,
        initial_policy=settings.algorithm.loss.kl_coef > 0,
    )
    if engine == "vllm":  # in the stage's own process, beside what rescores
        sampling.append(Part("weights to rescore with", BYTES[dtype] * shape.parameters, rescoring[0].rule))
        if not settings.engine.vllm.sleep:
            held = Part("vLLM, which does not sleep", vllm_share, "memory_fraction x the GPU")
            rescoring, update = [*rescoring, held], [*update, held]
    return batch, {"sampling": sampling, "rescoring": rescoring, "training": update}
