"""What long work calls as it goes on."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[int, int], None]
"""Called with how many are done, and how many there are."""
