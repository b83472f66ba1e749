"""Sampling with the random choice of transformers' own `generate`, one response after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from hacpo.engines.interface import OnProgress, SampledResponse, SamplingParameters, SamplingRequest
from hacpo.errors import ModelError


class OneByOne:
    """A loaded model as a sampler.

    Args:
        model: a causal language model in evaluation mode.
        eos_token_ids: tokens that end a response.
        pad_token_id: filler.
    """

    def __init__(self, model: Any, *, eos_token_ids: Sequence[int], pad_token_id: int) -> None:
        self._model = model
        self._eos = list(eos_token_ids)
        self._pad = pad_token_id

    @torch.inference_mode()
    def sample(
        self,
        requests: Sequence[SamplingRequest],
        parameters: SamplingParameters,
        on_progress: OnProgress | None = None,
    ) -> list[SampledResponse]:
        """See `interface.Sampler`.

        Raises:
            ModelError: stop strings are asked for.
        """
        if parameters.stop:
            raise ModelError("the engine one_by_one has no stop strings", where="sampling.stop", remedy="leave it out")
        responses = []
        for request in requests:
            responses.append(self._draw(request, parameters))
            if on_progress:
                on_progress(len(responses), len(requests))
        return responses

    def _draw(self, request: SamplingRequest, parameters: SamplingParameters) -> SampledResponse:
        prompt = torch.tensor([list(request.prompt_token_ids)], device=self._model.device)
        choice: dict[str, Any] = {"do_sample": False}
        if parameters.temperature > 0:
            choice = {
                "do_sample": True,
                "temperature": parameters.temperature,
                "top_p": parameters.top_p,
                "top_k": parameters.top_k or 0,
            }
        with torch.random.fork_rng(enabled=True):  # nobody else's random numbers depend on these
            torch.manual_seed(request.seed)
            drawn = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=GenerationConfig(
                    max_new_tokens=parameters.max_new_tokens,
                    eos_token_id=self._eos,
                    pad_token_id=self._pad,
                    output_scores=True,
                    return_dict_in_generate=True,
                    **choice,
                ),
            )
        tokens = drawn.sequences[0, prompt.shape[1] :]
        # Scores are logits over the temperature, minus infinity where `top_k` and `top_p` left a token out.
        scores = torch.cat(drawn.scores).float().log_softmax(dim=-1)
        return SampledResponse(
            token_ids=tokens.tolist(),
            logprobs=scores.gather(-1, tokens[:, None])[:, 0].cpu().numpy().astype(np.float32),
            finish_reason="stop" if int(tokens[-1]) in self._eos else "length",
        )
