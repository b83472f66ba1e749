"""A training step beside TRL's on the same work; see `bench`.

Both train one model on its own responses (GSPO: one update, sequence ratios, the same micro-batches) on one thread. A
step here ends with files: rollouts rescored by the training stack, verdicts of the real verifier, the trace, a
checkpoint with its optimizer, and DVC's records. TRL keeps everything in memory and has constant rewards. The processor
time of all processes is compared: other work on the machine matters less to it.

TRL has an environment of its own, named by HACPO_BENCH_TRL or made once in the user's cache.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from bench import ROOT, Row, Side, measured

_TRL = "1.16.0"
_CASES = {
    "small": (0.65, {"hidden": 128, "layers": 4, "vocabulary": 1024}, 32, 48, 12, "<= 0.6"),
    "vocabulary": (19.9, {"hidden": 128, "layers": 3, "vocabulary": 151_936}, 4, 48, 6, "<= 0.5"),
    "middle": (30.0, {"hidden": 512, "layers": 8, "vocabulary": 8192}, 2, 256, 5, "<= 0.8"),
}
"""Millions of parameters, shape, prompts, tokens of a response, steps, target. Start-up differs by up to half a second
from run to run, which few short steps would be measured with."""
_GROUP, _MICRO_BATCH = 8, 64

_PARAMS = """
seed: 1
steps: 100
agents: {{ada: {{model: models/ada}}}}
algorithm: {{recipe: gspo}}
data:
  train: arithmetic/train
  sets:
    arithmetic/train: {{task: arithmetic, split: train, problems: 256}}
    arithmetic/heldout: {{task: arithmetic, split: heldout, problems: 2}}
sampling: {{group_size: {group}, max_new_tokens: {longest}}}
batch: {{prompts: {prompts}, minibatch_prompts: {prompts}}}
optimizer: {{learning_rate: 1.0e-6, micro_batch_size: {micro_batch}}}
engine: {{name: transformers, device: cpu, threads: 1}}
evaluation: {{every: 100, benchmarks: {{heldout: {{data: arithmetic/heldout}}}}}}
"""


def _rows() -> dict[str, Row]:
    rows = {}
    for key, (size, shape, prompts, longest, _, target) in _CASES.items():
        work = f"{size:g}M parameters, vocabulary {shape['vocabulary']:,}, {prompts} x {_GROUP} x {longest} tokens"
        rows[f"{key}_ratio"] = Row(f"a step over TRL's: {work}", target)
        rows[f"{key}_seconds"] = Row("processor s a step, this")
        rows[f"{key}_trl"] = Row("processor s a step, TRL")
        rows[f"{key}_memory"] = Row("peak memory over TRL's", "<= 0.4" if key == "vocabulary" else "")
    return {key: Row(f"{row.what} ({key.split('_')[0]})", row.target) for key, row in rows.items()}


@measured("trl", **_rows())
def beside_trl(side: Side, folder: Path) -> dict[str, float]:
    """Each case here and by TRL, in turn."""
    chosen = os.environ.get("HACPO_BENCH_TRL_CASES", ",".join(_CASES)).split(",")
    found: dict[str, float] = {}
    for case in chosen:
        ours = _run(side, folder / case, case)
        theirs = _trl(folder / case)
        found |= {
            f"{case}_ratio": ours["seconds"] / theirs["seconds"],
            f"{case}_seconds": ours["seconds"],
            f"{case}_trl": theirs["seconds"],
            f"{case}_memory": ours["gib"] / theirs["gib"],
        }
    return found


def _run(side: Side, folder: Path, case: str) -> dict[str, float]:
    """Processor seconds of a step of `hacpo run`, all processes together, and the peak of the largest one in GiB."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "models").mkdir(parents=True)
    subprocess.run(
        side.command("python", __file__, str(folder / "models/ada"), json.dumps(_CASES[case][1])),
        check=True,
        capture_output=True,
    )
    (folder / "pipelines/trl").mkdir(parents=True)
    _, _, prompts, longest, steps, _ = _CASES[case]
    numbers = {"prompts": prompts, "longest": longest, "group": _GROUP, "micro_batch": _MICRO_BATCH}
    (folder / "pipelines/trl/params.yaml").write_text(_PARAMS.format(**numbers))
    shutil.copy(side.root / ".dvcignore", folder)
    side.run("dvc", "init", "--quiet", "--no-scm", at=folder)
    # The start of the program is in both, and cancels; so does nothing else: DVC's records and the verifier count.
    side.run("hacpo", "run", "pipelines/trl", "--until", "1", at=folder)
    one = side.processor_seconds("hacpo", "run", "pipelines/trl", "--until", "2", at=folder)
    more = side.processor_seconds("hacpo", "run", "pipelines/trl", "--until", str(steps), at=folder)
    metrics = folder / "artifacts/trl/metrics"
    peak = max(json.loads(path.read_text()).get("peak_memory_mib", 0) for path in metrics.rglob("*.json"))
    return {"seconds": (more - one) / (steps - 3), "gib": peak / 1024}


