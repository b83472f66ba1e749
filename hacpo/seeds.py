"""Seeds derived from names, so that any part of a run can be repeated alone and in any order."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from the given parts (for example seed, "generate", step, agent, problem_id, sample).

    The parts are hashed with SHA-256 over an unambiguous encoding: the same parts give the same seed on every machine.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
