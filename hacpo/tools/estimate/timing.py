"""Seconds of a step and of an evaluation, from work, shapes and a throughput table.

Sampling is a roofline: every decode step reads the weights and the cache once and multiplies them, whichever takes
longer, at a share of what the device could do. Scoring and training are arithmetic alone: 2 FLOPs a parameter and token
forward, twice as many backward, and attention on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from hacpo.settings.root import Settings
from hacpo.tools.estimate.disk import Checkpoint
from hacpo.tools.estimate.memory import BYTES, cache_per_token
from hacpo.tools.estimate.shapes import ModelShape
from hacpo.tools.estimate.throughput import NOT_MEASURED, Hardware, Measured
from hacpo.tools.estimate.workload import AgentWork, Drawn, together

GIB = 2**30


@dataclass(frozen=True)
class Seconds:
    """One agent's step by part, and one of its evaluations."""

    sampling: float
    rescoring: float
    update: float
    checkpoint: float
    other: float
    evaluation: float

    @property
    def step(self) -> float:
        """A step without its evaluation."""
        return self.sampling + self.rescoring + self.update + self.checkpoint + self.other


def forward_flops(shape: ModelShape, length: float) -> float:
    """FLOPs per token of a forward pass over sequences of `length` tokens: 2 a parameter, and 2 L A S of attention."""
    return 2 * shape.multiplied + 2 * shape.layers * shape.attention_width * length


def agent_seconds(
    settings: Settings,
    hardware: Hardware,
    shape: ModelShape,
    work: AgentWork,
    checkpoint: Checkpoint,
    *,
    model: str,
    engine: str,
) -> Seconds:
    """Seconds of one agent.

    Args:
        model: what the throughput table may know it by.
        engine: `transformers`, `vllm` or `vllm_server`, whichever samples.
    """
    own, drawn = work.step, together([work.step, work.side])
    measured = hardware.models.get(model, NOT_MEASURED)
    length = (own.prompt_tokens + own.tokens) / own.responses
    flops = forward_flops(shape, length)
    peak = 1e12 * (
        hardware.peak_tflops.float32 if settings.engine.dtype == "float32" else hardware.peak_tflops.bfloat16
    )
    efficiency = hardware.efficiency
    peak *= shape.hidden / (shape.hidden + efficiency.half_width)
    scored = measured.scoring or peak * efficiency.scoring / flops
    passes = 4 if settings.optimizer.gradient_checkpointing else 3
    trained = measured.training or peak * efficiency.training / (passes * flops)
    sharing = work.learned > own.responses
    # A KL penalty and the learner's own old policy each cost a forward pass over what they look at.
    extra = (1.0 if settings.algorithm.loss.kl_coef else 0.0) + (
        1.0 if sharing and settings.algorithm.importance.reference == "self" else 0.0
    )
    world = settings.launcher.world_size
    return Seconds(
        sampling=sampling_seconds(settings, hardware, shape, own, engine, measured)
        + sampling_seconds(settings, hardware, shape, work.side, engine, measured),
        rescoring=(drawn.prompt_tokens + drawn.tokens) / scored,
        update=work.learned_tokens / world * (1 / trained + extra / scored),
        checkpoint=checkpoint.each / 1e9 * (2 / hardware.disk_gb + 1 / hardware.hash_gb),
        other=(6 if work.side.responses else 4) * hardware.stage_seconds
        + drawn.responses / (hardware.verdicts * settings.verification.workers),
        evaluation=(
            sampling_seconds(settings, hardware, shape, work.evaluation, engine, measured)
            + work.evaluation.responses / (hardware.verdicts * settings.verification.workers)
            + hardware.stage_seconds
        ),
    )


def sampling_seconds(
    settings: Settings, hardware: Hardware, shape: ModelShape, drawn: Drawn, engine: str, measured: Measured
) -> float:
    """Seconds until all responses of a stage are sampled."""
    if not drawn.responses:
        return 0.0
    vllm, uses_vllm = settings.engine.vllm, engine != "transformers"
    copies = vllm.data_parallel if uses_vllm else 1
    ways = vllm.tensor_parallel if uses_vllm else 1
    if measured.sampling:
        return drawn.tokens / (measured.sampling * copies * ways)
    length = (drawn.prompt_tokens + drawn.tokens) / drawn.responses
    responses = drawn.responses / copies
    if uses_vllm:
        # Responses come and go; as many are at work as there are places for them.
        at_work = min(hardware.most_sequences, responses, _cache_places(settings, hardware, shape, length, ways))
        steps = drawn.tokens / copies / at_work
    else:
        # A batch goes on until its longest response is done.
        at_work = min(settings.engine.batch_size, responses)
        steps = responses / at_work * drawn.most_tokens / drawn.responses
    b = BYTES[settings.engine.dtype]
    peak = hardware.peak_tflops.float32 if settings.engine.dtype == "float32" else hardware.peak_tflops.bfloat16
    moved = (b * shape.multiplied + at_work * length / 2 * cache_per_token(shape, settings.engine.dtype)) / ways
    multiplied = at_work * forward_flops(shape, length) / ways
    busy = max(moved / (hardware.bandwidth_gb * 1e9), multiplied / (peak * 1e12)) / hardware.efficiency.sampling
    floor = hardware.decode_step_seconds.vllm if uses_vllm else hardware.decode_step_seconds.transformers
    return steps * max(busy, floor)


def _cache_places(settings: Settings, hardware: Hardware, shape: ModelShape, length: float, ways: int) -> float:
    """Responses of such a length whose keys and values fit beside the weights."""
    memory = hardware.memory_gib
    share = (
        settings.engine.vllm.cpu_cache_gib * GIB
        if memory is None
        else (
            memory * GIB * settings.engine.vllm.memory_fraction - BYTES[settings.engine.dtype] * shape.parameters / ways
        )
    )
    return max(1.0, share * ways / (length * cache_per_token(shape, settings.engine.dtype)))
