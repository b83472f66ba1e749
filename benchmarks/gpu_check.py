"""What this machine's GPU does with HACPO, in one command: `make gpu-check`.

    python benchmarks/gpu_check.py [--device cuda] [--small] [--steps 2] [--prompts 32] [--group 8] [--tokens 512]

First a small model of each architecture is scored and trained on the device and, in float32, on the CPU: they must
agree. Then two agents with random weights, of the shapes of Qwen3-0.6B and Llama-3.2-1B, run HACPO steps in bfloat16 on
MATH problems (`data/math/train.parquet` of `hacpo import math`, else ../shared/data, else made-up arithmetic), once
with each sampling engine that is installed, and are audited. Random weights never solve a problem, so a response's
reward is a coin thrown by a hash of its text: groups differ, and every part of a step has work to do.

Everything is written below gpu-check/, a project of its own. The exit code is 0 if every check passed. docs/gpu.md
explains each line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "gpu-check"
AGENTS = {"qwen": "Qwen/Qwen3-0.6B", "llama": "meta-llama/Llama-3.2-1B"}
TOKENIZERS = {"qwen": "qwen3", "llama": "llama3"}

# Log-probabilities, in nats per token. bfloat16 has 8 bits: a logit of 8 is off by up to 1/64.
MOST_FLOAT32, MOST_BFLOAT16 = 1e-3, 5e-2


REWARD = '''"""The reward of a response: 0 or 1 by a hash of its text."""

import hashlib


def coin(problem, response, finish_reason):
    return float(hashlib.sha256(response.encode()).digest()[0] & 1)
'''


# --- the same numbers as on the CPU ----------------------------------------------------------------------------------


def agreement(device: str) -> Iterator[tuple[str, float, float]]:
    """(what, difference from the CPU in float32, most that passes) of a small model of each architecture."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    for architecture in ("qwen3", "llama"):
        exact = _trained(architecture, "cpu", torch.float32)
        for dtype, most in ((torch.float32, MOST_FLOAT32), (torch.bfloat16, MOST_BFLOAT16)):
            found = _trained(architecture, device, dtype)
            name = f"{architecture} {str(dtype)[6:]} on {device}"
            yield f"{name}: log-probabilities, mean", _mean_difference(found[0], exact[0]), most
            yield f"{name}: gradient norm, relative", abs(found[1] / exact[1] - 1), most


def _trained(architecture: str, device: str, dtype: Any) -> tuple[list[float], float]:
    """Log-probabilities per response and the gradient's norm of one update on made-up responses."""
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

    torch.manual_seed(0)
    kind = {"qwen3": Qwen3Config, "llama": LlamaConfig}[architecture]
    config = kind(
        **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": True},
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    shards = dtype != torch.float32
    place = torch.device(device)
    rows = [_row(number) for number in range(16)]
    with joined(LauncherSettings(), place, fsdp=shards) as world:
        trainer = Trainer(
            model if shards else model.to(place),
            0,
            AlgorithmSettings.model_validate({"recipe": "hacpo", **RECIPES["hacpo"]}),
            OptimizerSettings(learning_rate=1e-4, max_grad_norm=1e9),
            1.0,
            world=world,
            dtype=dtype,
            device=place,
        )
        pool = TrainingPool(pa.Table.from_pylist(rows), [None] * len(rows))
        trace, metrics = trainer.train(plan_updates(pool.table, updates=1, order="mixed", seeds=[None]), pool)
    return trace.sort_by("rollout_id")["learner_logprob"].to_pylist(), metrics["grad_norm"]


def _row(number: int) -> dict[str, Any]:
    token_ids = [(37 * number + 11 * place) % 500 + 5 for place in range(8 + 3 * number)]
    return {
        "rollout_id": f"{number:03d}",
        "problem_id": str(number // 4),
        "source": "me",
        "is_self": True,
        "status": "kept",
        "prompt_token_ids": [7 + number % 4] * 12,
        "token_ids": token_ids,
        "learner_tokens": len(token_ids),
        "source_tokens": len(token_ids),
        "source_logprob": -6.25 * len(token_ids),
        "text_bytes": len(token_ids),
        "effective_advantage": (-1.0) ** number,
        "old_logprobs": [-6.25] * len(token_ids),
        "sampler_weight": 1.0,
    }


def _mean_difference(found: Sequence[float], wanted: Sequence[float]) -> float:
    return sum(abs(one - other) for one, other in zip(found, wanted, strict=True)) / len(found)


# --- two agents ------------------------------------------------------------------------------------------------------


def make_agents(problems: Sequence[str], *, small: bool) -> None:
    """Model folders with random weights, made anew if they have another size."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    from hacpo.tools.estimate.known_models import KNOWN_MODELS

    for name, repository in AGENTS.items():
        folder, shape = PROJECT / "models" / name, KNOWN_MODELS[repository]
        sizes = {
            "hidden_size": 128 if small else shape.hidden,
            "intermediate_size": 256 if small else shape.intermediate,
            "num_hidden_layers": 2 if small else shape.layers,
            "num_attention_heads": 4 if small else shape.heads,
            "num_key_value_heads": 2 if small else shape.kv_heads,
            "head_dim": 32 if small else shape.head_dim,
        }
        vocabulary, eos = _tokenizer(name, problems, folder, smallest=0 if small else shape.vocabulary)
        if (folder / "config.json").is_file():
            held = json.loads((folder / "config.json").read_text())
            if all(held.get(key) == value for key, value in {**sizes, "vocab_size": vocabulary}.items()):
                continue
        torch.manual_seed(0)
        config = {"qwen": Qwen3Config, "llama": LlamaConfig}[name](
            **sizes,
            vocab_size=vocabulary,
            eos_token_id=eos,
            tie_word_embeddings=shape.tied,
            max_position_embeddings=4096,
        )
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(str(folder))


def _tokenizer(name: str, problems: Sequence[str], folder: Path, *, smallest: int) -> tuple[int, int]:
    """A real tokenizer where there is one, else one trained on the problems; returns the vocabulary's size and EOS."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    real = ROOT.parent / "shared" / "tokenizers" / TOKENIZERS[name]
    if (real / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(str(real))
    elif (real / "tokenizer.json").is_file():
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(real / "tokenizer.json"), eos_token="<|eot_id|>", pad_token="<|finetune_right_pad_id|>"
        )
    else:
        trained = ByteLevelBPETokenizer()
        trained.train_from_iterator(problems, vocab_size=8000, special_tokens=["<eos>", "<pad>"], show_progress=False)
        trained.save(str(folder / "tokenizer.json"))
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), eos_token="<eos>", pad_token="<pad>"
        )
    tokenizer.save_pretrained(str(folder))
    return max(len(tokenizer), smallest), int(tokenizer.eos_token_id)