def _trl(folder: Path) -> dict[str, float]:
    prompts = subprocess.run(
        [sys.executable, __file__, "prompts", str(folder)], check=True, capture_output=True, text=True
    ).stdout
    case = _CASES[folder.name]
    work = {"prompts": json.loads(prompts), "group": _GROUP, "longest": case[3], "micro_batch": _MICRO_BATCH}
    (folder / "work.json").write_text(json.dumps({**work, "steps": case[4], "threads": 1}))
    (folder / "model").unlink(missing_ok=True)
    (folder / "model").symlink_to(folder / "models/ada")
    python = _environment() / "bin" / "python"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [str(python), str(ROOT / "benchmarks/trl_work.py"), str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _environment() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = Path(os.environ.get("HACPO_BENCH_TRL", cache / "hacpo-bench" / f"trl-{_TRL}"))
    if not (folder / "bin" / "trl").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        same = [f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "transformers", "accelerate")]
        subprocess.run([str(folder / "bin/pip"), "install", "--quiet", f"trl=={_TRL}", *same], check=True)
    return folder


def _prompts(folder: Path) -> list[str]:
    """What the first step's responses continue, as text."""
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    [file] = (folder / "artifacts/trl/rollouts/step=0001").rglob("*.parquet")
    tokenizer = AutoTokenizer.from_pretrained(folder / "models/ada")
    rows = pq.read_table(file, columns=["prompt_token_ids"]).column(0).to_pylist()
    return [tokenizer.decode(token_ids) for token_ids in dict.fromkeys(map(tuple, rows))]


def _make(folder: Path, shape: dict[str, int]) -> None:
    """A Qwen3 with random weights and a tiny agent's tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from hacpo.engines.models.tiny import build_tokenizer
    from hacpo.settings.agents import TinySettings, WarmupSettings

    tiny = TinySettings(
        architecture="qwen3", layers=1, hidden=8, heads=1, vocabulary="characters", warmup=WarmupSettings(steps=1)
    )
    tokenizer = build_tokenizer(tiny)
    torch.manual_seed(0)
    heads = shape["hidden"] // 32 if shape["hidden"] < 512 else 8
    config = Qwen3Config(
        vocab_size=shape["vocabulary"],
        hidden_size=shape["hidden"],
        intermediate_size=3 * shape["hidden"] if shape["hidden"] >= 512 else 2 * shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=heads,
        num_key_value_heads=heads if heads == 4 else heads // 2,
        head_dim=shape["hidden"] // heads,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.save_pretrained(str(folder))
    Qwen3ForCausalLM(config).save_pretrained(str(folder))


if __name__ == "__main__":
    if sys.argv[1] == "prompts":
        print(json.dumps(_prompts(Path(sys.argv[2]))))
    else:
        _make(Path(sys.argv[1]), json.loads(sys.argv[2]))
