"""Host memory of every process of an update over several: when training begins, and at its end.

    python benchmarks/update_memory.py [--processes 2] [--hidden 1024] [--layers 8] [--dtype bfloat16]

makes a model with random weights, samples a few short responses with it, and updates it on them on the CPU, in a
project of its own that is removed afterwards. On a GPU only the first figure is the machine's own memory. Figures:
docs/update.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import runpy
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 32_768

PARAMS = """
seed: 1
steps: 2
agents:
  ada: {{model: models/ada}}
algorithm: {{recipe: gspo}}
data:
  train: arithmetic/train
  sets: {{arithmetic/train: {{task: arithmetic, split: train, problems: 8}}}}
sampling: {{group_size: 2, max_new_tokens: 8}}
batch: {{prompts: 4, minibatch_prompts: 4}}
optimizer: {{learning_rate: 1.0e-6, micro_batch_size: 2}}
engine: {{device: cpu, dtype: {dtype}, threads: 1}}
launcher: {{processes: {processes}, command: {command}}}
evaluation: {{benchmarks: {{train: {{data: arithmetic/train}}}}}}
"""


def make_model(folder: Path, *, hidden: int, layers: int, dtype: str) -> int:
    """A Qwen3 with random weights; returns its number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from hacpo.engines.models.tiny import build_tokenizer
    from hacpo.settings.agents import TinySettings, WarmupSettings

    settings = TinySettings(
        architecture="qwen3", layers=1, hidden=8, heads=1, vocabulary="characters", warmup=WarmupSettings(steps=1)
    )
    tokenizer = build_tokenizer(settings)
    tokenizer.save_pretrained(str(folder))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(str(folder))
    return sum(parameter.numel() for parameter in model.parameters())


def measured(target: Path, words: list[str]) -> None:
    """Be one process of an update (`-m hacpo.stages.update ...`), and write down its peaks."""
    from hacpo.engines.training.trainer import Trainer

    begins: list[int] = []
    train = Trainer.train

    def recorded(*arguments: object, **options: object) -> object:
        begins.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return train(*arguments, **options)  # type: ignore[arg-type]

    Trainer.train = recorded  # type: ignore[assignment, method-assign]
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.argv = words[1:]
    try:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    finally:
        peaks = [start, *begins, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]
        (target / f"{os.environ['RANK']}.json").write_text(json.dumps(peaks))


def main() -> None:
    """Run two steps in a project of its own; the second one has an optimizer's state to read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--code", type=Path, default=ROOT, help="another checkout, to compare with")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        (project / "models/ada").mkdir(parents=True)
        parameters = make_model(
            project / "models/ada", hidden=options.hidden, layers=options.layers, dtype=options.dtype
        )
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        start += ["--nproc-per-node={processes}", __file__, "rank", str(project)]
        (project / "pipelines/small").mkdir(parents=True)
        (project / "pipelines/small/params.yaml").write_text(
            PARAMS.format(dtype=options.dtype, processes=options.processes, command=json.dumps(shlex.join(start)))
        )
        (project / ".dvc").mkdir()
        (project / ".dvc/config").write_text("[core]\n    no_scm = true\n")
        print(f"{parameters / 1e6:.0f}M parameters, {options.dtype}: {4 * parameters / 2**20:.0f} MiB in float32")
        # Freed memory goes back at once, so that a peak is what was held and not what the allocator kept.
        environment = {
            **os.environ,
            "PYTHONPATH": str(options.code),
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
        }
        stages = [("resolve",), ("prepare",), ("warmup", "--agent", "ada")]
        for step in ("1", "2"):
            one = ("--step", step)
            stages += [("generate", *one, "--agent", "ada"), ("verify", *one, "--agent", "ada")]
            stages += [("pool", *one, "--learner", "ada"), ("advantage", *one), ("update", *one, "--agent", "ada")]
        for name, *words in stages:
            command = [sys.executable, "-m", f"hacpo.stages.{name}", "pipelines/small", *words]
            subprocess.run(command, cwd=project, env=environment, check=True, stdout=subprocess.DEVNULL)
            if name == "update":
                for rank in range(options.processes):
                    start_kib, begins, ends = json.loads((project / f"{rank}.json").read_text())
                    print(
                        f"step {words[1]}, process {rank}: torch loaded {start_kib / 1024:5.0f} MiB, training begins "
                        f"{begins / 1024:5.0f} MiB, the end {ends / 1024:5.0f} MiB",
                        flush=True,
                    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        measured(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