def find_problems() -> Path | None:
    """A table of MATH problems, if there is one."""
    places = (ROOT / "data/math/train.parquet", ROOT.parent / "shared/data/math/train.parquet")
    return next((path for path in places if path.is_file()), None)


def write_pipeline(options: argparse.Namespace, engine: str, problems: Path | None) -> str:
    """The settings of a run that samples with `engine`; returns the pipeline's folder."""
    from ruamel.yaml import YAML

    if problems is not None:
        shutil.copyfile(problems, PROJECT / "problems.parquet")
    source: dict[str, Any] = (
        {"task": "arithmetic", "split": "train", "problems": 4 * options.prompts}
        if problems is None
        else {"path": "problems.parquet"}
    )
    params = {
        "seed": 1,
        "steps": options.steps,
        "agents": {name: {"model": f"models/{name}"} for name in AGENTS},
        "algorithm": {"recipe": "hacpo"},
        "data": {
            "train": "problems/train",
            "sets": {
                "problems/train": source,
                "problems/heldout": {"task": "arithmetic", "split": "heldout", "problems": 8},
            },
        },
        "sampling": {"group_size": options.group, "max_new_tokens": options.tokens},
        "batch": {"prompts": options.prompts, "minibatch_prompts": options.prompts // 2},
        "verification": {"reward": "coin:coin"},
        "optimizer": {
            "learning_rate": 1e-6,
            "micro_batch_size": 64,
            "micro_batch_tokens": 16_384,
            "gradient_checkpointing": True,
        },
        "engine": {
            "name": engine,
            "device": options.device,
            "dtype": "bfloat16",
            "batch_tokens": 65_536,
            "vllm": {"max_model_len": 2048},
        },
        "evaluation": {
            "every": options.steps,
            "benchmarks": {"heldout": {"data": "problems/heldout", "max_new_tokens": 16}},
        },
    }
    folder = f"pipelines/{engine}"
    (PROJECT / folder).mkdir(parents=True, exist_ok=True)
    (PROJECT / "coin.py").write_text(REWARD)
    with (PROJECT / folder / "params.yaml").open("w") as stream:
        YAML().dump(params, stream)
    return folder


def hacpo(*arguments: str) -> int:
    """Run a command of this checkout in the check's project."""
    return subprocess.run(
        [sys.executable, "-c", "from hacpo.cli import main; main()", *arguments],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        check=False,
    ).returncode


# --- figures ---------------------------------------------------------------------------------------------------------


def peak_flops(device: str, *, size: int) -> float:
    """Floating-point operations per second of a square product in bfloat16 on this device: what MFU is a share of."""
    import torch

    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    best = 0.0
    for _ in range(8):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(4):
            product = left @ left
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, 4 * 2 * size**3 / (time.perf_counter() - begun))
        del product
    return best


