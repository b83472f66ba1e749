"""Bytes of a step's tables, and the time to write and read them; see `bench` and `files_work`.

Two agents that were trained for half a minute on pieces of docs/ answer arithmetic problems in about a hundred tokens,
with a number in a box at the end, so that some are right. HACPO_BENCH_ROLLOUTS: how many responses in all (10,000).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
from bench import ROOT, Row, Side, measured

_ROLLOUTS = int(os.environ.get("HACPO_BENCH_ROLLOUTS", "10000"))
_AGENTS, _GROUP = ("ada", "bo"), 8
_SCRIPT = ROOT / "benchmarks" / "files_work.py"
_TABLES = ("rollouts", "verdicts", "pool", "advantages", "updates", "prompts", "capability")
_COLUMNS = {
    "rollouts": {
        "log-probabilities": ("sampler_logprobs", "logprobs", "support_logprob"),
        "token ids": ("prompt_token_ids", "token_ids", "support"),
        "text": ("text",),
    },
    "pool": {"token ids": ("prompt_token_ids", "token_ids", "support")},
}
"""Columns that are counted by themselves."""

_PARAMS = """
seed: 1
steps: 2
agents: {{ada: {{model: models/ada}}, bo: {{model: models/bo}}}}
algorithm: {{recipe: hacpo}}
data:
  train: arithmetic/train
  sets:
    arithmetic/train: {{task: arithmetic, split: train, problems: 1600}}
    arithmetic/heldout: {{task: arithmetic, split: heldout, problems: 2}}
sampling: {{group_size: {group}, max_new_tokens: 128}}
batch: {{prompts: {prompts}, minibatch_prompts: {prompts}}}
optimizer: {{learning_rate: 1.0e-5}}
engine: {{name: transformers, device: cpu, threads: 1}}
evaluation: {{every: 100, benchmarks: {{heldout: {{data: arithmetic/heldout}}}}}}
"""


def _rows() -> dict[str, Row]:
    rows = {"all": Row(f"all tables, bytes a rollout token, a step of {_ROLLOUTS:,} rollouts", "<= 4")}
    for table in _TABLES:
        rows[table] = Row(f"{table}, bytes a rollout token")
        for group in _COLUMNS.get(table, {}):
            rows[f"{table} {group}"] = Row(f"{table}: {group}, bytes a rollout token")
    rows["footers"] = Row("footers and metadata of all of them, bytes a rollout token")
    rows["write"] = Row("writing the step's tables, ns of processor time a rollout token")
    rows["read"] = Row("reading them, ns of processor time a rollout token")
    return rows


@measured("files", **_rows())
def files(side: Side, folder: Path) -> dict[str, float]:
    """The first step of a run that is made once; writing and reading are measured every round."""
    run = folder / "artifacts" / "text"
    if not run.exists():
        _make(side, folder)
    sizes: Counter[str] = Counter()
    for table in _TABLES:
        for path in (run / table / "step=0001").rglob("*.parquet"):
            sizes += _sizes(table, path)
    tokens = sum(
        len(response)
        for path in (run / "rollouts" / "step=0001").rglob("*.parquet")
        for response in pq.read_table(path, columns=["token_ids"], partitioning=None)["token_ids"]
    )
    timed = json.loads(_work(side, folder, "time", str(run)))
    return {key: size / tokens for key, size in sizes.items()} | {
        key: seconds / tokens * 1e9 for key, seconds in timed.items()
    }


def _make(side: Side, folder: Path) -> None:
    """A project whose agents are language models of this repository's docs, and its first step."""
    for seed, agent in enumerate(_AGENTS):
        _work(side, folder, "model", str(folder / "models" / agent), str(seed))
    params = folder / "pipelines" / "text" / "params.yaml"
    params.parent.mkdir(parents=True)
    params.write_text(_PARAMS.format(group=_GROUP, prompts=_ROLLOUTS // _GROUP // len(_AGENTS)))
    (folder / ".dvcignore").write_text((side.root / ".dvcignore").read_text())
    side.run("dvc", "init", "--quiet", "--no-scm", at=folder)
    side.run("hacpo", "run", "pipelines/text", "--until", "1", at=folder)


def _work(side: Side, folder: Path, *words: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = side.command("python", str(_SCRIPT), *words)
    done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()[-1]


def _sizes(table: str, path: Path) -> Counter[str]:
    """Bytes of one file by what they are counted as."""
    metadata, size = pq.read_metadata(path), path.stat().st_size
    columns: Counter[str] = Counter()
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            columns[column.path_in_schema.partition(".")[0]] += column.total_compressed_size
    found = Counter({"all": size, table: size, "footers": size - sum(columns.values())})
    for group, names in _COLUMNS.get(table, {}).items():
        found[f"{table} {group}"] = sum(columns[name] for name in names)
    return found
