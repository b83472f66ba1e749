"""What errors say."""

from __future__ import annotations

import pytest

from hacpo.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("\n  bad header\nat byte 3"), "bad header"),
        (ValueError("x" * 200), "x" * 120),
        (OSError(), "OSError"),  # it says nothing but what it is
    ],
)
def test_what_a_library_says_fits_one_line(error: Exception, line: str) -> None:
    assert first_line(error) == line
