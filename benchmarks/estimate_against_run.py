"""How good `hacpo estimate` is: against a finished run's files, and against the memory that training really takes.

    python benchmarks/estimate_against_run.py run [pipelines/quickstart]
    python benchmarks/estimate_against_run.py memory

`run` compares responses, tokens, and bytes of every table and of the checkpoints with a finished run's.
`memory` trains two updates of models made from scratch, each in a process of its own on the CPU, and compares the peak
of its resident memory above that before the model with the sum of the parts. Figures: docs/estimate.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

# --- a finished run --------------------------------------------------------------------------------------------------


def compare_run(folder: Path) -> None:
    """Print estimate, actual value and their ratio, line by line."""
    from hacpo.pipeline.project import Pipeline
    from hacpo.pipeline.views.progress import totals
    from hacpo.tools.estimate.throughput import choose, load
    from hacpo.tools.estimate.totals import default_hardware, estimate

    pipeline = Pipeline.open(folder)
    name = default_hardware(pipeline.settings)
    found = estimate(pipeline, name, choose(load(), name))
    steps, layout = pipeline.settings.steps, pipeline.layout

    def line(what: str, estimated: float, actual: float) -> None:
        print(f"{what:28s} {estimated:15,.0f} {actual:15,.0f} {estimated / actual:7.2f}")

    print(f"{pipeline.run:28s} {'estimate':>15s} {'actual':>15s}   ratio")
    sampled = [totals(pipeline, "generate", agent) for agent in found.agents]
    line("rollouts", found.work.rollouts(), sum(one["rollouts"] for one in sampled))
    line("tokens at most", found.work.most_sampled_tokens(), sum(one["tokens"] for one in sampled))
    for table, size in found.disk.step.items():
        line(
            f"{table}, bytes",
            size * steps,
            _bytes(layout.root, table) + (_bytes(layout.root, "capability") if table == "prompts" else 0),
        )
    line("evaluations, bytes", found.disk.evaluation * found.work.evaluations, _bytes(layout.root, "evaluations"))
    line("checkpoints, bytes", found.disk.written - found.disk.tables, _bytes(layout.root, "checkpoints"))


def _bytes(root: Path, table: str) -> int:
    return sum(file.stat().st_size for file in (root / table).rglob("*") if file.is_file())


# --- memory of training ----------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "qwen3, float32": {"architecture": "qwen3"},
    "llama, float32": {"architecture": "llama"},
    "qwen3, checkpointing": {"architecture": "qwen3", "checkpointing": True},
    "qwen3, real vocabulary": {"architecture": "qwen3", "vocabulary": 151_936, "hidden": 128, "layers": 4},
    "llama, real vocabulary, bfloat16": {
        "architecture": "llama",
        "vocabulary": 128_256,
        "hidden": 128,
        "layers": 4,
        "rows": 4,
        "length": 256,
        "dtype": "bfloat16",
    },
    "qwen3, bfloat16": {"architecture": "qwen3", "dtype": "bfloat16"},
    "qwen3, bfloat16, checkpointing": {"architecture": "qwen3", "dtype": "bfloat16", "checkpointing": True},
    "qwen3, mostly weights": {"architecture": "qwen3", "hidden": 512, "layers": 12, "rows": 2, "length": 64},
}
SHAPE = {"layers": 8, "hidden": 256, "vocabulary": 4_096, "rows": 8, "length": 512, "dtype": "float32"}


def measure(case: dict[str, Any]) -> dict[str, float]:
    """Estimated and actual bytes of two updates of two micro-batches each."""
    import pyarrow as pa
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    from hacpo.algorithm.training_pool import TrainingPool
    from hacpo.algorithm.updates import plan_updates
    from hacpo.engines.training.trainer import Trainer
    from hacpo.engines.training.world import joined
    from hacpo.settings.algorithm import AlgorithmSettings
    from hacpo.settings.engine import LauncherSettings
    from hacpo.settings.recipes import RECIPES
    from hacpo.settings.training import OptimizerSettings
    from hacpo.tools.estimate.memory import Batch, total, training_parts
    from hacpo.tools.estimate.shapes import ModelShape

    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = {**SHAPE, "checkpointing": False, **case}
    kind = {"qwen3": Qwen3Config, "llama": LlamaConfig}[case["architecture"]]
    heads = case["hidden"] // 32
    config = kind(
        vocab_size=case["vocabulary"],
        hidden_size=case["hidden"],
        num_hidden_layers=case["layers"],
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        intermediate_size=3 * case["hidden"],
        tie_word_embeddings=True,
    )
    shape = ModelShape(
        case["architecture"],
        case["layers"],
        case["hidden"],
        heads,
        heads // 2,
        32,
        3 * case["hidden"],
        case["vocabulary"],
        tied=True,
    )
    settings = OptimizerSettings(
        learning_rate=1e-4, micro_batch_size=case["rows"], gradient_checkpointing=case["checkpointing"]
    )
    rows = [_row(number, case["length"], case["vocabulary"]) for number in range(4 * case["rows"])]
    pool = TrainingPool(pa.Table.from_pylist(rows), [None] * len(rows))
    plan = plan_updates(pool.table, updates=2, order="mixed", seeds=[None])
    algorithm = AlgorithmSettings.model_validate({**RECIPES["gspo"], "recipe": "gspo"})
    dtype = getattr(torch, case["dtype"])
    with joined(LauncherSettings(), torch.device("cpu"), fsdp=dtype != torch.float32) as world:
        before = _resident()
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        trainer = Trainer(model, 0, algorithm, settings, 1.0, world=world, dtype=dtype)
        trainer.train(plan, pool)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    parts = training_parts(
        shape,
        Batch(case["rows"], case["length"], case["rows"] * case["length"]),
        dtype=case["dtype"],
        shards=1,
        wrapped=dtype != torch.float32,
        trained=shape.parameters,
        frozen=0,
        checkpointing=case["checkpointing"],
        initial_policy=False,
    )
    return {"estimate": total(parts), "actual": peak - before, **{part.name: part.bytes for part in parts}}


def _row(number: int, length: int, vocabulary: int) -> dict[str, Any]:
    response = [(number * 31 + place * 7) % vocabulary for place in range(length - 4)]
    return {
        "rollout_id": str(number),
        "problem_id": str(number // 2),
        "source": "ada",
        "is_self": True,
        "status": "kept",
        "prompt_token_ids": [1, 2, 3, 4],
        "token_ids": response,
        "learner_tokens": len(response),
        "source_tokens": len(response),
        "source_logprob": -float(len(response)),
        "text_bytes": len(response),
        "effective_advantage": (-1.0) ** number,
        "old_logprobs": [-1.0] * len(response),
        "sampler_weight": 1.0,
    }


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def compare_memory() -> None:
    """Print estimate, actual peak and their ratio for every case."""
    print(f"{'training':32s} {'estimate MiB':>13s} {'actual MiB':>11s}   ratio   parts")
    # Freed memory goes back at once, so that the peak is what was held and not what the allocator kept.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for name in CASES:
        done = subprocess.run(
            [sys.executable, __file__, "case", name], capture_output=True, text=True, check=True, env=environment
        )
        found = json.loads(done.stdout.splitlines()[-1])
        estimated, actual = found.pop("estimate"), found.pop("actual")
        parts = ", ".join(f"{part} {size / 2**20:.0f}" for part, size in found.items())
        print(
            f"{name:32s} {estimated / 2**20:13.0f} {actual / 2**20:11.0f} {estimated / actual:7.2f}   {parts}",
            flush=True,
        )


def main() -> None:
    """One of the two comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "memory", "case"))
    parser.add_argument("which", nargs="?", default="pipelines/quickstart")
    arguments = parser.parse_args()
    if arguments.what == "run":
        compare_run(Path(arguments.which))
    elif arguments.what == "memory":
        compare_memory()
    else:
        print(json.dumps(measure(CASES[arguments.which])))


if __name__ == "__main__":
    main()
