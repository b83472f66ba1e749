"""What `tables` measures: a step of many rollouts made without models, and the work of its tokenizers alone.

    python tables_work.py make ROLLOUTS   # pipelines/tables and artifacts/tables, in this folder
    python tables_work.py bare            # prints the processor time of encoding and decoding bo's texts as ada

The tokenizers are trained on the texts' sentences: a byte-level BPE of 4,096 tokens, and a SentencePiece-like Unigram
with bytes of 2,048. Responses have 1 to 12 sentences, about three on average, and a quarter is cut at the limit.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from hacpo.algorithm.rollouts import rollout_ids
from hacpo.artifacts import parquet, storage, tables
from hacpo.data import problems
from hacpo.pipeline.catalogue import STAGES
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.dvc_files import stamp
from hacpo.settings import params as settings_of

AGENTS = ("ada", "bo")
GROUP = 8
_DISTINCT = 20_000
"""Texts that are made; responses repeat them."""
_SENTENCES = (
    "We have {a} + {b} = {c}, so that {c} apples are left.",
    "Multiplying both sides by {a} gives {b}x = {c}.",
    "Then \\frac{{{a}}}{{{b}}} is about {c}.{a}.",
    "Let n be the number of boxes; each of them holds {b} pencils.",
    "Since {a} < {b}, the remainder of {c} is {a}.",
    "Wait, that isn't right: \u201c{b}\u201d was counted twice!",
    "Hence the area is {a} \u00d7 {b} = {c} cm\u00b2.",
)
_TEMPLATE = "{{ messages[-1].content + '\\n' }}"
PARAMS = """
seed: 1
steps: 1
agents: {{ada: {{model: models/ada}}, bo: {{model: models/bo}}}}
algorithm: {{recipe: hacpo}}
data: {{train: made/train, sets: {{made/train: {{path: problems.parquet}}}}}}
sampling: {{group_size: 8, max_new_tokens: 256}}
batch: {{prompts: {prompts}, minibatch_prompts: {prompts}}}
engine: {{device: cpu}}
optimizer: {{learning_rate: 1.0e-6}}
evaluation: {{every: 1, benchmarks: {{heldout: {{data: made/train}}}}}}
"""


def texts(random: np.random.Generator) -> list[str]:
    """Responses, each of its own length."""
    found = []
    for count in np.minimum(random.geometric(0.35, _DISTINCT), 12):
        numbers = random.integers(1, 1000, (count, 2)).tolist()
        kinds = random.integers(0, len(_SENTENCES), count).tolist()
        said = [_SENTENCES[kind].format(a=a, b=b, c=a * b) for kind, (a, b) in zip(kinds, numbers, strict=True)]
        found.append(f"{' '.join(said)}\n\\boxed{{{numbers[-1][0]}}}")
    return found


def byte_level(said: Sequence[str]) -> Tokenizer:
    """As Qwen's and Llama 3's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(said, trainer)
    return tokenizer


