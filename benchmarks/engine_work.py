"""One measurement of the transformers engine, in a process of its own: `python engine_work.py MODEL WORK`.

Prints a number of processor seconds. Models have random weights; 1 of 16 token ids ends a response, so lengths are
mixed: 16 tokens on average.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from hacpo.engines.interface import SamplingParameters, SamplingRequest
from hacpo.engines.training.logprobs import collate, token_logprobs
from hacpo.engines.transformers import TransformersEngine

_SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
MODELS: dict[str, tuple[dict[str, int], int, int]] = {
    "small": (_SMALL | {"num_key_value_heads": 4, "head_dim": 32, "vocab_size": 1024}, 32, 48),
    "vocabulary": (_SMALL | {"num_key_value_heads": 4, "head_dim": 32, "vocab_size": 151_936}, 4, 48),
    "middle": (
        {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
        | {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4096},
        4,
        64,
    ),
}
"""Shape, prompts, most tokens of a response."""
GROUP = 8


class Work:
    """A model with requests: 20 to 100 tokens a prompt, 8 responses to each."""

    def __init__(self, name: str) -> None:
        shape, prompts, self.longest = MODELS[name]
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.model: Any = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True)).eval()
        self.model.generation_config = GenerationConfig()
        self.eos = list(range(shape["vocab_size"] // 16))
        choice = random.Random(0)
        self.prompts = [
            [choice.randrange(shape["vocab_size"]) for _ in range(choice.randrange(20, 100))] for _ in range(prompts)
        ]
        self.engine = TransformersEngine(self.model, eos_token_ids=self.eos, pad_token_id=0, batch_size=256)
        self.tokens = [
            [
                choice.randrange(shape["vocab_size"])
                for _ in range(1 + min(self.longest - 1, int(choice.expovariate(1 / 16))))
            ]
            for _ in range(prompts * GROUP)
        ]

    def engine_sampling(self) -> int:
        """Tokens that the engine samples."""
        requests = [
            SamplingRequest(prompt, GROUP * n + k) for n, prompt in enumerate(self.prompts) for k in range(GROUP)
        ]
        return sum(len(r.token_ids) for r in self.engine.sample(requests, SamplingParameters(1.0, self.longest)))

    @torch.inference_mode()
    def bare_sampling(self) -> int:
        """The same by `generate` alone; tokens up to each response's end."""
        width = max(map(len, self.prompts))
        input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in self.prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in self.prompts])
        out = self.model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            generation_config=GenerationConfig(
                do_sample=True,
                top_k=0,
                num_return_sequences=GROUP,
                max_new_tokens=self.longest,
                eos_token_id=self.eos,
                pad_token_id=0,
            ),
        )[:, width:]
        ends = torch.isin(out, torch.tensor(self.eos)).int()
        return int(((ends.cumsum(dim=-1) - ends) == 0).sum())

    def _sequences(self) -> list[tuple[list[int], list[int]]]:
        return [(self.prompts[n // GROUP], tokens) for n, tokens in enumerate(self.tokens)]

    def rescoring(self) -> int:
        """Tokens that are rescored."""
        return sum(map(len, self.engine.score(self._sequences(), temperature=1.0)))

    def gradient(self) -> int:
        """Tokens of a forward and a backward pass in micro-batches of 2,048 tokens, in order of length."""
        from hacpo.algorithm.batching import batches

        rows = sorted(self._sequences(), key=lambda row: len(row[0]) + len(row[1]))
        lengths = [len(prompt) + len(response) for prompt, response in rows]
        for part in batches(lengths, most_rows=64, most_tokens=2048):
            batch = collate(rows[part.start : part.stop], 0, torch.device("cpu"))
            token_logprobs(self.model, batch, 1.0).sum().backward()
        return sum(len(response) for _, response in rows)


def main() -> None:
    """Do it once to warm up, and once for the clock."""
    work = Work(sys.argv[1])
    doing = getattr(work, sys.argv[2])
    doing()
    start = time.process_time()
    tokens = doing()
    print((time.process_time() - start) / tokens)


if __name__ == "__main__":
    main()
