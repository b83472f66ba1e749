"""Sampling and scoring with real models: what was sampled is what is scored, whatever else is in the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hacpo.engines.cache import ModelCache
from hacpo.engines.from_checkpoint import Engine, open_engine
from hacpo.engines.interface import SampledResponse, SamplingParameters, SamplingRequest
from hacpo.errors import MissingInputError
from hacpo.settings.engine import EngineSettings
from hacpo.tokens.stopping import completed_at, first_stop

SETTINGS = EngineSettings(device="cpu", threads=1, batch_size=64)


@pytest.fixture(params=["ada", "bo"])
def engine(request: pytest.FixtureRequest, models: Path) -> Engine:
    return open_engine(ModelCache(), request.param, models / request.param, SETTINGS, "hacpo warmup")


def requests(engine: Engine, count: int = 24) -> list[SamplingRequest]:
    texts = ["7+3-2=?", "4x+3=27?", "(8+7)%6=?", "Ann has 7, gets 3, eats 2?"]
    prompts = [engine.tokenizer.render(text, [{"role": "user", "content": text}]) for text in texts]
    return [SamplingRequest(prompts[n % len(prompts)], seed=n) for n in range(count)]


def sample(
    engine: Engine, asked: list[SamplingRequest], temperature: float = 1.0, top_p: float = 1.0
) -> list[SampledResponse]:
    return engine.sampler.sample(asked, SamplingParameters(temperature, 26, top_p))


def test_a_response_depends_on_its_seed_and_not_on_its_batch(engine: Engine) -> None:
    asked = requests(engine)
    together = sample(engine, asked)
    alone = [sample(engine, [one])[0] for one in asked]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert len({tuple(r.token_ids) for r in together}) > 12
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_sampled_and_rescored_logprobs_agree(engine: Engine, temperature: float) -> None:
    asked = requests(engine)
    responses = sample(engine, asked, temperature)
    scored = engine.scorer.score(
        [(one.prompt_token_ids, r.token_ids) for one, r in zip(asked, responses, strict=True)], temperature=temperature
    )
    for response, logprobs in zip(responses, scored, strict=True):
        assert logprobs.dtype == np.float32
        np.testing.assert_allclose(response.logprobs, logprobs, atol=2e-5)


def test_eos_ends_a_response_and_is_part_of_it(engine: Engine) -> None:
    responses = sample(engine, requests(engine, 64))
    reasons = {r.finish_reason for r in responses}
    assert "stop" in reasons
    for response in responses:
        ends = [n for n, token in enumerate(response.token_ids) if token == engine.tokenizer.eos_token_id]
        assert ends == ([len(response.token_ids) - 1] if response.finish_reason == "stop" else [])
        assert response.finish_reason == "stop" or len(response.token_ids) == 26
        assert len(response.logprobs) == len(response.token_ids)


def test_greedy_takes_the_likeliest_token_each_time(engine: Engine) -> None:
    asked = requests(engine, 4)
    for one, response in zip(asked, sample(engine, asked, temperature=0), strict=True):
        ids = torch.tensor([[*one.prompt_token_ids, *response.token_ids]])
        with torch.inference_mode():
            best = engine.sampler._model(ids).logits[0, len(one.prompt_token_ids) - 1 : -1].argmax(dim=-1)
        assert best.tolist() == response.token_ids


def test_sampling_follows_the_distribution(engine: Engine) -> None:
    """First tokens of 4,000 responses against the model's probabilities: chi-square near its degrees of freedom."""
    prompt = requests(engine, 1)[0].prompt_token_ids
    with torch.inference_mode():
        probabilities = engine.sampler._model(torch.tensor([prompt])).logits[0, -1].double().softmax(dim=-1).numpy()
    drawn = engine.sampler.sample([SamplingRequest(prompt, seed) for seed in range(4000)], SamplingParameters(1.0, 1))
    counts = np.bincount([r.token_ids[0] for r in drawn], minlength=len(probabilities))
    likely = probabilities * 4000 >= 5
    expected = np.append(probabilities[likely], probabilities[~likely].sum()) * 4000
    observed = np.append(counts[likely], counts[~likely].sum())
    degrees = len(expected) - 1
    statistic = ((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    assert statistic < degrees + 5 * np.sqrt(2 * degrees) + 10


def test_top_p_keeps_the_smallest_sufficient_set(engine: Engine) -> None:
    prompt = requests(engine, 1)[0].prompt_token_ids
    with torch.inference_mode():
        probabilities = engine.sampler._model(torch.tensor([prompt])).logits[0, -1].double().softmax(dim=-1)
    ordered, index = probabilities.sort(descending=True)
    size = int((ordered.cumsum(0) < 0.5).sum()) + 1
    allowed = set(index[:size].tolist())
    drawn = engine.sampler.sample(
        [SamplingRequest(prompt, seed) for seed in range(300)], SamplingParameters(1.0, 1, 0.5)
    )
    assert {r.token_ids[0] for r in drawn} <= allowed
    mass = float(ordered[:size].sum())
    for response in drawn[:20]:
        assert response.logprobs[0] == pytest.approx(
            np.log(float(probabilities[response.token_ids[0]]) / mass), abs=1e-4
        )


def test_top_k_keeps_the_likeliest_and_top_p_cuts_what_is_left(engine: Engine) -> None:
    prompt = requests(engine, 1)[0].prompt_token_ids
    with torch.inference_mode():
        probabilities = engine.sampler._model(torch.tensor([prompt])).logits[0, -1].double().softmax(dim=-1)
    ordered, index = probabilities.sort(descending=True)
    # Of the five likeliest those that make up 0.6 of the five's own mass.
    five = ordered[:5] / ordered[:5].sum()
    both = int((five.cumsum(0) < 0.6).sum()) + 1
    for parameters, size in ((SamplingParameters(1.0, 1, top_k=5), 5), (SamplingParameters(1.0, 1, 0.6, 5), both)):
        drawn = engine.sampler.sample([SamplingRequest(prompt, seed) for seed in range(300)], parameters)
        assert {r.token_ids[0] for r in drawn} <= set(index[:size].tolist())
        for response in drawn[:20]:
            share = float(probabilities[response.token_ids[0]] / ordered[:size].sum())
            assert response.logprobs[0] == pytest.approx(np.log(share), abs=1e-4)
    one = engine.sampler.sample(
        [SamplingRequest(prompt, seed) for seed in range(5)], SamplingParameters(1.0, 1, top_k=1)
    )
    assert {r.token_ids[0] for r in one} == {int(index[0])}
    everything = SamplingParameters(1.0, 1, top_k=10**6)  # more than there are
    assert len({r.token_ids[0] for r in engine.sampler.sample(requests(engine, 64), everything)}) > 5


def test_a_stop_string_ends_each_response_where_its_own_text_has_it(engine: Engine) -> None:
    """The same seeds draw the same tokens, so each response is a beginning of the one without stop strings."""
    asked, decode = requests(engine), engine.tokenizer.decode
    stop = ("=2", "=1", "x=")
    free = sample(engine, asked)
    cut = engine.sampler.sample(asked, SamplingParameters(1.0, 26, stop=stop))
    ends = [completed_at(response.token_ids, stop, decode) for response in free]
    assert 4 < sum(end is not None for end in ends) < len(ends)
    for before, after, end in zip(free, cut, ends, strict=True):
        count = len(before.token_ids) if end is None else end
        assert after.token_ids == before.token_ids[:count]
        np.testing.assert_allclose(after.logprobs, before.logprobs[:count], atol=2e-5)
        assert after.finish_reason == (before.finish_reason if end is None else "stop")
        assert (first_stop(decode(after.token_ids), stop) is None) == (end is None)
    # Prompts end in what a stop string begins with, or contain one (`7+3-2=?`, `4x+3=27?`): only responses count.
    alone = [engine.sampler.sample([one], SamplingParameters(1.0, 26, stop=stop))[0].token_ids for one in asked[:6]]
    assert alone == [response.token_ids for response in cut[:6]]


def test_a_missing_checkpoint_names_its_command(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="the checkpoint is missing. Run `hacpo warmup x`"):
        open_engine(ModelCache(), "ada", tmp_path / "none", SETTINGS, "hacpo warmup x")


def test_a_warm_model_is_used_only_for_its_own_weights(models: Path, tmp_path: Path) -> None:
    cache = ModelCache()
    first, policy = cache.model("ada", models / "ada", SETTINGS)
    assert cache.model("ada", models / "ada", SETTINGS)[0] is first
    other, other_policy = cache.model("ada", models / "bo", SETTINGS)
    assert other is not first
    assert other_policy != policy
    cache.keep("ada", policy, SETTINGS, first)
    assert cache.model("ada", models / "ada", SETTINGS)[0] is first
    cache.discard("ada")
    assert cache.model("ada", models / "ada", SETTINGS)[0] is not first


def test_on_a_cpu_few_tokens_of_similar_length_are_scored_together(models: Path) -> None:
    """64 long and 64 short sequences, mixed: 2,048 tokens a pass, padding included, are 20 of 100 or 64 of 30."""
    engine = open_engine(ModelCache(), "ada", models / "ada", SETTINGS, "hacpo warmup")
    sequences = [([5] * 20, [6] * (80 if n % 2 else 10)) for n in range(128)]
    shapes: list[tuple[int, ...]] = []
    model = engine.scorer._model
    hook = model.register_forward_pre_hook(
        lambda _, __, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    scored = engine.scorer.score(sequences, temperature=1.0)
    hook.remove()
    assert shapes == [(64, 30), *[(20, 100)] * 3, (4, 100)]
    assert [len(values) for values in scored] == [80 if n % 2 else 10 for n in range(128)]
