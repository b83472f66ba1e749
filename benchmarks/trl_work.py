"""TRL's GRPOTrainer on the work of `beside_trl`, in an environment with TRL: `python trl_work.py FOLDER`.

The folder has `work.json` and a model. Prints the median processor seconds of a step (the first is left out), and peak
memory in GiB. Nothing of hacpo is imported.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):  # type: ignore[misc]
    """When each optimizer step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called by the trainer."""
        self.ends.append(time.process_time())


def main() -> None:
    """Train some steps on the same prompts over and over: only their number and length matter."""
    folder = Path(sys.argv[1])
    work = json.loads((folder / "work.json").read_text())
    torch.set_num_threads(work["threads"])
    clock = Clock()
    rows = len(work["prompts"]) * work["group"]
    micro = min(rows, work["micro_batch"])
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // micro,
        num_generations=work["group"],
        max_completion_length=work["longest"],
        max_steps=work["steps"],
        learning_rate=1e-6,
        adam_beta2=0.95,
        temperature=1.0,
        beta=0.0,
        epsilon=3e-4,
        epsilon_high=4e-4,
        importance_sampling_level="sequence",
        loss_type="grpo",
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        reward_funcs=lambda completions, **_: [float(n % 2) for n in range(len(completions))],
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": work["prompts"]}),
        callbacks=[clock],
    )
    trainer.train()
    seconds = statistics.median(after - before for before, after in itertools.pairwise(clock.ends))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"seconds": seconds, "gib": peak}))


if __name__ == "__main__":
    main()
