"""Memory of one process by part, in bytes: training, rescoring and sampling.

What must be held whatever the batch follows from the optimizer (AdamW in float32) and from FSDP2 as
`training.policy` uses it; activations follow from which tensors PyTorch keeps for the backward pass of a decoder
layer, counted term by term (docs/estimate.md has the terms, and how far they are off).

Notation: H width, A heads x head size, K key-value heads x head size, M width of the MLP, V vocabulary, L layers, S
longest prompt plus response of a forward pass, N its tokens, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass

from hacpo.algorithm.batching import CHUNK_LOGITS
from hacpo.settings.engine import Dtype
from hacpo.tools.estimate.shapes import ModelShape

BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}
"""Bytes of a number."""

GIB = 2**30

KNOWN_ARCHITECTURES = ("qwen3", "llama", "qwen2", "mistral", "gpt_neox")
"""Those whose layers keep for the backward pass what `activations_per_token` counts; others are taken for Llama's."""


@dataclass(frozen=True)
class Part:
    """One part of a process's memory, and the rule it follows."""

    name: str
    bytes: float
    rule: str


@dataclass(frozen=True)
class Batch:
    """A forward pass: so many sequences, the longest of so many tokens, and padded tokens in all."""

    sequences: int
    longest: int
    tokens: int


