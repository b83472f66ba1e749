"""Truncated sampling: what is kept, log-probabilities renormalised over it, and their gradients."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hacpo.algorithm.support import Support, from_column, to_column
from hacpo.engines.cache import ModelCache
from hacpo.engines.from_checkpoint import Engine, open_engine
from hacpo.engines.interface import SamplingParameters, SamplingRequest, rescored
from hacpo.engines.training import head as head_module
from hacpo.engines.training import logprobs as logprobs_module
from hacpo.engines.training.head import Head, chunked_logprobs
from hacpo.engines.training.logprobs import TokenBatch, collate, support_scores, token_logprobs
from hacpo.engines.truncation import KeptTokens, truncated
from hacpo.settings.engine import EngineSettings

CPU = torch.device("cpu")


class Given(torch.nn.Module):
    """A model whose logits after token t are row t of a table: its hidden states, under a head that changes nothing."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding.from_pretrained(table, freeze=False)
        self.lm_head = torch.nn.Linear(*reversed(table.shape), bias=False)
        self.lm_head.weight.data = torch.eye(table.shape[1])
        text = SimpleNamespace(vocab_size=table.shape[1])
        self.config = SimpleNamespace(get_text_config=lambda: text)

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def get_decoder(self) -> Any:
        return lambda input_ids, **_: SimpleNamespace(last_hidden_state=self.embed(input_ids))

    def forward(self, input_ids: torch.Tensor, logits_to_keep: Any = slice(None), **_: Any) -> Any:
        return SimpleNamespace(logits=self.lm_head(self.embed(input_ids))[:, logits_to_keep])


MASSES = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.3, 0.2], [0.7, 0.1, 0.1, 0.1]])
"""Probabilities of the next token after each of four tokens, at temperature 1."""


