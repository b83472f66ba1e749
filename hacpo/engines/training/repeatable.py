"""Training on the kernels that repeat themselves to the bit, where a GPU has them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def repeatable_kernels(device: torch.device) -> Iterator[None]:
    """While the block runs, a GPU computes with kernels that repeat themselves where PyTorch has such, and others warn;
    a CPU with its usual ones.

    Afterwards the process is as it was: whatever it samples next must not depend on whether it trained before.
    """
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(device.type == "cuda", warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
