"""Sequences cut into forward passes."""

from __future__ import annotations

from hacpo.algorithm.batching import batches


def cut(lengths: list[int], rows: int, tokens: int | None) -> list[list[int]]:
    return [list(part) for part in batches(lengths, most_rows=rows, most_tokens=tokens)]


def test_rows_alone() -> None:
    assert cut([5] * 7, 3, None) == [[0, 1, 2], [3, 4, 5], [6]]
    assert cut([], 3, 10) == []


def test_padding_counts_towards_the_tokens() -> None:
    # 2 + 3 + 4 tokens padded to 4 are 12; with the 6 they would be 24.
    assert cut([2, 3, 4, 6], 64, 12) == [[0, 1, 2], [3]]
    assert cut([6, 2, 2], 64, 12) == [[0, 1], [2]]  # 2 * 6, then 3 * 6 would be too many


def test_a_sequence_beyond_the_budget_stands_alone() -> None:
    assert cut([3, 50, 3, 3], 64, 10) == [[0], [1], [2, 3]]