def figures(engine: str, steps: int, peak: float) -> Iterator[tuple[str, str, str]]:
    """(agent, what, figure) of the last step, the one that is warm."""
    import polars as pl

    from hacpo.tools.estimate.arithmetic import forward_flops
    from hacpo.tools.estimate.shapes import from_folder

    artifacts = PROJECT / "artifacts" / engine
    for name in AGENTS:
        made, trained = (
            json.loads((artifacts / "metrics" / stage / f"step={steps:04d}" / f"{name}.json").read_text())
            for stage in ("generate", "update")
        )
        pool = pl.read_parquet(artifacts / f"pool/step={steps:04d}/learner={name}/*.parquet")
        kept = pool.filter(pl.col("status") == "kept")
        lengths = (kept["prompt_token_ids"].list.len() + kept["token_ids"].list.len()).to_list()
        shape = from_folder(PROJECT / "models" / name)
        operations = 3 * sum(length * forward_flops(shape, length) for length in lengths)
        seconds = trained["train_seconds"]
        yield name, "sampling", f"{made['tokens'] / made['sampling_seconds']:,.0f} tokens/s"
        yield name, "rescoring", f"{made['tokens'] / made['scoring_seconds']:,.0f} response tokens/s"
        yield name, "update", f"{sum(lengths) / seconds:,.0f} tokens/s, prompts included"
        yield (
            name,
            "update, MFU",
            f"{operations / seconds / peak:.1%} of the {peak / 1e12:,.1f} TFLOP/s of a product here",
        )
        for stage, found in (("generate", made), ("update", trained)):
            where = "peak_gpu_memory_mib" if "peak_gpu_memory_mib" in found else "peak_memory_mib"
            kind = "GPU" if "gpu" in where else "host"
            yield name, f"{stage}, peak {kind} memory", f"{found[where] / 1024:.1f} GiB"
        yield (
            name,
            "sampler against trainer",
            f"mean {made['sampler_difference_mean']:.2g}, largest {made['sampler_difference_max']:.2g} nats a token",
        )
        yield name, "pool", f"{len(kept)} of {len(pool)} responses kept"


def main() -> int:
    """Run the check; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="models of two layers, for a machine without a GPU")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--engine", choices=("transformers", "vllm"), action="append", help="default: all installed")
    options = parser.parse_args()
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: error: torch sees no GPU. To try the check itself: --device cpu --small", file=sys.stderr)
        return 2
    from rich.console import Console
    from rich.table import Table

    console = Console()
    title = torch.cuda.get_device_name(0) if options.device == "cuda" else "CPU"
    passed = True
    table = Table("check", "found", "at most", "", title=f"{title}, torch {torch.__version__}")
    for what, found, most in agreement(options.device):
        passed &= found <= most
        table.add_row(what, f"{found:.2g}", f"{most:g}", "pass" if found <= most else "FAIL")
    console.print(table)

    problems = find_problems()
    import polars as pl

    texts = [] if problems is None else pl.read_parquet(problems)["problem"].to_list()
    PROJECT.mkdir(exist_ok=True)
    if not (PROJECT / ".dvc").is_dir():
        subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "--quiet"], cwd=PROJECT, check=True)
    make_agents(texts or ["12 + 3 * 4 = 24", "How many are left?"] * 50, small=options.small)
    peak = peak_flops(options.device, size=1024 if options.small else 8192)
    installed = ["transformers", *(["vllm"] if importlib.util.find_spec("vllm") else [])]
    for engine in options.engine or installed:
        folder = write_pipeline(options, engine, problems)
        shutil.rmtree(PROJECT / "artifacts" / engine, ignore_errors=True)
        ran = hacpo("run", folder) == 0
        clean = ran and hacpo("audit", folder) == 0
        passed &= clean
        table = Table("agent", "part", "figure", title=f"{title}, sampling with {engine}, bfloat16")
        for row in figures(engine, options.steps, peak) if ran else ():
            table.add_row(*row)
        table.add_row("both", f"{options.steps} steps", "ran" if ran else "FAILED")
        table.add_row("both", "audit", "clean" if clean else "FAILED")
        console.print(table)
    console.print("gpu-check: " + ("passed" if passed else "FAILED"))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