def unigram(said: Sequence[str]) -> Tokenizer:
    """As SentencePiece's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=2048, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(said, trainer)
    spec = json.loads(tokenizer.to_str())
    spec["model"] |= {"unk_id": 0, "byte_fallback": True}
    spec["model"]["vocab"] += [[f"<0x{number:02X}>", 0.0] for number in range(256)]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def checkpoint(folder: Path, tokenizer: Tokenizer) -> None:
    """A first checkpoint: a tokenizer, and a tensor of one number."""
    folder.mkdir(parents=True)
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id("<eos>")
    contents = {
        "tokenizer_config.json": {"tokenizer_class": "TokenizersBackend", "eos_token": "<eos>"},
        "config.json": {"model_type": "llama", "vocab_size": size, "max_position_embeddings": 512},
        "generation_config.json": {"eos_token_id": end},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    header = json.dumps({"w": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def lists(parts: Sequence[Any], chosen: Any, kind: Any) -> Any:
    """A column of lists: the chosen ones of some arrays."""
    distinct = pa.array(parts, kind)
    return distinct.take(chosen)


class Maker:
    """Writes the run's tables."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.random = pipeline, np.random.default_rng(1)
        self.said = texts(self.random)

    def write(self, table: tables.Table, content: Any, stage: str, step: int | None, agent: str = "") -> None:
        """One table of the run."""
        settings = settings_of.reads(self.pipeline.settings, STAGES[stage].settings, agent)
        layout = self.pipeline.layout
        parquet.write_table(
            layout.path(table, step, agent),
            table,
            content,
            run=self.pipeline.run,
            partition=table.partition(step, agent),
            settings=settings,
            rows_per_shard=self.pipeline.settings.storage.rows_per_shard,
        )

    def inputs(self) -> list[Any]:
        """The step's problems."""
        settings = self.pipeline.settings
        rows = problems.load(settings.data.train, settings.data.sets[settings.data.train], self.pipeline.root)
        scheduled = problems.schedule(rows, steps=1, prompts=settings.batch.prompts, seed=settings.seed)
        self.write(tables.PROMPTS, parquet.to_arrow(tables.PROMPTS, [vars(row) for row in scheduled]), "prepare", 1)
        return scheduled

    def agent(self, name: str, tokenizer: Tokenizer, scheduled: Sequence[Any]) -> None:
        """An agent's first checkpoint, rollouts and verdicts."""
        checkpoint(self.pipeline.layout.checkpoint(0, name), tokenizer)
        count, random = len(scheduled) * GROUP, self.random
        end = tokenizer.token_to_id("<eos>")
        encoded = [one.ids for one in tokenizer.encode_batch_fast(self.said)]
        which = random.integers(0, len(self.said), count)
        stopped = random.random(count) < 0.75
        # The same texts with and without the token that ends them.
        both, chosen = [*encoded, *([*ids, end] for ids in encoded)], pa.array(which + stopped * len(encoded))
        logprobs = [(-random.exponential(0.7, len(ids))).astype(np.float32) for ids in both]
        prompts = tokenizer.encode_batch_fast([f"{row.problem}\n" for row in scheduled])
        repeated = pa.array(np.repeat(np.arange(len(scheduled)), GROUP))
        ids = pa.array([row.problem_id for row in scheduled], pa.string())
        schema = tables.ROLLOUTS.schema
        scored = lists(logprobs, chosen, schema.field("logprobs").type)
        identities = rollout_ids(1, name, ids, GROUP)
        columns = {
            "rollout_id": identities,
            "step": pa.array(np.ones(count), pa.int32()),
            "agent": pa.repeat(name, count),
            "problem_id": ids.take(repeated),
            "sample": pa.array(np.tile(np.arange(GROUP), len(scheduled)), pa.int16()),
            "prompt_token_ids": lists([one.ids for one in prompts], repeated, schema.field("prompt_token_ids").type),
            "token_ids": lists(both, chosen, schema.field("token_ids").type),
            "text": pa.array(self.said).take(pa.array(which)),
            "finish_reason": pa.array(["length", "stop"]).take(pa.array(stopped.astype(np.int8))),
            "sampler_logprobs": scored,
            "logprobs": scored,
            "policy": pa.repeat("0" * 64, count),
            **{key: pa.nulls(count, schema.field(key).type) for key in ("stop_string", "support", "support_logprob")},
        }
        self.write(tables.ROLLOUTS, pa.table({key: columns[key] for key in schema.names}), "generate", 1, name)
        rewards = (stopped & (random.random(count) < 0.4)).astype(np.float32)
        verdicts = {
            **{key: columns[key] for key in ("rollout_id", "problem_id", "sample")},
            "reward": pa.array(rewards),
            "verdict": pa.array(["wrong", "correct"]).take(pa.array(rewards.astype(np.int8))),
            "extracted": pa.nulls(count, pa.string()),
            "answer": pa.array([row.answer for row in scheduled], pa.string()).take(repeated),
            "message": pa.nulls(count, pa.string()),
        }
        names = tables.VERDICTS.schema.names
        self.write(tables.VERDICTS, pa.table({key: verdicts[key] for key in names}), "verify", 1, name)


def make(rollouts: int) -> None:
    """The step of `ROLLOUTS` rollouts of both agents together."""
    root, prompts = Path.cwd(), rollouts // (GROUP * len(AGENTS))
    folder = root / "pipelines" / "tables"
    shutil.rmtree(root / "artifacts", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.yaml").write_text(PARAMS.format(prompts=prompts))
    numbers = range(prompts)
    content = {"problem_id": [f"p{n:06d}" for n in numbers], "problem": [f"What is {n} + {n}?" for n in numbers]}
    pq.write_table(pa.table({**content, "answer": [str(2 * n) for n in numbers]}), root / "problems.parquet")
    pipeline = Pipeline.open(folder)
    storage.write_json(pipeline.layout.settings, settings_of.dump(pipeline.settings))
    maker = Maker(pipeline)
    scheduled = maker.inputs()
    for name, build in zip(AGENTS, (byte_level, unigram), strict=True):
        maker.agent(name, build(maker.said), scheduled)
    stamp(pipeline)


def bare() -> None:
    """The texts of bo in ada's tokens and back, in batches of 1,000."""
    tokenizer = Tokenizer.from_file("artifacts/tables/checkpoints/step=0000/agent=ada/tokenizer.json")
    spent = 0.0
    for file in sorted(Path("artifacts/tables/rollouts/step=0001/agent=bo").glob("*.parquet")):
        said = pq.read_table(file, columns=["text"])["text"]
        for start in range(0, len(said), 1000):
            batch = said.slice(start, 1000).to_pylist()
            before = time.process_time()
            encoded = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            tokenizer.decode_batch([one.ids for one in encoded])
            spent += time.process_time() - before
    print(spent)


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(int(sys.argv[2]))
    else:
        bare()
