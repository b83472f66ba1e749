"""What errors say."""

from __future__ import annotations

import pytest

from hacpo.errors import HacpoError, first_line


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


def test_a_line_names_no_user_of_an_address() -> None:
    error = HacpoError("the hub says no at http://me:p@ss@127.0.0.1:8/api", where="hf://datasets/owner/name@0123abc")
    assert str(error) == "hf://datasets/owner/name@0123abc: the hub says no at http://***@127.0.0.1:8/api"
