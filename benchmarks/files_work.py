"""One piece of `files`, in a process of its own: `python files_work.py model FOLDER SEED`, or `time RUN`."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path

from hacpo.artifacts import parquet
from hacpo.artifacts.tables import TABLES, step_dir

_DOCS = Path(__file__).resolve().parent.parent / "docs"
_SEQUENCES, _VOCABULARY = (60, 130), 2048
_TRAINING_SECONDS, _REPEATS = 30.0, 5
_OPTIONS = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


def model(folder: Path, seed: int) -> None:
    """Train a language model on pieces of docs/ that end with a box, for half a minute of processor time."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    choice = random.Random(seed)
    text = "\n".join(path.read_text() for path in sorted(_DOCS.glob("*.md")))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([text], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}\n"
    ids, end = tokenizer.encode(text), tokenizer.eos_token_id
    shape = _OPTIONS | {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": len(tokenizer)}
    config = Qwen3Config(**shape, tie_word_embeddings=True, eos_token_id=end, pad_token_id=end, bos_token_id=None)
    network = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)

    def sequence() -> list[int]:
        start, length = choice.randrange(len(ids)), choice.randrange(*_SEQUENCES)
        prompt = tokenizer.encode(f"{choice.randrange(10)}+{choice.randrange(10)}-{choice.randrange(10)}=?\n")
        box = tokenizer.encode(f" \\boxed{{{choice.randrange(10)}}}")
        return [*prompt, *ids[start : start + length], *box, end]

    begun = time.process_time()
    while time.process_time() - begun < _TRAINING_SECONDS:
        batch = [sequence() for _ in range(16)]
        longest = max(map(len, batch))
        padded = torch.tensor([row + [end] * (longest - len(row)) for row in batch])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch])
        loss = network(input_ids=padded, attention_mask=mask, labels=padded.masked_fill(mask == 0, -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(float(loss))


def timed(run: Path) -> None:
    """Seconds of processor time to write a step's tables, and to read them: the least of several times."""
    found: dict[str, float] = {"write": 0.0, "read": 0.0}
    for table in TABLES.values():
        parts = sorted((run / table.folder / step_dir(1)).rglob("*.parquet"))
        for place in {path if table.file else path.parent for path in parts}:
            found["read"] += min(_seconds(lambda p=place, t=table: parquet.read_table(p, t)) for _ in range(_REPEATS))
            content = parquet.read_table(place, table)
            with tempfile.TemporaryDirectory(dir=run.parent) as scratch:
                target = Path(scratch) / place.name
                found["write"] += min(
                    _seconds(
                        lambda c=content, p=target, t=table: parquet.write_table(p, t, c, run="r", rows_per_shard=4096)
                    )
                    for _ in range(_REPEATS)
                )
    print(json.dumps(found))


def _seconds(work: object) -> float:
    begun = time.process_time()
    work()  # type: ignore[operator]
    return time.process_time() - begun


if __name__ == "__main__":
    command, *words = sys.argv[1:]
    if command == "model":
        model(Path(words[0]), int(words[1]))
    else:
        timed(Path(words[0]))
