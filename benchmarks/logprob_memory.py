"""Peak memory and time of one forward and backward pass through a real vocabulary: chunked against plain.

    python benchmarks/logprob_memory.py [--tokens 4096] [--rounds 2]

A one-layer Qwen3 of width 256 with vocabulary 151,936 scores `tokens` response tokens. `chunked` is what training
uses; `plain` is log_softmax and gather over all logits. Each measurement is a process of its own (peak memory is a
process's), interleaved; ratios within one run are what counts.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

VOCABULARY, WIDTH, ROWS = 151_936, 256, 4


def measure(kind: str, tokens: int) -> dict[str, float]:
    """Peak resident memory above the loaded model, and seconds, of one pass."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from hacpo.engines.training import logprobs

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=512, tie_word_embeddings=True, **shape
    )
    model = AutoModelForCausalLM.from_config(config)
    rows = [([1, 2, 3], torch.randint(0, VOCABULARY, (tokens // ROWS,)).tolist()) for _ in range(ROWS)]
    batch = logprobs.collate(rows, 0, torch.device("cpu"))
    if kind == "plain":
        logprobs.CHUNK_LOGITS = 1 << 60  # nothing is too large for the model's own logits
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    values = logprobs.token_logprobs(model, batch, 1.0)
    values.sum().backward()
    return {
        "seconds": time.perf_counter() - start,
        "gib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20,
        "sum": float(values.sum()),
    }


def main() -> None:
    """Measure both, interleaved, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--measure", choices=("plain", "chunked"))
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.tokens)))
        return
    found: dict[str, list[dict[str, float]]] = {"chunked": [], "plain": []}
    for _ in range(arguments.rounds):
        for kind, results in found.items():
            command = [sys.executable, __file__, "--measure", kind, "--tokens", str(arguments.tokens)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            results.append(json.loads(done.stdout))
            print(f"{kind:8s} {results[-1]['gib']:6.2f} GiB {results[-1]['seconds']:6.1f} s", flush=True)
    best = {kind: {key: min(r[key] for r in results) for key in ("gib", "seconds")} for kind, results in found.items()}
    memory, seconds = (best["plain"][key] / best["chunked"][key] for key in ("gib", "seconds"))
    print(f"{arguments.tokens} tokens x {VOCABULARY}: plain / chunked memory {memory:.1f}, time {seconds:.2f}")


if __name__ == "__main__":
    main()
