"""What a process asks the kernel about itself: its memory, and a bound that holds, for good where that is asked."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hacpo import kernel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

BOUND = """
import resource
from hacpo import kernel
resource.setrlimit(resource.RLIMIT_AS, ({allowed}, {allowed}))
kernel.bound_memory({more}, for_good={for_good})
limit, most = resource.getrlimit(resource.RLIMIT_AS)
try:
    block, held = bytearray(64 << 20), True
except MemoryError:
    held = False
print(held, limit == {allowed}, most == limit)
"""


def bounded(more: int, *, for_good: bool, allowed: int = -1) -> str:
    code = BOUND.format(more=more, for_good=for_good, allowed=allowed)
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_the_memory_of_a_process_and_of_none() -> None:
    space, held = kernel.memory() or (0, 0)
    assert space >= held > 1 << 20
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert kernel.memory(process.pid) is None


@pytest.mark.parametrize(
    ("more", "for_good", "expected"),
    [
        (32 << 20, False, "False False False"),
        (32 << 20, True, "False False True"),
        (256 << 20, False, "True False False"),
    ],
)
def test_a_bound_on_memory_holds(more: int, for_good: bool, expected: str) -> None:
    """64 MiB are asked for: whether they are given, whether the cluster's bound holds, whether it is final."""
    assert bounded(more, for_good=for_good) == expected


def test_a_cluster_that_allows_less_is_obeyed() -> None:
    assert bounded(1 << 50, for_good=False, allowed=1 << 40) == "True True True"
