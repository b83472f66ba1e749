"""Which sequences share a forward pass."""

from __future__ import annotations

from collections.abc import Sequence

CPU_TOKENS = 2048
"""Most tokens of a forward pass on a CPU where the settings do not say: what a layer makes of them stays in the cache,
and there is nothing to gain from more (benchmarks/engine_work.py)."""

CHUNK_LOGITS = 1 << 26
"""Logits held at once, 256 MiB in float32: as large as makes the product efficient, small beside any real model."""


def most_tokens(setting: int | None, device: str) -> int | None:
    """Bound of tokens on a type of device, padding included: the settings', or what suits a CPU; None: no bound."""
    return CPU_TOKENS if setting is None and device == "cpu" else setting


def batches(lengths: Sequence[int], *, most_rows: int, most_tokens: int | None) -> list[range]:
    """Cut sequences, in their order, into batches.

    Args:
        lengths: tokens of each sequence; where similar ones are beside each other, little is padding.
        most_rows: sequences of a batch.
        most_tokens: tokens of a batch whose sequences are padded to its longest; a sequence longer than this is a
            batch of its own. None: no bound.

    Returns:
        The indices of each batch.
    """
    parts: list[range] = []
    start = longest = 0
    for end, length in enumerate(lengths):
        padded = max(longest, length) * (end + 1 - start)
        if end > start and (end - start == most_rows or (most_tokens is not None and padded > most_tokens)):
            parts.append(range(start, end))
            start, longest = end, 0
        longest = max(longest, length)
    return [*parts, range(start, len(lengths))] if start < len(lengths) else parts