def chunks_of(logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (head_module, logprobs_module):
        monkeypatch.setattr(module, "CHUNK_LOGITS", logits)


@pytest.mark.parametrize("chunk", [1 << 40, 8, 1])
def test_renormalised_by_hand(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """top_k 2 keeps {0, 1} after 0 and {2, 3} after 1, of mass .7 each, and all after 3: three are tied for second."""
    chunks_of(chunk, monkeypatch)
    model = Given(MASSES.log())
    batch = collate([([0], [1, 3, 0])], 0, CPU)
    found = support_scores(model, batch, 1.0, top_p=1.0, top_k=2)
    assert found.support.supports([3])[0].lists() == [[0, 1], [2, 3], [0, 1, 2, 3]]
    wanted = [0.3 / 0.7, 0.4 / 0.7, 0.7]
    np.testing.assert_allclose(found.logprobs.exp(), wanted, rtol=1e-6)
    np.testing.assert_allclose(found.support_logprobs.exp(), [0.7, 0.7, 1.0], rtol=1e-6)
    # The policy that training compares is the same one, to the bit.
    kept = Support.of([[0, 1], [2, 3], [0, 1, 2, 3]])
    values = token_logprobs(model, collate([([0], [1, 3, 0])], 0, CPU, [kept]), 1.0)
    assert torch.equal(values[0].detach(), found.logprobs)
    # Over the vocabulary the three are .3 * .4 * .7 likely, .7 * .7 times as much: what p / q would multiply to.
    whole = token_logprobs(model, batch, 1.0).detach().sum()
    assert math.exp(float(whole - found.logprobs.sum())) == pytest.approx(0.49, rel=1e-5)


def test_temperature_and_top_p_by_hand() -> None:
    """At temperature .5 the masses .4, .3, .2, .1 go as their squares, 16 : 9 : 4 : 1; of 30 parts 25 are .83."""
    model = Given(MASSES.log())
    found = support_scores(model, collate([([0], [1])], 0, CPU), 0.5, top_p=0.8, top_k=None)
    assert found.support.supports([1])[0].lists() == [[0, 1]]
    assert found.logprobs.exp().item() == pytest.approx(9 / 25, rel=1e-6)
    assert found.support_logprobs.exp().item() == pytest.approx(25 / 30, rel=1e-6)


def test_a_token_outside_what_the_logits_keep_is_added() -> None:
    found = support_scores(Given(MASSES.log()), collate([([0], [3])], 0, CPU), 1.0, top_p=1.0, top_k=2)
    assert found.support.supports([1])[0].lists() == [[0, 1, 3]]
    assert found.logprobs.exp().item() == pytest.approx(0.1 / 0.8, rel=1e-6)


def test_a_response_without_a_support_keeps_the_vocabulary_beside_one_with() -> None:
    model = Given(MASSES.log())
    sequences = [([0], [1]), ([0], [1])]
    values = token_logprobs(model, collate(sequences, 0, CPU, [Support.of([[0, 1]]), None]), 1.0)
    np.testing.assert_allclose(values.detach().exp()[:, 0], [0.3 / 0.7, 0.3], rtol=1e-6)
    values.sum().backward()
    assert torch.isfinite(model.embed.weight.grad).all()


def test_ids_beyond_the_vocabulary_do_not_count() -> None:
    """A source of the same tokenizer may have its embeddings padded further."""
    values = token_logprobs(Given(MASSES.log()), collate([([0], [1])], 0, CPU, [Support.of([[0, 1, 7]])]), 1.0)
    assert values.detach().exp().item() == pytest.approx(0.3 / 0.7, rel=1e-6)


@pytest.mark.parametrize("chunk", [1 << 40, 2 * 61, 1])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradients_are_those_of_the_restricted_softmax(
    chunk: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against autograd through logits that are -inf outside the support; every third token keeps the vocabulary."""
    chunks_of(chunk, monkeypatch)
    torch.manual_seed(0)
    tokens, width, vocabulary, temperature = 9, 6, 61, 0.7
    kept = torch.rand(tokens, vocabulary) < 0.2
    targets = torch.randint(vocabulary, (tokens,))
    kept[torch.arange(tokens), targets] = True
    ids = [row.nonzero().flatten().tolist() if number % 3 else [] for number, row in enumerate(kept)]
    support = KeptTokens.of([Support.of(ids)], [tokens], CPU)
    assert support is not None
    kept[::3] = True
    values, gradients = [], []
    for plain in (True, False):
        torch.manual_seed(1)
        hidden, weight, bias = torch.randn(tokens, width), torch.randn(vocabulary, width), torch.randn(vocabulary)
        parts = [one.requires_grad_() for one in (hidden, weight, bias)]
        head = Head(weight, bias, 0.9, softcap)
        if plain:
            logits = (head.logits(hidden) / temperature).masked_fill(~kept, float("-inf"))
            found = torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None]).squeeze(-1)
        else:
            found = chunked_logprobs(hidden, targets, head, temperature, support)
        (found * torch.linspace(-1, 2, tokens)).sum().backward()
        values.append(found.detach())
        gradients.append([one.grad for one in parts])
    torch.testing.assert_close(values[1], values[0], rtol=1e-5, atol=2e-6)
    for mine, theirs in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_far_likelier_token_outside_leaves_the_gradient_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """exp(logit - normaliser) overflows outside a support that has become unlikely."""
    chunks_of(1, monkeypatch)
    hidden = torch.tensor([[0.0, 1.0, 400.0]], requires_grad=True)
    support = KeptTokens.of([Support.of([[0, 1]])], [1], CPU)
    chunked_logprobs(hidden, torch.tensor([0]), Head(torch.eye(3), None, 1.0, None), 1.0, support).sum().backward()
    other = math.e / (1 + math.e)  # the other kept token's share
    np.testing.assert_allclose(hidden.grad, [[other, -other, 0.0]], rtol=1e-6)


def test_columns_hold_supports_and_give_them_back() -> None:
    supports = [Support.of([[3, 1], [2]]), None, Support.of([]), Support.of([[5]])]
    column = to_column(supports)
    assert column.to_pylist() == [[[1, 3], [2]], None, [], [[5]]]
    for start in range(4):
        found = from_column(column.slice(start))
        assert [None if one is None else one.lists() for one in found] == column.to_pylist()[start:]
    assert supports[0].head(1).lists() == [[1, 3]]


# --- real models -----------------------------------------------------------------------------------------------------


SETTINGS = EngineSettings(device="cpu", threads=1, batch_size=16)


@pytest.fixture(params=["ada", "bo"])
def engine(request: pytest.FixtureRequest, models: Path) -> Engine:
    return open_engine(ModelCache(), request.param, models / request.param, SETTINGS, "hacpo warmup")


CUTS = [(1.0, 1.0, 3), (0.7, 0.9, None), (1.3, 0.8, 5)]


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), CUTS)
def test_sampled_and_rescored_agree_within_the_support(
    engine: Engine, temperature: float, top_p: float, top_k: int | None
) -> None:
    texts = ["7+3-2=?", "4x+3=27?", "(8+7)%6=?"]
    prompts = [engine.tokenizer.render(text, [{"role": "user", "content": text}]) for text in texts]
    asked = [SamplingRequest(prompts[number % 3], number) for number in range(24)]
    parameters = SamplingParameters(temperature, 26, top_p, top_k, record=True)
    drawn = engine.sampler.sample(asked, parameters)
    assert all(one.support is None for one in engine.sampler.sample(asked[:1], SamplingParameters(1.0, 26, 0.5)))
    sequences = [(one.prompt_token_ids, response.token_ids) for one, response in zip(asked, drawn, strict=True)]
    behaviour = rescored(engine.scorer, sequences, parameters, [response.support for response in drawn])
    whole = engine.scorer.score(sequences, temperature=temperature)
    for response, scored, full in zip(drawn, behaviour, whole, strict=True):
        assert response.support is not None
        assert scored.support_logprob is not None
        kept = response.support.lists()
        assert len(kept) == len(response.token_ids)
        assert all(token in ids == sorted(ids) for token, ids in zip(response.token_ids, kept, strict=True))
        np.testing.assert_allclose(scored.logprobs, response.logprobs, atol=2e-5)
        np.testing.assert_allclose(scored.logprobs + scored.support_logprob, full, atol=2e-5)
        assert (scored.support_logprob <= 0).all()
    assert min(float(one.support_logprob.min()) for one in behaviour if one.support_logprob is not None) < -0.02
    # Where the sampler does not say, the training stack keeps the same tokens.
    again = rescored(engine.scorer, sequences, parameters, [None] * len(drawn))
    same = [
        ids == other
        for one, response in zip(again, drawn, strict=True)
        for ids, other in zip(one.support.lists(), response.support.lists(), strict=True)
    ]
    assert sum(same) >= len(same) - 1  # one on the very edge may fall on either side by rounding


def test_keeping_everything_is_the_untruncated_distribution(engine: Engine) -> None:
    logits = torch.randn(3, 17)
    assert torch.equal(truncated(logits, top_p=1.0, top_k=None), logits)
    batch: TokenBatch = collate([([3], [4, 5])], 0, CPU)
    whole = token_logprobs(engine.scorer._model, batch, 1.0)[0].detach()
    found = support_scores(engine.scorer._model, batch, 1.0, top_p=1.0, top_k=10**6)
    torch.testing.assert_close(found.logprobs, whole, rtol=0, atol=2e-6)
    assert float(found.support_logprobs.abs().max()) < 2e-6