def padded(rows: int, longest: int, most_tokens: int | None) -> Batch:
    """The largest batch of at most `rows` sequences and `most_tokens` tokens (one sequence may be longer)."""
    fitting = rows if most_tokens is None else max(1, min(rows, most_tokens // longest))
    return Batch(fitting, longest, fitting * longest)


def activations_per_token(shape: ModelShape, dtype: Dtype, longest: int) -> float:
    """Bytes that one layer keeps for the backward pass, per token (SDPA attention with a padding mask)."""
    b, h, a, k, m = BYTES[dtype], shape.hidden, shape.attention_width, shape.kv_width, shape.intermediate
    mask = b * longest
    if (
        shape.architecture == "gpt_neox"
    ):  # two norms: input and output; queries, keys, values, result; MLP before and after
        return 4 * h * b + 5 * a * b + 2 * m * b + mask
    norms = 2 * h * (4 + 2 * b)  # each keeps its input in float32, and the normalised and the scaled result
    heads = (a + k) * (4 + b) if shape.normed_heads else 0
    attention = 4 * a * b  # queries, keys and values for every head, and the result
    mlp = 4 * m * b  # gate, its activation, up, and their product
    statistics = 4 * (2 + shape.heads + (shape.heads + shape.kv_heads if shape.normed_heads else 0))
    return norms + heads + attention + mlp + mask + statistics


def training_parts(
    shape: ModelShape,
    batch: Batch,
    *,
    dtype: Dtype,
    shards: int,
    wrapped: bool,
    trained: int,
    frozen: int,
    checkpointing: bool,
    initial_policy: bool,
) -> list[Part]:
    """Memory of one process of `update`, when it is largest: at the head's backward pass.

    Args:
        batch: the largest micro-batch.
        shards: processes that hold one copy of the model together.
        wrapped: whether FSDP holds the model (several processes, or bfloat16).
        trained: parameters that are trained: the model's, or an adapter's.
        frozen: parameters that are not: none, or with an adapter the model's.
        initial_policy: whether a KL penalty needs its log-probabilities.
    """
    b = BYTES[dtype]
    parts = [
        Part("weights, float32", 4 * trained / shards, "4 bytes a trained parameter / shards"),
        Part("gradients, float32", 4 * trained / shards, "4 bytes a trained parameter / shards"),
        Part("AdamW's two moments", 8 * trained / shards, "8 bytes a trained parameter / shards"),
    ]
    if frozen:
        parts.append(Part("frozen weights", b * frozen / shards, f"{b} bytes a parameter / shards"))
    if wrapped:
        root = shape.embedding * (1 if shape.tied else 2)
        gathered = b * (root + 2 * shape.layer_parameters)
        parts.append(Part(f"gathered, {dtype}", gathered, f"{b} bytes x (embeddings, head and two layers)"))
    if initial_policy:
        parts.append(Part("initial policy", b * shape.parameters, f"{b} bytes a parameter"))
    parts += [
        Part(
            "activations",
            activations(shape, batch, dtype, checkpointing=checkpointing),
            _activation_rule(checkpointing),
        ),
        Part(
            "head",
            head_backward(shape, batch, dtype, frozen=bool(frozen)),
            "a chunk of logits, and the head's gradient",
        ),
    ]
    return parts


def activations(shape: ModelShape, batch: Batch, dtype: Dtype, *, checkpointing: bool) -> float:
    """Bytes kept for the backward pass of a micro-batch; with checkpointing each layer's input, and one layer whole."""
    layer = activations_per_token(shape, dtype, batch.longest)
    ends = shape.hidden * (4 + 2 * BYTES[dtype])  # the last norm, as in a layer
    if checkpointing:
        return batch.tokens * (shape.layers * shape.hidden * BYTES[dtype] + layer + ends)
    return batch.tokens * (shape.layers * layer + ends)


def _activation_rule(checkpointing: bool) -> str:
    return "a layer's input x layers + one layer" if checkpointing else "what layers keep for the backward pass"


def head_backward(shape: ModelShape, batch: Batch, dtype: Dtype, *, frozen: bool) -> float:
    """Bytes of the head's backward pass: logits, and the gradient of its weight as a float32 sum."""
    mixed = dtype != "float32"
    weight = 0 if frozen else shape.embedding
    logits = batch.tokens * shape.vocabulary
    if logits <= CHUNK_LOGITS:  # all at once: their log-softmax and its gradient
        return logits * (10 if mixed else 8) + weight * 4
    # A chunk, the same before it is scaled, and the one before it; with bfloat16 also the gradient in it.
    chunks = CHUNK_LOGITS * (14 if mixed else 12)
    # The sum over chunks, one chunk's product before it is added (bfloat16), and the sum in the weight's own dtype.
    return chunks + weight * (10 if mixed else 4)


def rescoring_parts(shape: ModelShape, batch: Batch, dtype: Dtype) -> list[Part]:
    """Memory of one process that rescores responses: weights, one layer at work, and a chunk of logits."""
    b, h, m, a = BYTES[dtype], shape.hidden, shape.intermediate, shape.attention_width
    layer = max(3 * m, 4 * a) * b + h * (4 + 2 * b) + b * batch.longest
    logits = min(batch.tokens * shape.vocabulary, CHUNK_LOGITS)
    return [
        Part("weights", b * shape.parameters, f"{b} bytes a parameter"),
        Part("one layer at work", batch.tokens * layer, "tokens x (3 M or 4 A, and 2 H)"),
        Part("logits", logits * 8, "at most one chunk, and its copy"),
    ]


def cache_per_token(shape: ModelShape, dtype: Dtype) -> int:
    """Bytes of keys and values that one token leaves in the cache: 2 L K numbers."""
    return 2 * shape.layers * shape.kv_width * BYTES[dtype]


def transformers_parts(shape: ModelShape, batch: Batch, dtype: Dtype) -> list[Part]:
    """Memory of one process that samples with transformers."""
    return [
        Part("weights", BYTES[dtype] * shape.parameters, f"{BYTES[dtype]} bytes a parameter"),
        Part("KV cache", batch.tokens * cache_per_token(shape, dtype), "2 L K numbers a token"),
        # float32 logits and log-probabilities, float64 probabilities and their sums, the masked scores
        Part("next token", 28 * batch.sequences * shape.vocabulary, "28 bytes x responses x vocabulary"),
    ]


def vllm_parts(shape: ModelShape, dtype: Dtype, *, share: float, tensor_parallel: int) -> list[Part]:
    """Memory of one GPU that samples with vLLM, which takes a fixed share of it whatever it needs.

    Args:
        share: bytes that vLLM may take.
    """
    weights = BYTES[dtype] * shape.parameters / tensor_parallel
    return [
        Part("weights", weights, f"{BYTES[dtype]} bytes a parameter / tensor_parallel"),
        Part("KV cache and vLLM's own", max(0.0, share - weights), "the rest of memory_fraction x the GPU"),
    ]


def total(parts: list[Part]) -> float:
    """Bytes of all parts."""
    return sum(part.bytes for part in parts)
