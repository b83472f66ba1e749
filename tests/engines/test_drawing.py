"""Tokens drawn by inverting the cumulative distribution at given numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hacpo.engines.drawing import draw, likeliest


def drawn(probabilities: list[float], *uniforms: float) -> tuple[list[int], list[float]]:
    scores = torch.tensor([probabilities]).log().expand(len(uniforms), -1) + 3.0  # logits are free up to a constant
    tokens, logprobs = draw(scores, torch.tensor(uniforms, dtype=torch.float64))
    return tokens.tolist(), logprobs.tolist()


def test_a_token_is_drawn_where_the_cumulative_distribution_passes_the_number() -> None:
    # Cumulative: .1, .1, .6, 1. The second token has probability 0 and is never drawn.
    tokens, logprobs = drawn([0.1, 0.0, 0.5, 0.4], 0.0, 0.099, 0.101, 0.599, 0.601, 1 - 2**-53)
    assert tokens == [0, 0, 2, 2, 3, 3]
    assert np.exp(logprobs) == pytest.approx([0.1, 0.1, 0.5, 0.5, 0.4, 0.4], rel=1e-6)


def test_what_cannot_be_drawn_is_not_drawn_at_the_ends_either() -> None:
    # Vocabularies are often padded; the last ids, and the first of a later block, have probability 0 here.
    probabilities = [0.0] * 2000
    probabilities[1] = probabilities[700] = 0.5
    tokens, _ = drawn(probabilities, 0.0, 0.4999, 0.5001, 1 - 2**-53)
    assert tokens == [1, 1, 700, 700]


@pytest.mark.parametrize("vocabulary", [3, 511, 512, 513, 5000])
def test_every_token_has_an_interval_as_wide_as_its_probability(vocabulary: int) -> None:
    """Against a plain cumulative sum in float64, just inside the ends of the intervals of likely tokens."""
    scores = 3 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    cumulative = np.cumsum(torch.softmax(scores.double(), dim=-1).numpy())
    wide = np.flatnonzero(np.diff(cumulative, prepend=0.0) > 1e-5)
    low, high = np.insert(cumulative, 0, 0.0)[wide] + 1e-6, cumulative[wide] - 1e-6
    for uniforms in (low, high):
        tokens, logprobs = draw(scores.expand(len(wide), -1), torch.from_numpy(uniforms))
        np.testing.assert_array_equal(tokens, wide)
        np.testing.assert_allclose(logprobs, torch.log_softmax(scores, dim=-1)[wide], atol=2e-6)


def test_greedy_is_the_likeliest_token_with_its_log_probability() -> None:
    tokens, logprobs = likeliest(torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]]).log())
    assert tokens.tolist() == [1, 0]
    assert logprobs.exp().tolist() == pytest.approx([0.5, 0.6])
